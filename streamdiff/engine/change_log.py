"""The log of a session: all that steered its stream, at the chunks in which it took effect. With the model and the seed
it makes the same latents again.

JSON lines: the header (`LogHeader`), and a `TimedChange` for each change, in order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from streamdiff.core import KVContext
from streamdiff.engine.timeline import CHANGE, TimedChange, checked, explained, placed
from streamdiff.errors import ConfigError, RequestError
from streamdiff.version import __version__

KIND, FORMAT = "streamdiff log", 1
MAX_LOG_BYTES = 10_000_000
"""Of a log's changes: what follows is left out. That is more than an hour of a mouse that moves in every chunk."""
_MAX_FILE_BYTES = MAX_LOG_BYTES + (1 << 20)
_Number = Annotated[int, Field(ge=0, le=2**40)]


@dataclass(frozen=True)
class LogHeader:
    """What a logged stream began with: `prompt` as the model was given it, `image` the SHA-256 of the start picture's
    pixels ("": none); and how far it was: `chunks` begun, `frames` made, and so many lines with `changes`. `model`:
    facts of the model, see `RestingStates.facts`. `fault`: why it cannot be played again, `cut`: why the log ends
    before it was asked for; else empty."""

    kind: str
    format: int
    model: dict[str, Any]
    prompt: Annotated[str, Field(max_length=2000)]
    seed: _Number
    steps: Annotated[int, Field(ge=1, le=1000)]
    kv_context: KVContext
    chunks: _Number
    frames: _Number
    changes: _Number
    image: str = ""
    fault: str = ""
    cut: str = ""


_HEADER = TypeAdapter(LogHeader)


@dataclass(frozen=True)
class KeptPlace:
    """Where a stream was, whose next chunk was `chunk`: its log had `size` bytes of changes, `frames` were made, and
    chunks before had `held` these controls. `stream` stands for it, see `Session`; `snapshot` is a file of then."""

    chunk: int
    size: int
    frames: int
    held: dict[str, float]
    stream: object
    snapshot: bytes | memoryview = field(default=b"", repr=False)


class ChangeLog:
    """What steers one stream, from its beginning on. Memory: that of `MAX_LOG_BYTES`.

    Controls are noted as a chunk gets them: what is held since, and taps. Numbers are float32, as they are used.
    """

    def __init__(self, fault: str = "", **begin: Any) -> None:
        """`begin`: fields of `LogHeader`."""
        self.fault, self._begin = fault, begin
        self.loras = set[str]()
        """Labels of the LoRAs that it names."""
        self.frames = 0
        """Of the stream, that have been made."""
        self.held: dict[str, float] = {}
        """Controls, as they are held now."""
        self._before: dict[str, float] = {}  # as the chunk before `_chunk` had them
        self._pressed: dict[str, float] = {}
        self._chunk = 0  # of the changes that are not in `_lines` yet
        self._open = bytearray()
        self._lines = bytearray()
        self.end: tuple[int, int, str] | None = None
        """The chunk from which on it has nothing, the frames made by then, and why; None: it goes on."""

    def add(self, chunk: int, **change: Any) -> None:
        """Note a change, in the words of `TimedChange`, of the next chunk to be admitted. Mutates: self."""
        self._advance(chunk)
        self.loras |= {change["lora"]["name"]} if "lora" in change else set()
        if self.end is None:
            self._open += _line({"at": chunk, **change})
            self._limit(chunk)

    def hold(self, chunk: int, values: Mapping[str, float], pressed: bool = True) -> None:
        """Note controls that are held from the next chunk on; not `pressed`: as in `HeldControls.set`. Mutates:
        self."""
        self._advance(chunk)
        for name, value in values.items():
            self.held[name] = short = float(str(np.float32(value)))
            if short and pressed:
                self._pressed[name] = short

    def begin_with(self, chunk: int, other: ChangeLog, next_chunk: int) -> None:
        """Keys stay down over a reset: hold what the stream before, whose next chunk was `next_chunk`, held, with the
        taps that had no chunk yet. Mutates: self."""
        taps = other._taps if other._chunk == next_chunk else {}
        for values in ({name: value for name, value in other.held.items() if value}, taps, dict.fromkeys(taps, 0.0)):
            self.hold(chunk, values)

    def cut(self, chunk: int, why: str) -> None:
        """What comes from this chunk on cannot be played again. Mutates: self."""
        self._advance(chunk)
        self.end = self.end or (chunk, self.frames, why)

    def place(self, chunk: int, stream: object) -> KeptPlace:
        """The present place, of a stream whose next chunk is `chunk`. Mutates: self."""
        self._advance(chunk)
        return KeptPlace(chunk, len(self._lines) + len(self._open), self.frames, dict(self._before), stream)

    def back(self, place: KeptPlace, until: int) -> tuple[ChangeLog, tuple[TimedChange, ...]]:
        """The log as it was at a place of it, and what it has of the chunks from there to `until`, exclusive. The first
        of these changes holds all controls that are held, as a snapshot has none of them."""
        data, log = bytes(self._lines + self._latest()), ChangeLog(self.fault, **self._begin)
        log.frames, log.held, log._before, log._chunk = place.frames, dict(place.held), dict(place.held), place.chunk
        log._lines += data[: place.size]
        log.loras |= self.loras
        changes = [CHANGE.validate_json(line) for line in data[place.size :].splitlines()]
        changes = [each for each in changes if (each.at or 0) < until]
        own = (each for each in changes if each.at == place.chunk and (each.controls or each.taps))
        first = next(own, TimedChange(at=place.chunk))
        whole = replace(first, controls=place.held | first.controls)
        others = [each for each in changes if each is not first]
        return log, (whole, *others) if place.chunk < until else ()

    def content(self, model: Mapping[str, Any], chunk: int) -> bytes:
        """The file, with the facts of the model, of a stream whose next chunk is `chunk`."""
        chunks, frames, cut = self.end or (chunk, self.frames, "")
        lines = self._lines + (self._latest() if self._chunk < chunks else b"")
        header = {"kind": KIND, "format": FORMAT, "version": __version__, "fault": self.fault, **self._begin}
        header |= {"chunks": chunks, "frames": frames, "changes": lines.count(b"\n"), "cut": cut, "model": dict(model)}
        return _line(header) + lines

    @property
    def _taps(self) -> dict[str, float]:
        return {name: value for name, value in self._pressed.items() if not self.held[name]}

    def _advance(self, chunk: int) -> None:
        """Changes of `chunk` follow. Mutates: self."""
        if chunk == self._chunk:
            return
        if self.end is None:
            self._lines += self._latest()
        self._chunk, self._before = chunk, dict(self.held)
        self._open.clear()
        self._pressed.clear()
        self._limit(chunk)

    def _limit(self, chunk: int) -> None:
        if self.end is None and len(self._lines) + len(self._open) > MAX_LOG_BYTES:
            self._open.clear()
            self.cut(chunk, f"it has {MAX_LOG_BYTES / 1e6:g} MB, the most that is kept")

    def _latest(self) -> bytes:
        """The lines of chunk `_chunk`."""
        held = {name: value for name, value in self.held.items() if value != self._before.get(name, 0.0)}
        controls = {"controls": held, "taps": self._taps}
        change = {name: values for name, values in controls.items() if values}
        return bytes(self._open) + (_line({"at": self._chunk, **change}) if change else b"")


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True)
class Log:
    """A log that was read: it may be a stranger's, and asks for what a client may ask for."""

    header: LogHeader
    changes: tuple[TimedChange, ...]


def read_log(path: Path) -> Log:
    """A log's file. Raises ConfigError as `parse_log`, or where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the log {path} cannot be read: {error.strerror}", field="replay", code="log") from None
    return parse_log(data, str(path))


def parse_log(data: bytes, name: str) -> Log:
    """The log in a file's content; errors call it `name`.

    Raises:
        ConfigError: it is too large or no whole log, is of another format, or of a stream that cannot be played again.
    """
    if len(data) > _MAX_FILE_BYTES:
        why = f"the log {name} is larger than {_MAX_FILE_BYTES:,} bytes; no session's log is"
        raise ConfigError(why, field="replay", code="log")
    first, *lines = data.removesuffix(b"\n").split(b"\n")
    header: LogHeader = _parsed(_HEADER, first, f"{name}:1")
    for wrong, named, why in (
        ((header.kind, header.format) != (KIND, FORMAT), "format", f"this version plays format {FORMAT} of {KIND!r}"),
        (header.fault, "fault", f"it cannot be played again: {header.fault[:200]}"),
        (not header.frames, "frames", "no frame was made"),
        (header.changes != len(lines), "changes", f"it has {len(lines)} changes of {header.changes}; get it again"),
    ):
        if wrong:
            raise ConfigError(f"the log {name}: {why}", field=named, code=named)
    changes = tuple(_parsed(CHANGE, line, f"{name}:{number}") for number, line in enumerate(lines, 2))
    try:
        if placed(checked(changes), 1.0) != changes:
            raise RequestError("at", "changes are in the order of their chunks, and have no `seconds`")
        return Log(header, changes)
    except RequestError as error:
        raise _damaged(name, error.field, str(error)) from None


def _parsed(kind: TypeAdapter[Any], line: bytes, where: str) -> Any:
    try:
        return kind.validate_json(line)
    except ValidationError as error:
        raise _damaged(where, *explained(error)) from None


def _damaged(where: str, name: str, why: str) -> ConfigError:
    told = f"{where} is no line of a session's log: {name or 'line'}: {why}; get it again from where it was made"
    return ConfigError(told, field=name or "line", code="log")
