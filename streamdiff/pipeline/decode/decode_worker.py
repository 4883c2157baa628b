"""Decodes latents to pictures, on a thread of the head or on another rank of the ring.

Pictures come out latent frame by latent frame. A CPU also decodes one at a time, so that the first picture is early; a
GPU, where that gains nothing, decodes a whole chunk in one call. Chunks are decoded one at a time, in the order in
which they were finished. A *stream* here is a session from its start or reset to the next. `Decoding` is what the
pipeline asks for, whichever rank decodes.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamdiff.core import MicroStep
from streamdiff.device import bind
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.decode.decoder_memories import (
    NO_STREAM,
    SHAPE_KEY,
    DecoderMemories,
    TransferStream,
    stream_key,
)
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.heartbeat import LEAVE_S, RankLoop
from streamdiff.pipeline.distributed.link import LinkClosed, Receiver, Sender
from streamdiff.pipeline.distributed.message import (
    MessageKind,
    MessageLayout,
    Outcome,
    SessionUpdate,
    StageMessage,
)
from streamdiff.pipeline.distributed.state_exchange import LocalExchange, State
from streamdiff.pipeline.row_faults import ROW_ERRORS, check_own, describe
from streamdiff.session_state.swap_store import SwapStore
from streamdiff.video.pixel_format import PictureKind, shape_of


@dataclass(frozen=True)
class Piece:
    """Pictures uint8 `[n, *P]` of one latent frame, P as in `streamdiff.video.pixel_format`; `last` of its chunk.
    `fault`: why there are none, and the stream cannot go on."""

    stream: int
    chunk: int
    pictures: NDArray[np.uint8]
    last: bool
    fault: str = ""

    @classmethod
    def failed(cls, stream: int, chunk: int, fault: str) -> Piece:
        """The final piece of a chunk that failed."""
        return cls(stream, chunk, np.empty(0, np.uint8), True, fault)


Deliver = Callable[[Piece], None]
SavedMemory = Callable[[], State]
"""Waits for what a decoder remembers of a stream, and gives it once; where that cannot be had why, as `broken`. From
any thread. Raises RuntimeError as `LocalExchange.take`."""


class Decoding(ABC):
    """Decodes latents to pictures, which are delivered from a thread of its own. What a decoder remembers of a stream
    is copied, and put back, as a stage's part of a session is."""

    def __init__(self, deliver: Deliver, wake: Callable[[], None], exchange: LocalExchange) -> None:
        """`wake` is called, from another thread, when something has gone wrong or a stream has come back; `exchange`
        leads to the decoder."""
        self._deliver, self._wake, self._exchange = deliver, wake, exchange
        self._coming: dict[int, Outcome] = {}  # streams that were asked to come back; NOT_YET: no answer yet
        self._error: BaseException | None = None

    @abstractmethod
    def submit(self, stream: int, chunk: int, latents: Tensor) -> None:
        """Decode latents `[C, F, h, w]`, the next chunk of a stream. Does not wait."""

    @abstractmethod
    def _tell(self, kind: MessageKind, update: SessionUpdate) -> None:
        """Have `DecoderMemories.apply` called with these, after all that was submitted. Does not wait."""

    @abstractmethod
    def close(self, abandon: bool = False) -> None:
        """End the threads; what is not decoded is dropped. With `abandon` they are not waited for: the device that they
        wait for is stuck."""

    def forget(self, stream: int) -> None:
        """The stream has ended; what was submitted may still come out."""
        self._coming.pop(stream, None)
        self._tell(MessageKind.CLOSE, SessionUpdate(stream))

    def save(self, stream: int) -> SavedMemory:
        """What the decoder remembers of a stream after all that was submitted. Does not wait."""
        self._tell(MessageKind.COPY_OUT, SessionUpdate(stream, saved=True))
        return partial(self._exchange.take, stream_key(stream))

    def load(self, stream: int, state: State) -> None:
        """Let a stream that has not begun continue from what was saved, which is one of `outlines`."""
        self._exchange.put(stream_key(stream), state)
        self._tell(MessageKind.PUT_BACK, SessionUpdate(stream, saved=True))

    def outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        """What the decoder may remember of a stream of chunks `[C, F, h, w]`, see `memory_outlines`; waits for it.
        Raises ConfigError where it cannot be had."""
        self._exchange.put(SHAPE_KEY, ({}, list(chunk_shape)))
        outlines = self.save(NO_STREAM)()[1]
        if not isinstance(outlines, list):
            raise ConfigError(outlines["broken"])
        return outlines

    def swap_out(self, stream: int) -> None:
        """Keep what the decoder remembers of a stream elsewhere, after all that was submitted, until `swap_in`."""
        self._tell(MessageKind.COPY_OUT, SessionUpdate(stream))

    def swap_in(self, stream: int) -> Outcome:
        """Have it remembered again, before what is submitted later. NOT_YET: call again; never waits."""
        if stream not in self._coming:
            self._coming[stream] = Outcome.NOT_YET
            self._tell(MessageKind.PUT_BACK, SessionUpdate(stream))
        outcome = self._coming[stream]
        if outcome is not Outcome.NOT_YET:
            del self._coming[stream]
        return outcome

    def check(self) -> None:
        """Raises what has gone wrong on the way."""
        if self._error is not None:
            raise self._error

    def _answered(self, stream: int, outcome: Outcome) -> None:
        """The answer to what `swap_in` has asked, which asks again after NOT_YET. Mutates: self."""
        if stream in self._coming:
            self._coming[stream] = outcome
            if outcome is Outcome.NOT_YET:
                self._coming.pop(stream, None)
            self._wake()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._wake()


CPU = torch.device("cpu")
DECODE_THREADS = 1
"""CPU threads of decoding beside a stage's work."""


def _fault_key(stream: int) -> str:
    """Exchange key of the reason, posted by a decoding rank, why a chunk of a stream could not be decoded."""
    return f"decoding of stream {stream}"


class LocalDecoding(Decoding):
    """Decodes on a thread of this process, with one CPU thread, on a GPU with a stream of its own."""

    def __init__(
        self,
        decoder: PictureDecoder,
        deliver: Deliver,
        wake: Callable[[], None],
        device: torch.device = CPU,
        at_once: int = 1,
        timer: DeviceTimer | None = None,
        swaps: SwapStore | None = None,
    ) -> None:
        """`device` is the decoder's, `timer` that device's; `at_once` latent frames are decoded by one call; `swaps` is
        where what is swapped out lies."""
        super().__init__(deliver, wake, LocalExchange())
        self._memories = DecoderMemories(
            decoder, device, at_once, timer or DeviceTimer.on(device), self._exchange, swaps
        )  # fmt: skip
        self._transfer_stream = self._memories.transfer_stream
        self._pool = ThreadPoolExecutor(1, "decode", initializer=self._enter)

    def submit(self, stream: int, chunk: int, latents: Tensor) -> None:
        self._run(self._decode, stream, chunk, latents, self._transfer_stream.mark())

    def _tell(self, kind: MessageKind, update: SessionUpdate) -> None:
        self._run(self._apply, kind, update)

    def close(self, abandon: bool = False) -> None:
        self._exchange.close()
        self._pool.shutdown(wait=not abandon, cancel_futures=True)

    def _run(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call it on the thread."""
        self._pool.submit(call, *arguments).add_done_callback(self._ended)

    def _ended(self, job: Future[None]) -> None:
        if not job.cancelled() and (error := job.exception()) is not None:
            self._fail(error)

    def _apply(self, kind: MessageKind, update: SessionUpdate) -> None:
        outcome = self._memories.apply(kind, update)
        if kind is MessageKind.PUT_BACK:
            self._answered(update.session, outcome)
        elif kind is MessageKind.COPY_OUT:
            self._copy_next()

    def _copy_next(self) -> None:
        """Copy a piece; the next one comes behind what was submitted meanwhile."""
        if self._memories.copy_next():
            self._run(self._copy_next)

    def _enter(self) -> None:
        torch.set_num_threads(DECODE_THREADS)
        self._transfer_stream.enter()

    def _decode(self, stream: int, chunk: int, latents: Tensor, ready: torch.cuda.Event | None) -> None:
        self._transfer_stream.follow(ready, latents)
        try:
            for index, pictures in enumerate(self._memories.decode(stream, chunk, latents)):
                self._deliver(Piece(stream, chunk, pictures.numpy().copy(), index == latents.shape[1] - 1))
        except ROW_ERRORS as error:
            check_own(error)
            self._deliver(Piece.failed(stream, chunk, describe(error, f"decoding chunk {chunk}")))


def latents_layout(spec: ModelSpec) -> MessageLayout:
    """From the head to a decoding rank: one chunk's latents."""
    return MessageLayout(1, ((spec.chunk_shape, torch.float32),), None)


def pictures_layout(spec: ModelSpec, kind: PictureKind = "rgb") -> MessageLayout:
    """Back to the head: the pictures of one latent frame, a row each."""
    return MessageLayout(spec.frames_per_latent, ((shape_of(kind, spec.height, spec.width), torch.uint8),), None)


class RemoteDecoding(Decoding):
    """Sends latents to a rank that runs a `DecodeWorker`, and delivers what comes back."""

    def __init__(
        self,
        sender: Sender,
        receiver: Receiver,
        spec: ModelSpec,
        deliver: Deliver,
        wake: Callable[[], None],
        exchange: LocalExchange,
        device: torch.device = CPU,
    ) -> None:
        """Latents lie on `device`."""
        super().__init__(deliver, wake, exchange)
        self._sender, self._receiver, self._pieces = sender, receiver, spec.chunk_latents
        self._messages: queue.SimpleQueue[tuple[StageMessage, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._device, self._transfer_stream = device, TransferStream(device)
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._send, "latents"), (self._receive, "pictures"))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, stream: int, chunk: int, latents: Tensor) -> None:
        row = MicroStep(stream, chunk, 0, self._pieces, 0)
        # Behind what makes them, and not behind the ring's next forwards.
        self._messages.put(
            (StageMessage(MessageKind.ROWS, (row,), None, (latents[None],)), self._transfer_stream.mark())
        )

    def _tell(self, kind: MessageKind, update: SessionUpdate) -> None:
        self._messages.put((StageMessage(kind, (), update), None))

    def close(self, abandon: bool = False) -> None:
        self._tell(MessageKind.STOP, SessionUpdate(0))
        for thread in self._threads:
            thread.join(0.0 if abandon else LEAVE_S)

    def _send(self) -> None:
        bind(self._device)
        self._transfer_stream.enter()
        try:
            while True:
                message, made = self._messages.get()
                for tensor in message.tensors:
                    self._transfer_stream.follow(made, tensor)
                self._sender.send(message)
                if message.kind is MessageKind.STOP:
                    break
            self._sender.close()
            self._sender.flush(LEAVE_S)
        except LinkClosed as error:
            self._fail(error)

    def _receive(self) -> None:
        try:
            while (message := self._receiver.receive(None)) is None or message.kind is not MessageKind.STOP:
                if message is not None and message.update is not None:
                    self._take(message.kind, message.update)
                elif message is not None:
                    row, pictures = message.rows[0], message.tensors[0].numpy().copy()
                    self._deliver(Piece(row.session, row.chunk, pictures, row.step == self._pieces - 1))
            self._receiver.close(LEAVE_S)
        except LinkClosed as error:
            self._fail(error)

    def _take(self, kind: MessageKind, about: SessionUpdate) -> None:
        """Handle an answer of the other rank about a stream: swapped in, or why a chunk, whose number is in
        `about.epoch`, could not be decoded."""
        if kind is MessageKind.PUT_BACK:
            self._answered(about.session, about.outcome)
        else:
            why = self._exchange.pop_text(_fault_key(about.session)) or f"decoding chunk {about.epoch} failed"
            self._deliver(Piece.failed(about.session, about.epoch, why))


class DecodeWorker(RankLoop):
    """The other end: decodes for the head until it gets the end message."""

    def __init__(
        self,
        decoder: PictureDecoder,
        receiver: Receiver,
        sender: Sender,
        device: torch.device = CPU,
        at_once: int = 1,
        timer: DeviceTimer | None = None,
        exchange: LocalExchange | None = None,
        swaps: SwapStore | None = None,
    ) -> None:
        """`device` is the decoder's, `timer` that device's; `at_once` latent frames are decoded by one call; `exchange`
        leads to the head, None: within this process; `swaps` is where what is swapped out lies."""
        super().__init__(receiver, sender, timer or DeviceTimer.on(device))
        self._exchange = exchange or LocalExchange()
        self._memories = DecoderMemories(decoder, device, at_once, self.timer, self._exchange, swaps)

    def run(self) -> None:
        self._memories.transfer_stream.enter()  # also what the receiver uploads
        copying = False  # for the head, a piece with each turn
        while (message := self.receiver.receive(0.0 if copying else None)) is None or (
            message.kind is not MessageKind.STOP
        ):
            if message is not None and message.update is not None:
                self._apply(message.kind, message.update)
            elif message is not None:
                self._decode(message)
            copying = self._memories.copy_next()
        self.sender.send(message)
        self.close_links()

    def _apply(self, kind: MessageKind, update: SessionUpdate) -> None:
        outcome = self._memories.apply(kind, update)
        if kind is MessageKind.PUT_BACK and not update.saved:
            self.sender.send(StageMessage(kind, (), replace(update, outcome=outcome)))

    def _decode(self, message: StageMessage) -> None:
        (row,) = message.rows
        self.now = message
        try:
            for index, pictures in enumerate(self._memories.decode(row.session, row.chunk, message.tensors[0][0])):
                rows = (MicroStep(row.session, row.chunk, index, row.steps, 0),) * len(pictures)
                self.sender.send(StageMessage(MessageKind.ROWS, rows, None, (pictures,)))
        except ROW_ERRORS as error:
            check_own(error)
            self._exchange.post_text(_fault_key(row.session), describe(error, f"decoding chunk {row.chunk}"))
            self.sender.send(StageMessage(MessageKind.CLOSE, (), SessionUpdate(row.session, row.chunk)))
        self.done += 1
        self.now, self.last = None, message

    def where(self) -> str:
        at = self.now or self.last
        return f"decoding chunk {at.rows[0].chunk}" if at is not None else "before its first chunk"
