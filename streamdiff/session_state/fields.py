"""How a dataclass declares what of a session it holds: each field says its kind. Imports no torch.

Resetting is generated from these declarations here; counting, copying, moving, saving, and loading what is of the
declared types, in `walk`. A field is listed nowhere else, so none can be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

STATE: dict[str, str] = {"session_state": "state"}
"""Metadata of what the stream has become. A reset gives it its default; a tensor without one zeros, in place."""
BY_LAYER: dict[str, str | int] = {"session_state": "state", "layers": 1}
"""Metadata of STATE that each stage has for its own layers: a tensor with them on axis 1, a dict of lists with an
entry per layer, or a state with such fields. On another number of stages it is cut elsewhere."""
BY_SHARE: dict[str, str | int] = {**BY_LAYER, "shares": 4}
"""Metadata of BY_LAYER whose axis 4 are heads, or tokens of a latent frame, or a state with such fields: where ranks
share a stage, each has as many of them, in their order."""
KEPT: dict[str, str] = {"session_state": "kept"}
"""Metadata of what the session was opened with, or told since, and keeps when its stream restarts."""
DERIVED: dict[str, str] = {"session_state": "derived"}
"""Metadata of what follows from other fields, or from where the session runs. It is not counted and not saved; a copy
shares it, and what is loaded has it of what it is loaded into. A class's `derive()` makes it again where it must be."""

_KINDS = {"state", "kept", "derived"}
_CLASSES: dict[str, type[Any]] = {}
_NAMES: dict[type[Any], str] = {}
_ClassT = TypeVar("_ClassT", bound=type[Any])


def axis_of(kind: type[Any], name: str, what: str) -> int | None:
    """The axis of `layers` or `shares` of a declared class's field; None: it has none, see BY_SHARE."""
    axis: int | None = next(each for each in fields(kind) if each.name == name).metadata.get(what)
    return axis


def session_state(name: str) -> Callable[[_ClassT], _ClassT]:
    """Declare a dataclass part of what a session is, or a frozen dataclass or named tuple a value that sessions hold,
    to which all it has belongs; `name` is what it is called where it is saved, and stays when the class is renamed.

    Raises:
        TypeError: it is no such class, a field does not say its kind, or the name is taken.
    """

    def declare(kind: _ClassT) -> _ClassT:
        if not (hasattr(kind, "_fields") or is_dataclass(kind)):
            raise TypeError(f"{kind.__name__} is no dataclass; decorate it with @dataclass below @session_state")
        for each in () if hasattr(kind, "_fields") or _frozen(kind) else fields(kind):
            if each.metadata.get("session_state") not in _KINDS:
                raise TypeError(
                    f"{kind.__name__}.{each.name} does not say what it is to a session; declare it as "
                    "field(metadata=STATE), field(metadata=KEPT) or field(metadata=DERIVED)"
                )
        if name in _CLASSES:
            raise TypeError(f"{kind.__name__} is declared as {name!r}, which {_CLASSES[name].__name__} is already")
        _CLASSES[name], _NAMES[kind] = kind, name
        return kind

    return declare


def name_of(kind: type[Any]) -> str | None:
    """What a class is called where it is saved; None: it is not declared. A subclass is not declared by its base."""
    return _NAMES.get(kind)


def class_of(name: str) -> type[Any] | None:
    """The class that is called so; None: there is none."""
    return _CLASSES.get(name)


def saved_fields(kind: type[Any]) -> tuple[str, ...]:
    """Names of a declared class's fields but those that are DERIVED."""
    if hasattr(kind, "_fields"):
        names: tuple[str, ...] = kind._fields
        return names
    return tuple(each.name for each in fields(kind) if each.metadata.get("session_state") != "derived")


def mutable(value: object) -> bool:
    """Whether it is a declared state, whose fields can be set; not a value."""
    return type(value) in _NAMES and is_dataclass(value) and not _frozen(type(value))


def reset(state: Any) -> None:
    """Let a state's stream restart: STATE gets its default, or zeros in place (where these are tensors of
    inference mode, in that); what is KEPT stays.

    Mutates: state.

    Raises:
        TypeError: a field can have neither.
    """
    for each in fields(state):
        if each.metadata["session_state"] != "state":
            continue
        value = getattr(state, each.name)
        if each.default_factory is not MISSING:
            setattr(state, each.name, each.default_factory())
        elif each.default is not MISSING:
            setattr(state, each.name, each.default)
        elif mutable(value):
            reset(value)
        elif hasattr(value, "zero_"):
            value.zero_()
        elif value is None:  # a part that this session does not have
            continue
        else:
            raise TypeError(f"{type(state).__name__}.{each.name} has no default to be reset to; give it one, or KEPT")
    derive(state)


def derive(state: Any) -> None:
    """Make what follows from other fields again, where a class says how. Mutates: state."""
    if hasattr(state, "derive"):
        state.derive()


def _frozen(kind: Any) -> bool:
    params: Any = getattr(kind, "__dataclass_params__", None)
    return params is not None and bool(params.frozen)
