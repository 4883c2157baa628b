"""Loads the parts of a model that `models.resolve` has found, and says what is known of it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from streamdiff.device import pick_device
from streamdiff.errors import ConfigError
from streamdiff.models import random_weights, resolve
from streamdiff.models.autoencoder import autoencoder
from streamdiff.models.autoencoder.reencoder import FirstFrameReencoder
from streamdiff.models.autoencoder.stepped_decoder import SteppedDecoder
from streamdiff.models.catalogue import entries, specs
from streamdiff.models.checkpoint import hub
from streamdiff.models.interfaces import TextEncoder
from streamdiff.models.resolve import NOTHING, PartOverrides, ResolvedModel
from streamdiff.models.spec import ModelSpec
from streamdiff.models.text_encoder import wan_files
from streamdiff.models.text_encoder.embedding_cache import CachedText, EmbeddingCache
from streamdiff.models.text_encoder.embedding_store import EmbeddingFolder
from streamdiff.models.text_encoder.wan import WanText
from streamdiff.models.tiny import model as tiny
from streamdiff.models.transformer import attention_backend
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import SPATIAL, TransformerSource, load_denoiser, read_config

_CPU = torch.device("cpu")


def find(name: str, parts: PartOverrides = NOTHING) -> ResolvedModel:
    """`resolve.find`; of a model without a file with what would stand in the catalogue."""
    found = resolve.find(name, parts)
    if found.weights is not None:
        return found
    return replace(found, entry=random_weights.entry(name), vae=found.vae or random_weights.WAN_VAE)


# ---- what is known -------------------------------------------------------------------------------------------------


def spec_of(place: ResolvedModel, size: tuple[int, int] | None = None) -> ModelSpec:
    """The model's own facts, for pictures of `size` (width, height); of a checkpoint without any, what is usual.
    Reads headers, no weights."""
    if place.embedded:
        assert place.folder is not None
        if size is not None:
            raise ConfigError(f"the size of {place.name} is fixed; leave --size out")
        return tiny.read_spec(place.folder, place.name)
    spec = specs.spec_of(place.name, place.entry, architecture(place), size)
    return random_weights.any_steps(spec) if random_weights.is_random(place.name) else spec


def remark(place: ResolvedModel, kv_context: str) -> str:
    """What a user should know before a model runs with this KV context; empty where it was made for it."""
    if place.entry is None and not place.embedded:
        return f"nobody says in which KV context {place.name} keeps its quality; it runs with {kv_context}"
    context = place.entry.context if place.entry is not None else None
    if context is None or kv_context == context.trained or kv_context in context.works:
        return without_video(place)
    trained = f"was trained for {context.trained}" if context.trained else "was trained for nobody says what"
    return f"{place.name} {trained}; whether it keeps its quality with KV context {kv_context} is not known"


def without_video(place: ResolvedModel) -> str:
    """What a user should know before a model runs on noise alone; empty where it was made for that."""
    if place.entry is None or place.entry.begins_with == "noise":
        return ""
    return (
        f"{place.name} was made to change a video, and noise alone is nothing that it knows; `streamdiff generate "
        "--video-latents` gives it one"
    )


def architecture(place: ResolvedModel) -> dict[str, Any]:
    """Arguments of diffusers' `WanTransformer3DModel`, from headers and configurations."""
    source = _transformer(place)
    return read_config(source.weights, source.container, source.config)


def _transformer(
    place: ResolvedModel, device: torch.device = _CPU, dtype: torch.dtype = torch.float32
) -> TransformerSource:
    """Where the transformer comes from; weights that nobody has are drawn on `device`."""
    if place.weights is None:
        return replace(random_weights.source(place.name, device, dtype), loras=place.loras)
    return TransformerSource(place.weights, place.container, place.config, place.loras)


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of `WIDTHxHEIGHT`, which a latent and a patch have to fit into.

    Raises:
        ConfigError: anything else.
    """
    match, unit = re.fullmatch(r"(\d+)x(\d+)", text), 2 * SPATIAL
    if match is None or any(int(side) % unit or int(side) < unit for side in match.groups()):
        raise ConfigError(f"--size is {text!r}; it must be WIDTHxHEIGHT, multiples of {unit}, such as 832x480")
    return int(match[1]), int(match[2])


def digest(place: ResolvedModel) -> str:
    """Of all configuration files, and of the weights' names, sizes and beginnings: no weights are read."""
    found = hashlib.sha256()
    for path in sorted(_files(place)):
        found.update(path.name.encode() + str(path.stat().st_size).encode())
        with path.open("rb") as file:
            found.update(file.read(_BEGINNING))
    return found.hexdigest()[:16]


_BEGINNING = 2**20
_TEXT_SHARE = 3  # the rest of a GPU's free memory is for sessions
_CACHE_BYTES = 256 * 2**20  # some sixty prompts of 512 x 4096 in bfloat16


def _files(place: ResolvedModel) -> set[Path]:
    """Every file that a part of the model is read from."""
    vae = None if random_weights.is_random(place.vae) or place.vae is None else autoencoder.locate(place.vae)
    roots = [place.folder, place.weights, place.text_encoder, vae, *(lora.path for lora in place.loras)]
    found: set[Path] = set()
    for root in roots:
        if root is not None:
            found |= {path for path in root.rglob("*") if path.is_file()} if root.is_dir() else {root}
    return found


# ---- loading -------------------------------------------------------------------------------------------------------


def load_transformer(
    place: ResolvedModel,
    device: torch.device,
    dtype: torch.dtype,
    blocks: tuple[int, int] | None = None,
    kernel: str = "auto",
    quantize: str = "none",
) -> WanDenoiser:
    """Blocks `blocks` (first, last exclusive; all when None) of the transformer, and what goes with them; `kernel` is
    the attention's (`models.transformer.attention_backend`), which is tried out first; `quantize` is that of the
    blocks' linear layers (`models.transformer.quantization`).

    Raises:
        ConfigError: weights that do not fit, a model that is told more than latents and text, a kernel that cannot run
            here or is wrong, or weights that cannot be quantised so here.
    """
    sizes = architecture(place)
    attention_backend.probe(kernel, device, dtype, sizes["num_attention_heads"], sizes["attention_head_dim"])
    source = _transformer(place, device, dtype)
    denoiser = load_denoiser(source, device, dtype, blocks, quantize)
    if denoiser.extra_channels and not place.embedded:
        raise ConfigError(
            f"{source.weights} takes {denoiser.extra_channels} channels beside the latents', which nothing "
            "gives it; only text to video is supported"
        )
    denoiser.attention = kernel
    return denoiser.fuse()


def load_text(
    place: ResolvedModel,
    spec: ModelSpec,
    device: torch.device,
    keep: bool = True,
    where: str | None = None,
    on_disk: bool = True,
) -> TextEncoder:
    """The text encoder, which puts embeddings on `device`. That of a large model runs on the device that `where` says;
    else on `device` where it takes a third of the free memory or less, and on the CPU where it takes more. Its weights
    come with the first text; without `keep` they go after every text. `on_disk`: embeddings of a large one are kept in
    the user's cache folder too (`EmbeddingFolder`).

    Raises:
        ConfigError: there is none, or `where` is no device that there is, or the model is a small one.
    """
    if place.embedded:
        if where is not None:
            raise ConfigError(f"the text encoder of {place.name} is small and runs beside it; leave --text-device out")
        assert place.folder is not None
        return tiny.load_text(place.folder, device)
    folder = place.text_encoder
    if folder is None and random_weights.is_random(place.name):
        return random_weights.DrawnText(spec.text_shape, device)
    if folder is None and place.entry is not None:
        files = entries.parts().text_encoders[place.entry.text_encoder].weights
        folder = hub.fetch_folder(files) if files is not None else None
    if folder is None:
        raise ConfigError(
            f"{place.name} comes without a text encoder; give a folder with encoder and tokenizer, in diffusers' or "
            "original Wan's layout, as --text-encoder, or embeddings as --prompt-embeds"
        )
    length, width = spec.text_shape
    home = _text_home(folder, device) if where is None else pick_device(where, "--text-device")
    encoder = WanText(folder, length=length, width=width, device=home, output=device, keep=keep)
    return CachedText(
        encoder,
        EmbeddingCache(_CACHE_BYTES),
        identity=encoder.identity,
        revision=encoder.revision,
        length=length,
        kept=EmbeddingFolder() if on_disk else None,
        device=device,
    )


def _text_home(folder: Path, device: torch.device) -> torch.device:
    """Where a large text encoder runs beside a transformer on `device`, whose weights are there already."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if wan_files.find(folder).values() * torch.bfloat16.itemsize <= free // _TEXT_SHARE:
            return device
    return torch.device("cpu")


def awaited_bytes(text: TextEncoder, device: torch.device) -> int:
    """What a text encoder's weights will take on `device` once the first text loads them."""
    encoder = text.encoder if isinstance(text, CachedText) else text
    return encoder.awaited_bytes(device) if isinstance(encoder, WanText) else 0


def load_decoder(place: ResolvedModel, device: torch.device, dtype: torch.dtype = torch.float32) -> SteppedDecoder:
    """What turns latents into pictures, in `dtype` unless it is the embedded model's.

    Raises:
        ConfigError: there is none.
    """
    if place.embedded:
        dtype = torch.float32  # a small one gains nothing from less
    vae = _vae_of(place)
    if vae is None:
        raise ConfigError(f"{place.name} comes without an autoencoder; give --vae PATH, or make latents only")
    if random_weights.is_random(vae):
        return random_weights.decoder(vae, device, dtype)
    return autoencoder.load_decoder(vae, device, dtype)


def load_past(
    place: ResolvedModel, spec: ModelSpec, device: torch.device, dtype: torch.dtype = torch.float32
) -> FirstFrameReencoder | None:
    """What shows the clean pass the past, for a model whose past is seen again from its pictures; None for others.

    Raises:
        ConfigError: there is no autoencoder with both halves.
    """
    if not spec.context_pictures:
        return None
    vae = _vae_of(place)
    if vae is None or random_weights.is_random(vae):
        raise ConfigError(
            f"the past of {place.name} is seen again from its pictures, which takes an autoencoder with both halves, "
            f"but there is {'none' if vae is None else vae}; give one as --vae"
        )
    halves = autoencoder.load_decoder(vae, device, dtype), autoencoder.load_encoder(vae, device, dtype)
    return FirstFrameReencoder(*halves)


def _vae_of(place: ResolvedModel) -> str | None:
    """The model's autoencoder: the one given, else the one its catalogue entry names, fetched if need be."""
    if place.vae is not None or place.entry is None:
        return place.vae
    files = entries.parts().autoencoders[place.entry.autoencoder].weights
    return None if files is None else str(hub.fetch(files)[0])


class NoText:
    """Stands where embeddings are given."""

    examples: tuple[str, ...] = ()
    vocabulary: str = ""
    slow = False

    def read(self, prompt: str, previous: str | None) -> NoReturn:
        raise ConfigError("there is no text encoder here; give embeddings")

    def encode(self, text: str) -> NoReturn:
        raise ConfigError("there is no text encoder here; give embeddings")
