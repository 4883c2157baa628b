"""Counts the operations that torch carries out, and the bytes that they move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FREE = ("empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "lift_fresh", "_pin_memory")
_FUSED = ("rms_norm", "layer_norm")
"""One kernel each on CUDA."""
_MATRIX = ("mm", "addmm", "bmm", "baddbmm", "convolution")


@dataclass
class Count:
    """What was counted. `matrix` and `attention` are among the `operations`."""

    operations: int = 0
    matrix: int = 0
    attention: int = 0
    moved_bytes: int = 0
    copied_bytes: int = 0

    def __sub__(self, other: Count) -> Count:
        return Count(**{name: value - vars(other)[name] for name, value in vars(self).items()})


class Counter(TorchDispatchMode):
    """Counts the operations that run under it; `caches` are tensors whose memory only attention should read."""

    def __init__(self, caches: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = Count()
        self.watch(caches)

    def watch(self, caches: Iterable[Tensor]) -> None:
        """Let these be the caches. Mutates: self."""
        self._caches = {_memory(each) for each in caches}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten":
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _FUSED:
            with self:  # what is made of other operations comes back as these
                if (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                    return result
        result = func(*args, **(kwargs or {}))
        if not func.is_view and name not in _FREE:
            self._add(name, func, args, kwargs or {}, result)
        return result

    def _add(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        count = self.count
        count.operations += 1
        if name in _MATRIX or "attention" in name:
            count.matrix += name in _MATRIX
            count.attention += "attention" in name
            return
        read, written = _traffic(name, func, args, kwargs, result)
        count.moved_bytes += sum(map(_nbytes, (*read, *written)))
        count.copied_bytes += sum(_nbytes(each) for each in read if _memory(each) in self._caches)


def _traffic(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an element-wise operation reads and writes."""
    if name == "index_copy_":
        return [args[3]], [args[3]]  # as many are written
    if name == "copy_":
        return [args[1]], [args[0]]
    outs = [kwargs[arg.name] for arg in func._schema.arguments if arg.is_out and arg.name in kwargs]
    given = {name: each for name, each in kwargs.items() if not any(each is out for out in outs)}
    if name == "index_select":
        return [result], [result]
    return _tensors((args, given)), outs or _tensors(result)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    """Of the numbers that are there: one that is repeated over a dimension is there once."""
    there = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        there *= size if stride else 1
    return there * tensor.element_size()


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
