"""Commands and events as bytes: a JSON header, and pictures and snapshots raw beside it.

The codec is generated from the dataclass fields of `messages`, so a new message or field travels without a line
here; anything unknown, missing or of the wrong type is an error. Knows nothing about sockets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from streamdiff.engine import messages
from streamdiff.engine.messages import Command, Data, Event, Pictures
from streamdiff.errors import StreamdiffError
from streamdiff.video.pixel_format import kind_of

Part = bytes | memoryview
COMMANDS: tuple[type, ...] = get_args(Command)
EVENTS: tuple[type, ...] = get_args(Event)
_KIND = "kind"
_OPTIONAL = Pictures | None
_DATA = (Data, Data | None)


class SerializationError(StreamdiffError):
    """Bytes that are not one of our messages: the two processes run different versions, or one has a fault."""


@cache
def _schema(kind: type) -> dict[str, object]:
    """Field name to type hint; `Pictures` and `Data` stand for a raw part."""
    hints = get_type_hints(kind, vars(messages))
    return {item.name: hints[item.name] for item in fields(kind)}


def _fits(value: object, hint: object) -> bool:
    """Whether a JSON value may stand for `hint`: str, bool, int, float, None, unions of them, tuple of one of them."""
    if isinstance(hint, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is str or hint is bool or hint is NoneType:
        return isinstance(value, hint)
    raise TypeError(f"messages may hold str, bool, int, float, None, tuples of these, Pictures and Data, not {hint!r}")


def _check(kind: type, name: str, value: object, hint: object) -> object:
    if not _fits(value, hint):
        raise SerializationError(f"{kind.__name__}.{name} is {value!r:.80}, expected {hint}")
    return _frozen(value)


def _frozen(value: object) -> object:
    """JSON's lists as tuples, of tuples too."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def encode(message: Command | Event) -> list[Part]:
    """Bytes of a message: one part, and one more for each field that has pictures or data: a view, not a copy.

    Raises:
        SerializationError: a field that has not the declared type.
    """
    kind: type = type(message)
    header: dict[str, object] = {_KIND: kind.__name__}
    parts: list[Part] = []
    for name, hint in _schema(kind).items():
        value = getattr(message, name)
        if hint == Pictures or (hint == _OPTIONAL and value is not None):
            pictures = _checked_pictures(kind, name, value)
            header[name] = list(pictures.shape)
            parts.append(np.ascontiguousarray(pictures).data.cast("B"))
        elif hint in _DATA and value is not None:
            if not isinstance(value, bytes | memoryview):
                raise SerializationError(f"{kind.__name__}.{name} is {type(value).__name__}, expected bytes")
            header[name] = len(value)
            parts.append(value)
        else:
            header[name] = None if hint == _OPTIONAL or hint in _DATA else _check(kind, name, value, hint)
    return [json.dumps(header, separators=(",", ":"), allow_nan=False).encode("ascii"), *parts]


def _checked_pictures(kind: type, name: str, value: object) -> Pictures:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        what = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise SerializationError(f"{kind.__name__}.{name} is {what}, expected uint8 [count, ...]")
    _check_shape(f"{kind.__name__}.{name}", list(value.shape))
    return value


def _check_shape(name: str, shape: list[int]) -> None:
    """Raises SerializationError unless `shape` is that of one or more pictures of a kind that there is."""
    try:
        kind_of(shape[1:])
    except ValueError as error:
        raise SerializationError(f"{name} has shape {shape}: {error}") from error
    if 0 in shape:
        raise SerializationError(f"{name} has no pictures: its shape is {shape}")


def _header(data: Part) -> dict[str, Any]:
    try:
        header = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"a header of {len(data)} bytes is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise SerializationError(f"a header is {type(header).__name__}, expected an object")
    return header


def _decode(parts: Sequence[Part], kinds: tuple[type, ...]) -> Any:
    if not parts:
        raise SerializationError("a message without parts")
    header = _header(parts[0])
    name = header.pop(_KIND, None)
    kind = next((kind for kind in kinds if kind.__name__ == name), None)
    if kind is None:
        raise SerializationError(f"unknown kind {name!r:.80}; expected {', '.join(kind.__name__ for kind in kinds)}")
    schema = _schema(kind)
    if header.keys() != schema.keys():
        unknown, missing = sorted(header.keys() - schema.keys()), sorted(schema.keys() - header.keys())
        raise SerializationError(f"{name}: unknown fields {unknown}, missing fields {missing}")
    raw = list(parts[1:])
    values = {
        field: _value(kind, field, value, hint, raw)
        for (field, hint), value in ((item, header[item[0]]) for item in schema.items())
    }
    if raw:
        raise SerializationError(f"{name}: {len(raw)} raw parts too many")
    return kind(**values)


def _value(kind: type, field: str, value: object, hint: object, raw: list[Part]) -> object:
    """A field's value; pictures and data are the next of the `raw` parts. Mutates: raw."""
    if value is None and (hint == _OPTIONAL or hint == _DATA[1]):
        return None
    if hint in _DATA:
        if not raw or value != len(raw[0]) or isinstance(value, bool):
            raise SerializationError(f"{kind.__name__}.{field}: {value!r:.80} bytes, with {len(raw)} raw parts")
        return raw.pop(0)
    return _pictures(kind, value, raw) if hint in (Pictures, _OPTIONAL) else _check(kind, field, value, hint)


def _pictures(kind: type, shape: object, raw: list[Part]) -> Pictures:
    valid = isinstance(shape, list) and len(shape) in (3, 4) and all(_fits(n, int) and n > 0 for n in shape)
    if not isinstance(shape, list) or not valid or not raw:
        raise SerializationError(f"{kind.__name__}: pictures of shape {shape!r:.80} with {len(raw)} raw parts")
    data = raw.pop(0)
    _check_shape(f"{kind.__name__}.pictures", shape)
    if len(data) != math.prod(shape):
        raise SerializationError(f"{kind.__name__}: {len(data)} bytes for pictures of shape {shape}")
    return np.frombuffer(memoryview(data).toreadonly(), dtype=np.uint8).reshape(shape)


def decode_command(parts: Sequence[Part]) -> Command:
    """The command in `parts`. Raises SerializationError for anything else."""
    command: Command = _decode(parts, COMMANDS)
    return command


def decode_event(parts: Sequence[Part]) -> Event:
    """The event in `parts`; pictures are a read-only view of their part, and data is the part itself. Raises
    SerializationError for anything else."""
    event: Event = _decode(parts, EVENTS)
    return event
