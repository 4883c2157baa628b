"""What can be done with a session's state, generated from its declared fields: `nbytes`, `copy`, `to_device`, `save`
and `load`; `reset` is in `fields`, as the scheduler has no torch.

A state is a declared object (`fields`), and what it holds: tensors, declared objects and values, lists, tuples and
dicts of them, and plain values (numbers, texts, None). Anything else is a TypeError that says where it is. A tensor or
object that is held twice is counted, copied and saved once, and held twice again afterwards.
"""

from __future__ import annotations

import copy as shallow
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.session_state.fields import (
    BY_LAYER,
    KEPT,
    STATE,
    class_of,
    derive,
    fields_of,
    heads_axis,
    mutable,
    name_of,
)

_T = TypeVar("_T")
_PLAIN = (bool, int, float, str, type(None))
_CLASS, _TENSOR, _ORDER, _FIELDS = "class", "tensor", "order", "fields"

CPU = torch.device("cpu")
META = torch.device("meta")
"""Where tensors have a shape and a type, and no content."""


def nbytes(state: object) -> int:
    """Bytes of all tensors of a state, whatever device they are on."""
    held = {id(tensor): tensor for tensor in _tensors(state, type(state).__name__)}
    return sum(tensor.nbytes for tensor in held.values())


def copy(state: _T) -> _T:
    """A state of its own, on the same device."""
    return changed(state, lambda tensor: tensor.clone())


def to_device(state: _T, device: torch.device) -> _T:
    """The state on `device`. Tensors that are there already are not copied."""
    return changed(state, lambda tensor: tensor.to(device))


@torch.inference_mode()
def changed(state: _T, change: Callable[[Tensor], Tensor]) -> _T:
    """The state with every tensor changed, each once; DERIVED is shared, or made anew by `derive()`."""
    done: dict[int, tuple[Any, Any]] = {}  # the original too, so that its id is nobody else's meanwhile

    def visit(value: Any, where: str) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if id(value) not in done:
            done[id(value)] = value, change(value) if isinstance(value, Tensor) else made(value, where)
        return done[id(value)][1]

    def made(value: Any, where: str) -> Any:
        parts = [visit(each, f"{where}{name}") for name, each in _parts(value, where)]
        if isinstance(value, dict):
            return dict(zip(value, parts, strict=True))
        if type(value) in (list, tuple):
            return type(value)(parts)
        own = dict(zip(fields_of(type(value), STATE, BY_LAYER, KEPT), parts, strict=True))
        return _set(shallow.copy(value), own) if mutable(value) else type(value)(**own)

    result: _T = visit(state, type(state).__name__)
    return result


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
) -> _T:
    """Put what `save` gave into a state that has just been opened in the same way. Its tensors are written in place, so
    that graphs stay bound to them; others are made on `device`. What is DERIVED stays. `put` copies the second tensor
    into the first, and returns that.

    Returns the state. Mutates: into; where it raises, part of it may be written.

    Raises:
        ConfigError: saved by other classes, or tensors of other shapes; names what differs.
    """
    made: dict[str, Tensor] = {}

    def read(node: Mapping[str, Any], there: object, where: str) -> Tensor:
        name, order = node[_TENSOR], node[_ORDER]
        if name not in tensors:
            raise ConfigError(f"{where} is tensor {name!r}, which the snapshot lacks")
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

    result: _T = _read(tree, into, "the session" if into is None else type(into).__name__, read)
    return result


def restored(tensors: Mapping[str, Tensor], tree: Any, device: torch.device = CPU) -> Any:
    """The state that `save` was given, without what is DERIVED. Raises ConfigError as `load`."""
    result: Any = load(None, tensors, tree, device)
    return result


@torch.inference_mode()
def joined(parts: Sequence[_T]) -> _T:
    """The state of all layers, of those that stages have of theirs, first to last. Mutates: nothing."""

    def join(each: Sequence[Any]) -> Any:
        if isinstance(each[0], Tensor):
            return torch.cat(list(each), 1)
        if isinstance(each[0], dict):
            return {key: [layer for one in each for layer in one[key]] for key in each[0]}
        return joined(each)

    return _with_layers(parts[0], lambda name: join([getattr(part, name) for part in parts]))


@torch.inference_mode()
def layers_of(state: _T, first: int, last: int) -> _T:
    """The state of layers `first` to `last` (exclusive): views of that of all."""

    def cut(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each[:, first:last]
        if isinstance(each, dict):
            return {key: layers[first:last] for key, layers in each.items()}
        return layers_of(each, first, last)

    return _with_layers(state, lambda name: cut(getattr(state, name)))


@torch.inference_mode()
def with_all_heads(parts: Sequence[_T]) -> _T:
    """The state with all heads, of those that the ranks of a stage have with theirs. Mutates: nothing."""

    def join(name: str) -> Any:
        each = [getattr(part, name) for part in parts]
        if (axis := heads_axis(type(parts[0]), name)) is not None:
            return torch.cat(each, axis)
        return with_all_heads(each) if mutable(each[0]) else each[0]

    return parts[0] if len(parts) == 1 else _with_layers(parts[0], join)


@torch.inference_mode()
def heads_of(state: _T, index: int, count: int) -> _T:
    """The state with the heads of rank `index` of the `count` ranks of a stage: views of that with all."""

    def cut(name: str) -> Any:
        each = getattr(state, name)
        if (axis := heads_axis(type(state), name)) is not None:
            return each.chunk(count, axis)[index]
        return heads_of(each, index, count) if mutable(each) else each

    return _with_layers(state, cut)


# ---- the walk ---------------------------------------------------------------------------------------------------


def _tensors(value: Any, where: str) -> Iterator[Tensor]:
    """All tensors of a state."""
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, _PLAIN):
        for name, each in _parts(value, where):
            yield from _tensors(each, f"{where}{name}")


def _parts(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """What a container or a declared object holds, by how it is reached."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif type(value) in (list, tuple):
        yield from ((f"[{index}]", each) for index, each in enumerate(value))
    elif name_of(type(value)) is None:
        raise TypeError(
            f"{where} is a {type(value).__name__}, which is not declared part of a session; decorate it with "
            "@session_state or @session_value, or mark its field DERIVED"
        )
    else:
        yield from ((f".{name}", getattr(value, name)) for name in fields_of(type(value), STATE, BY_LAYER, KEPT))


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
    own = fields_of(type(value), STATE, BY_LAYER, KEPT)
    return {_CLASS: name_of(type(value)), _FIELDS: dict(zip(own, parts, strict=True))}


def _read(node: Any, there: Any, where: str, read: Callable[[Mapping[str, Any], object, str], Tensor]) -> Any:
    """The value of a node that `_written` made; `there` is what is in its place now."""
    if isinstance(node, _PLAIN):
        return node
    if _TENSOR in node:
        return read(node, there, where)
    kind, content = node[_CLASS], node[_FIELDS]
    if kind == "dict":
        return {
            _read(key, None, where, read): _read(each, None, f"{where}[{index}]", read)
            for index, (key, each) in enumerate(content)
        }
    if kind in ("list", "tuple"):
        items = [_read(each, None, f"{where}[{index}]", read) for index, each in enumerate(content)]
        return items if kind == "list" else tuple(items)
    known = class_of(kind)
    if known is None:
        raise ConfigError(f"{where} is {kind!r} in the snapshot, which this version does not know")
    own = fields_of(known, STATE, BY_LAYER, KEPT)
    if set(own) != set(content):
        differ = ", ".join(sorted(set(own) ^ set(content)))
        raise ConfigError(f"{where} ({kind}) has other fields in the snapshot than here: {differ}")
    if there is not None and name_of(type(there)) != kind:
        raise ConfigError(f"{where} is {kind!r} in the snapshot, but {name_of(type(there))!r} here")
    values = {
        name: _read(content[name], None if there is None else getattr(there, name), f"{where}.{name}", read)
        for name in own
    }
    if there is None or not mutable(there):
        try:
            return known(**values)
        except (TypeError, ValueError) as error:  # what is below `Any` has fields of any kind
            raise ConfigError(f"{where} cannot be: {error}") from error
    return _set(there, values)


def _with_layers(state: _T, value: Callable[[str], Any]) -> _T:
    """A copy that shares all but its BY_LAYER fields."""
    return _set(shallow.copy(state), {name: value(name) for name in fields_of(type(state), BY_LAYER)})


def _set(state: _T, values: Mapping[str, Any]) -> _T:
    """The state, with these fields set, and what follows from them. Mutates: state."""
    for name, each in values.items():
        setattr(state, name, each)
    derive(state)
    return state


def described(tensor: Tensor) -> str:
    """Type and shape of a tensor, as messages name it."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
