"""The log of a session: all that steered its stream, at the chunks in which it took effect. With the model and the seed
it makes the same latents again.

JSON lines: the header (`LogHeader`), a `TimedChange` for each change, in order, and how far the stream was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from streamdiff.core import KVContext
from streamdiff.engine.timeline import TimedChange, checked, explained
from streamdiff.errors import ConfigError, RequestError
from streamdiff.version import __version__

KIND, FORMAT = "streamdiff log", 1
MAX_LOG_BYTES = 10_000_000
"""Of a log's changes: what follows is left out. That is more than an hour of a mouse that moves in every chunk."""
_MAX_FILE_BYTES = MAX_LOG_BYTES + (1 << 20)


@dataclass(frozen=True)
class LogHeader:
    """What a logged stream began with: `prompt` as the model was given it, `image` the SHA-256 of the start picture's
    pixels ("": none). `model`: facts of the model, see `RestingStates.facts`. `fault`: why it cannot be played again,
    else empty."""

    kind: str
    format: int
    model: dict[str, Any]
    prompt: Annotated[str, Field(max_length=2000)]
    seed: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=1, le=1000)]
    kv_context: KVContext
    image: str = ""
    fault: str = ""
    version: str = ""


@dataclass(frozen=True)
class _End:
    """The last line: chunks that were begun, frames that were made, and why the log ends there, if not as it was
    asked for."""

    chunks: Annotated[int, Field(ge=0, le=2**40)]
    frames: Annotated[int, Field(ge=0, le=2**40)]
    cut: str = ""


@dataclass(frozen=True)
class _Last:
    end: _End


_HEADER, _CHANGE, _LAST = TypeAdapter(LogHeader), TypeAdapter(TimedChange), TypeAdapter(_Last)


class ChangeLog:
    """What steers one stream, from its beginning on. Memory: that of `MAX_LOG_BYTES`.

    Controls are noted as a chunk gets them: what is held since, and taps. Numbers are float32, as they are used.
    """

    def __init__(self, fault: str = "", **begin: Any) -> None:
        """`begin`: fields of `LogHeader`."""
        self.fault, self._begin = fault, begin
        self.frames = 0
        """Of the stream, that have been made."""
        self.held: dict[str, float] = {}
        """Controls, as they are held now."""
        self._before: dict[str, float] = {}  # as the chunk before `_chunk` had them
        self._pressed: dict[str, float] = {}
        self._chunk = 0  # of the changes that are not in `_lines` yet
        self._open: list[dict[str, Any]] = []
        self._open_bytes = 0
        self._lines = bytearray()
        self._end: _End | None = None

    def add(self, chunk: int, **change: Any) -> None:
        """Note a change, in the words of `TimedChange`, of the next chunk to be admitted. Mutates: self."""
        self._advance(chunk)
        if self._end is None:
            self._open.append(change)
            self._open_bytes += len(_line(change))
            self._limit(chunk)

    def hold(self, chunk: int, values: Mapping[str, float]) -> None:
        """Note controls that are held from the next chunk on. Mutates: self."""
        self._advance(chunk)
        for name, value in values.items():
            self.held[name] = short = float(str(np.float32(value)))
            if short:
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
        self._end = self._end or _End(chunk, self.frames, why)

    def content(self, model: Mapping[str, Any], chunk: int) -> bytes:
        """The file, with the facts of the model, of a stream whose next chunk is `chunk`."""
        header = {"kind": KIND, "format": FORMAT, "version": __version__, "fault": self.fault, **self._begin}
        end = self._end or _End(chunk, self.frames)
        latest = self._latest() if self._chunk < end.chunks else b""
        return b"".join((_line(header | {"model": dict(model)}), self._lines, latest, _line({"end": vars(end)})))

    @property
    def _taps(self) -> dict[str, float]:
        return {name: value for name, value in self._pressed.items() if not self.held[name]}

    def _advance(self, chunk: int) -> None:
        """Changes of `chunk` follow. Mutates: self."""
        if chunk == self._chunk:
            return
        if self._end is None:
            self._lines += self._latest()
        self._chunk, self._before = chunk, dict(self.held)
        self._open.clear()
        self._pressed.clear()
        self._open_bytes = 0
        self._limit(chunk)

    def _limit(self, chunk: int) -> None:
        if self._end is None and len(self._lines) + self._open_bytes > MAX_LOG_BYTES:
            self._open.clear()
            self._end = _End(chunk, self.frames, f"it has {MAX_LOG_BYTES / 1e6:g} MB, the most that is kept")

    def _latest(self) -> bytes:
        """The lines of chunk `_chunk`."""
        held = {name: value for name, value in self.held.items() if value != self._before.get(name, 0.0)}
        controls = {"controls": held, "taps": self._taps}
        changes = [*self._open, {name: values for name, values in controls.items() if values}]
        return b"".join(_line({"at": self._chunk, **change}) for change in changes if change)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True)
class Log:
    """A log that was read: it may be a stranger's, and asks for what a client may ask for. `cut`: why it does not go
    on, else empty."""

    header: LogHeader
    changes: tuple[TimedChange, ...]
    frames: int
    cut: str


def read_log(path: Path) -> Log:
    """A log's file.

    Raises:
        ConfigError: it cannot be read, is too large or no whole log, is of another format, or of a stream that cannot
            be played again.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the log {path} cannot be read: {error.strerror}", field="replay", code="log") from None
    if len(data) > _MAX_FILE_BYTES:
        why = f"the log {path} is larger than {_MAX_FILE_BYTES:,} bytes; no session's log is"
        raise ConfigError(why, field="replay", code="log")
    first, *lines = data.removesuffix(b"\n").split(b"\n")
    header = _read_header(first, path)
    changes: list[TimedChange] = []
    for number, line in enumerate(lines[:-1], 2):
        changes.append(change := _parsed(_CHANGE, line, f"{path}:{number}"))
        if change.at is None or change.loop or change.at < (changes[-2:][0].at or 0):
            raise _damaged(f"{path}:{number}", "at", "changes are in the order of their chunks, without a loop")
    end = _parsed(_LAST, lines[-1] if lines else b"", f"{path}:{len(lines) + 1}").end
    try:
        return Log(header, checked(changes), end.frames, end.cut)
    except RequestError as error:
        raise _damaged(str(path), error.field, str(error)) from None


def _read_header(line: bytes, path: Path) -> LogHeader:
    """Raises ConfigError as `read_log`."""
    header: LogHeader = _parsed(_HEADER, line, f"{path}:1")
    if (header.kind, header.format) != (KIND, FORMAT):
        found = f"{header.kind[:40]!r} of format {header.format}"
        why = f"{path} is a {found}; this version reads {KIND!r} of format {FORMAT}: play it with that which wrote it"
        raise ConfigError(why, field="format", code="format")
    if header.fault:
        why = f"the log {path} cannot be played again: {header.fault[:200]}"
        raise ConfigError(why, field="fault", code="fault")
    return header


def _parsed(kind: TypeAdapter[Any], line: bytes, where: str) -> Any:
    try:
        return kind.validate_json(line)
    except ValidationError as error:
        raise _damaged(where, *explained(error)) from None


def _damaged(where: str, name: str, why: str) -> ConfigError:
    told = f"{where} is no line of a session's log: {name or 'line'}: {why}; get it again from where it was made"
    return ConfigError(told, field=name or "line", code="log")


def check_model(header: LogHeader, here: Mapping[str, Any]) -> None:
    """Raises RequestError where a log is of another model, size, window, type or weights than the loaded one, of which
    `here` are the facts. In a ring each rank knows the weights of its own blocks: the first ones are compared."""
    theirs = header.model
    for name in sorted({*theirs, *here} - {"weights"}):
        if theirs.get(name) != here.get(name):
            why = f"the log is of a model whose {name} is {_short(theirs.get(name))}; here it is "
            raise RequestError(name, f"{why}{_short(here.get(name))}: load the model that it was made with", "model")
    weights = theirs.get("weights")
    if (
        not isinstance(weights, list)
        or not weights
        or any(a != b for a, b in zip(weights, here["weights"], strict=False))
    ):
        why = "the log is of other weights than those that are loaded, though of the same kind of model; load those"
        raise RequestError("weights", why, "weights")


def _short(value: object) -> str:
    return repr(value)[:80]
