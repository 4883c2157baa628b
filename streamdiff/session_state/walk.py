"""What can be done with a session's state, generated from its declared fields: `nbytes`, `save` and `load`; `reset` is
in `fields`, as the scheduler has no torch.

A state is a declared object (`fields`), and what it holds: tensors, declared objects and values, lists, tuples and
dicts of them, and plain values (numbers, texts, None). Anything else is a TypeError that says where it is. A tensor or
object that is held twice is counted, copied and saved once, and held twice again afterwards.

What is loaded may come from a stranger, so it is read by the declared types of the fields: of another type, or a number
out of range, it is a ConfigError that says where it is. What is below `Any` is only of some declared type.
"""

from __future__ import annotations

import copy as shallow
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.session_state.fields import axis_of, class_of, derive, mutable, name_of, saved_fields

_T = TypeVar("_T")
_PLAIN = (bool, int, float, str, NoneType)
_CLASS, _TENSOR, _ORDER, _FIELDS = "class", "tensor", "order", "fields"
LARGEST = 2**53
"""Whole numbers of a state are at most that, either way: what every reader of JSON has exactly."""

CPU = torch.device("cpu")
META = torch.device("meta")
"""Where tensors have a shape and a type, and no content."""


def nbytes(state: object) -> int:
    """Bytes of all tensors of a state, whatever device they are on."""
    held: dict[int, Tensor] = {}
    _written(state, type(state).__name__, lambda tensor, where: held.setdefault(id(tensor), tensor))
    return sum(tensor.nbytes for tensor in held.values())


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.to(CPU, copy=True).contiguous()


@torch.inference_mode()
def save(state: object, path: str = "", fetch: Callable[[Tensor], Tensor] = _to_host) -> tuple[dict[str, Tensor], Any]:
    """A state as tensors by name, which begins with `path`, contiguous and in host memory, and all else as what JSON
    can hold. Nothing of it is the state's own memory. `fetch` copies a tensor, which may be a view of a larger one, to
    the host, where it is contiguous."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, tuple[Tensor, Any]] = {}

    def write(tensor: Tensor, where: str) -> Any:
        if id(tensor) not in names:
            strides = tensor.stride()
            order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
            tensors[where] = fetch(tensor.detach().permute(order))
            names[id(tensor)] = tensor, {_TENSOR: where, _ORDER: order}
        return names[id(tensor)][1]

    return tensors, _written(state, path or "state", write)


def outline(state: object) -> Any:
    """The state as what JSON can hold, with type and shape of each tensor in place of its content."""
    return _written(state, "", lambda tensor, where: {_TENSOR: described(tensor)})


def difference(one: Any, other: Any, where: str) -> tuple[str, Any, Any] | None:
    """The first place where two outlines differ, and what each has there; None: they are alike."""
    if isinstance(one, dict) and isinstance(other, dict) and set(one) == set(other):
        parts = [(f".{name}" if name not in (_CLASS, _FIELDS) else "", one[name], other[name]) for name in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        parts = [(f"[{index}]", *pair) for index, pair in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else (where, one, other)
    found = (difference(a, b, where + name) for name, a, b in parts)
    return next((each for each in found if each is not None), None)


@torch.inference_mode()
def load(
    into: _T,
    tensors: Mapping[str, Tensor],
    tree: Any,
    device: torch.device = CPU,
    put: Callable[[Tensor, Tensor], Tensor] = Tensor.copy_,
    where: str = "",
) -> _T:
    """Put what `save` gave into a state that has just been opened in the same way. Its tensors are written in place, so
    that graphs stay bound to them; others are made on `device`. What is DERIVED stays. `put` copies the second tensor
    into the first, and returns that. `where` is what errors call the state.

    Returns the state. Mutates: into; where it raises, part of it may be written.

    Raises:
        ConfigError: values of other types, or tensors of other shapes; names what differs.
    """
    made: dict[str, Tensor] = {}

    def read(node: Mapping[str, Any], there: object, where: str) -> Tensor:
        name, order = node[_TENSOR], node[_ORDER]
        if not isinstance(name, str) or name not in tensors:
            raise ConfigError(f"{where} is tensor {shown(name)}, which the snapshot lacks")
        whole = isinstance(order, list) and all(type(axis) is int for axis in order)
        if not whole or sorted(order) != list(range(tensors[name].ndim)):
            raise ConfigError(f"{where} has its axes in the order {shown(order)}; it has {tensors[name].ndim}")
        saved = tensors[name].permute([order.index(axis) for axis in range(len(order))])
        if not isinstance(there, Tensor):
            if name not in made:
                made[name] = put(torch.empty_like(saved, device=device), saved)
            return made[name]
        if (there.shape, there.dtype) != (saved.shape, saved.dtype):
            raise ConfigError(
                f"{where} is {described(saved)} in the snapshot, but {described(there)} here: it was taken with "
                "another model, size, or KV context"
            )
        return put(there, saved)

    kind = Any if into is None else type(into)
    result: _T = _read(tree, kind, into, where or getattr(kind, "__name__", "the session"), read)
    return result


def restored(tensors: Mapping[str, Tensor], tree: Any, device: torch.device = CPU, where: str = "") -> Any:
    """The state that `save` was given, without what is DERIVED. Raises ConfigError as `load`."""
    result: Any = load(None, tensors, tree, device, where=where)
    return result


def tensor_names(tree: Any) -> set[str]:
    """Names of the tensors that a tree, which has been loaded, holds."""
    if isinstance(tree, dict):
        return {tree[_TENSOR]} if _TENSOR in tree else tensor_names(list(tree.values()))
    return {name for each in tree for name in tensor_names(each)} if isinstance(tree, list) else set()


@torch.inference_mode()
def joined(parts: Sequence[_T], what: str) -> _T:
    """The state of all `layers`, of those that stages have of theirs, first to last; or of all `shares`,
    which the ranks of a stage have. Shares the rest with the first. Mutates: nothing."""

    def join(each: Sequence[Any], axis: int) -> Any:
        if isinstance(each[0], Tensor):
            return torch.cat(list(each), axis)
        if each[0] is None:
            return None
        if isinstance(each[0], dict):
            return {key: [layer for one in each for layer in one[key]] for key in each[0]}
        return joined(each, what)

    return _changed_along(parts[0], what, lambda name, axis: join([getattr(part, name) for part in parts], axis))


@torch.inference_mode()
def cut(state: _T, what: str, first: int, last: int, count: int = 0) -> _T:
    """The state of `layers` `first` to `last` (exclusive), or of these of `count` equal `shares`: views of that of
    all."""

    def part(each: Any, axis: int) -> Any:
        if each is None:
            return None
        if isinstance(each, Tensor):  # the last layers may have none of it
            size = each.shape[axis]
            begin, end = (place * size // count if count else min(place, size) for place in (first, last))
            return each.narrow(axis, begin, end - begin)
        if isinstance(each, dict):
            return {key: layers[first:last] for key, layers in each.items()}
        return cut(each, what, first, last, count)

    return _changed_along(state, what, lambda name, axis: part(getattr(state, name), axis))


# ---- the walk ---------------------------------------------------------------------------------------------------


def _parts(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """What a container or a declared object holds, by how it is reached."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif type(value) in (list, tuple):
        yield from ((f"[{index}]", each) for index, each in enumerate(value))
    elif name_of(type(value)) is None:
        raise TypeError(
            f"{where} is a {type(value).__name__}, which is not declared part of a session; decorate it with "
            "@session_state, or mark its field DERIVED"
        )
    else:
        yield from ((f".{name}", getattr(value, name)) for name in saved_fields(type(value)))


def _written(value: Any, where: str, write: Callable[[Tensor, str], Any]) -> Any:
    """A value as what JSON can hold; `write` takes tensors."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return write(value, where)
    parts = [_written(each, f"{where}{name}", write) for name, each in _parts(value, where)]
    if isinstance(value, dict):
        keys = [_written(key, where, write) for key in value]
        return {_CLASS: "dict", _FIELDS: [list(pair) for pair in zip(keys, parts, strict=True)]}
    if type(value) in (list, tuple):
        return {_CLASS: type(value).__name__, _FIELDS: parts}
    own = saved_fields(type(value))
    return {_CLASS: name_of(type(value)), _FIELDS: dict(zip(own, parts, strict=True))}


_ReadTensor = Callable[[Mapping[str, Any], object, str], Tensor]
_hints = cache(get_type_hints)


def _read(node: Any, kind: Any, there: Any, where: str, read: _ReadTensor) -> Any:
    """The value of `kind` of a node that `_written` made; `there` is what is in its place now. `read` reads tensors."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    own = next((each for each in options if _begins_as(node, each)), None)
    if own is None:
        raise ConfigError(f"{where} is {shown(node)} in the snapshot; it must be {_described_kind(options)}")
    if isinstance(node, _PLAIN):
        if isinstance(node, float) and not math.isfinite(node):
            raise ConfigError(f"{where} is {node} in the snapshot; it must be a finite number")
        if isinstance(node, int) and abs(node) > LARGEST:
            raise ConfigError(f"{where} is {shown(node)} in the snapshot; it must be from {-LARGEST} to {LARGEST}")
        return node
    if _TENSOR in node:
        return read(node, there, where)
    if node[_CLASS] in ("dict", "list", "tuple"):
        return _read_items(node[_CLASS], node[_FIELDS], own, where, read)
    return _read_fields(node[_CLASS], node[_FIELDS], there, where, read)


def _read_items(container: str, content: Any, kind: Any, where: str, read: _ReadTensor) -> Any:
    """A list, a tuple or a dict."""
    if not isinstance(content, list):
        raise ConfigError(f"{where} is {shown(content)} in the snapshot; it must be a {container}")
    given = get_args(kind)
    if container == "dict":
        key, value = given or (Any, Any)
        if odd := [pair for pair in content if not (isinstance(pair, list) and len(pair) == 2 and _is_key(pair[0]))]:
            raise ConfigError(f"{where} has an entry whose key is {shown(odd[0])} in the snapshot; it must be plain")
        return {
            _read(pair[0], key, None, f"{where}[{index}]'s key", read): _read(
                pair[1], value, None, f"{where}[{index}]", read
            )
            for index, pair in enumerate(content)
        }
    many = not given or container == "list" or given[-1] is Ellipsis
    kinds = [given[0] if given else Any] * len(content) if many else list(given)
    if len(kinds) != len(content):
        raise ConfigError(f"{where} has {len(content)} parts in the snapshot; it must be {_described_kind([kind])}")
    items = [
        _read(each, own, None, f"{where}[{i}]", read) for i, (each, own) in enumerate(zip(content, kinds, strict=True))
    ]
    return items if container == "list" else tuple(items)


def _read_fields(name: str, content: Any, there: Any, where: str, read: _ReadTensor) -> Any:
    """An object of a declared class, or `there` with its fields."""
    known = class_of(name)
    if known is None:
        raise ConfigError(f"{where} is {name!r} in the snapshot, which this version does not know")
    own = saved_fields(known)
    if not isinstance(content, dict) or set(own) != set(content):
        differ = ", ".join(sorted(set(own) ^ set(content))) if isinstance(content, dict) else shown(content)
        raise ConfigError(f"{where} ({name}) has other fields in the snapshot than here: {differ}")
    there = there if name_of(type(there)) == name else None
    hints = _hints(known)  # type: ignore[arg-type]  # mypy takes no class for hashable
    values = {
        each: _read(content[each], hints.get(each, Any), getattr(there, each, None), f"{where}.{each}", read)
        for each in own
    }
    if not mutable(there):
        try:
            return known(**values)
        except (TypeError, ValueError) as error:  # what is below `Any` has fields of any kind
            raise ConfigError(f"{where} cannot be: {error}") from error
    return _set(there, values)


def _begins_as(node: Any, kind: Any) -> bool:
    """Whether a node is of `kind`, whatever it holds."""
    kind = NoneType if kind is None else kind
    origin = get_origin(kind) or kind
    if isinstance(node, _PLAIN):
        return kind is Any or type(node) is kind or (kind is float and type(node) is int)
    if not isinstance(node, dict):
        return False
    if set(node) == {_TENSOR, _ORDER}:
        return kind is Any or origin is Tensor
    if set(node) != {_CLASS, _FIELDS} or not isinstance(node[_CLASS], str):
        return False
    return kind is Any or node[_CLASS] == (name_of(origin) or getattr(origin, "__name__", ""))


def _is_key(node: Any) -> bool:
    """Whether a node is of something that a dict can have as a key."""
    if isinstance(node, dict):
        return node.get(_CLASS) == "tuple" and isinstance(node.get(_FIELDS), list) and all(map(_is_key, node[_FIELDS]))
    return isinstance(node, _PLAIN)


def _described_kind(options: Sequence[Any]) -> str:
    """Kinds as messages name them."""
    plain = {NoneType: "none", int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    names = [plain.get(each) or name_of(each) or getattr(each, "__name__", str(each)) for each in options]
    return " or ".join(names)


def shown(node: Any) -> str:
    """A node as messages show it."""
    text = json.dumps(node, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _changed_along(state: _T, what: str, value: Callable[[str, int], Any]) -> _T:
    """A copy with `value`, by name and axis, of those fields that are by `layers` or `shares`; it shares the others."""
    axes = {name: axis_of(type(state), name, what) for name in saved_fields(type(state))}
    return _set(shallow.copy(state), {name: value(name, axis) for name, axis in axes.items() if axis is not None})


def _set(state: _T, values: Mapping[str, Any]) -> _T:
    """The state, with these fields set, and what follows from them. Mutates: state."""
    for name, each in values.items():
        setattr(state, name, each)
    derive(state)
    return state


def pieces(tensor: Tensor, nbytes: int) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor in host memory, so many at a time."""
    content = tensor.view(-1).view(torch.uint8).numpy().data
    return (content[at : at + nbytes] for at in range(0, len(content), nbytes))


def described(tensor: Tensor) -> str:
    """Type and shape of a tensor, as messages name it."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
