"""The nouns: what a chunk sees of the past, what the scheduler hands out, what comes out of a pipeline, and how far a
stream is. Who keeps what else of a session: the table in docs/design.md. Imports neither torch nor numpy.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from streamdiff import clock
from streamdiff.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# ---- KV contexts and prompt policies -----------------------------------------------------------------------------

KVContext = Literal["clean", "staircase", "same_step"]
PromptPolicy = Literal["keep", "recache", "recache-causal", "flush", "reset"]
"""What a new prompt does to the past: all of it stays as it was cached; it is cached again under the new prompt, in one
forward or chunk by chunk; only the oldest chunks that always stay (the sink) are kept; or the stream restarts."""
RECACHES = ("recache", "recache-causal")
PROMPT_POLICIES: tuple[str, ...] = get_args(PromptPolicy)
KV_CONTEXTS: tuple[str, ...] = get_args(KVContext)
PER_STEP = ("same_step",)
"""Those with a cache for each step."""


def in_flight_limit(kv_context: str, *, steps: int, stages: int) -> int:
    """Chunks of one session that may be in flight at once.

    Raises:
        ValueError: unknown KV context.
    """
    if kv_context not in KV_CONTEXTS:
        raise ValueError(f"kv_context is {kv_context!r}; it can be {', '.join(KV_CONTEXTS)}")
    return {"clean": 1, "staircase": steps + 1}.get(kv_context, stages)


def most_steps(steps: int, known: Sequence[int]) -> int:
    """The largest number of steps that a session may change to (`known`: those its model has). Its caches are sized for
    it, so that nothing is allocated while it runs."""
    return max(steps, *known) if known else steps


def cache_count(kv_context: str, *, steps: int) -> int:
    """Caches of one session: `same_step` keeps one per step."""
    return steps if kv_context in PER_STEP else 1


def spare_slots(kv_context: str, *, steps: int) -> int:
    """Slots, in chunks, that a cache has beyond the window, for newer chunks in flight.

    Only a staircase's newcomers write into the cache that older chunks still read, so it needs one for each of them,
    in-flight limit less one. A cache of `same_step` holds one step, which chunks pass in order. So no cache
    depends on the number of stages, and on any number the same keys are summed in the same order.
    """
    return in_flight_limit(kv_context, steps=steps, stages=1) - 1 if kv_context == "staircase" else 0


def min_ahead_frames(kv_context: str, *, steps: int, stages: int, chunk_frames: int, first_chunks: int = 1) -> int:
    """Frames that must be allowed ahead of those shown so that the ring can run: the chunks in flight and one being
    shown; at the beginning those that are made together."""
    return chunk_frames * max(in_flight_limit(kv_context, steps=steps, stages=stages) + 1, first_chunks)


# ---- micro-steps -------------------------------------------------------------------------------------------------

SHARED: dict[str, str] = {"in_a_forward": "shared"}
"""Metadata of a field that must be equal in all rows of a forward."""
PER_ROW: dict[str, str] = {"in_a_forward": "per_row"}
"""Metadata of a field that each row of a forward has for itself: the model takes a vector of it."""

_HEAD = 2  # sequence number and count go before the rows


@dataclass(frozen=True, order=True)
class MicroStep:
    """One step of one chunk of one session; integers only, so that a forward's rows travel as a fixed-size record.

    `step` counts from 0; `step == steps` is the clean pass, which only rewrites the chunk's keys and values. `epoch`
    is the session's epoch when the chunk was admitted: all of a chunk's steps use the same prompt. `recache_end` is the
    newest chunk of a window that is run again in one forward, of which this is a row; -1: it is no such row.
    """

    session: int = field(metadata=PER_ROW)
    chunk: int = field(metadata=PER_ROW)
    step: int = field(metadata=PER_ROW)
    steps: int = field(metadata=PER_ROW)
    epoch: int = field(metadata=PER_ROW)
    recache_end: int = field(default=-1, metadata=SHARED)

    @property
    def clean(self) -> bool:
        """Whether this is the clean pass."""
        return self.step == self.steps

    @property
    def recaches(self) -> bool:
        """Whether it is a row of a forward in which a window is run again, which has no other rows."""
        return self.recache_end >= 0

    @property
    def last(self) -> bool:
        """Whether the chunk's latents are finished when this step has come back."""
        return self.step == self.steps - 1


@cache
def shared_fields(kind: type) -> tuple[str, ...]:
    """Fields of a dataclass in which all rows of a forward must be equal.

    Raises:
        TypeError: a field does not say whether it is shared.
    """
    for each in fields(kind):
        if each.metadata.get("in_a_forward") not in ("shared", "per_row"):
            raise TypeError(f"{kind.__name__}.{each.name} has to be field(metadata=SHARED) or PER_ROW")
    return tuple(each.name for each in fields(kind) if each.metadata["in_a_forward"] == "shared")


def differing_field(one: Any, other: Any) -> str | None:
    """The first shared field in which two of the same kind differ, so that they cannot share a forward; None: they may.
    If each of some may with the first, all may."""
    return next(
        (name for name in shared_fields(cast(Hashable, type(one))) if getattr(one, name) != getattr(other, name)), None
    )


_FIELDS = len(fields(MicroStep))
_VALUES = attrgetter(*(each.name for each in fields(MicroStep)))


def record_length(max_rows: int) -> int:
    """Integers in the record of a forward of up to `max_rows` rows."""
    return _HEAD + max_rows * _FIELDS


def pack(rows: Sequence[MicroStep], max_rows: int, sequence: int) -> list[int]:
    """The record of a forward of at most `max_rows` rows: sequence number, count, each row's fields in order, zeros up
    to `record_length`."""
    record = [sequence, len(rows)]
    for row in rows:
        record += _VALUES(row)
    return record + [0] * (record_length(max_rows) - len(record))


def unpack(record: Sequence[int]) -> tuple[int, list[MicroStep]]:
    """Sequence number and rows of a record that `pack` made."""
    sequence, count = record[:_HEAD]
    return sequence, [MicroStep(*record[at : at + _FIELDS]) for at in range(_HEAD, record_length(count), _FIELDS)]


# ---- LoRAs that sessions load ------------------------------------------------------------------------------------

MOST_LORAS = 8
"""That may be loaded at once."""
MAX_LORA_SCALE = 2.0
SCALE_UNIT = 2.0**-20
"""Scales are multiples of it, which float32 has exactly."""
_LABEL, _ID_DIGITS = re.compile(r"(.+)@([0-9a-f]{64})"), 10


def exact_scale(scale: float) -> float:
    """The nearest scale that all ranks have exactly."""
    return round(scale / SCALE_UNIT) * SCALE_UNIT


def split_label(label: str) -> tuple[str, str]:
    """Name and digest of a LoRA's label, `name@digest` (SHA-256 of the file); of a name alone the digest is empty."""
    match = _LABEL.fullmatch(label)
    return (match[1], match[2]) if match else (label, "")


def lora_id(label: str) -> int:
    """The number, from the digest, by which ranks know the LoRA of a label."""
    return int(split_label(label)[1][:_ID_DIGITS], 16)


# ---- models, frames, streams -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Control:
    """One number that steers a model's world: an `axis`, from -1 to 1, or a `button`, 0 or 1; at rest it is 0. `keys`
    are those that people hold for it, as `KeyboardEvent.code` has them: an axis' for -1 and for 1, in one or more such
    pairs, a button's one; after them `MouseX`, `MouseY` or `-MouseY` where the mouse turns the axis. `whole_chunk`: it
    is the same in all latent frames of a chunk. `scale` is what 1 is to the model. A button that is `idle` is 1 by
    itself while every other control is at rest."""

    name: str
    kind: Literal["axis", "button"] = "axis"
    keys: tuple[str, ...] = ()
    whole_chunk: bool = False
    scale: float = 1.0
    idle: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(self.keys))


def control_values(controls: Sequence[Control], values: Mapping[str, float]) -> dict[int, float]:
    """The values of a control message by index among `controls`, rounded to float32.

    Raises:
        RequestError: a control that the model does not have, or a value that it cannot take.
    """
    found, index = {}, {each.name: number for number, each in enumerate(controls)}
    for name, value in values.items():
        if name not in index:
            has = f"it has {', '.join(index)}" if index else "it has none"
            raise RequestError("control", f"control {name[:40]!r} is not one of this model's; {has}", "control")
        button = controls[index[name]].kind == "button"
        if not (value in (0, 1) if button else -1 <= value <= 1):
            allowed = "0 or 1" if button else "from -1 to 1"
            raise RequestError(name, f"control {name} is {value}; it must be {allowed}", "out_of_range")
        (found[index[name]],) = struct.unpack("f", struct.pack("f", value))  # as it is used, and stands in a log
    return found


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model, by name, and how it runs: sizes in pixels; `chunk_frames` frames come out of one chunk. `steps`
    and `kv_context` are those of a session that does not name its own, `steps_known` the numbers of steps that it may
    name, `switch` what a new prompt does to the past (PROMPT_POLICIES) unless it says. `text_shape` is (most rows,
    width) of a prompt's embeddings, `chunk_shape` that of a chunk's latents, `[C, F, h, w]`, and `first_chunks` how
    many are made together at a stream's beginning; without them it takes no features that were made elsewhere.
    `controls` steer it while it plays. With `begins_with_picture` it needs a start picture; `has_camera`: it takes a
    camera's poses."""

    model: str
    device: str
    width: int
    height: int
    native_fps: float
    chunk_frames: int
    steps: int
    kv_context: str
    steps_known: tuple[int, ...] = ()
    switch: str = "keep"
    text_shape: tuple[int, ...] = ()
    chunk_shape: tuple[int, ...] = ()
    first_chunks: int = 1
    controls: tuple[Control, ...] = ()
    begins_with_picture: bool = False
    has_camera: bool = False

    def __post_init__(self) -> None:
        """Controls as objects, also those that came as JSON."""
        made = (each if isinstance(each, Control) else Control(**cast(dict[str, Any], each)) for each in self.controls)
        object.__setattr__(self, "controls", tuple(made))


@dataclass(frozen=True)
class Frames:
    """Decoded frames of one chunk, in order, possibly several pieces per chunk.

    pictures are uint8 `[n, *P]`, P as in `streamdiff.video.pixel_format`; `last` marks a chunk's last piece, which also
    tells the seconds from the chunk's admission until now; `control` is that of the chunk, see `Chunk`.
    """

    session: int
    chunk: int
    epoch: int
    pictures: NDArray[np.uint8]
    last: bool
    chunk_s: float | None
    control: int = 0


@dataclass(frozen=True)
class InputFigures:
    """A session's video input: the noise level of the latest chunk, None before the first; frames that were used, and
    that came too fast; what ended it, where it failed."""

    level: float | None
    used: int
    dropped: int
    fault: str = ""


@dataclass
class Chunk:
    """A chunk that is in the ring or decoding. `cost` is relative to a chunk in the default number of steps;
    `admitted_s` is on this process's clock; `control` is the number of the latest change of controls that it has."""

    epoch: int
    cost: float
    admitted_s: float = field(default_factory=clock.monotonic_s)
    control: int = 0


@dataclass
class StreamProgress:
    """One run of a session, from open or reset to the next reset. `number` is unique, so late pieces of an earlier run
    are dropped; `ahead_frames` are admitted and not handed out yet, `frame_credit` is as `set_frame_credit` said, and
    `decoding` counts chunks that are finished and not handed out whole."""

    number: int
    session: int
    background: bool = False
    decoding: int = 0
    frame_credit: int = 0
    chunks: dict[int, Chunk] = field(default_factory=dict)
    ahead_frames: int = 0
