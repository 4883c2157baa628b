"""The catalogue: what is known of every published model, so that a name is all a user has to give.

One YAML file per model in `catalogue/`, and `parts.yaml` with what models share: architectures, autoencoders, text
encoders. Every file is validated when it is read; an unknown key is an error. `None` means not known: nobody
published it, or nobody has read it. It never stands for a default. Needs no torch.

Sizes of chunk, window and sink are in latent frames; a window counts the sink and the chunk itself.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.catalogue.schema import _PARTS, Entry, Files, SharedParts, _Model


@cache
def entries() -> dict[str, Entry]:
    """Every packaged model by name: the embedded one first, then by family and name."""
    found = [read_entry(path) for path in _folder().iterdir() if path.name.endswith(".yaml") and path.name != _PARTS]
    return {entry.name: entry for entry in sorted(found, key=lambda entry: (entry.name != "tiny", _rank(entry)))}


def listed() -> list[Entry]:
    """Models that stream. Their bases make no pictures worth a look without guidance: for who asks by name."""
    return [entry for entry in entries().values() if entry.kind == "causal"]


@cache
def parts() -> SharedParts:
    """What the packaged models share."""
    return _read(_folder() / _PARTS, SharedParts)


def find(name: str) -> Entry:
    """The entry called `name`.

    Raises:
        ConfigError: there is none; the nearest known name is told.
    """
    known = entries()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(entry.name for entry in listed())}"
    raise ConfigError(f"no model is called {name!r}; {hint}")


def autoencoders() -> dict[str, Files]:
    """The files of published autoencoders, large and small, by name."""
    large = {name: each.weights for name, each in parts().autoencoders.items() if each.weights is not None}
    return {**large, **{small.name: small for each in parts().autoencoders.values() for small in each.tiny}}


def with_own_context(model: ModelConfig) -> ModelConfig:
    """`model` with the KV context that its weights were made for, where none was asked for."""
    entry = entries().get(model.name)
    if "kv_context" in model.model_fields_set or entry is None or entry.context is None:
        return model
    return model.model_copy(update={"kv_context": entry.context.default})


def read_entry(path: Path | Traversable) -> Entry:
    """A model's file.

    Raises:
        ConfigError: it cannot be read, a key is unknown or missing, a value is out of range, a part is not in
            `parts.yaml`, or the name is not that of the file. All that pydantic finds is listed, one per line.
    """
    entry = _read(path, Entry)
    if f"{entry.name}.yaml" != path.name:
        raise ConfigError(f"{path}: name is {entry.name!r}, but the file is called {path.name}")
    shared = parts()
    for key, value, known in (
        ("architecture", entry.architecture, shared.architectures),
        ("autoencoder", entry.autoencoder, shared.autoencoders),
        ("text_encoder", entry.text_encoder, shared.text_encoders),
    ):
        if value not in known:
            raise ConfigError(f"{path}: {key} is {value!r}, but must be one of {', '.join(known)}")
    return entry


def _folder() -> Traversable:
    return importlib.resources.files("streamdiff") / "models" / "catalogue" / "data"


def _rank(entry: Entry) -> tuple[bool, str, int, str]:
    """Bases first; within a family the smaller architecture, then the name."""
    return entry.kind == "causal", entry.family, parts().architectures[entry.architecture].width, entry.name


def _read(path: Path | Traversable, model: type[_Model]) -> _Model:
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        # By way of JSON, where a strict model takes a list for a tuple.
        return model.model_validate_json(json.dumps(tree))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(lines)) from None
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML for a model: {error}") from None
