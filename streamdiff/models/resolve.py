"""A model by name, path or hub id: where each of its parts lies, and which have to be fetched first.

Needs no torch, and reads no weights; `models.model_loader` loads the parts of what is found here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamdiff.config import EMBEDDED, ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models import recognition
from streamdiff.models.catalogue import entries
from streamdiff.models.catalogue.schema import Entry, Files
from streamdiff.models.checkpoint import hub
from streamdiff.models.checkpoint.json_file import read_object

if TYPE_CHECKING:
    from streamdiff.models.transformer.lora import Lora

RANDOM = "random:"
"""What the name of a model, or autoencoder, without a file begins with; see `models.random_weights`."""
EMBEDDED_WEIGHTS = Path(__file__).parent / "tiny" / "weights"
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".json")
_FOLDERS = ("transformer", "vae", "text_encoder")


@dataclass(frozen=True)
class PartOverrides:
    """Parts in place of a model's own: `weights` is a checkpoint, `vae` an autoencoder (see `autoencoders`),
    `text_encoder` a folder or file that `wan.text_files` knows, `config` a transformer's configuration where shapes do
    not tell."""

    weights: Path | None = None
    container: str | None = None
    config: Mapping[str, Any] | None = None
    loras: tuple[Lora, ...] = ()
    vae: str | None = None
    text_encoder: Path | None = None


NOTHING = PartOverrides()


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model's parts lie. `weights`, `container`, `config` and `loras` are the transformer's, `weights` None
    where they are drawn (`RANDOM`); `folder` is one in diffusers' layout; `vae` and `text_encoder` are None where they
    are those that `entry`, what the catalogue knows, names."""

    name: str
    weights: Path | None
    container: str | None = None
    config: Mapping[str, Any] | None = None
    loras: tuple[Lora, ...] = ()
    folder: Path | None = None
    vae: str | None = None
    text_encoder: Path | None = None
    entry: Entry | None = None

    @property
    def embedded(self) -> bool:
        """Whether it is a folder of the embedded model's kind, which says everything about itself."""
        return self.folder is not None and is_embedded(self.folder)


def find(name: str, parts: PartOverrides = NOTHING) -> ResolvedModel:
    """The model called `name`: `tiny`, a name of the catalogue, a folder in diffusers' layout or with weights, a file,
    or a repository of the hub in diffusers' layout; or one without a file (`models.random_weights`). Its transformer is
    fetched if it is published, not there, and no part takes its place; of a repository everything that is needed is.

    Raises:
        ConfigError: no such model, or a file that can neither be found nor fetched.
    """
    if name.startswith(RANDOM):
        return _with(ResolvedModel(name, None), parts)
    if (folder := _folder(name)) is not None:
        return _with(_of_folder(name, folder), parts)
    if Path(name).is_file():
        return _with(ResolvedModel(name, Path(name)), parts)
    if is_repository(name):
        files = _of_repository(name, parts)
        return _with(_of_folder(name, hub.fetch_patterns(files.repo, files.files)), parts)
    return _of_entry(_entry(name), parts)


def to_fetch(name: str, parts: PartOverrides = NOTHING) -> list[Files]:
    """What is published, and is needed to show pictures of a text with the model `name`, whether it is on disk already
    or not. Asks no network.

    Raises:
        ConfigError: as `find`.
    """
    if (small := entries.autoencoders().get(parts.vae or "")) is not None and not Path(str(parts.vae)).exists():
        autoencoder = [small]
    else:
        autoencoder = []
    if name.startswith(RANDOM) or _folder(name) is not None or Path(name).is_file():
        return autoencoder
    if is_repository(name):
        return [_of_repository(name, parts), *autoencoder]
    entry, shared = _entry(name), entries.parts()
    needed = (
        (entry.weights, parts.weights),
        (entry.lora, parts.loras or None),
        (shared.autoencoders[entry.autoencoder].weights, parts.vae),
        (shared.text_encoders[entry.text_encoder].weights, parts.text_encoder),
    )
    return [files for files, own in needed if files is not None and own is None] + autoencoder


def parts_of(config: ModelConfig) -> PartOverrides:
    """The parts that a configuration names, but for its LoRA."""
    weights, text = config.weights, config.text_encoder
    return PartOverrides(
        weights=None if weights is None else Path(weights),
        vae=config.vae,
        text_encoder=None if text is None else Path(text),
    )


def completed(config: ModelConfig) -> ModelConfig:
    """`config` with the model that its weights are, where none was asked for, and with the KV context that the model
    was made for, where none was.

    Raises:
        ConfigError: the weights do not tell whose they are.
    """
    if config.weights is not None and "name" not in config.model_fields_set and Path(config.weights).exists():
        config = config.model_copy(update={"name": recognition.entry_of(Path(config.weights)).name})
    return entries.with_own_context(config)


def is_embedded(name: str | Path) -> bool:
    """Whether this is the embedded model's name, or a folder of its kind."""
    if name == EMBEDDED:
        return True
    index = Path(name) / "model_index.json"
    return index.is_file() and "stream" in read_object(index)


def _folder(name: str) -> Path | None:
    folder = EMBEDDED_WEIGHTS if name == EMBEDDED else Path(name)
    return folder if folder.is_dir() else None


def is_repository(name: str) -> bool:
    """Whether this can be the name of a repository of the hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and Path(name).suffix not in _FILES


def _entry(name: str) -> Entry:
    if "/" in name or Path(name).suffix in _FILES:
        raise ConfigError(
            f"--model is {name}: there is no such file or folder, and it is no repository of the hub (OWNER/NAME); "
            "`streamdiff models` lists names"
        )
    return entries.find(name)


def _of_folder(name: str, folder: Path) -> ResolvedModel:
    there = {part: folder / part for part in _FOLDERS if (folder / part).is_dir()}
    return ResolvedModel(
        name,
        there.get("transformer", folder),
        folder=folder,
        vae=str(there["vae"]) if "vae" in there else None,
        text_encoder=folder if "text_encoder" in there else None,
    )


def _of_repository(repo: str, parts: PartOverrides) -> Files:
    """The files of a repository in diffusers' layout that are needed."""
    own = {"transformer": parts.weights, "vae": parts.vae, "text_encoder": parts.text_encoder}
    needed = [f"{part}/*" for part in _FOLDERS if own[part] is None]
    if parts.text_encoder is None:
        needed.append("tokenizer/*")
    return Files(repo=repo, files=("*.json", *needed), licence=None)


def _of_entry(entry: Entry, parts: PartOverrides) -> ResolvedModel:
    assert entry.weights is not None, "the embedded model is a folder"
    loras: tuple[Lora, ...] = ()
    if entry.lora is not None and not parts.loras:  # a model is not itself without the LoRA that belongs to it
        from streamdiff.models.transformer.lora import Lora

        loras = tuple(map(partial(Lora, scale=entry.lora.scale), hub.fetch(entry.lora)))
    container = entry.weights.container if entry.weights.container != "flat" else None
    weights = parts.weights or hub.fetch(entry.weights)[0]
    found = ResolvedModel(entry.name, weights, container, loras=loras, entry=entry)
    return _with(found, replace(parts, weights=None))


def _with(model: ResolvedModel, parts: PartOverrides) -> ResolvedModel:
    """`model` with what `parts` has instead."""
    if model.embedded and parts.text_encoder is not None:
        raise ConfigError(f"the text encoder of {model.name} is fixed; leave --text-encoder out")
    if parts.weights is not None:
        model = replace(model, weights=parts.weights, container=None, loras=())
    return replace(
        model,
        container=parts.container or model.container,
        config=parts.config,
        loras=(*model.loras, *parts.loras),
        vae=parts.vae or model.vae,
        text_encoder=parts.text_encoder or model.text_encoder,
    )
