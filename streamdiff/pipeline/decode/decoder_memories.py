"""Per-stream decoder states: kept, saved, swapped out and in."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamdiff.errors import NOT_FINITE
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, memory_outlines
from streamdiff.pipeline.decode.host_copy import TransferStream, decode_chunk
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.message import Outcome
from streamdiff.pipeline.distributed.state_exchange import State, readiness
from streamdiff.session_state import walk
from streamdiff.session_state.swap_store import HostCopy, Lost, SwapStore

_PIECE = 1 << 24
"""Bytes of what is remembered that are copied between two decodes."""


class DecoderMemories:
    """The decoder, and its state of each stream."""

    def __init__(
        self,
        decoder: PictureDecoder,
        device: torch.device,
        at_once: int,
        timer: DeviceTimer,
        swaps: SwapStore | None = None,
    ) -> None:
        """`device` is the decoder's, `timer` that device's; `at_once` latent frames are decoded by one call; `swaps` is
        where what is swapped out lies, None: one that is made here."""
        self._decoder, self._at_once, self._swaps = decoder, at_once, swaps or SwapStore(device)
        self.transfer_stream = TransferStream(device)
        self._timed = timer.stream()
        self._memories: dict[int, Any] = {}
        self._copies: dict[int, HostCopy] = {}  # of streams that are being saved
        self._outlines: list[Any] = []

    def decode(self, stream: int, chunk: int, latents: Tensor) -> Iterator[Tensor]:
        if stream not in self._memories:
            self._memories[stream] = self._decoder.new_memory()
        if stream in self._copies:
            self._copies[stream].go_on()
            self._swaps.follow()
        timed, finite = partial(self._timed.work, f"decoding chunk {chunk}"), self.transfer_stream.finite(latents)
        for pictures in decode_chunk(
            self._decoder, latents, self._memories[stream], self.transfer_stream, self._at_once, timed
        ):  # fmt: skip
            if not finite():
                raise ArithmeticError(f"its latents are {NOT_FINITE}")
            yield pictures

    def forget(self, stream: int) -> None:
        self._memories.pop(stream, None)
        self._swaps.drop(_swapped(stream))

    def swap_out(self, stream: int) -> None:
        if stream in self._memories:
            self._swaps.put(_swapped(stream), self._memories.pop(stream))

    def swap_in(self, stream: int) -> Outcome:
        """Restore a stream's state, or drop it if lost."""
        name = _swapped(stream)
        if name not in self._swaps:  # it had none
            return Outcome.DONE
        outcome = readiness(self._swaps, name)
        if outcome is Outcome.LOST:
            self._swaps.drop(name)
        elif outcome is Outcome.DONE:
            self._memories[stream] = self._swaps.take(name, self._decoder.new_memory())
            self._swaps.follow()
        return outcome

    def begin_save(self, stream: int) -> None:
        """Save what is remembered of a stream now, by `save_on`. Mutates: self."""
        if _swapped(stream) not in self._swaps:
            memory = self._memories[stream] if stream in self._memories else self._decoder.new_memory()
            self._copies[stream] = HostCopy(self._swaps.copies, memory)

    def save_on(self, stream: int) -> State | None:
        """What was remembered of a stream when the save began, with the first call if not before, copied a piece with
        each call: None before the last. Where it is lost, why, as `broken`. Mutates: self."""
        if stream not in self._copies and _swapped(stream) in self._swaps:
            try:
                return self._swaps.read(_swapped(stream))
            except Lost as error:
                return {}, {"broken": f"what the decoder remembered is lost: {error}"}
        if stream not in self._copies:
            self.begin_save(stream)
        copy = self._copies[stream]
        done = copy.go_on(_PIECE)
        state = copy.result()  # the next piece is not to be in the way of a decode on its way to the device
        if not done:
            return None
        del self._copies[stream]
        return state

    def load(self, stream: int, state: State) -> None:
        device = self._decoder.network.device
        self._memories[stream] = walk.load(self._decoder.new_memory(), *state, device)

    def outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        """See `memory_outlines`. Decodes some chunks of nothing, once."""
        if not self._outlines:
            latents = torch.zeros((1, *chunk_shape), device=self._decoder.network.device)
            decode = partial(self._decoder.decode, latents)
            self._outlines = memory_outlines(self._decoder.new_memory, decode, chunk_shape[1])
        return self._outlines


def _swapped(stream: int) -> str:
    """Name of a stream's decoder state in a swap store."""
    return f"decoder {stream}"
