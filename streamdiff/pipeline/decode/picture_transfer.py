"""The way of pictures to the host: chunks are decoded on a CUDA stream of its own, and pictures copied into pinned
memory while the next ones are decoded. On a CPU there is no stream and no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from streamdiff.models.autoencoder.picture_decoder import PictureDecoder


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
