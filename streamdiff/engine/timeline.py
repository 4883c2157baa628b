"""Changes of a stream by chunk. A timeline is a list of those to come: of a file, or posted to a live session; a log
(`change_log`) is one of those that were.

A change holds from its chunk on, which is not admitted before. So what a stream shows depends on its changes, and not
on when they arrived.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import from_json

from streamdiff.core import MAX_LORA_SCALE, PromptPolicy
from streamdiff.errors import ConfigError, RequestError

BLENDS, MAX_BLEND_CHUNKS = ("line", "sphere"), 256
MAX_CHANGES = 10_000
_LONGEST_S, _MOST = 366 * 24 * 3600, 2**40
_Name = Annotated[str, Field(min_length=1, max_length=64)]
_Value = Annotated[float, Field(ge=-1, le=1)]
_Values = Annotated[dict[_Name, _Value], Field(max_length=64)]


LoraName = Annotated[str, Field(min_length=1, max_length=300)]
LoraScale = Annotated[float, Field(strict=True, ge=0, le=MAX_LORA_SCALE)] | None
Over = Annotated[int, Field(strict=True, ge=1, le=MAX_BLEND_CHUNKS)]


@dataclass(frozen=True)
class LoraChange:
    """A LoRA of `model.lora_dir` as in `SetLora`; a log has its label, `name@digest`, in place of the name."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: LoraName
    """of its file, without .safetensors"""
    scale: LoraScale = 1.0
    """null: it is taken out"""
    over: Over = 1
    """chunks over which the scale changes"""


Lora = Annotated[LoraChange, WithJsonSchema(TypeAdapter(LoraChange).json_schema())]
"""Described where it stands."""


@dataclass(frozen=True)
class TimedChange:
    """What changes at chunk `at`, or, until `placed` says at which, after `seconds`. `prompt`, with `switch` (None:
    what suits the model), `over` and `along`, `steps` and `lora` as in the commands of these names. `controls` are
    held from then on, `taps` only for the chunk's first latent frame (of some controls: for all of it). `loop`: at this
    chunk everything begins again."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    at: Annotated[int, Field(strict=True, ge=0, le=_MOST)] | None = None
    """chunk, from 0"""
    seconds: Annotated[float, Field(ge=0, le=_LONGEST_S)] | None = None
    """instead of `at`: the chunk that begins nearest"""
    prompt: Annotated[str, Field(min_length=1, max_length=2000, pattern=r"^[^\x00]*$")] | None = None
    switch: PromptPolicy | None = None
    """what the prompt does to the past, but `reset`; left out: what suits the model"""
    over: Over = 1
    """chunks over which the prompt comes"""
    along: Literal["line", "sphere"] = "line"
    steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    lora: Lora | None = None
    controls: _Values = field(default_factory=dict)
    """held from then on, by name"""
    taps: _Values = field(default_factory=dict)
    """held for the chunk's first latent frame"""
    loop: bool = False
    """everything begins again here; alone, in the last one"""


CHANGE = TypeAdapter(TimedChange)
_CHANGES: TypeAdapter[list[TimedChange]] = TypeAdapter(Annotated[list[TimedChange], Field(max_length=MAX_CHANGES)])


def timeline_schema() -> dict[str, Any]:
    """JSON schema of a timeline."""
    items = _CHANGES.json_schema()["$defs"]["TimedChange"]
    return {"type": "array", "maxItems": MAX_CHANGES, "items": items}


def explained(error: ValidationError) -> tuple[str, str]:
    """The first field at fault, and what is wrong with it."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return ".".join(map(str, first["loc"]))[:80], str(first["msg"])


def checked(changes: Sequence[TimedChange]) -> tuple[TimedChange, ...]:
    """The changes, of which each can be.

    Raises:
        RequestError: for the first that cannot; `field` is its place and the field.
    """
    for index, each in enumerate(changes):
        others = each.prompt is not None or each.steps is not None or each.lora or each.controls or each.taps
        one_time = (each.at is None) != (each.seconds is None)
        for name, wrong, why in (
            ("at", not one_time, "(a chunk) or `seconds` says when: give one of the two"),
            ("loop", each.loop and (others or index < len(changes) - 1), "is alone, in the last change of all"),
            ("loop", each.loop and not (each.at or each.seconds), "is at a later chunk than the first"),
            ("loop", each.loop and index == 0, "has nothing before it that could begin again"),
            ("prompt", not (others or each.loop), "is missing; give it, or steps, lora, controls, taps or loop"),
            ("switch", each.switch == "reset", "cannot be reset: that would begin the timeline again"),
            ("over", each.over > 1 and each.prompt is None, "is for a prompt; give one"),
        ):
            if wrong:
                raise RequestError(f"{index}.{name}", f"change {index} of the timeline: `{name}` {why}", "timeline")
    return tuple(changes)


def parse_timeline(value: object) -> tuple[TimedChange, ...]:
    """A timeline of a JSON value. Raises RequestError: it is none."""
    try:
        changes = _CHANGES.validate_python(value)
    except ValidationError as error:
        name, why = explained(error)
        raise RequestError(name, f"the timeline cannot be read: {name or 'the list'}: {why}", "timeline") from None
    return checked(changes)


def read_timeline(path: Path) -> tuple[TimedChange, ...]:
    """A timeline's file. Raises ConfigError: it cannot be read, or is none."""
    try:
        return parse_timeline(from_json(path.read_bytes()))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        why = f"--timeline is {path}, which is no list of changes as JSON: {why}"
        raise ConfigError(why, field="timeline", code="timeline") from None


def placed(changes: Sequence[TimedChange], chunk_s: float) -> tuple[TimedChange, ...]:
    """The changes in the order of their chunks, of which each shows `chunk_s` seconds."""
    at = [replace(each, at=round((each.seconds or 0) / chunk_s), seconds=None) if each.at is None else each
          for each in changes]  # fmt: skip
    if at and at[-1].loop and not at[-1].at:
        raise RequestError(f"{len(at) - 1}.loop", f"`loop` is less than a chunk, {chunk_s:g} s, away", "timeline")
    return tuple(sorted(at, key=lambda each: (each.at or 0, each.loop)))


def coming(changes: Sequence[TimedChange], begin: int, chunk: int, most: int = 3) -> list[dict[str, Any]]:
    """What changes after a chunk, at most so many of them, with the chunk at which each comes, JSON-able; chunks of the
    changes count from `begin` on."""
    period = (changes[-1].at or 0) if changes and changes[-1].loop else 0
    begin += max(0, chunk - begin) // period * period if period else 0
    place = bisect_right(changes, chunk - begin, key=lambda each: each.at or 0)
    ahead = [(begin, each) for each in changes[place : place + most] if not each.loop]
    ahead += [(begin + period, each) for each in changes[:most] if period]
    told = ("prompt", "controls", "taps")
    return [
        {"chunk": first + (each.at or 0), **{name: getattr(each, name) for name in told if getattr(each, name)}}
        for first, each in ahead[:most]
    ]


@dataclass
class Timeline:
    """Changes that a stream plays, by chunk, counted from `begin` on; `place` is that of the next one. The next prompt
    is encoded ahead, by `encode` (`PromptQueue.encode_ahead`); `encoding`: None where none is to come."""

    changes: tuple[TimedChange, ...]
    begin: int
    encode: Callable[[str], Future[Any]]
    place: int = 0
    encoding: Future[Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._look_ahead()

    @property
    def chunk(self) -> int | None:
        """The chunk that waits for the next change; None: there is none."""
        return None if self.place == len(self.changes) else self.begin + (self.changes[self.place].at or 0)

    def take(self) -> tuple[TimedChange, Any] | None:
        """The next change, and its prompt's conditioning if it has one; None while that is encoded. Mutates: self."""
        change, conditioning = self.changes[self.place], None
        if change.prompt is not None:
            assert self.encoding is not None, "it was looked ahead for"
            if not self.encoding.done():
                return None
            conditioning = self.encoding.result().conditioning
        self.place += 1
        if change.loop:
            self.begin, self.place = self.begin + (change.at or 0), 0
        if change.loop or change.prompt is not None:
            self._look_ahead()
        return change, conditioning

    def _look_ahead(self) -> None:
        following = (self.changes[at].prompt for at in range(self.place, len(self.changes)))
        text = next((each for each in following if each is not None), None)
        self.encoding = None if text is None else self.encode(text)
