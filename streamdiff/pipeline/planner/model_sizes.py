"""Sizes of a model: layers, widths, caches, bytes; from its catalogue entry or its folder, without torch or weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from streamdiff.config import EMBEDDED, ModelConfig
from streamdiff.core import cache_count, most_steps, spare_slots
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue
from streamdiff.models.autoencoder.memory_size import NO_DECODER, DecoderSizes, TaehvConfig, wan_decoder
from streamdiff.models.catalogue import CatalogueEntry
from streamdiff.models.headers import stored_values
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.spec import ModelSpec, parse_size, with_size, with_window
from streamdiff.models.tiny.folder import FolderFacts, read_folder


@dataclass(frozen=True)
class ModelSizes:
    """A model's spec, and the sizes of its parts. `text_values` are numbers of a small text encoder's weights; those of
    `decoder` are 0 where nothing is known of it."""

    spec: ModelSpec
    blocks: int
    heads: int
    head_dim: int
    ffn_dim: int
    text_dim: int
    freq_dim: int
    in_channels: int
    out_channels: int
    patch: tuple[int, int, int]
    cross_attn_norm: bool
    camera_channels: int | None = None
    image_dim: int | None = None
    text_values: int = 0
    decoder: DecoderSizes = NO_DECODER

    @property
    def width(self) -> int:
        """Model width D."""
        return self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Tokens of a chunk."""
        return prod(size // patch for size, patch in zip(self.spec.chunk_shape[1:], self.patch, strict=True))

    def window_tokens(self, kv_context: str) -> int:
        """Tokens that a chunk sees once its window is full, its own included."""
        return self.tokens * self.spec.window(kv_context) // self.spec.chunk_latents

    @property
    def text_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.spec.text_shape[0]

    @property
    def first_chunk_steps(self) -> int | None:
        """Steps of a stream's first chunk, where it has more than the others."""
        first = self.spec.schedules[0].first if self.spec.schedules else None
        return first.steps if first is not None else None

    @property
    def flow_values(self) -> int:
        """Numbers in the predicted flow of a chunk."""
        return self.out_channels * prod(self.spec.chunk_shape[1:])

    @property
    def hidden_values(self) -> int:
        """Numbers that one row sends to the next stage: hidden states and the time embedding of each latent frame."""
        return (self.tokens + self.spec.chunk_latents // self.patch[0]) * self.width

    # ---- weights, in numbers -----------------------------------------------------------------------------------

    @property
    def block_values(self) -> int:
        """One block: self- and cross-attention with their norms, feed-forward, modulation table, camera."""
        width = self.width
        camera = self._camera_layers * (width**2 + width)
        attention = 4 * (width**2 + width) + 2 * width
        norm = 2 * width if self.cross_attn_norm else 0
        return camera + 2 * attention + norm + 2 * width * self.ffn_dim + self.ffn_dim + width + 6 * width

    def action_values(self, first: int, end: int) -> int:
        """The action modules of blocks `first` to `end` (exclusive)."""
        if (own := self.spec.actions) is None:
            return 0
        inner, window, hidden = own.heads * own.head_dim, own.rows.window, own.hidden
        one = (own.keyboard + hidden + 2) * hidden + 2 * inner * (self.width + window * hidden)
        if own.mouse:
            one += (self.width + window * own.mouse + 1) * inner + (4 * inner + 3) * inner + inner * self.width
        return one * sum(first <= block < end for block in own.blocks)

    @property
    def acting_values(self) -> int:
        """Numbers of an action module's matrices that each token is multiplied by; 0 without action modules."""
        if (own := self.spec.actions) is None:
            return 0
        inner = own.heads * own.head_dim
        mouse = (2 * self.width + own.rows.window * own.mouse + 4 * inner) * inner
        return 2 * inner * self.width + mouse * (own.mouse > 0)

    @property
    def linear_values(self) -> int:
        """Numbers of a block that can be quantised to 8 bits: the matrices of attention, feed-forward and camera."""
        return (8 + self._camera_layers) * self.width**2 + 2 * self.width * self.ffn_dim

    @property
    def linear_rows(self) -> int:
        """Rows of these matrices; in 8 bits each has a scale, four bytes, and a zero, one byte."""
        return (9 + self._camera_layers) * self.width + self.ffn_dim

    @property
    def _camera_layers(self) -> int:
        """Layers of a block that a camera steers, each D x D."""
        return 0 if self.camera_channels is None else 4

    @property
    def shared_values(self) -> int:
        """What every stage needs beside its blocks: the projections of time and text, or of a picture's features, and
        the camera's embedding."""
        width, image, channels = self.width, self.image_dim, self.camera_channels
        text = (self.text_dim + 1) * width + width**2 + width
        if image is not None:
            text = 2 * image + image**2 + image + image * width + width + 2 * width
        camera = 0 if channels is None else (channels + 1) * width + 2 * (width**2 + width)
        return camera + width * 6 * width + 6 * width + text

    @property
    def embed_values(self) -> int:
        """Patch embedding and time embedding, on the first rank."""
        width = self.width
        return (self.in_channels * prod(self.patch) + 1) * width + (self.freq_dim + 1) * width + width**2 + width

    @property
    def output_values(self) -> int:
        """Output layer with its modulation, on the last rank."""
        return (self.width + 1) * self.out_channels * prod(self.patch) + 2 * self.width

    def camera_values(self, blocks: int, shares: int = 1) -> int:
        """What a chunk's cameras do to so many blocks, made once for all its steps: a scale and a shift for each token
        and channel; a share of the tokens on each of `shares` ranks."""
        return 0 if self.camera_channels is None else blocks * 2 * self.tokens * self.width // shares

    # ---- caches, in numbers ------------------------------------------------------------------------------------

    def cache_values(self, blocks: int, *, steps: int, kv_context: str, shares: int = 1) -> int:
        """Keys and values that one session keeps on a stage of `blocks` blocks: each cache with its window and spare
        slots, those of action modules, which the first blocks have, and the text's for one epoch. Of `shares` ranks
        that share the stage each keeps that share of the caches' heads, or tokens, and all of the text. The number of
        stages does not matter, and a session in few steps keeps as much as in the most that the model has: it may
        change to them."""
        steps = most_steps(steps, self.spec.steps)
        slots = self.spec.window_chunks(kv_context) + spare_slots(kv_context, steps=steps)
        caches = cache_count(kv_context, steps=steps)
        pinned = -(-self.spec.sink_latents // self.spec.chunk_latents)
        # Slots whose keys are kept un-rotated too, as they move.
        sink = 0 if self.spec.adaptive_ring(kv_context) else pinned
        own_width, acting = self.width // shares, 0
        if (own := self.spec.actions) is not None:  # the first stages have most
            seen = self.tokens * (own.mouse > 0) // shares + self.spec.chunk_latents
            acting = min(blocks, len(own.blocks)) * 2 * caches * slots * seen * own.heads * own.head_dim
        return acting + blocks * (
            own_width * caches * (2 * slots + sink) * self.tokens + self.width * 2 * self.text_tokens
        )


def read_sizes(model: str) -> ModelSizes:
    """Sizes of `tiny`, the embedded model, or of a folder in the same layout.

    Raises:
        ConfigError: no such folder; or as `read_folder` and `folder_sizes`.
    """
    folder = EMBEDDED_WEIGHTS if model == EMBEDDED else Path(model)
    if not folder.is_dir():
        raise ConfigError(
            f"--model is {model!r}; it can be `tiny`, a name that `streamdiff models` lists, or a model's folder"
        )
    facts = read_folder(folder, model)
    return folder_sizes(facts, facts.spec)


def folder_sizes(facts: FolderFacts, spec: ModelSpec) -> ModelSizes:
    """Sizes of a model of the embedded one's kind with the facts `spec`, its own or changed ones.

    Raises:
        ConfigError: a file of weights that is damaged.
    """
    sizes, decoder = sizes_from(facts.architecture, spec), facts.decoder.decoder(spec.latent_height, spec.latent_width)
    # The whole autoencoder is loaded, whose numbers the file says.
    decoder = replace(decoder, weights=stored_values(facts.folder / "vae"))
    return replace(sizes, decoder=decoder, text_values=stored_values(facts.folder / "text_encoder"))


def sizes_from(architecture: Mapping[str, Any], spec: ModelSpec, decoder: DecoderSizes = NO_DECODER) -> ModelSizes:
    """Sizes of a model with a transformer of this architecture (arguments of diffusers' `WanTransformer3DModel`) and
    this decoder. Weights of a text encoder count as 0."""
    given: Any = architecture
    return ModelSizes(
        spec=spec,
        blocks=given["num_layers"],
        heads=given["num_attention_heads"],
        head_dim=given["attention_head_dim"],
        ffn_dim=given["ffn_dim"],
        text_dim=given["text_dim"],
        freq_dim=given["freq_dim"],
        in_channels=given["in_channels"],
        out_channels=given["out_channels"],
        patch=tuple(given["patch_size"]),
        cross_attn_norm=given["cross_attn_norm"],
        camera_channels=given.get("camera_channels"),
        image_dim=given.get("image_dim"),
        decoder=decoder,
    )


BFLOAT16 = 2  # bytes of a number


def sizes_of(model: ModelConfig) -> ModelSizes:
    """Sizes of a model of the catalogue, of random weights, or of a folder of the embedded kind, with the picture and
    autoencoder that the configuration asks for.

    Raises:
        ConfigError: none of these; or a size that it cannot have.
    """
    entry = catalogue.lookup(model.name)
    if entry is None or entry.weights is None:
        if model.size is not None:
            raise ConfigError(f"the size of {model.name} is fixed; leave --size out")
        return read_sizes(model.name)
    return entry_sizes(entry, None if model.size is None else parse_size(model.size), model.vae)


def sizes_with_window(model: ModelConfig) -> ModelSizes:
    """`sizes_of`, with the window, sink and positions that the configuration asks for. Raises what that does, and
    ConfigError where these do not go together."""
    sizes = sizes_of(model)
    return replace(sizes, spec=with_window(sizes.spec, model.window, model.sink, model.rope))


def entry_sizes(entry: CatalogueEntry, size: tuple[int, int] | None = None, vae: str | None = None) -> ModelSizes:
    """Sizes of the model with pictures of `size` (width, height) in pixels, by default its own, and with the
    autoencoder `vae`, see `decoder_sizes`.

    A model that makes whole clips counts as a chunk of one latent frame that sees itself.
    """
    if entry.weights is None:
        return read_sizes(entry.name)
    architecture = catalogue.transformer_arguments(entry)
    spec = catalogue.make_spec(entry.name, entry, architecture, catalogue.parts_of(entry)[0].actions)
    if size is not None:
        spec = with_size(spec, *size)
    if entry.stream is None:
        spec = replace(spec, chunk_latents=1, window_latents=1)
    return sizes_from(architecture, spec, decoder_sizes(spec, entry.autoencoder, vae))


def small_of(own: str) -> str:
    """The small autoencoder that is proposed where the catalogue's `own` does not fit; empty where there is none."""
    return next((each.name for each in catalogue.parts().autoencoders[own].tiny), "")


def decoder_sizes(spec: ModelSpec, own: str, vae: str | None = None, *, small: bool = False) -> DecoderSizes:
    """The decoder that the configuration's `vae` means (None: the catalogue's autoencoder `own`), for pictures of
    `spec`. A file is a `small` one, also where its name says so, as the published ones' do; else it is Wan's, as `own`
    is."""
    small = small or any(each.name == vae for known in catalogue.parts().autoencoders.values() for each in known.tiny)
    config, patch = catalogue.parts().autoencoders[own].config, spec.width // spec.latent_width // TaehvConfig().spatial
    if config is None or small or "tae" in Path(vae or "").name.removeprefix(catalogue.RANDOM):
        shape = TaehvConfig(spec.latent_channels, 1 if config is None else patch)
        found = shape.decoder(spec.latent_height, spec.latent_width)
    else:
        found = wan_decoder(config, spec.latent_height, spec.latent_width)
    # Whose past is seen again from its pictures decodes every chunk a second time, with a decoder of its own.
    times = 2 if spec.context_pictures else 1
    return replace(found, weights=times * found.weights, remembered=times * found.remembered, flops=times * found.flops)
