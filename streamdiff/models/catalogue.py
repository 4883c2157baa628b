"""The catalogue: what is known of every published model, so that a name is all a user has to give, and its `ModelSpec`.

One YAML file per model in `published/`, and `parts.yaml` with what models share: architectures, autoencoders, text
encoders. An unknown key is an error. `None` means not known: not published, or not read. It never
stands for a default. Needs no torch.

Sizes of chunk, window and sink are in latent frames; a window counts the sink and the chunk itself.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict

from streamdiff.core import KV_CONTEXTS, Control, KVContext, PromptPolicy
from streamdiff.errors import ConfigError
from streamdiff.models.sampling import Schedule, published
from streamdiff.models.spec import CAMERA_CONTROLS, CAMERA_ROWS, ActionModules, ModelSpec

Rope = Literal["absolute", "relative"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Architecture(_Entry):
    """Sizes of a transformer in diffusers' Wan layout; `width` is D, heads * head_dim; `camera_channels` those that a
    camera has for each patch, None without one; `image_dim` is the width of a picture's features in the text's
    place."""

    width: int
    ffn_dim: int
    heads: int
    blocks: int
    in_channels: int
    out_channels: int
    freq_dim: int
    patch: tuple[int, int, int] = (1, 2, 2)
    camera_channels: int | None = None
    image_dim: int | None = None
    actions: ActionModules | None = None


class Files(_Entry):
    """Files of one repository of the hub; `licence` is that of the files, not of any code."""

    repo: str
    files: tuple[str, ...]
    licence: str | None
    licence_note: str | None = None


class Weights(Files):
    """Transformer weights. `container` is the top-level key that holds the tensors, `flat` where they lie at the top
    themselves, None where nobody has said (the loader then looks). `others` are files of the same repository for other
    uses, by name."""

    container: str | None
    others: dict[str, str] = {}


class PublishedLora(Files):
    """An adapter on top of the weights, in PEFT's layout; `alpha / rank` is its scale."""

    container: str | None
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """Factor on B @ A."""
        return self.alpha / self.rank


class TinyDecoder(Files):
    """A small one for the same latents. `latents` says in which space it wants them: `model`, as the transformer
    makes them, or `vae`, after mean and deviation are put back. The wrong one gives washed-out colour and no error."""

    name: str
    latents: Literal["model", "vae"]
    note: str | None = None


class Autoencoder(_Entry):
    """An autoencoder: its latent channels, and pixels per latent pixel in time and space; `values` are stored numbers,
    `config` that of diffusers' class, as far as memory depends on it."""

    title: str
    weights: Files | None
    channels: int
    temporal: int
    spatial: int
    values: int | None
    config: dict[str, Any] | None = None
    tiny: tuple[TinyDecoder, ...] = ()


class PublishedTextEncoder(_Entry):
    """A text encoder: `tokens` is the fixed length that texts are padded to, `width` that of an embedding,
    `gigabytes` what its weights take in bfloat16."""

    title: str
    weights: Files | None
    tokens: int
    width: int
    gigabytes: float | None


class SharedParts(_Entry):
    """What models share, by name."""

    architectures: dict[str, Architecture]
    autoencoders: dict[str, Autoencoder]
    text_encoders: dict[str, PublishedTextEncoder]


class Sampling(_Entry):
    """Denoise steps as they are published: arguments of `sampling.published`. With `keep_end` the last step may be left
    out."""

    steps: tuple[float, ...]
    first_chunk_steps: tuple[float, ...] | None = None
    shift: float
    warp: bool
    nearest: bool
    keep_end: bool = False
    timestep_dtype: Literal["exact", "bfloat16"] = "exact"
    first_noise_scale: float = 1.0
    truncated: bool = False

    def schedule(self) -> Schedule:
        """Timesteps and noise levels of the denoise steps, with those of the first chunk where it has its own.

        Raises:
            ConfigError: a list is no schedule.
        """
        options = self.model_dump(exclude={"steps", "first_chunk_steps"})
        first = None if self.first_chunk_steps is None else published(self.first_chunk_steps, **options)
        return replace(published(self.steps, **options), first=first)

    def schedules(self) -> tuple[Schedule, ...]:
        """`schedule()`, and, where the model has `keep_end`, the same schedule without the step at its end."""
        if not self.keep_end:
            return (self.schedule(),)
        without_end = self.model_copy(update={"keep_end": False, "first_chunk_steps": None})
        return self.schedule(), without_end.schedule()


class Streaming(_Entry):
    """How chunks follow one another. `first_chunk_latents` where the first chunk differs, `clean_window_latents` where
    the window of KV context `clean` does; `sink_value` is what an `average` sink keeps of itself when a chunk is folded
    into it, or the likeness below which a chunk of an `adaptive` one gives way; `trained_latents` is the longest stream
    it was trained on, None where that is not known."""

    chunk_latents: int
    first_chunk_latents: int | None = None
    window_latents: int
    clean_window_latents: int | None = None
    sink_latents: int
    sink_policy: Literal["fixed", "average", "adaptive"] | None = None
    sink_value: float | None = None
    trained_latents: int | None = None

    def window(self, kv_context: KVContext) -> int:
        """Latent frames that a chunk sees, sink and itself included."""
        return (self.clean_window_latents if kv_context == "clean" else None) or self.window_latents


class Context(_Entry):
    """KV contexts: the one the weights were trained for (None: not known), and others that are known to work; `only`:
    it runs in these alone. `noise` is the timestep told in the clean pass, None where there is none. `alone`: that pass
    sees nothing before the chunk but the sink. With a window of two chunks this is what comes of recomputing the past
    for every chunk. `pictures`: from the second chunk on it is shown a first latent frame that was encoded again, by
    itself, from the last of its pictures. `source`: where the contexts can be read, the authors' code."""

    trained: KVContext | None
    works: tuple[KVContext, ...] = ()
    noise: float | None
    alone: bool = False
    only: bool = False
    pictures: bool = False
    source: str | None = None

    @property
    def default(self) -> KVContext:
        """The context to run with when nothing else is asked for."""
        return self.trained or (self.works[0] if self.works else "clean")


class Switches(_Entry):
    """Policies of a prompt change: what the model was trained with, and what is known to work. `reset` always does."""

    trained: PromptPolicy | None = None
    works: tuple[PromptPolicy, ...] = ()

    @property
    def own(self) -> PromptPolicy:
        """Policy of a prompt change that names none."""
        return self.trained or (self.works[0] if self.works else "keep")


class Positions(_Entry):
    """Rotary positions as published, and others that the authors offer; `count` is the length of the authors' table, as
    far as a stream longer than that would be read beyond it."""

    published: Rope
    count: int | None = None
    works: tuple[Rope, ...] = ()


class CatalogueEntry(_Entry):
    """One model; `use` is what it is good for, `height` and `width` those of the picture it was trained for, or is
    shown with, `begins_with` what its chunks are made from. `sampling`, `stream`, `context`, `switches` and `positions`
    are None where it makes whole clips and cannot stream (`kind` bidirectional); `weights` is None for the embedded
    model. `encode_normalised` says whether the authors' code normalises what the autoencoder encodes; where it does
    not, such latents are taken, if the user makes them. `controls` steer its world, in the order of its columns."""

    name: str
    title: str
    family: str
    kind: Literal["causal", "bidirectional"]
    use: str
    architecture: str
    weights: Weights | None
    lora: PublishedLora | None = None
    height: int
    width: int
    native_fps: float | None
    autoencoder: str
    encode_normalised: bool | None
    text_encoder: str
    begins_with: Literal["noise", "video"] = "noise"
    sampling: Sampling | None
    stream: Streaming | None
    context: Context | None
    switches: Switches | None
    positions: Positions | None
    controls: tuple[Control, ...] = ()
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...]


USUAL = "self-forcing"
"""The model of the catalogue whose picture, rate and chunk a checkpoint has that the catalogue does not know."""
RANDOM = "random:"
"""What the name of a model, or autoencoder, without a file begins with: its weights are drawn where they are used, to
measure speed and memory before anything is downloaded; the picture is noise. `random:wan2.1-1.3b` is a transformer of
that architecture (any of the catalogue's but the embedded model's) with LongLive's stream, in 4, 2 or 1 steps;
`random:wan2.1` is Wan's autoencoder, `random:taew2_1` the small one, and so for Wan2.2."""
_FOLDER, _PARTS = Path(__file__).with_name("published"), "parts.yaml"
_RANDOM_LIKE, _RANDOM_STEPS, _RANDOM_SHIFT = "longlive-1.3b", (4, 2, 1), 5.0
_Model = TypeVar("_Model", bound=BaseModel)


@cache
def entries() -> dict[str, CatalogueEntry]:
    """Every packaged model by name: the embedded one first, then bases, then by family, size and name."""
    sizes = parts().architectures
    files = [path for path in _FOLDER.glob("*.yaml") if path.name != _PARTS]
    found = [_read(path, CatalogueEntry) for path in files]
    found.sort(key=lambda e: (e.name != "tiny", e.kind == "causal", e.family, sizes[e.architecture].width, e.name))
    return {entry.name: entry for entry in found}


def listed() -> list[CatalogueEntry]:
    """Models that stream. Their bases make no pictures worth a look without guidance: for who asks by name."""
    return [entry for entry in entries().values() if entry.kind == "causal"]


@cache
def parts() -> SharedParts:
    """Architectures, autoencoders and text encoders that the catalogue's entries refer to by name."""
    return _read(_FOLDER / _PARTS, SharedParts)


def find(name: str) -> CatalogueEntry:
    """The entry called `name`; of random weights (`RANDOM`) what would stand in the catalogue.

    Raises:
        ConfigError: there is none; the message has the nearest known name.
    """
    if name.startswith(RANDOM):
        return _random_entry(name)
    known = entries()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), [entry.name for entry in listed()], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(entry.name for entry in listed())}"
    raise ConfigError(f"no model is called {name!r}; {hint}")


def lookup(name: str) -> CatalogueEntry | None:
    """The entry called `name`, of random weights too; None where there is none."""
    return find(name) if is_random(name) else entries().get(name)


def is_random(name: str | None) -> bool:
    """Whether this is the name of a model, or an autoencoder, without a file."""
    return name is not None and name.startswith(RANDOM)


def _random_entry(name: str) -> CatalogueEntry:
    found = parts().architectures
    known = [each for each in found if each != "tiny" and found[each].image_dim is None]
    wanted = name.removeprefix(RANDOM)
    if wanted not in known:
        raise ConfigError(f"there is no {name}; it can be {' or '.join(RANDOM + each for each in known)}")
    changes: dict[str, Any] = {
        "name": wanted,
        "title": f"{wanted} with random weights",
        "architecture": wanted,
        "autoencoder": autoencoder_of(found[wanted].out_channels),
        "lora": None,
        "context": Context(trained="clean", works=("clean", "staircase", "same_step"), noise=0.0),
        "positions": Positions(published="relative"),
    }
    return find(_RANDOM_LIKE).model_copy(update=changes)


def autoencoders() -> dict[str, Files]:
    """The files of published autoencoders, large and small, by name."""
    large = {name: each.weights for name, each in parts().autoencoders.items() if each.weights is not None}
    return {**large, **{small.name: small for each in parts().autoencoders.values() for small in each.tiny}}


def autoencoder_of(channels: int) -> str | None:
    """The name of Wan's autoencoder that has so many latent channels; None: there is none."""
    known = parts().autoencoders.items()
    return next((name for name, each in known if each.config is not None and each.channels == channels), None)


def parts_of(entry: CatalogueEntry) -> tuple[Architecture, Autoencoder, PublishedTextEncoder]:
    """What the entry refers to by name."""
    shared = parts()
    architecture, text_encoder = shared.architectures[entry.architecture], shared.text_encoders[entry.text_encoder]
    return architecture, shared.autoencoders[entry.autoencoder], text_encoder


def files_of(entry: CatalogueEntry) -> dict[str, Files]:
    """Files that running the model needs, by the setting of `model` that names others in their place."""
    _, pictures, text = parts_of(entry)
    files = {"weights": entry.weights, "lora": entry.lora, "vae": pictures.weights, "text_encoder": text.weights}
    return {name: found for name, found in files.items() if found is not None}


def transformer_arguments(entry: CatalogueEntry) -> dict[str, Any]:
    """Arguments of diffusers' `WanTransformer3DModel` for the model's own transformer."""
    own, _, text = parts_of(entry)
    camera = {} if own.camera_channels is None else {"camera_channels": own.camera_channels}
    return camera | {
        "patch_size": own.patch,
        "num_attention_heads": own.heads,
        "attention_head_dim": own.width // own.heads,
        "in_channels": own.in_channels,
        "out_channels": own.out_channels,
        "text_dim": text.width,
        "freq_dim": own.freq_dim,
        "ffn_dim": own.ffn_dim,
        "num_layers": own.blocks,
        "cross_attn_norm": True,
        "image_dim": own.image_dim,
    }


def make_spec(
    name: str, entry: CatalogueEntry | None, architecture: Mapping[str, Any], actions: ActionModules | None = None
) -> ModelSpec:
    """The facts of the model `name` with a transformer of this architecture (see `transformer_arguments`), for pictures
    of its own size. Of a checkpoint without an entry, what is usual.

    A model that makes whole clips has no steps, and a window of 0: who runs it has to say both.
    """
    usual = _usual(architecture["out_channels"])
    assert usual.stream is not None and usual.native_fps is not None
    known = entry or usual
    _, pictures, text = parts_of(known)
    beside = architecture["in_channels"] - architecture["out_channels"]
    camera = architecture.get("camera_channels") is not None
    spec = ModelSpec(
        name=name,
        latent_channels=architecture["out_channels"],
        latent_height=known.height // pictures.spatial,
        latent_width=known.width // pictures.spatial,
        chunk_latents=usual.stream.chunk_latents,
        window_latents=0,
        sink_latents=0,
        frames_per_latent=pictures.temporal,
        width=known.width,
        height=known.height,
        native_fps=known.native_fps or usual.native_fps,
        shift=1.0,
        steps=(),
        text_shape=(text.tokens, architecture["text_dim"]),
        condition_channels=beside if beside == architecture["out_channels"] + pictures.temporal else 0,
        actions=actions,
        action_rows=CAMERA_ROWS if camera else None if actions is None else actions.rows,
        controls=CAMERA_CONTROLS if camera else (),
        kv_contexts=("clean",) if camera or actions is not None else KV_CONTEXTS,
    )
    if entry is None or entry.stream is None:
        return spec
    assert entry.sampling and entry.context and entry.switches and entry.positions, "it streams"
    stream, context, schedules = entry.stream, entry.context, entry.sampling.schedules()
    spec = replace(
        spec,
        chunk_latents=stream.chunk_latents,
        first_chunks=(stream.first_chunk_latents or stream.chunk_latents) // stream.chunk_latents,
        window_latents=stream.window_latents,
        clean_window_latents=stream.clean_window_latents,
        sink_latents=stream.sink_latents,
        adaptive_sink=stream.sink_value if stream.sink_policy == "adaptive" else None,
        averaged_sink=stream.sink_value if stream.sink_policy == "average" else None,
        rope=entry.positions.published,
        positions=entry.positions.count,
        steps=tuple(schedule.steps for schedule in schedules),
        schedules=schedules,
        context_sigma=(context.noise or 0.0) / 1000,
        context_alone=context.alone,
        context_pictures=context.pictures,
        kv_contexts=(context.default, *context.works) if context.only else spec.kv_contexts,
        switch=entry.switches.own,
        controls=entry.controls if actions is not None else spec.controls,
    )
    return replace(spec, steps=_RANDOM_STEPS, shift=_RANDOM_SHIFT, schedules=()) if name.startswith(RANDOM) else spec


def _usual(channels: int) -> CatalogueEntry:
    """What is usual, with Wan's autoencoder for so many latent channels."""
    usual = find(USUAL)
    return usual.model_copy(update={"autoencoder": autoencoder_of(channels) or usual.autoencoder})


def small_autoencoder(name: str) -> str | None:
    """The name of the small autoencoder that goes with the model `name`; None where none is known."""
    known = lookup(name)
    small = parts_of(known)[1].tiny if known is not None else ()
    if not small:
        return None
    return f"{RANDOM}{small[0].name}" if is_random(name) else small[0].name


def _read(path: Path, model: type[_Model]) -> _Model:
    # By way of JSON, where a strict model takes a list for a tuple.
    return model.model_validate_json(json.dumps(yaml.safe_load(path.read_text(encoding="utf-8"))))
