"""Models by name or path: where their parts lie, what is known of them, and how each part is loaded.

`find` reads no weights. A *place* has a transformer, and perhaps a text encoder and an autoencoder; each of them can be
put in from elsewhere.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from streamdiff.device import pick_device
from streamdiff.errors import ConfigError
from streamdiff.models import attention, autoencoders, catalogue, hub, random_weights, specs
from streamdiff.models.again import FromPictures
from streamdiff.models.base import ModelSpec, TextEncoder
from streamdiff.models.catalogue import Entry
from streamdiff.models.checkpoint import Checkpoint
from streamdiff.models.files import read_object
from streamdiff.models.stepping import SteppedDecoder
from streamdiff.models.text_cache import CachedText, EmbeddingCache
from streamdiff.models.tiny import model as tiny
from streamdiff.models.wan.lora import Lora
from streamdiff.models.wan.model import SPATIAL, TransformerSource, load_denoiser
from streamdiff.models.wan.text import WanText
from streamdiff.models.wan.transformer import WanDenoiser
from streamdiff.models.wan.weights import read_config


@dataclass(frozen=True)
class Parts:
    """Parts in place of a model's own: `weights` is a checkpoint, `vae` an autoencoder (see `autoencoders`),
    `text_encoder` a folder or file that `wan.text_files` knows, `config` a transformer's configuration where shapes do
    not tell."""

    weights: Path | None = None
    container: str | None = None
    config: Mapping[str, Any] | None = None
    loras: tuple[Lora, ...] = ()
    vae: str | None = None
    text_encoder: Path | None = None


NOTHING = Parts()
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".json")


@dataclass(frozen=True)
class Place:
    """Where a model's parts lie. `folder` is one in diffusers' layout, `entry` what the catalogue knows."""

    name: str
    transformer: TransformerSource
    folder: Path | None = None
    vae: str | None = None
    text_encoder: Path | None = None
    entry: Entry | None = None

    @property
    def embedded(self) -> bool:
        """Whether it is a folder of the embedded model's kind, which says everything about itself."""
        return self.folder is not None and "stream" in _index(self.folder)


def find(name: str, parts: Parts = NOTHING) -> Place:
    """The model called `name`: `tiny`, a name of the catalogue, a folder in diffusers' layout or with weights, a file,
    or a repository of the hub in diffusers' layout; or one without a file (`random_weights`). What is published is
    fetched if it is not there and no part takes its place.

    Raises:
        ConfigError: no such model, or a file that can neither be found nor fetched.
    """
    if random_weights.is_random(name):
        given = Place(name, random_weights.source(name), vae=random_weights.WAN_VAE, entry=random_weights.entry(name))
        return _with(given, parts)
    folder = tiny.WEIGHTS if name == "tiny" else Path(name)
    if folder.is_dir():
        return _with(_of_folder(name, folder), parts)
    if folder.is_file():
        return _with(Place(name, TransformerSource(folder)), parts)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and folder.suffix not in _FILES:
        return _with(_of_folder(name, _from_hub(name, parts)), parts)
    if "/" in name or folder.suffix in _FILES:
        raise ConfigError(
            f"--model is {name}: there is no such file or folder, and it is no repository of the hub (OWNER/NAME); "
            "`streamdiff models` lists names"
        )
    return _of_entry(catalogue.find(name), parts)


def _of_folder(name: str, folder: Path) -> Place:
    there = {part: folder / part for part in ("transformer", "vae", "text_encoder") if (folder / part).is_dir()}
    source = TransformerSource(there.get("transformer", folder))
    vae = str(there["vae"]) if "vae" in there else None
    return Place(name, source, folder, vae, folder if "text_encoder" in there else None)


def _from_hub(repo: str, parts: Parts) -> Path:
    """The folder of a repository's files, as far as they are needed."""
    wanted = {"transformer": parts.weights, "vae": parts.vae, "text_encoder": parts.text_encoder}
    needed = ["*.json", *(f"{part}/*" for part, own in wanted.items() if own is None)]
    if parts.text_encoder is None:
        needed.append("tokenizer/*")
    return hub.fetch_patterns(repo, needed)


def _of_entry(entry: Entry, parts: Parts) -> Place:
    assert entry.weights is not None, "the embedded model is a folder"
    own = parts.loras or entry.lora is None  # a model is not itself without the LoRA that belongs to it
    loras = () if own or entry.lora is None else tuple(Lora(path, entry.lora.scale) for path in hub.fetch(entry.lora))
    container = entry.weights.container if entry.weights.container != "flat" else None
    source = TransformerSource(parts.weights or hub.fetch(entry.weights)[0], container, None, loras)
    return _with(Place(entry.name, source, vae=None, entry=entry), replace(parts, weights=None))


def _with(place: Place, parts: Parts) -> Place:
    """`place` with what `parts` has instead."""
    if place.embedded and parts.text_encoder is not None:
        raise ConfigError(f"the text encoder of {place.name} is fixed; leave --text-encoder out")
    source = place.transformer
    if parts.weights is not None:
        source = TransformerSource(parts.weights)
    source = replace(
        source,
        container=parts.container or source.container,
        config=parts.config,
        loras=(*source.loras, *parts.loras),
    )
    return replace(
        place, transformer=source, vae=parts.vae or place.vae, text_encoder=parts.text_encoder or place.text_encoder
    )


def _index(folder: Path) -> dict[str, Any]:
    path = folder / "model_index.json"
    return read_object(path) if path.is_file() else {}


# ---- what is known -------------------------------------------------------------------------------------------------


def spec_of(place: Place, size: tuple[int, int] | None = None) -> ModelSpec:
    """The model's own facts, for pictures of `size` (width, height); of a checkpoint without any, what is usual.
    Reads headers, no weights."""
    if place.embedded:
        assert place.folder is not None
        if size is not None:
            raise ConfigError(f"the size of {place.name} is fixed; leave --size out")
        return tiny.read_spec(place.folder, place.name)
    spec = specs.spec_of(place.name, place.entry, architecture(place), size)
    return random_weights.any_steps(spec) if random_weights.is_random(place.name) else spec


def remark(place: Place, kv_context: str) -> str:
    """What a user should know before a model runs with this KV context; empty where it was made for it."""
    context = place.entry.context if place.entry is not None else None
    if context is None or kv_context == context.trained or kv_context in context.works:
        return without_video(place)
    trained = f"was trained for {context.trained}" if context.trained else "was trained for nobody says what"
    return f"{place.name} {trained}; whether it keeps its quality with KV context {kv_context} is not known"


def without_video(place: Place) -> str:
    """What a user should know before a model runs on noise alone; empty where it was made for that."""
    if place.entry is None or place.entry.begins_with == "noise":
        return ""
    return (
        f"{place.name} was made to change a video, and noise alone is nothing that it knows; `streamdiff generate "
        "--video-latents` gives it one"
    )


def architecture(place: Place) -> dict[str, Any]:
    """Arguments of diffusers' `WanTransformer3DModel`, from headers and configurations."""
    source = place.transformer
    return read_config(source.weights, source.container, source.config)


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of `WIDTHxHEIGHT`, which a latent and a patch have to fit into.

    Raises:
        ConfigError: anything else.
    """
    match, unit = re.fullmatch(r"(\d+)x(\d+)", text), 2 * SPATIAL
    if match is None or any(int(side) % unit or int(side) < unit for side in match.groups()):
        raise ConfigError(f"--size is {text!r}; it must be WIDTHxHEIGHT, multiples of {unit}, such as 832x480")
    return int(match[1]), int(match[2])


def digest(place: Place) -> str:
    """Of all configuration files, and of the weights' names, sizes and beginnings: no weights are read."""
    found = hashlib.sha256()
    for path in sorted(_files(place)):
        found.update(path.name.encode() + str(path.stat().st_size).encode())
        with path.open("rb") as file:
            found.update(file.read(_BEGINNING))
    return found.hexdigest()[:16]


_BEGINNING = 2**20
_CACHE_BYTES = 256 * 2**20  # some sixty prompts of 512 x 4096 in bfloat16


def _files(place: Place) -> set[Path]:
    """Every file that a part of the model is read from."""
    vae = None if random_weights.is_random(place.vae) or place.vae is None else Path(place.vae)
    roots = [place.folder, place.transformer.weights, place.text_encoder, vae]
    roots += [lora.path for lora in place.transformer.loras]
    found: set[Path] = set()
    for root in roots:
        if isinstance(root, Path):
            found |= {path for path in root.rglob("*") if path.is_file()} if root.is_dir() else {root}
    return found


# ---- loading -------------------------------------------------------------------------------------------------------


def load_transformer(
    place: Place,
    device: torch.device,
    dtype: torch.dtype,
    blocks: tuple[int, int] | None = None,
    kernel: str = "auto",
    quantize: str = "none",
) -> WanDenoiser:
    """Blocks `blocks` (first, last exclusive; all when None) of the transformer, and what goes with them; `kernel` is
    the attention's (`models.attention`), which is tried out first; `quantize` is that of the blocks' linear layers
    (`models.quantize`).

    Raises:
        ConfigError: weights that do not fit, a model that is told more than latents and text, a kernel that cannot run
            here or is wrong, or weights that cannot be quantised so here.
    """
    sizes = architecture(place)
    attention.probe(kernel, device, dtype, sizes["num_attention_heads"], sizes["attention_head_dim"])
    source = place.transformer
    if isinstance(source.weights, Checkpoint) and random_weights.is_random(str(source.weights)):
        source = replace(random_weights.source(place.name, device, dtype), loras=source.loras)
    denoiser = load_denoiser(source, device, dtype, blocks, quantize)
    if denoiser.extra_channels and not place.embedded:
        raise ConfigError(
            f"{place.transformer.weights} takes {denoiser.extra_channels} channels beside the latents', which nothing "
            "gives it; only text to video is supported"
        )
    denoiser.attention = kernel
    return denoiser.fuse()


def load_text(
    place: Place, spec: ModelSpec, device: torch.device, keep: bool = True, where: str | None = None
) -> TextEncoder:
    """The text encoder; that of a large model runs on the CPU unless `where` says another device, and puts embeddings
    on `device`. Its weights come with the first text; without `keep` they go after every text.

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
        files = catalogue.parts().text_encoders[place.entry.text_encoder].weights
        folder = hub.fetch_folder(files) if files is not None else None
    if folder is None:
        raise ConfigError(
            f"{place.name} comes without a text encoder; give a folder with encoder and tokenizer, in diffusers' or "
            "original Wan's layout, as --text-encoder, or embeddings as --prompt-embeds"
        )
    length, width = spec.text_shape
    home = pick_device(where or "cpu", "--text-device")
    encoder = WanText(folder, length=length, width=width, device=home, output=device, keep=keep)
    cache = EmbeddingCache(_CACHE_BYTES)
    return CachedText(encoder, cache, identity=encoder.identity, revision=encoder.revision, length=length)


def load_decoder(place: Place, device: torch.device, dtype: torch.dtype = torch.float32) -> SteppedDecoder:
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
    return autoencoders.load_decoder(vae, device, dtype)


def load_past(
    place: Place, spec: ModelSpec, device: torch.device, dtype: torch.dtype = torch.float32
) -> FromPictures | None:
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
    halves = autoencoders.load_decoder(vae, device, dtype), autoencoders.load_encoder(vae, device, dtype)
    return FromPictures(*halves)


def _vae_of(place: Place) -> str | None:
    """The model's autoencoder: the one given, else the one its catalogue entry names, fetched if need be."""
    if place.vae is not None or place.entry is None:
        return place.vae
    files = catalogue.parts().autoencoders[place.entry.autoencoder].weights
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
