"""How a dataclass declares what of a session it holds: each field says its kind. Imports no torch.

Resetting is generated from these declarations here, and checking what a snapshot holds against the fields' types;
counting, copying, moving, saving and loading in `walk`. A field is listed nowhere else, so none can be forgotten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from streamdiff.errors import ConfigError

STATE: dict[str, str] = {"session_state": "state"}
"""Metadata of what the stream has become. A reset gives it its default; a tensor without one zeros, in place."""
BY_LAYER: dict[str, str] = {"session_state": "state", "of": "layers"}
"""Metadata of STATE that each stage has for its own layers: a tensor `[caches, layers, ...]`, a dict of lists with an
entry per layer, or a state with such fields. On another number of stages it is cut elsewhere."""
BY_HEAD: dict[str, str | int] = {**BY_LAYER, "heads": 4}
"""Metadata of BY_LAYER whose axis 4 are heads: where ranks share a stage, each has its own of them."""
KEPT: dict[str, str] = {"session_state": "kept"}
"""Metadata of what the session was opened with, or told since, and keeps when its stream begins afresh."""
DERIVED: dict[str, str] = {"session_state": "derived"}
"""Metadata of what follows from other fields, or from where the session runs. It is not counted and not saved; a copy
shares it, and what is loaded has it of what it is loaded into. A class's `derive()` makes it anew where it must be."""

_KINDS = (STATE, BY_LAYER, KEPT, DERIVED)
_CLASSES: dict[str, type[Any]] = {}
_NAMES: dict[type[Any], str] = {}
_ClassT = TypeVar("_ClassT", bound=type[Any])


def _kind(declared: Field[Any]) -> dict[str, str]:
    """What a field says of a session, beside what it may say of other things."""
    return {key: value for key, value in declared.metadata.items() if key in BY_LAYER}


def heads_axis(kind: type[Any], name: str) -> int | None:
    """The axis of heads of a declared class's field; None: it has none, see BY_HEAD."""
    axis: int | None = next(each for each in fields(kind) if each.name == name).metadata.get("heads")
    return axis


def session_state(name: str) -> Callable[[_ClassT], _ClassT]:
    """Declare a dataclass part of what a session is; `name` is what it is called where it is saved, and stays when the
    class is renamed.

    Raises:
        TypeError: it is no dataclass, a field does not say its kind, or the name is taken.
    """

    def declare(kind: _ClassT) -> _ClassT:
        if not is_dataclass(kind):
            raise TypeError(f"{kind.__name__} is no dataclass; decorate it with @dataclass below @session_state")
        for each in fields(kind):
            if _kind(each) not in _KINDS:
                raise TypeError(
                    f"{kind.__name__}.{each.name} does not say what it is to a session; declare it as "
                    "field(metadata=STATE), field(metadata=KEPT) or field(metadata=DERIVED)"
                )
        return _register(name, kind)

    return declare


def session_value(name: str) -> Callable[[_ClassT], _ClassT]:
    """Declare a frozen dataclass or named tuple a value that sessions hold: whatever it has belongs to it.

    Raises:
        TypeError: it is neither, or the name is taken.
    """

    def declare(kind: _ClassT) -> _ClassT:
        if not hasattr(kind, "_fields") and not _frozen(kind):
            raise TypeError(f"{kind.__name__} is neither a frozen dataclass nor a named tuple; use @session_state")
        return _register(name, kind)

    return declare


def name_of(kind: type[Any]) -> str | None:
    """What a class is called where it is saved; None: it is not declared. A subclass is not declared by its base."""
    return _NAMES.get(kind)


def class_of(name: str) -> type[Any] | None:
    """The class that is called so; None: there is none."""
    return _CLASSES.get(name)


def fields_of(kind: type[Any], *kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Names of a declared class's fields of these kinds; of a value, all."""
    if hasattr(kind, "_fields"):
        names: tuple[str, ...] = kind._fields
        return names
    return tuple(each.name for each in fields(kind) if not each.metadata or _kind(each) in kinds)


def mutable(value: object) -> bool:
    """Whether it is a declared state, whose fields can be set; not a value."""
    return type(value) in _NAMES and is_dataclass(value) and not _frozen(type(value))


def reset(state: Any) -> None:
    """Let a state's stream begin afresh: STATE gets its default, or zeros in place (where these are tensors of
    inference mode, in that); what is KEPT stays.

    Mutates: state.

    Raises:
        TypeError: a field can have neither.
    """
    for each in fields(state):
        if _kind(each) not in (STATE, BY_LAYER):
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
        else:
            raise TypeError(f"{type(state).__name__}.{each.name} has no default to be reset to; give it one, or KEPT")
    derive(state)


def derive(state: Any) -> None:
    """Make what follows from other fields anew, where a class says how. Mutates: state."""
    if hasattr(state, "derive"):
        state.derive()


def _frozen(kind: Any) -> bool:
    params: Any = getattr(kind, "__dataclass_params__", None)
    return params is not None and bool(params.frozen)


def _register(name: str, kind: _ClassT) -> _ClassT:
    if name in _CLASSES:
        raise TypeError(f"{kind.__name__} is declared as {name!r}, which {_CLASSES[name].__name__} is already")
    _CLASSES[name], _NAMES[kind] = kind, name
    return kind


LARGEST = 2**53
"""Whole numbers of a state are at most that, either way: what every reader of JSON has exactly."""
_PLAIN = (bool, int, float, str, NoneType)


def check_tree(node: Any, kind: Any, where: str, tensors: Mapping[str, int]) -> set[str]:
    """The names of the tensors that a node of `kind` holds; `tensors` has the dimensions of all that there are.

    Raises:
        ConfigError: it is of another kind, a number out of range, or a tensor that is not there; `where` is in it.
    """
    found: set[str] = set()
    _check(node, kind, where, tensors, found)
    return found


def check_plain(values: Any, kind: type[Any], where: str) -> None:
    """Whether these are values for the fields of a class that JSON holds as they are, see `Session.saved`.

    Raises:
        ConfigError: other fields, or values of other types.
    """
    names = fields_of(kind, STATE, KEPT)
    _check_names(values, names, where)
    for name in names:
        _check(values[name], get_type_hints(kind)[name], f"{where}.{name}", {}, set())


def shown(node: Any) -> str:
    """A node as messages show it."""
    text = json.dumps(node, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check(node: Any, kind: Any, where: str, tensors: Mapping[str, int], found: set[str]) -> None:
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    own = next((each for each in options if _begins_as(node, each)), None)
    if own is None:
        raise ConfigError(f"{where} is {shown(node)} in the snapshot; it must be {_described(kind)}")
    if isinstance(node, _PLAIN):
        _check_number(node, where)
    elif "tensor" in node:
        _check_tensor(node, where, tensors)
        found.add(node["tensor"])
    elif node["class"] in ("dict", "list", "tuple"):
        _check_items(node, own, where, tensors, found)
    else:
        _check_fields(node, where, tensors, found)


def _begins_as(node: Any, kind: Any) -> bool:
    """Whether a node is of `kind`, whatever it holds."""
    kind = NoneType if kind is None else kind
    origin = get_origin(kind) or kind
    if isinstance(node, _PLAIN):
        return kind is Any or type(node) is kind or (kind is float and type(node) is int)
    if not isinstance(node, dict):
        return False
    if set(node) == {"tensor", "order"}:
        return kind is Any or _is_tensor(kind)
    if set(node) != {"class", "fields"} or not isinstance(node["class"], str):
        return False
    if origin in (dict, list, tuple):
        return bool(node["class"] == origin.__name__)
    if name_of(origin) is not None:
        return node["class"] == name_of(origin)
    known = node["class"] in ("dict", "list", "tuple") or class_of(node["class"]) is not None
    return known and (kind is Any or not (origin in _PLAIN or _is_tensor(kind)))  # else a protocol's


def _check_number(node: Any, where: str) -> None:
    if isinstance(node, float) and not math.isfinite(node):
        raise ConfigError(f"{where} is {node} in the snapshot; it must be a finite number")
    if isinstance(node, int) and abs(node) > LARGEST:
        raise ConfigError(f"{where} is {shown(node)} in the snapshot; it must be from {-LARGEST} to {LARGEST}")


def _check_tensor(node: Any, where: str, tensors: Mapping[str, int]) -> None:
    name, order = node["tensor"], node["order"]
    if not isinstance(name, str) or name not in tensors:
        raise ConfigError(f"{where} is tensor {shown(name)}, which the snapshot lacks")
    whole = isinstance(order, list) and all(type(axis) is int for axis in order)
    if not whole or sorted(order) != list(range(tensors[name])):
        raise ConfigError(
            f"{where} has its axes in the order {shown(order)} in the snapshot; the tensor has {tensors[name]}"
        )


def _check_items(node: Any, kind: Any, where: str, tensors: Mapping[str, int], found: set[str]) -> None:
    """Of a list, a tuple or a dict."""
    content, given = node["fields"], get_args(kind)
    if not isinstance(content, list):
        raise ConfigError(f"{where} is {shown(content)} in the snapshot; it must be a {node['class']}")
    if node["class"] == "dict":
        key, value = given or (Any, Any)
        for index, pair in enumerate(content):
            if not isinstance(pair, list) or len(pair) != 2:
                raise ConfigError(f"{where}[{index}] is {shown(pair)} in the snapshot; it must be a key and a value")
            _check(pair[0], key, f"{where}[{index}]'s key", tensors, found)
            if not _is_key(pair[0]):
                raise ConfigError(
                    f"{where}[{index}]'s key is {shown(pair[0])} in the snapshot; it must be a plain value, or a tuple "
                    "of such"
                )
            _check(pair[1], value, f"{where}[{index}]", tensors, found)
        return
    many = not given or node["class"] == "list" or given[-1] is Ellipsis
    kinds = [given[0] if given else Any] * len(content) if many else list(given)
    if len(kinds) != len(content):
        raise ConfigError(f"{where} has {len(content)} parts in the snapshot; it must be {_described(kind)}")
    for index, (each, own) in enumerate(zip(content, kinds, strict=True)):
        _check(each, own, f"{where}[{index}]", tensors, found)


def _is_key(node: Any) -> bool:
    """Whether a node, which holds, is of something that a dict can have as a key."""
    return isinstance(node, _PLAIN) or (node.get("class") == "tuple" and all(map(_is_key, node["fields"])))


def _check_fields(node: Any, where: str, tensors: Mapping[str, int], found: set[str]) -> None:
    """Of a declared class."""
    kind, content = class_of(node["class"]), node["fields"]
    assert kind is not None, "`_begins_as` has looked"
    names = fields_of(kind, STATE, BY_LAYER, KEPT)
    _check_names(content, names, f"{where} ({node['class']})")
    for name in names:
        _check(content[name], get_type_hints(kind)[name], f"{where}.{name}", tensors, found)


def _check_names(values: Any, names: tuple[str, ...], where: str) -> None:
    """Raise ConfigError unless these are values of the fields `names`, and of no others."""
    if not isinstance(values, dict) or set(values) != set(names):
        differ = ", ".join(sorted(set(values) ^ set(names))) if isinstance(values, dict) else shown(values)
        raise ConfigError(f"{where} has other fields in the snapshot than here: {differ}")


def _is_tensor(kind: Any) -> bool:
    return getattr(kind, "__name__", "") == "Tensor"


def _described(kind: Any) -> str:
    """A kind as messages name it."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    plain = {
        NoneType: "none",
        int: "a whole number",
        float: "a number with a point",
        bool: "true or false",
        str: "text",
    }
    named = [plain.get(each) or ("a tensor" if _is_tensor(each) else _class_name(each)) for each in options]
    return " or ".join(named)


def _class_name(kind: Any) -> str:
    return str(kind) if get_args(kind) else str(name_of(kind) or getattr(kind, "__name__", kind))
