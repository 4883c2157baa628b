"""The catalogue: what is known of every published model, so that a name is all a user has to give, and its `ModelSpec`.

One YAML file per model in `data/`, and `parts.yaml` with what models share: architectures, autoencoders, text
encoders. Every file is validated when it is read; an unknown key is an error. `None` means not known: nobody
published it, or nobody has read it. It never stands for a default. Needs no torch.

Sizes of chunk, window and sink are in latent frames; a window counts the sink and the chunk itself.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.catalogue.schema import CatalogueEntry, Context, Files, Positions, SharedParts
from streamdiff.models.spec import ModelSpec

USUAL = "self-forcing"
"""The model of the catalogue whose picture, rate and chunk a checkpoint has that the catalogue does not know."""
RANDOM = "random:"
"""What the name of a model, or autoencoder, without a file begins with; see `models.random_weights`."""
_PARTS = "parts.yaml"
_RANDOM_LIKE, _RANDOM_STEPS, _RANDOM_SHIFT = "longlive-1.3b", (4, 2, 1), 5.0
_Model = TypeVar("_Model", bound=BaseModel)


@cache
def entries() -> dict[str, CatalogueEntry]:
    """Every packaged model by name: the embedded one first, then bases, then by family, size and name."""
    sizes = parts().architectures
    found = [read_entry(path) for path in _folder().iterdir() if path.name.endswith(".yaml") and path.name != _PARTS]
    found.sort(key=lambda e: (e.name != "tiny", e.kind == "causal", e.family, sizes[e.architecture].width, e.name))
    return {entry.name: entry for entry in found}


def listed() -> list[CatalogueEntry]:
    """Models that stream. Their bases make no pictures worth a look without guidance: for who asks by name."""
    return [entry for entry in entries().values() if entry.kind == "causal"]


@cache
def parts() -> SharedParts:
    """Architectures, autoencoders and text encoders that the catalogue's entries refer to by name."""
    return _read(_folder() / _PARTS, SharedParts)


def find(name: str) -> CatalogueEntry:
    """The entry called `name`; of random weights (`RANDOM`) what would stand in the catalogue.

    Raises:
        ConfigError: there is none; the nearest known name is told.
    """
    if name.startswith(RANDOM):
        return _random_entry(name)
    known = entries()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(entry.name for entry in listed())}"
    raise ConfigError(f"no model is called {name!r}; {hint}")


def lookup(name: str) -> CatalogueEntry | None:
    """The entry called `name`, of random weights too; None where there is none."""
    return find(name) if is_random(name) else entries().get(name)


def is_random(name: str | None) -> bool:
    """Whether this is the name of a model, or an autoencoder, without a file."""
    return name is not None and name.startswith(RANDOM)


def _random_entry(name: str) -> CatalogueEntry:
    known, wanted = [each for each in parts().architectures if each != "tiny"], name.removeprefix(RANDOM)
    if wanted not in known:
        raise ConfigError(f"there is no {name}; it can be {' or '.join(RANDOM + each for each in known)}")
    changes: dict[str, Any] = {
        "name": wanted,
        "title": f"{wanted} with random weights",
        "architecture": wanted,
        "lora": None,
        "context": Context(trained="clean", works=("clean", "staircase", "same_step"), noise=0.0),
        "positions": Positions(published="relative"),
    }
    return find(_RANDOM_LIKE).model_copy(update=changes)


def autoencoders() -> dict[str, Files]:
    """The files of published autoencoders, large and small, by name."""
    large = {name: each.weights for name, each in parts().autoencoders.items() if each.weights is not None}
    return {**large, **{small.name: small for each in parts().autoencoders.values() for small in each.tiny}}


def transformer_arguments(entry: CatalogueEntry) -> dict[str, Any]:
    """Arguments of diffusers' `WanTransformer3DModel` for the model's own transformer."""
    shared = parts()
    return shared.architectures[entry.architecture].arguments(shared.text_encoders[entry.text_encoder].width)


def make_spec(name: str, entry: CatalogueEntry | None, architecture: Mapping[str, Any]) -> ModelSpec:
    """The facts of the model `name` with a transformer of this architecture (see `transformer_arguments`), for pictures
    of its own size. Of a checkpoint without an entry, what is usual.

    A model that makes whole clips has no steps, and a window of 0: who runs it has to say both.
    """
    stream = entry.stream if entry is not None else None
    usual = find(USUAL)
    assert usual.stream is not None and usual.native_fps is not None
    known = entry or usual
    shared = parts()
    pictures, tokens = shared.autoencoders[known.autoencoder], shared.text_encoders[known.text_encoder].tokens
    schedules = entry.sampling.schedules() if entry is not None and entry.sampling is not None else ()
    noise = entry.context.noise if entry is not None and entry.context is not None else None
    spec = ModelSpec(
        name=name,
        latent_channels=architecture["out_channels"],
        latent_height=known.height // pictures.spatial,
        latent_width=known.width // pictures.spatial,
        chunk_latents=(stream or usual.stream).chunk_latents,
        window_latents=stream.window_latents if stream is not None else 0,
        clean_window_latents=stream.clean_window_latents if stream is not None else None,
        sink_latents=stream.sink_latents if stream is not None else 0,
        frames_per_latent=pictures.temporal,
        width=known.width,
        height=known.height,
        native_fps=known.native_fps or usual.native_fps,
        shift=1.0,
        steps=tuple(schedule.steps for schedule in schedules),
        schedules=schedules,
        text_shape=(tokens, architecture["text_dim"]),
        context_sigma=(noise or 0.0) / 1000,
        rope=entry.positions.published if entry is not None and entry.positions is not None else "relative",
        adaptive_sink=stream.sink_value if stream is not None and stream.sink_policy == "adaptive" else None,
        averaged_sink=stream.sink_value if stream is not None and stream.sink_policy == "average" else None,
        context_alone=entry is not None and entry.context is not None and entry.context.alone,
        context_pictures=entry is not None and entry.context is not None and entry.context.pictures,
        switch=entry.switches.own if entry is not None and entry.switches is not None else "keep",
        first_chunks=(stream.first_chunk_latents or stream.chunk_latents) // stream.chunk_latents if stream else 1,
    )
    return replace(spec, steps=_RANDOM_STEPS, shift=_RANDOM_SHIFT, schedules=()) if name.startswith(RANDOM) else spec


def with_own_context(model: ModelConfig) -> ModelConfig:
    """`model` with the KV context that its weights were made for, where none was asked for."""
    entry = entries().get(model.name)
    if "kv_context" in model.model_fields_set or entry is None or entry.context is None:
        return model
    return model.model_copy(update={"kv_context": entry.context.default})


def small_autoencoder(name: str) -> str | None:
    """The name of the small autoencoder that goes with the model `name`; None where none is known."""
    known = lookup(name)
    small = parts().autoencoders[known.autoencoder].tiny if known is not None else ()
    if not small:
        return None
    return f"{RANDOM}{small[0].name}" if is_random(name) else small[0].name


def read_entry(path: Path | Traversable) -> CatalogueEntry:
    """A model's file.

    Raises:
        ConfigError: it cannot be read, a key is unknown or missing, a value is out of range, a part is not in
            `parts.yaml`, or the name is not that of the file. All that pydantic finds is listed, one per line.
    """
    entry = _read(path, CatalogueEntry)
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
