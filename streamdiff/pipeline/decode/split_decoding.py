"""Decoding that the ranks of the first stage share by rows (`row_group`): the head's thread, and a loop on each other
rank. The head says what comes next, over a link to each; all then carry out the same exchanges in that order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.autoencoder.row_decoder import RowDecoder
from streamdiff.pipeline.decode.decode_worker import DecodeWorker, LocalDecoding
from streamdiff.pipeline.decode.decoding import NO_STREAM, Deliver, SavedMemory, shape_key, stream_key
from streamdiff.pipeline.decode.row_group import RowGroup
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.link import LinkClosed, Receiver, Sender
from streamdiff.pipeline.distributed.local_link import NoSender
from streamdiff.pipeline.distributed.message import MessageKind, Outcome, SessionUpdate, StageMessage
from streamdiff.pipeline.distributed.state_exchange import State, StateExchange
from streamdiff.pipeline.runner.worker import LEAVE_S
from streamdiff.pipeline.scheduler.step import MicroStep
from streamdiff.session_state import walk
from streamdiff.session_state.swap_store import SwapStore


class SplitDecoding(LocalDecoding):
    """On the head, whose decoder is a `RowDecoder`; the `others` lead to `SplitDecodeWorker`s.

    What a stream remembers is saved with all rows, as one rank that decodes would have it: so it goes on there too.
    """

    def __init__(
        self,
        others: Sequence[Sender],
        exchange: StateExchange,
        decoder: PictureDecoder,
        deliver: Deliver,
        wake: Callable[[], None],
        device: torch.device,
        at_once: int = 1,
        timer: DeviceTimer | None = None,
        swaps: SwapStore | None = None,
    ) -> None:
        """`exchange` is between this rank and the others."""
        super().__init__(decoder, deliver, wake, device, at_once, timer, swaps)
        self._others, self._exchange, self._network, self._rows = others, exchange, *_shared(decoder)

    def forget(self, stream: int) -> None:
        self._queue_update(MessageKind.CLOSE, stream)
        super().forget(stream)

    def save(self, stream: int) -> SavedMemory:
        self._queue_update(MessageKind.SAVE, stream)
        own, keys = super().save(stream), self._keys(stream)
        states: list[State] = []

        def whole() -> State | None:
            if not states and (first := own()) is not None:
                states.append(first)
            if not states or not all(self._exchange.holds(key) for key in keys):
                return None
            return self._joined([*states, *(self._exchange.take(key) for key in keys)])

        return whole

    def load(self, stream: int, state: State) -> None:
        self._pool.submit(self._load, stream, state).result()

    def outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        return self._pool.submit(self._outlines, chunk_shape).result()

    def swap_out(self, stream: int) -> None:
        self._queue_update(MessageKind.SWAP_OUT, stream)
        super().swap_out(stream)

    def close(self, abandon: bool = False) -> None:
        super().close(abandon)
        if abandon:
            return
        with contextlib.suppress(LinkClosed):  # whoever is gone needs no end
            self._send_update(MessageKind.STOP, 0)
            for other in self._others:
                other.close()
                other.flush(LEAVE_S)

    # ---- on the thread ------------------------------------------------------------------------------------------

    def _decode(self, stream: int, chunk: int, latents: Tensor, ready: torch.cuda.Event | None) -> None:
        self._transfer_stream.follow(ready, latents)
        row = MicroStep(stream, chunk, 0, latents.shape[1], 0)
        self._send(StageMessage(MessageKind.ROWS, (row,), None, (latents[None],)))
        super()._decode(stream, chunk, latents, ready)

    def _joined(self, states: Sequence[State]) -> State:
        broken = next((state for state in states if "broken" in state[1]), None)
        if broken is not None:
            return broken
        return walk.save(self._network.with_all_rows([walk.restored(*each) for each in states]))

    def _load(self, stream: int, state: State) -> None:
        whole = walk.restored(*state)
        try:
            own, *parts = [walk.save(self._network.rows_of(whole, rank)) for rank in range(self._rows.size)]
        except ValueError as error:
            raise ConfigError(f"what the decoder remembers is of another size: {error}") from error
        for key, part in zip(self._keys(stream), parts, strict=True):
            self._exchange.put(key, part)
        self._send_update(MessageKind.LOAD, stream)
        self._memories.load(stream, own)

    def _outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        """All ranks decode chunks of nothing together, of which each has its own rows."""
        for rank in self._other_ranks:
            self._exchange.put(shape_key(rows_key(rank)), ({}, list(chunk_shape)))
        self._send_update(MessageKind.SAVE, NO_STREAM)
        outlines = self._memories.outlines(chunk_shape, self._network.as_whole)
        for key in self._keys(NO_STREAM):
            self._exchange.take(key)
        return outlines

    def _swap_in(self, stream: int) -> Outcome:
        self._send_update(MessageKind.SWAP_IN, stream)
        return self._memories.swap_in(stream, self._rows.highest)

    @property
    def _other_ranks(self) -> range:
        return range(1, self._rows.size)

    def _keys(self, stream: int) -> list[str]:
        return [stream_key(rows_key(rank), stream) for rank in self._other_ranks]

    def _queue_update(self, kind: MessageKind, stream: int) -> None:
        """Queue `_send_update` on the decoding thread, behind all jobs already queued."""
        job: Future[None] = self._pool.submit(self._send_update, kind, stream)
        job.add_done_callback(self._ended)

    def _send_update(self, kind: MessageKind, stream: int) -> None:
        self._send(StageMessage(kind, (), SessionUpdate(stream)))

    def _send(self, message: StageMessage) -> None:
        for other in self._others:
            other.send(message)


class SplitDecodeWorker(DecodeWorker):
    """Runs on every other rank: decodes its rows, which the head collects into pictures. Its decoder is a
    `RowDecoder`, with the layout `one_pixel`."""

    awaits_others = True

    def __init__(
        self,
        decoder: PictureDecoder,
        receiver: Receiver,
        device: torch.device,
        at_once: int,
        timer: DeviceTimer | None,
        exchange: StateExchange | None = None,
        swaps: SwapStore | None = None,
    ) -> None:
        super().__init__(decoder, receiver, NoSender(), device, at_once, timer, exchange, swaps)
        self._rows = _shared(decoder)[1]
        self.exchange_key = rows_key(self._rows.index)

    def _swap_in(self, stream: int) -> None:
        self._memories.swap_in(stream, self._rows.highest)


def rows_key(rank: int) -> str:
    """Prefix of the exchange keys of a rank's decoder state."""
    return f"decoder, rows of rank {rank}"


def _shared(decoder: PictureDecoder) -> tuple[RowDecoder, RowGroup]:
    network = decoder.network
    assert isinstance(network, RowDecoder), "`rank_loader` makes one"
    rows = network.rows
    assert isinstance(rows, RowGroup)
    return network, rows
