"""What a model's folder tells about sizes: layers, widths, caches, bytes. Read as JSON, without torch or weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from streamdiff.config import EMBEDDED
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.memory_size import taehv_values, wan_values
from streamdiff.models.catalogue import entries
from streamdiff.models.catalogue.schema import Entry
from streamdiff.models.checkpoint.json_file import read_object
from streamdiff.models.checkpoint.safetensors_header import read_header
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.scheduler.kv_context import cache_count, most_steps, spare_slots

_INTEGERS = (
    "num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "text_dim", "freq_dim", "in_channels",
    "out_channels",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSizes:
    """A model's facts, and the sizes of its parts. `*_values` count stored numbers, 0 where unknown: of the decoder's
    weights, and what it remembers of a stream. `decode_flops` are those of decoding one latent frame, 0 where unknown.
    """

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
    text_values: int = 0
    decoder_values: int = 0
    decoder_memory_values: int = 0
    decode_flops: float = 0.0

    @property
    def width(self) -> int:
        """Model width D."""
        return self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Tokens of a chunk."""
        return prod(size // patch for size, patch in zip(self.spec.chunk_shape[1:], self.patch, strict=True))

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
        """One block: self- and cross-attention with their norms, feed-forward, modulation table."""
        width = self.width
        attention = 4 * (width**2 + width) + 2 * width
        norm = 2 * width if self.cross_attn_norm else 0
        return 2 * attention + norm + 2 * width * self.ffn_dim + self.ffn_dim + width + 6 * width

    @property
    def linear_values(self) -> int:
        """Of a block's numbers, those that can be had in 8 bits: the matrices of attention and feed-forward."""
        return 8 * self.width**2 + 2 * self.width * self.ffn_dim

    @property
    def linear_rows(self) -> int:
        """Rows of these matrices; in 8 bits each has a scale, four bytes, and a zero, one byte."""
        return 9 * self.width + self.ffn_dim

    @property
    def shared_values(self) -> int:
        """What every stage needs beside its blocks: the projections of time and text."""
        width = self.width
        return width * 6 * width + 6 * width + (self.text_dim + 1) * width + width**2 + width

    @property
    def embed_values(self) -> int:
        """Patch embedding and time embedding, on the first rank."""
        width = self.width
        return (self.in_channels * prod(self.patch) + 1) * width + (self.freq_dim + 1) * width + width**2 + width

    @property
    def output_values(self) -> int:
        """Output layer with its modulation, on the last rank."""
        return (self.width + 1) * self.out_channels * prod(self.patch) + 2 * self.width

    # ---- caches, in numbers ------------------------------------------------------------------------------------

    def cache_values(self, blocks: int, *, steps: int, kv_context: str) -> int:
        """Keys and values that one session keeps on a stage of `blocks` blocks: each cache with its window and spare
        slots, and the text's for one epoch. The number of stages does not matter, and a session in few steps keeps as
        much as in the most that the model has: it may change to them."""
        steps = most_steps(steps, self.spec.steps)
        slots = self.spec.window_chunks(kv_context) + spare_slots(kv_context, steps=steps)
        caches = cache_count(kv_context, steps=steps)
        return 2 * blocks * self.width * (caches * slots * self.tokens + self.text_tokens)


def read_facts(model: str) -> ModelSizes:
    """The facts of `tiny`, the embedded model, or of a folder in the same layout.

    Raises:
        ConfigError: no such folder, a part that cannot be read, or a value that is missing or of the wrong kind.
    """
    folder = EMBEDDED_WEIGHTS if model == EMBEDDED else Path(model)
    if not folder.is_dir():
        raise ConfigError(
            f"--model is {model!r}; it can be `tiny`, a name that `streamdiff models` lists, or a model's folder"
        )
    index = _Table(folder / "model_index.json")
    stream = index.table("stream")
    transformer, decoder = _Table(folder / "transformer" / "config.json"), _Table(folder / "vae" / "config.json")
    height, width = stream.integer("latent_height"), stream.integer("latent_width")
    widths, blocks = decoder.integers("decoder_widths", 4), decoder.integers("decoder_blocks", 3, low=0)
    space, time = decoder.integers("decoder_space", 3), decoder.integers("decoder_time", 3)
    patch_size, channels = decoder.integer("patch_size"), decoder.integer("latent_channels")
    spatial = patch_size * prod(space)
    clean_window = stream.integer("clean_window_latents") if "clean_window_latents" in stream.values else None
    spec = ModelSpec(
        name=model,
        latent_channels=channels,
        latent_height=height,
        latent_width=width,
        chunk_latents=stream.integer("chunk_latents"),
        window_latents=stream.integer("window_latents"),
        clean_window_latents=clean_window,
        sink_latents=stream.integer("sink_latents", low=0) if "sink_latents" in stream.values else 0,
        frames_per_latent=prod(time),
        width=width * spatial,
        height=height * spatial,
        native_fps=stream.number("native_fps"),
        shift=stream.number("shift"),
        steps=stream.integers("steps"),
        text_shape=(_text_tokens(folder / "tokenizer" / "tokenizer.json"), transformer.integer("text_dim")),
    )
    architecture: dict[str, Any] = {key: transformer.integer(key) for key in _INTEGERS}
    architecture["patch_size"] = transformer.integers("patch_size", 3)
    architecture["cross_attn_norm"] = bool(transformer.values.get("cross_attn_norm", True))
    sizes = replace(
        facts_from(architecture, spec, taehv_values(widths, blocks, space, height, width)),
        text_values=stored_values(folder / "text_encoder"),
        decoder_values=stored_values(folder / "vae"),
        decode_flops=_taehv_flops((channels, *widths, 3 * patch_size**2), blocks, space, time, height * width),
    )
    if sizes.tokens < 1 or min(map(spec.window, ("matched", "clean"))) < spec.sink_latents + spec.chunk_latents:
        raise ConfigError(
            f"{folder}: a chunk has {sizes.tokens} tokens, and a window must hold at least the sink and one chunk"
        )
    return sizes


def _taehv_flops(
    widths: Sequence[int], blocks: Sequence[int], space: Sequence[int], time: Sequence[int], pixels: int
) -> float:
    """Floating-point operations of TAEHV's decoder for one latent frame of so many latent pixels. `widths` are the
    channels of the latents, of the stages' inputs, of the last stage's output, and of the picture."""
    latent, *inner, picture = widths
    frames, macs = 1, 9 * latent * inner[0] * pixels
    for i, (count, grows, lasts) in enumerate(zip(blocks, space, time, strict=True)):
        # A block is three 3x3 convolutions, the first of which sees the frame before too; then time grows by a 1x1.
        macs += (count * 36 + lasts) * inner[i] ** 2 * pixels * frames
        pixels, frames = pixels * grows**2, frames * lasts
        macs += 9 * inner[i] * inner[i + 1] * pixels * frames
    return 2.0 * (macs + 9 * inner[-1] * picture * pixels * frames)


def facts_from(architecture: Mapping[str, Any], spec: ModelSpec, decoder_memory_values: int = 0) -> ModelSizes:
    """The facts of a model with a transformer of this architecture (arguments of diffusers' `WanTransformer3DModel`),
    and a decoder that remembers so many numbers. Weights of text encoder and autoencoder count as 0, and nothing is
    said of how long decoding takes."""
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
        decoder_memory_values=decoder_memory_values,
    )


def stored_values(folder: Path) -> int:
    """Numbers in the weight files (*.safetensors) of `folder`, from their headers alone; 0 without any.

    Raises:
        ConfigError: a file is damaged.
    """
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            header = json.loads(read_header(path))
            count += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a readable safetensors file: {error}") from None
    return count


class _Table:
    """A JSON object whose entries are asked for by name and kind."""

    def __init__(self, path: Path, values: Mapping[str, Any] | None = None) -> None:
        self.path, self.values = path, read_object(path) if values is None else values

    def table(self, key: str) -> _Table:
        value = self._get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object with keys")
        return _Table(self.path, value)

    def integer(self, key: str, low: int = 1) -> int:
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self._wrong(key, value, f"a whole number, at least {low}")
        return value

    def integers(self, key: str, count: int | None = None, low: int = 1) -> tuple[int, ...]:
        value = self._get(key)
        good = isinstance(value, list) and all(type(item) is int and item >= low for item in value) and value
        if not good or count not in (None, len(value)):
            raise self._wrong(key, value, f"a list of {count or 'some'} whole numbers, each at least {low}")
        return tuple(value)

    def number(self, key: str) -> float:
        value = self._get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError(f"{self.path}: the key {key!r} is missing")
        return self.values[key]

    def _wrong(self, key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key} is {json.dumps(value)[:60]}, but must be {allowed}")


def _text_tokens(path: Path) -> int:
    """The length to which texts are padded; 0 where the tokenizer's file does not say."""
    try:
        length = read_object(path)["padding"]["strategy"]["Fixed"]
    except (ConfigError, KeyError, TypeError):
        return 0
    return length if isinstance(length, int) else 0


BFLOAT16 = 2  # bytes of a number


def facts_of(name: str) -> ModelSizes:
    """Of a model of the catalogue, or of a folder of the embedded kind.

    Raises:
        ConfigError: neither.
    """
    entry = entries.entries().get(name)
    return known_facts(entry) if entry is not None else read_facts(name)


def known_facts(entry: Entry, *, height: int | None = None, width: int | None = None) -> ModelSizes:
    """Sizes of the model at `height` x `width` pixels, by default its own picture.

    As `facts_from` has them, and what the decoder remembers of a stream. A model that makes whole clips counts as a
    chunk of one latent frame that sees itself.
    """
    if entry.weights is None:
        return read_facts(entry.name)
    architecture = entries.transformer_arguments(entry)
    spec = entries.make_spec(entry.name, entry, architecture, (width or entry.width, height or entry.height))
    if entry.stream is None:
        spec = replace(spec, chunk_latents=1, window_latents=1)
    decoder = entries.parts().autoencoders[entry.autoencoder].config
    remembered = wan_values(decoder, spec.latent_height, spec.latent_width) if decoder else 0
    # Whose past is seen again from its pictures decodes every chunk a second time.
    return facts_from(architecture, spec, remembered * (2 if spec.context_pictures else 1))
