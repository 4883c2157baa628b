"""Decodes latents to pictures, on a thread of the head or on another rank of the ring.

Pictures come out latent frame by latent frame. A CPU also decodes one at a time, so that the first picture is early; a
GPU, where that gains nothing, decodes a whole chunk in one call. Chunks are decoded one at a time, in the order in
which they were finished. A *stream* here is a session from its start or reset to the next. `Decoding` is what the
pipeline asks for, whichever rank decodes.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamdiff.core import MicroStep
from streamdiff.device import bind
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.decode.decoder_memories import DecoderMemories, TransferStream
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
from streamdiff.pipeline.distributed.state_exchange import LocalExchange, State, send_state
from streamdiff.pipeline.row_faults import ROW_ERRORS, check_own, describe
from streamdiff.session_state.swap_store import SwapStore
from streamdiff.video.pixel_format import PictureKind, shape_of

NO_STREAM = -1
"""A SAVE of it asks for `outlines`."""


SHAPE_KEY = "decoder: chunk shape"
"""Exchange key of a chunk's shape, which the head puts there for the decoding rank."""


def stream_key(stream: int) -> str:
    """Exchange key of a decoder's state of one stream."""
    return f"decoder: stream {stream}"


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
SavedMemory = Callable[[], State | None]
"""Gives what a decoder remembers of a stream once, when it is there; None: not yet. From any thread."""


class Decoding(Protocol):
    """Decodes latents to pictures, which are delivered from a thread of its own."""

    _error: BaseException | None

    def submit(self, stream: int, chunk: int, latents: Tensor) -> None:
        """Decode latents `[C, F, h, w]`, the next chunk of a stream. Does not wait."""

    def forget(self, stream: int) -> None:
        """The stream has ended; what was submitted may still come out."""

    def save(self, stream: int) -> SavedMemory:
        """What the decoder remembers of a stream after all that was submitted. Does not wait."""

    def load(self, stream: int, state: State) -> None:
        """Let a stream that has not begun continue from what was saved. Raises ConfigError where it does not fit."""

    def outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        """What the decoder may remember of a stream of chunks `[C, F, h, w]`, see `memory_outlines`; waits for it."""

    def swap_out(self, stream: int) -> None:
        """Keep what the decoder remembers of a stream elsewhere, after all that was submitted, until `swap_in`."""

    def swap_in(self, stream: int) -> Outcome:
        """Have it remembered again, before what is submitted later. NOT_YET: call again; never waits."""

    def check(self) -> None:
        """Raises what has gone wrong on the way."""
        if self._error is not None:
            raise self._error

    def close(self, abandon: bool = False) -> None:
        """End the threads; what is not decoded is dropped. With `abandon` they are not waited for: the device that they
        wait for is stuck."""


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
        """`wake` is called, from that thread, when something has gone wrong; `device` is the decoder's, `timer` that
        device's; `at_once` latent frames are decoded by one call; `swaps` is where what is swapped out lies."""
        self._memories = DecoderMemories(decoder, device, at_once, timer or DeviceTimer.on(device), swaps)
        self._transfer_stream = self._memories.transfer_stream
        self._coming: dict[int, Future[Outcome]] = {}
        self._deliver, self._wake = deliver, wake
        self._error: BaseException | None = None
        self._pool = ThreadPoolExecutor(1, "decode", initializer=self._enter)

    def submit(self, stream: int, chunk: int, latents: Tensor) -> None:
        job = self._pool.submit(self._decode, stream, chunk, latents, self._transfer_stream.mark())
        job.add_done_callback(self._ended)

    def forget(self, stream: int) -> None:
        self._coming.pop(stream, None)
        self._pool.submit(self._memories.forget, stream)

    def save(self, stream: int) -> SavedMemory:
        saved: Future[State] = Future()
        self._pool.submit(self._save_on, stream, saved)
        return lambda: saved.result() if saved.done() else None

    def load(self, stream: int, state: State) -> None:
        self._pool.submit(self._memories.load, stream, state).result()

    def outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        return self._pool.submit(self._memories.outlines, chunk_shape).result()

    def swap_out(self, stream: int) -> None:
        self._pool.submit(self._memories.swap_out, stream)

    def swap_in(self, stream: int) -> Outcome:
        if stream not in self._coming:
            self._coming[stream] = self._pool.submit(self._memories.swap_in, stream)
        if not self._coming[stream].done():
            return Outcome.NOT_YET
        return self._coming.pop(stream).result()

    def close(self, abandon: bool = False) -> None:
        self._pool.shutdown(wait=not abandon, cancel_futures=True)

    def _save_on(self, stream: int, saved: Future[State]) -> None:
        """Copy a piece; the next one comes behind what was submitted meanwhile. Mutates: saved."""
        try:
            state = self._memories.save_on(stream)
        except Exception as error:
            saved.set_exception(error)
            raise
        if state is None:
            self._pool.submit(self._save_on, stream, saved)
        else:
            saved.set_result(state)

    def _ended(self, job: Future[None]) -> None:
        if not job.cancelled() and (error := job.exception()) is not None:
            self._error = error
            self._wake()

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
        """`wake` is called, from a thread, when the other rank is gone; `exchange` is between the two. Latents lie on
        `device`."""
        self._sender, self._receiver, self._pieces = sender, receiver, spec.chunk_latents
        self._exchange = exchange
        self._coming: dict[int, Outcome | None] = {}  # streams that were asked to come back; None: no answer yet
        self._deliver, self._wake = deliver, wake
        self._messages: queue.SimpleQueue[tuple[StageMessage, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._device, self._transfer_stream = device, TransferStream(device)
        self._error: BaseException | None = None
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

    def _queue(self, message: StageMessage) -> None:
        self._messages.put((message, None))

    def forget(self, stream: int) -> None:
        self._coming.pop(stream, None)
        self._queue(StageMessage(MessageKind.CLOSE, (), SessionUpdate(stream)))

    def save(self, stream: int) -> SavedMemory:
        self._queue(StageMessage(MessageKind.SAVE, (), SessionUpdate(stream)))
        key = stream_key(stream)
        return lambda: self._exchange.take(key) if self._exchange.holds(key) else None

    def load(self, stream: int, state: State) -> None:
        self._exchange.put(stream_key(stream), state)
        self._queue(StageMessage(MessageKind.LOAD, (), SessionUpdate(stream)))

    def outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        self._exchange.put(SHAPE_KEY, ({}, list(chunk_shape)))
        self._queue(StageMessage(MessageKind.SAVE, (), SessionUpdate(NO_STREAM)))
        outlines: list[Any] = self._exchange.take(stream_key(NO_STREAM))[1]
        return outlines

    def swap_out(self, stream: int) -> None:
        self._queue(StageMessage(MessageKind.SWAP_OUT, (), SessionUpdate(stream)))

    def swap_in(self, stream: int) -> Outcome:
        if stream not in self._coming:
            self._coming[stream] = None
            self._queue(StageMessage(MessageKind.SWAP_IN, (), SessionUpdate(stream)))
        if self._coming[stream] is None:
            return Outcome.NOT_YET
        return self._coming.pop(stream) or Outcome.DONE

    def close(self, abandon: bool = False) -> None:
        self._queue(StageMessage(MessageKind.STOP, (), SessionUpdate(0)))
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
        if kind is not MessageKind.SWAP_IN:
            why = self._exchange.pop_text(_fault_key(about.session)) or f"decoding chunk {about.epoch} failed"
            self._deliver(Piece.failed(about.session, about.epoch, why))
        elif about.session in self._coming:
            self._coming[about.session] = about.outcome
            self._wake()

    def _fail(self, error: LinkClosed) -> None:
        self._error = error
        self._wake()


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
        self._memories = DecoderMemories(decoder, device, at_once, self.timer, swaps)
        self._saving: deque[int] = deque()  # streams
        self._to_head = ThreadPoolExecutor(1, "to head")

    def run(self) -> None:
        self._memories.transfer_stream.enter()  # also what the receiver uploads
        while (message := self._next()) is None or message.kind is not MessageKind.STOP:
            if message is not None and message.update is not None:
                self._update(message.kind, message.update.session)
            elif message is not None:
                self._decode(message)
        self.sender.send(message)
        self.close_links()

    def _next(self) -> StageMessage | None:
        """The next message, None if there is none; while a stream is being saved a piece is copied. Mutates: self."""
        message = self.receiver.receive(0.0 if self._saving else None)
        if self._saving and (state := self._memories.save_on(self._saving[0])) is not None:
            key = stream_key(self._saving.popleft())
            self._to_head.submit(send_state, self._exchange, key, lambda: state)
        return message

    def _update(self, kind: MessageKind, stream: int) -> None:
        """Apply an update of the head to a stream's decoder state. Mutates: self."""
        match kind:
            case MessageKind.CLOSE:
                self._memories.forget(stream)
            case MessageKind.SAVE if stream == NO_STREAM:
                shape = tuple(self._exchange.take(SHAPE_KEY)[1])
                self._exchange.put(stream_key(stream), ({}, self._memories.outlines(shape)))
            case MessageKind.SAVE:  # what is decoded from here on is not in it
                self._memories.begin_save(stream)
                self._saving.append(stream)
            case MessageKind.LOAD:
                self._memories.load(stream, self._exchange.take(stream_key(stream)))
            case MessageKind.SWAP_OUT:
                self._memories.swap_out(stream)
            case MessageKind.SWAP_IN:
                outcome = self._memories.swap_in(stream)
                self.sender.send(StageMessage(MessageKind.SWAP_IN, (), SessionUpdate(stream, outcome=outcome)))

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
