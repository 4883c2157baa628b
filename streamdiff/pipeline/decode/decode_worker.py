"""Decodes latents to pictures, on a thread of the head or on another rank of the ring.

Pictures come out latent frame by latent frame. A CPU also decodes one at a time, so that the first picture is early; a
GPU, where that gains nothing, decodes a whole chunk in one call. Chunks are decoded one at a time, in the order in
which they were finished. A *stream* here is a session from its start or reset to the next. `Decoding` is what the
pipeline asks for, whichever rank decodes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
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
from streamdiff.pipeline.decode import decoder_memories
from streamdiff.pipeline.decode.decoder_memories import DecoderMemories, TransferStream
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.heartbeat import LEAVE_S, RankLoop
from streamdiff.pipeline.distributed.link import Receiver, Sender
from streamdiff.pipeline.distributed.message import MessageKind, MessageLayout, Outcome, SessionUpdate, StageMessage
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


CPU = torch.device("cpu")
DECODE_THREADS = 1
"""CPU threads of decoding beside a stage's work."""


def latents_layout(spec: ModelSpec) -> MessageLayout:
    """From the head to a decoding rank: one chunk's latents."""
    return MessageLayout(1, ((spec.chunk_shape, torch.float32),), None)


def pictures_layout(spec: ModelSpec, kind: PictureKind = "rgb") -> MessageLayout:
    """Back to the head: the pictures of one latent frame, a row each."""
    return MessageLayout(spec.frames_per_latent, ((shape_of(kind, spec.height, spec.width), torch.uint8),), None)


def _fault_key(stream: int) -> str:
    """Exchange key of the reason, posted by the worker, why a chunk of a stream could not be decoded."""
    return f"decoding of stream {stream}"


class Decoding:
    """Decodes latents to pictures, which are delivered from a thread of its own. What is asked for goes as messages to
    a `DecodeWorker`, on a thread `here` or a rank `elsewhere`."""

    def __init__(self, deliver: Deliver, wake: Callable[[], None], exchange: LocalExchange, stream: TransferStream):
        """`wake` is called, from a thread, when something has gone wrong, or a stream has come back; `exchange` leads
        to the worker; on `stream` latents are handed over."""
        self._deliver, self._wake, self._exchange, self._transfer_stream = deliver, wake, exchange, stream
        self._messages: queue.SimpleQueue[tuple[StageMessage, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._coming: dict[int, Outcome] = {}  # streams that were asked to come back; NOT_YET: no answer yet
        self._error: Exception | None = None
        self._threads: list[threading.Thread] = []
        self._is_here = False

    @classmethod
    def here(
        cls,
        decoder: PictureDecoder,
        deliver: Deliver,
        wake: Callable[[], None],
        device: torch.device = CPU,
        at_once: int = 1,
        timer: DeviceTimer | None = None,
        swaps: SwapStore | None = None,
    ) -> Decoding:
        """On a thread of this process, with one CPU thread, on a GPU with a stream of its own; the rest as of
        `DecodeWorker`."""
        exchange, stream = LocalExchange(), TransferStream(device)
        decoding = cls(deliver, wake, exchange, stream)
        decoding._is_here = True
        end = _WorkersEnd(decoding)
        worker = DecodeWorker(decoder, end, end, device, at_once, timer, exchange, swaps, stream)

        def run() -> None:
            torch.set_num_threads(DECODE_THREADS)
            bind(device)
            worker.run()

        decoding._start("decode", run)
        return decoding

    @classmethod
    def elsewhere(
        cls,
        sender: Sender,
        receiver: Receiver,
        deliver: Deliver,
        wake: Callable[[], None],
        exchange: LocalExchange,
        device: torch.device = CPU,
    ) -> Decoding:
        """On the rank at the other end of the links; latents lie on `device`."""
        decoding = cls(deliver, wake, exchange, TransferStream(device))

        def send() -> None:
            bind(device)
            decoding._transfer_stream.enter()
            message = None
            while message is None or message.kind is not MessageKind.STOP:
                if (message := decoding.next_message(None)) is not None:
                    sender.send(message)
            sender.close()
            sender.flush(LEAVE_S)

        def receive() -> None:
            while (message := receiver.receive(None)) is None or message.kind is not MessageKind.STOP:
                if message is not None:
                    decoding.take_answer(message)
            receiver.close(LEAVE_S)

        decoding._start("latents", send)
        decoding._start("pictures", receive)
        return decoding

    def _start(self, name: str, run: Callable[[], None]) -> None:
        """Run a loop on a thread of its own; what it raises, `check` does. Mutates: self."""

        def guarded() -> None:
            try:
                run()
            except Exception as error:  # noqa: BLE001  # `check` raises it
                self._error = error
                self._wake()

        self._threads.append(threading.Thread(target=guarded, name=name, daemon=True))
        self._threads[-1].start()

    # ---- what the pipeline asks for ------------------------------------------------------------------------------

    def submit(self, stream: int, chunk: int, latents: Tensor) -> None:
        """Decode latents `[C, F, h, w]`, the next chunk of a stream. Does not wait."""
        row = MicroStep(stream, chunk, 0, latents.shape[1], 0)
        # Behind what makes them, and not behind the ring's next forwards.
        self._messages.put(
            (StageMessage(MessageKind.ROWS, (row,), None, (latents[None],)), self._transfer_stream.mark())
        )

    def forget(self, stream: int) -> None:
        """The stream has ended; what was submitted may still come out."""
        self._coming.pop(stream, None)
        self._tell(MessageKind.CLOSE, SessionUpdate(stream))

    def save(self, stream: int) -> SavedMemory:
        """What the decoder remembers of a stream after all that was submitted. Does not wait."""
        self._tell(MessageKind.COPY_OUT, SessionUpdate(stream, saved=True))
        return partial(self._exchange.take, decoder_memories.stream_key(stream))

    def load(self, stream: int, state: State) -> None:
        """Let a stream that has not begun continue from what was saved, which is one of `outlines`."""
        self._exchange.put(decoder_memories.stream_key(stream), state)
        self._tell(MessageKind.PUT_BACK, SessionUpdate(stream, saved=True))

    def outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        """What the decoder may remember of a stream of chunks `[C, F, h, w]`, see `memory_outlines`; waits for it.
        Raises ConfigError where it cannot be had."""
        self._exchange.put(decoder_memories.SHAPE_KEY, ({}, list(chunk_shape)))
        outlines = self.save(decoder_memories.NO_STREAM)()[1]
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
        outcome = self._coming.get(stream, Outcome.NOT_YET)  # an answer that it is not yet takes it away
        if outcome is not Outcome.NOT_YET:
            del self._coming[stream]
        return outcome

    def check(self) -> None:
        """Raises what has gone wrong on the way."""
        if self._error is not None:
            raise self._error

    def close(self, abandon: bool = False) -> None:
        """End the threads; what is not decoded is dropped. With `abandon` they are not waited for: the device that they
        wait for is stuck."""
        if self._is_here:
            self._exchange.close()
        with suppress(queue.Empty):
            while True:
                self._messages.get_nowait()
        self._tell(MessageKind.STOP, SessionUpdate(0))
        for thread in self._threads:
            thread.join(0.0 if abandon else None if self._is_here else LEAVE_S)

    def _tell(self, kind: MessageKind, update: SessionUpdate) -> None:
        self._messages.put((StageMessage(kind, (), update), None))

    # ---- its threads ---------------------------------------------------------------------------------------------

    def next_message(self, wait_s: float | None) -> StageMessage | None:
        """The next message for the worker, None when none came within `wait_s` (None: wait for ever)."""
        try:
            message, made = self._messages.get(timeout=wait_s) if wait_s != 0 else self._messages.get_nowait()
        except queue.Empty:
            return None
        for tensor in message.tensors:
            self._transfer_stream.follow(made, tensor)
        return message

    def take_answer(self, message: StageMessage) -> None:
        """What the worker says: pictures of a latent frame, that a stream is swapped in, or why a chunk, whose number
        is in `epoch`, could not be decoded. Mutates: self."""
        about = message.update
        if about is None:
            row, pictures = message.rows[0], message.tensors[0].numpy().copy()
            self._deliver(Piece(row.session, row.chunk, pictures, row.step == row.steps - 1))
        elif message.kind is MessageKind.CLOSE:
            why = self._exchange.pop_text(_fault_key(about.session)) or f"decoding chunk {about.epoch} failed"
            self._deliver(Piece.failed(about.session, about.epoch, why))
        elif message.kind is MessageKind.PUT_BACK and about.session in self._coming:
            self._coming[about.session] = about.outcome
            if about.outcome is Outcome.NOT_YET:  # `swap_in` asks again
                self._coming.pop(about.session, None)
            self._wake()


class _WorkersEnd(Sender):
    """Both ends of the links of a worker in this process."""

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        return self._decoding.next_message(wait_s)

    def send(self, message: StageMessage) -> None:
        self._decoding.take_answer(message)

    def notify(self, call: Callable[[], None]) -> None:
        """Does nothing: the worker waits in `receive`."""


class DecodeWorker(RankLoop):
    """Decodes for the head until it gets the end message."""

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
        stream: TransferStream | None = None,
    ) -> None:
        """`device` is the decoder's, `timer` that device's; `at_once` latent frames are decoded by one call; `exchange`
        leads to the head, None: within this process; `swaps` is where what is swapped out lies, and on `stream` it
        decodes; None: one that is made here."""
        super().__init__(receiver, sender, timer or DeviceTimer.on(device))
        self._exchange = exchange or LocalExchange()
        stream = stream or TransferStream(device)
        self._memories = DecoderMemories(decoder, stream, at_once, self.timer, self._exchange, swaps)

    def run(self) -> None:
        self._memories.transfer_stream.enter()  # also what the receiver uploads
        copying = False  # for the head, a piece with each turn
        while (message := self.receiver.receive(0.0 if copying else None)) is None or (
            message.kind is not MessageKind.STOP
        ):
            if message is not None and (update := message.update) is not None:
                outcome = self._memories.apply(message.kind, update)
                if message.kind is MessageKind.PUT_BACK and not update.saved:
                    self.sender.send(StageMessage(message.kind, (), replace(update, outcome=outcome)))
            elif message is not None:
                self._decode(message)
            copying = self._memories.copy_next()
        self.sender.send(message)
        self.close_links()

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
