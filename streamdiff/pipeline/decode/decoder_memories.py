"""The decoder at work: its state of each stream, kept, saved, swapped out and in; chunks are decoded on a CUDA
stream of its own, and pictures copied into pinned memory while the next ones are decoded. On a CPU there is no stream
and no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamdiff.errors import NOT_FINITE
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, memory_outlines
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.message import MessageKind, Outcome, SessionUpdate
from streamdiff.pipeline.distributed.state_exchange import LocalExchange, State, readiness, send_state
from streamdiff.session_state import walk
from streamdiff.session_state.swap_store import HostCopy, SwapStore

_PIECE = 1 << 24
"""Bytes of what is remembered that are copied between two decodes."""
NO_STREAM = -1
"""To copy it to the head gives `outlines`."""
SHAPE_KEY = "decoder: chunk shape"
"""Exchange key of a chunk's shape, which the head puts there for the decoding rank."""


def stream_key(stream: int) -> str:
    """Exchange key of a decoder's state of one stream."""
    return f"decoder: stream {stream}"


class DecoderMemories:
    """The decoder, and its state of each stream."""

    def __init__(
        self,
        decoder: PictureDecoder,
        stream: TransferStream,
        at_once: int,
        timer: DeviceTimer,
        exchange: LocalExchange,
        swaps: SwapStore | None = None,
    ) -> None:
        """`stream` is on the decoder's device, `timer` that device's; `at_once` latent frames are decoded by one call;
        `exchange` leads to the head; `swaps` is where what is swapped out lies, None: one that is made here."""
        self._decoder, self._at_once, self._swaps = decoder, at_once, swaps or SwapStore(stream.device)
        self._exchange, self._to_head = exchange, ThreadPoolExecutor(1, "to head")
        self.transfer_stream = stream
        self._timed = timer.stream()
        self._memories: dict[int, Any] = {}
        self._copies: dict[int, HostCopy] = {}  # of streams that are being saved
        self._outlines: list[Any] = []

    def decode(self, stream: int, chunk: int, latents: Tensor) -> Iterator[Tensor]:
        if stream not in self._memories:
            self._memories[stream] = self._decoder.new_memory()
        if stream in self._copies:
            self._copies[stream].go_on()
            self._swaps.copies.follow()
        timed, finite = partial(self._timed.work, f"decoding chunk {chunk}"), self.transfer_stream.finite(latents)
        for pictures in decode_chunk(
            self._decoder, latents, self._memories[stream], self.transfer_stream, self._at_once, timed
        ):  # fmt: skip
            if not finite():
                raise ArithmeticError(f"its latents are {NOT_FINITE}")
            yield pictures

    def apply(self, kind: MessageKind, update: SessionUpdate) -> Outcome:
        """Do what the head asks with what is remembered of a stream: forget it on CLOSE; see `SessionUpdate`. What goes
        to the head is copied by `copy_next`; what is decoded from here on is not in it. Mutates: self."""
        stream, name = update.session, f"decoder {update.session}"  # in the swap store
        match kind:
            case MessageKind.CLOSE:
                self._memories.pop(stream, None)
                self._swaps.drop(name)
            case MessageKind.COPY_OUT if not update.saved:
                if stream in self._memories:
                    self._swaps.put(name, self._memories.pop(stream))
            case MessageKind.COPY_OUT if stream == NO_STREAM:
                shape = tuple(self._exchange.take(SHAPE_KEY)[1])
                self._send(stream, lambda: ({}, self.outlines(shape)))
            case MessageKind.COPY_OUT if name in self._swaps:
                self._send(stream, partial(self._swaps.read, name))
            case MessageKind.COPY_OUT:
                memory = self._memories[stream] if stream in self._memories else self._decoder.new_memory()
                self._copies[stream] = HostCopy(self._swaps.copies, memory)
            case MessageKind.PUT_BACK if update.saved:
                state, device = self._exchange.take(stream_key(stream)), self._decoder.network.device
                self._memories[stream] = walk.load(self._decoder.new_memory(), *state, device)
            case MessageKind.PUT_BACK if name in self._swaps:  # else it had none
                outcome = readiness(self._swaps, name)
                if outcome is Outcome.DONE:
                    self._memories[stream] = self._swaps.take(name, self._decoder.new_memory())
                    self._swaps.copies.follow()
                return outcome
        return Outcome.DONE

    def copy_next(self) -> bool:
        """Copy a piece for the head, if there is one; whether there are more. Mutates: self."""
        for stream, copy in list(self._copies.items())[:1]:
            done = copy.go_on(_PIECE)
            copy.result()  # the next piece is not to be in the way of a decode on its way to the device
            if done:
                del self._copies[stream]
                self._to_head.submit(self._send, stream, copy.result)
        return bool(self._copies)

    def _send(self, stream: int, made: Callable[[], State]) -> None:
        send_state(self._exchange, stream_key(stream), made)

    def outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        """See `memory_outlines`. Decodes some chunks of nothing, once."""
        if not self._outlines:
            latents = torch.zeros((1, *chunk_shape), device=self._decoder.network.device)
            decode = partial(self._decoder.decode, latents)
            self._outlines = memory_outlines(self._decoder.new_memory, decode, chunk_shape[1])
        return self._outlines


class TransferStream:
    """The stream of a decoding thread: on a CUDA device one of its own, so that decoding waits only for its latents,
    and no forward waits for decoding."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._finite = torch.empty((), dtype=torch.bool, pin_memory=self._stream is not None)
        self._copied = [torch.cuda.Event() for _ in range(2)] if self._stream is not None else []

    def enter(self) -> None:
        """Make this the current stream of the calling thread."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """A point of the caller's own stream, for `follow`."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def follow(self, point: torch.cuda.Event | None, latents: Tensor) -> None:
        """Make this stream wait for `point`, and tell the allocator that it uses `latents`."""
        if self._stream is not None and point is not None:
            self._stream.wait_event(point)
            latents.record_stream(self._stream)

    def finite(self, values: Tensor) -> Callable[[], bool]:
        """Start checking that all values are finite. Call the result, which then does not wait, after fetching
        something that was queued later, and before the next `finite`."""
        if self._stream is None:
            return torch.isfinite(values).all().item  # type: ignore[return-value]
        self._finite.copy_(torch.isfinite(values).all(), non_blocking=True)
        return self._finite.item  # type: ignore[return-value]

    def fetch(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Each piece `[n, ...]` on the host, valid until the next is asked for. The next one is already being
        decoded when the host waits for a copy; two pinned buffers take turns."""
        if self._stream is None:
            yield from pieces
            return
        waiting: tuple[Tensor, torch.cuda.Event] | None = None
        for index, piece in enumerate(pieces):
            buffer, copied = self._buffer(index % 2, piece), self._copied[index % 2]
            buffer.copy_(piece, non_blocking=True)
            copied.record()
            if waiting is not None:
                waiting[1].synchronize()
                yield waiting[0]
            waiting = buffer, copied
        if waiting is not None:
            waiting[1].synchronize()
            yield waiting[0]

    def _buffer(self, index: int, piece: Tensor) -> Tensor:
        """Pinned memory of the shape of `piece`; made for the largest so far. Mutates: self."""
        if self._buffers[index].numel() < piece.numel():
            self._buffers[index] = torch.empty(piece.numel(), dtype=torch.uint8, pin_memory=True)
        return self._buffers[index][: piece.numel()].view(piece.shape)


def decode_chunk(
    decoder: PictureDecoder,
    latents: Tensor,
    memory: Any,
    transfer_stream: TransferStream,
    at_once: int,
    timed: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[Tensor]:
    """Pictures uint8 `[n, ...]` of each latent frame of `[C, F, h, w]`, on the host, valid until the next is asked
    for; `at_once` latent frames are decoded by one call, each within `timed()`. Mutates: memory."""
    groups = latents.split(at_once, 1)

    def decode(group: Tensor) -> Tensor:
        with timed():
            return decoder.decode(group[None], memory)

    decoded = map(decode, groups)
    for group, pictures in zip(groups, transfer_stream.fetch(decoded), strict=True):
        count = group.shape[1]
        # A stream's first latent frame may show fewer frames than the others.
        first = len(pictures) - (count - 1) * decoder.temporal if count > 1 else len(pictures)
        yield from pictures.split([first] + [decoder.temporal] * (count - 1))
