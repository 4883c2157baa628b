"""Copies of states between a device and host memory. From and to CUDA they go through pinned memory on a stream of
their own, in pieces, so that neither the host nor other sessions wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from streamdiff.session_state import walk

_PIECE = 1 << 24
"""Bytes of one copy: a picture that leaves the device meanwhile waits for no more than that."""


class HostCopies:
    """The copies of one rank. For one thread."""

    def __init__(self, device: torch.device = walk.CPU) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None  # made with the first copy on CUDA

    @contextmanager
    def on_stream(self) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
        """Context manager yielding `copy(dst, src)`, which runs on this object's CUDA stream after the caller's queued
        work; on a CPU at once."""
        if self._stream is None and self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
        if self._stream is None:
            yield copy_in_pieces
            return
        own, caller = self._stream, torch.cuda.current_stream(self.device)

        def copy(there: Tensor, saved: Tensor) -> Tensor:
            """Copy, and keep the memory of both from reuse until it is done, even if they are freed meanwhile."""
            for tensor in (there, saved):
                for stream in (caller, own) if tensor.is_cuda else ():
                    tensor.record_stream(stream)
            return copy_in_pieces(there, saved)

        own.wait_stream(caller)
        with torch.cuda.stream(own):
            yield copy

    def mark(self) -> torch.cuda.Event | None:
        """A point behind all copies so far; None where they are done."""
        return None if self._stream is None else self._stream.record_event()

    def follow(self) -> None:
        """Make the caller's current stream wait for all copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def host(self, tensor: Tensor) -> Tensor:
        """Host memory for a tensor."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda")


class HostCopy:
    """A copy of a state as `walk.save` gives it, `tensors` and `tree`, that is made by and by; the state must
    stand still until it is complete."""

    def __init__(self, copies: HostCopies, state: object, path: str = "") -> None:
        """Names of tensors begin with `path`."""
        self._copies = copies
        self._left: deque[tuple[Tensor, Tensor]] = deque()
        self._copied: torch.cuda.Event | None = None
        self.tensors, self.tree = walk.save(state, path, self._expect)

    def go_on(self, nbytes: int | None = None) -> bool:
        """Copy so many bytes more, None: all; whether that was the last. On CUDA they are on their way then: `follow`
        comes before the state changes. Mutates: self."""
        with self._copies.on_stream() as copy, torch.inference_mode():
            while self._left and (nbytes is None or nbytes > 0):
                there, saved = self._left.popleft()
                if nbytes is not None and saved.nbytes > nbytes:
                    count = max(1, nbytes // saved.element_size())
                    self._left.appendleft((there[count:], saved[count:]))
                    there, saved = there[:count], saved[:count]
                copy(there, saved)
                nbytes = None if nbytes is None else nbytes - saved.nbytes
        self._copied = self._copies.mark()
        return not self._left

    def result(self) -> tuple[dict[str, Tensor], Any]:
        """The tensors and the tree of a copy that is complete; waits for the device. From any thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.tensors, self.tree

    def _expect(self, tensor: Tensor) -> Tensor:
        there = self._copies.host(tensor)
        self._left.extend(_flat(there, tensor))
        return there


def _flat(there: Tensor, saved: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both as pairs `[n]` of what lies together in memory, as caches of a pool do layer by layer. Of what does not, and
    is small, `saved` is a copy."""
    if saved.is_contiguous() or saved.nbytes <= _PIECE:
        yield there.view(-1), saved.reshape(-1)
        return
    for pair in zip(there, saved, strict=True):
        yield from _flat(*pair)


def copy_in_pieces(there: Tensor, saved: Tensor) -> Tensor:
    """Copy; what is contiguous in pieces. Mutates: there."""
    if not (there.is_contiguous() and saved.is_contiguous()):
        if saved.nbytes <= _PIECE:
            return there.copy_(saved, non_blocking=True)
        for target, source in zip(there, saved, strict=True):  # caches of a pool lie layer by layer
            copy_in_pieces(target, source)
        return there
    count = max(1, _PIECE // there.element_size())
    for target, source in zip(there.view(-1).split(count), saved.view(-1).split(count), strict=True):
        target.copy_(source, non_blocking=True)
    return there
