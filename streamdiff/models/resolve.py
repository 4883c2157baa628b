"""A model by name, path or hub id: where each of its parts lies, and which have to be fetched first.

Needs no torch, and reads no weights; `models.model_loader.ModelLoader` loads the parts of what is found here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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

EMBEDDED_WEIGHTS = Path(__file__).parent / "tiny" / "weights"
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".json")
_FOLDERS = ("transformer", "vae", "text_encoder")


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model's parts lie, those that a configuration names in place of the model's own included. `weights` (None
    where they are drawn: `models.random_weights`), `container`, `architecture` (what shapes do not tell) and `loras`
    are the transformer's. `folder` is one in diffusers' layout; `vae` and `text_encoder` are None where they are those
    that `entry`, what the catalogue knows, names."""

    name: str
    weights: Path | None
    container: str | None = None
    architecture: Mapping[str, Any] | None = None
    loras: tuple[Lora, ...] = ()
    folder: Path | None = None
    vae: str | None = None
    text_encoder: Path | None = None
    entry: Entry | None = None

    @property
    def embedded(self) -> bool:
        """Whether it is a folder of the embedded model's kind, which says everything about itself."""
        return self.folder is not None and is_embedded(self.folder)

    def fetch_autoencoder(self) -> str | None:
        """The path or name of the autoencoder, fetched if it is published and not there; None where there is none."""
        if self.vae is not None or self.entry is None:
            return self.vae
        files = entries.parts().autoencoders[self.entry.autoencoder].weights
        return None if files is None else str(hub.fetch(files)[0])

    def fetch_text_encoder(self) -> Path | None:
        """The folder or file of the text encoder, as `fetch_autoencoder`; random weights have none."""
        if self.text_encoder is not None or self.entry is None or entries.is_random(self.name):
            return self.text_encoder
        files = entries.parts().text_encoders[self.entry.text_encoder].weights
        return None if files is None else hub.fetch_folder(files)

    def remark(self, kv_context: str) -> str:
        """What a user should know before the model runs with this KV context; empty where it was made for it."""
        if self.entry is None and not self.embedded:
            return f"nobody says in which KV context {self.name} keeps its quality; it runs with {kv_context}"
        context = self.entry.context if self.entry is not None else None
        if context is None or kv_context == context.trained or kv_context in context.works:
            return self.noise_remark()
        trained = f"was trained for {context.trained}" if context.trained else "was trained for nobody says what"
        return f"{self.name} {trained}; whether it keeps its quality with KV context {kv_context} is not known"

    def noise_remark(self) -> str:
        """What a user should know before the model runs on noise alone; empty where it was made for that."""
        if self.entry is None or self.entry.begins_with == "noise":
            return ""
        return (
            f"{self.name} was made to change a video, and noise alone is nothing that it knows; `streamdiff generate "
            "--video-latents` gives it one"
        )


def find(
    config: ModelConfig, container: str | None = None, architecture: Mapping[str, Any] | None = None
) -> ResolvedModel:
    """The model that a configuration names, its parts those that it names instead: `tiny`, a name of the catalogue, a
    folder in diffusers' layout or with weights, a file, or a repository of the hub in diffusers' layout; or one without
    a file (`models.random_weights`). Its transformer is fetched if it is published, not there, and no part takes its
    place; of a repository everything that is needed is. `container` and `architecture`: see `ResolvedModel`.

    Raises:
        ConfigError: no such model, or a file that can neither be found nor fetched.
    """
    name = config.name
    if entries.is_random(name):
        found = ResolvedModel(name, None, vae=f"{entries.RANDOM}wan2.1", entry=entries.find(name))
    elif (folder := _folder(name)) is not None:
        found = _in_folder(name, folder)
    elif Path(name).is_file():
        found = ResolvedModel(name, Path(name))
    elif is_repository(name):
        files = _repository_files(config)
        found = _in_folder(name, hub.fetch_patterns(files.repo, files.files))
    else:
        found = _published(_entry(name), config)
    return _with_parts(found, config, container, architecture)


def to_fetch(config: ModelConfig) -> list[Files]:
    """What is published, and is needed to show pictures of a text with the model of `config`, whether it is on disk
    already or not. Asks no network.

    Raises:
        ConfigError: as `find`.
    """
    name = config.name
    if (small := entries.autoencoders().get(config.vae or "")) is not None and not Path(str(config.vae)).exists():
        autoencoder = [small]
    else:
        autoencoder = []
    if entries.is_random(name) or _folder(name) is not None or Path(name).is_file():
        return autoencoder
    if is_repository(name):
        return [_repository_files(config), *autoencoder]
    entry, shared = _entry(name), entries.parts()
    needed = (
        (entry.weights, config.weights),
        (entry.lora, config.lora),
        (shared.autoencoders[entry.autoencoder].weights, config.vae),
        (shared.text_encoders[entry.text_encoder].weights, config.text_encoder),
    )
    return [files for files, own in needed if files is not None and own is None] + autoencoder


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


def is_repository(name: str) -> bool:
    """Whether this can be the name of a repository of the hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and Path(name).suffix not in _FILES


def _folder(name: str) -> Path | None:
    folder = EMBEDDED_WEIGHTS if name == EMBEDDED else Path(name)
    return folder if folder.is_dir() else None


def _entry(name: str) -> Entry:
    if "/" in name or Path(name).suffix in _FILES:
        raise ConfigError(
            f"--model is {name}: there is no such file or folder, and it is no repository of the hub (OWNER/NAME); "
            "`streamdiff models` lists names"
        )
    return entries.find(name)


def _in_folder(name: str, folder: Path) -> ResolvedModel:
    there = {part: folder / part for part in _FOLDERS if (folder / part).is_dir()}
    return ResolvedModel(
        name,
        there.get("transformer", folder),
        folder=folder,
        vae=str(there["vae"]) if "vae" in there else None,
        text_encoder=folder if "text_encoder" in there else None,
    )


def _repository_files(config: ModelConfig) -> Files:
    """The files of a repository in diffusers' layout that are needed."""
    given = {"transformer": config.weights, "vae": config.vae, "text_encoder": config.text_encoder}
    needed = [f"{part}/*" for part in _FOLDERS if given[part] is None]
    if config.text_encoder is None:
        needed.append("tokenizer/*")
    return Files(repo=config.name, files=("*.json", *needed), licence=None)


def _published(entry: Entry, config: ModelConfig) -> ResolvedModel:
    """Of the catalogue; its container and its LoRA are those of weights that are given too."""
    assert entry.weights is not None, "the embedded model is a folder"
    loras: tuple[Lora, ...] = ()
    if entry.lora is not None and config.lora is None:  # a model is not itself without the LoRA that belongs to it
        from streamdiff.models.transformer.lora import Lora

        loras = tuple(Lora(path, entry.lora.scale) for path in hub.fetch(entry.lora))
    weights = hub.fetch(entry.weights)[0] if config.weights is None else Path(config.weights)
    container = entry.weights.container if entry.weights.container != "flat" else None
    return ResolvedModel(entry.name, weights, container, loras=loras, entry=entry)


def _with_parts(
    model: ResolvedModel, config: ModelConfig, container: str | None, architecture: Mapping[str, Any] | None
) -> ResolvedModel:
    """`model` with what `config` names instead."""
    if model.embedded and config.text_encoder is not None:
        raise ConfigError(f"the text encoder of {model.name} is fixed; leave --text-encoder out")
    loras = model.loras
    if config.lora is not None:
        from streamdiff.models.transformer.lora import parse_lora

        loras = (*loras, parse_lora(config.lora))
    return replace(
        model,
        weights=model.weights if config.weights is None else Path(config.weights),
        container=container or model.container,
        architecture=architecture,
        loras=loras,
        vae=config.vae or model.vae,
        text_encoder=model.text_encoder if config.text_encoder is None else Path(config.text_encoder),
    )
