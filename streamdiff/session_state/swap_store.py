"""Where states of sessions lie that are not on the device: copies in host memory, and beyond its limit in files.

From and to CUDA copies go through pinned memory on a stream of their own, in pieces: neither host nor other sessions
wait for them. Each rank has a store for its own parts of sessions; nothing of it travels. Files are written and read on
a thread.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from streamdiff import clock
from streamdiff.errors import ConfigError, StreamdiffError
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
    """Both as pairs `[n]` of what lies together in memory, as caches of a pool do layer by layer; what does not, and is
    small, as it is."""
    if there.is_contiguous() and saved.is_contiguous():
        yield there.view(-1), saved.view(-1)
    elif saved.nbytes <= _PIECE:
        yield there, saved
    else:
        for pair in zip(there, saved, strict=True):
            yield from _flat(*pair)


def copy_in_pieces(there: Tensor, saved: Tensor) -> Tensor:
    """Copy in pieces. Mutates: there."""
    for target, source in _flat(there, saved):
        if source.nbytes <= _PIECE:
            target.copy_(source, non_blocking=True)
        else:
            count = max(1, _PIECE // source.element_size())
            for to, piece in zip(target.split(count), source.split(count), strict=True):
                to.copy_(piece, non_blocking=True)
    return there


logger = logging.getLogger(__name__)

_T = TypeVar("_T")
DISK_RETRY_S = 2.0
"""How long after a write that failed no other is tried for want of room in host memory."""


class Lost(StreamdiffError):
    """A state whose file is damaged."""


@dataclass(eq=False)
class _SwappedState:
    """A state away from its device: the tree and the tensors of `walk.save`, these in `tensors`, in `file`, or while it
    is written or read in both; `copy` brought it here. `outline`: the tensors without content; `checksum`: of the
    file."""

    tree: Any
    tensors: Mapping[str, Tensor] | None
    outline: Mapping[str, Tensor]
    copy: HostCopy | None
    file: FileIO | None = None
    checksum: int = 0
    writing: bool = False
    reading: Future[Mapping[str, Tensor]] | None = None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.outline.values())


class SwapStore:
    """The states of one rank that are away, by name, the one away longest first. From any thread."""

    def __init__(
        self, device: torch.device = walk.CPU, host_bytes: int | None = None, state_dir: Path | None = None
    ) -> None:
        """Beyond `host_bytes` (None: without limit) states go to files in `state_dir`; None: none do. The files have no
        name there, so that no one else opens them, and whatever ends the process, they are gone with it.

        Raises:
            ConfigError: the folder cannot be made, or nothing can be written there.
        """
        self.device, self.host_bytes, self.copies = device, host_bytes, HostCopies(device)
        self._kept: dict[str, _SwappedState] = {}
        self._changed = threading.Lock()
        self._disk_fault, self._fault_s = "", 0.0
        self._folder = None if state_dir is None else state_dir.expanduser()
        self._thread = ThreadPoolExecutor(1, "swap")
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with TemporaryFile(dir=self._folder) as trial:
                trial.write(bytes(1 << 16))
        except OSError as error:
            raise ConfigError(
                f"serve.state_dir is {state_dir}, where nothing can be written: {error.strerror or error}; name a "
                "folder with room that is yours, or leave it out to keep sessions in host memory alone",
                field="serve.state_dir",
            ) from error

    # ---- out and in ---------------------------------------------------------------------------------------------

    def put(self, name: str, state: object) -> None:
        """Take a copy of a state, whose tensors may be reused after `copies.follow`; what lies here
        longest goes to disk where host memory is used up. Mutates: self."""
        copy = HostCopy(self.copies, state)
        copy.go_on()
        with self._changed:
            outline = {name: each.to(walk.META) for name, each in copy.tensors.items()}
            self._kept[name] = _SwappedState(copy.tree, copy.tensors, outline, copy)
            self._spill()

    def ready(self, name: str) -> bool:
        """Whether `take` would give it at once. Where its file must be read first that begins now. Mutates: self.

        Raises:
            Lost: its file is damaged; it is no longer kept.
        """
        with self._changed:
            kept = self._kept[name]
            if kept.tensors is None and kept.reading is None:
                kept.reading = self._thread.submit(self._content, kept)
            elif kept.tensors is None and kept.reading is not None and kept.reading.done():
                try:
                    kept.tensors = kept.reading.result()
                except Lost:
                    self._forget(name)
                    raise
            return kept.tensors is not None

    def take(self, name: str, into: _T) -> _T:
        """Put a state that is ready into one that was opened in the same way, see `walk.load`; `copies.follow` comes
        before it is used. Mutates: self, into."""
        with self._changed:
            kept = self._forget(name)
            self._spill()
        assert kept.tensors is not None, "`ready` said so"
        with self.copies.on_stream() as copy:
            return walk.load(into, kept.tensors, kept.tree, self.device, copy)

    def read(self, name: str) -> tuple[Mapping[str, Tensor], Any]:
        """What `walk.save` gave of a state, which stays away. Waits for the device or its file.

        Raises:
            Lost: its file is damaged, or it is not kept any more.
        """
        with self._changed:
            kept = self._kept.get(name)
            if kept is None:
                raise Lost("the session has ended meanwhile")
            tensors, copy = kept.tensors, kept.copy
        if tensors is None:
            return self._content(kept), kept.tree
        return (tensors, kept.tree) if copy is None else copy.result()

    def drop(self, name: str) -> None:
        """Forget a state, if it is here. Mutates: self."""
        with self._changed:
            if name in self._kept:
                self._forget(name)
                self._spill()

    # ---- what there is ------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def location(self, name: str) -> str:
        """Whether a state is in host memory or in a file on disk."""
        return "disk" if self._kept[name].tensors is None else "host"

    @property
    def spills(self) -> bool:
        """Whether there is a disk to write to, and the latest write went well; if not, another is begun after a while.
        Mutates: self."""
        with self._changed:
            if self._disk_fault and clock.monotonic_s() - self._fault_s >= DISK_RETRY_S:
                self._spill()
            return self._folder is not None and not self._disk_fault

    def close(self) -> None:
        """Forget everything."""
        with self._changed:
            for name in list(self._kept):
                self._forget(name)
        self._thread.shutdown()

    # ---- the disk -----------------------------------------------------------------------------------------------

    def _spill(self) -> None:
        """Begin to write what has been here longest while there is too much; after a fault too, as there may be room
        again. Mutates: self."""
        in_host = [kept for kept in self._kept.values() if kept.tensors is not None and not kept.writing]
        nbytes = sum(kept.nbytes for kept in in_host)
        for kept in in_host:
            if self._folder is None or self.host_bytes is None or nbytes <= self.host_bytes:
                return
            if kept.reading is None:
                kept.writing, nbytes = True, nbytes - kept.nbytes
                self._thread.submit(self._write, kept)

    def _write(self, kept: _SwappedState) -> None:
        """Write a state to a file of its own, unless it has been taken meanwhile. On the thread. Mutates: kept."""
        assert kept.tensors is not None
        if kept.copy is not None:
            kept.copy.result()
        file: FileIO | None = None
        checksum, fault = 0, ""
        try:
            file = TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115
            for piece in _pieces(kept.tensors):
                checksum = crc32(piece, checksum)
                while piece:
                    piece = piece[file.write(piece) :]
        except OSError as error:
            fault = str(error)
        with self._changed:
            kept.writing = False
            if not fault and kept in self._kept.values():
                kept.file, kept.checksum, kept.tensors, kept.copy = file, checksum, None, None
            elif file is not None:
                file.close()
            known, self._disk_fault, self._fault_s = self._disk_fault, fault, clock.monotonic_s()
        if fault and fault != known:
            logger.warning("A session stays in host memory, as it cannot be written to %s: %s", self._folder, fault)

    def _content(self, kept: _SwappedState) -> dict[str, Tensor]:
        """What a state's file holds. Raises Lost where it is not what was written."""
        assert kept.file is not None
        tensors = {name: self.copies.host(each) for name, each in kept.outline.items()}
        at, checksum = 0, 0
        try:
            for piece in _pieces(tensors):
                at += os.preadv(kept.file.fileno(), [piece], at)
                checksum = crc32(piece, checksum)
        except (OSError, ValueError) as error:  # closed, as the session has ended
            raise Lost(f"its file in {self._folder} cannot be read: {error}") from error
        if at != kept.nbytes or checksum != kept.checksum:
            raise Lost(f"its file in {self._folder} is not what was written")
        return tensors

    def _forget(self, name: str) -> _SwappedState:
        """Mutates: self."""
        kept = self._kept.pop(name)
        if kept.file is not None:
            kept.file.close()
        return kept


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of tensors, piece by piece."""
    return (piece for tensor in tensors.values() for piece in walk.pieces(tensor, _PIECE))
