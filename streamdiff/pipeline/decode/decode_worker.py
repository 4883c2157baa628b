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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamdiff.core import MicroStep
from streamdiff.device import bind
from streamdiff.errors import NOT_FINITE
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, memory_outlines
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.decode.picture_transfer import TransferStream, decode_chunk
from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.heartbeat import LEAVE_S, RankLoop
from streamdiff.pipeline.distributed.link import Receiver, Sender
from streamdiff.pipeline.distributed.message import (
    MessageKind,
    MessageLayout,
    Outcome,
    SessionUpdate,
    StageMessage,
)
from streamdiff.pipeline.distributed.state_exchange import LocalExchange, State, readiness, send_state
from streamdiff.pipeline.row_faults import ROW_ERRORS, check_own, describe
from streamdiff.session_state import walk
from streamdiff.session_state.swap_store import HostCopy, Lost, SwapStore
from streamdiff.video.pixel_format import PictureKind, shape_of

NO_STREAM = -1
"""A SAVE of it asks for `outlines`."""
_PIECE = 1 << 24
"""Bytes of what is remembered that are copied between two decodes."""
SHAPE_KEY = "decoder: chunk shape"
"""Exchange key of a chunk's shape, which the head puts there for the decoding rank."""


def stream_key(stream: int) -> str:
    """Exchange key of a decoder's state of one stream."""
    return f"decoder: stream {stream}"


def _swapped(stream: int) -> str:
    """Name of a stream's decoder state in a swap store."""
    return f"decoder {stream}"


def _fault_key(stream: int) -> str:
    """Exchange key of the reason, posted by the worker, why a chunk of a stream could not be decoded."""
    return f"decoding of stream {stream}"


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
CPU = torch.device("cpu")
DECODE_THREADS = 1
"""CPU threads of decoding beside a stage's work."""


def latents_layout(spec: ModelSpec) -> MessageLayout:
    """From the head to a decoding rank: one chunk's latents."""
    return MessageLayout(1, ((spec.chunk_shape, torch.float32),), None)


def pictures_layout(spec: ModelSpec, kind: PictureKind = "rgb") -> MessageLayout:
    """Back to the head: the pictures of one latent frame, a row each."""
    return MessageLayout(spec.frames_per_latent, ((shape_of(kind, spec.height, spec.width), torch.uint8),), None)


class Decoding:
    """Decodes latents to pictures, which are delivered from a thread of its own. What is asked for goes as messages to
    a `DecodeWorker`, on a thread `here` or a rank `elsewhere`."""

    def __init__(self, deliver: Deliver, wake: Callable[[], None], exchange: LocalExchange, stream: TransferStream):
        """`wake` is called, from a thread, when something has gone wrong, or a stream has come back; `exchange` leads
        to the worker; on `stream` latents are handed over."""
        self._deliver, self._wake, self._exchange, self._transfer_stream = deliver, wake, exchange, stream
        self._messages: queue.SimpleQueue[tuple[StageMessage, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._coming: dict[int, Outcome | None] = {}  # streams that were asked to come back; None: no answer yet
        self._error: Exception | None = None
        self._threads: list[threading.Thread] = []
        self._leave_s: float | None = None

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
        decoding._leave_s = LEAVE_S

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
        self._ask(MessageKind.CLOSE, stream)

    def save(self, stream: int) -> SavedMemory:
        """What the decoder remembers of a stream after all that was submitted. Does not wait."""
        self._ask(MessageKind.SAVE, stream)
        key = stream_key(stream)
        return lambda: self._exchange.take(key) if self._exchange.holds(key) else None

    def load(self, stream: int, state: State) -> None:
        """Let a stream that has not begun continue from what was saved, which has the form of `outlines`."""
        self._exchange.put(stream_key(stream), state)
        self._ask(MessageKind.LOAD, stream)

    def outlines(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        """What the decoder may remember of a stream of chunks `[C, F, h, w]`, see `memory_outlines`; waits for it."""
        self._exchange.put(SHAPE_KEY, ({}, list(chunk_shape)))
        self._ask(MessageKind.SAVE, NO_STREAM)
        outlines: list[Any] = self._exchange.take(stream_key(NO_STREAM))[1]
        return outlines

    def swap_out(self, stream: int) -> None:
        """Keep what the decoder remembers of a stream elsewhere, after all that was submitted, until `swap_in`."""
        self._ask(MessageKind.SWAP_OUT, stream)

    def swap_in(self, stream: int) -> Outcome:
        """Have it remembered again, before what is submitted later. NOT_YET: call again; never waits."""
        if stream not in self._coming:
            self._coming[stream] = None
            self._ask(MessageKind.SWAP_IN, stream)
        if self._coming[stream] is None:
            return Outcome.NOT_YET
        return self._coming.pop(stream) or Outcome.DONE

    def check(self) -> None:
        """Raises what has gone wrong on the way."""
        if self._error is not None:
            raise self._error

    def close(self, abandon: bool = False) -> None:
        """End the threads; what is not decoded is dropped. With `abandon` they are not waited for: the device that they
        wait for is stuck."""
        with suppress(queue.Empty):
            while True:
                self._messages.get_nowait()
        self._ask(MessageKind.STOP, 0)
        for thread in self._threads:
            thread.join(0.0 if abandon else self._leave_s)

    def _ask(self, kind: MessageKind, stream: int) -> None:
        self._messages.put((StageMessage(kind, (), SessionUpdate(stream)), None))

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
        elif message.kind is MessageKind.SWAP_IN and about.session in self._coming:
            self._coming[about.session] = about.outcome
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
    """Decodes for the head until it gets the end message: the decoder, and what it remembers of each stream, kept,
    saved, swapped out and in."""

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
        self._decoder, self._at_once, self._swaps = decoder, at_once, swaps or SwapStore(device)
        self._exchange, self._transfer_stream = exchange or LocalExchange(), stream or TransferStream(device)
        self._timed = self.timer.stream()
        self.memories: dict[int, Any] = {}
        """What the decoder remembers, by stream."""
        self._copies: dict[int, HostCopy] = {}  # of streams that are being saved
        self._saving: deque[int] = deque()  # streams
        self._outlines: list[Any] = []
        self._to_head = ThreadPoolExecutor(1, "to head")

    def run(self) -> None:
        self._transfer_stream.enter()  # also what the receiver uploads
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
        if self._saving and (state := self._save_on(self._saving[0])) is not None:
            key = stream_key(self._saving.popleft())
            self._to_head.submit(send_state, self._exchange, key, lambda: state)
        return message

    def _update(self, kind: MessageKind, stream: int) -> None:
        """Apply an update of the head to what is remembered of a stream. Mutates: self."""
        match kind:
            case MessageKind.CLOSE:
                self.memories.pop(stream, None)
                self._swaps.drop(_swapped(stream))
            case MessageKind.SAVE if stream == NO_STREAM:
                shape = tuple(self._exchange.take(SHAPE_KEY)[1])
                self._exchange.put(stream_key(stream), ({}, self._outlined(shape)))
            case MessageKind.SAVE:  # what is decoded from here on is not in it
                if _swapped(stream) not in self._swaps:
                    self._begin_save(stream)
                self._saving.append(stream)
            case MessageKind.LOAD:
                state = self._exchange.take(stream_key(stream))
                self.memories[stream] = walk.load(self._decoder.new_memory(), *state, self._decoder.network.device)
            case MessageKind.SWAP_OUT if stream in self.memories:
                self._swaps.put(_swapped(stream), self.memories.pop(stream))
            case MessageKind.SWAP_IN:
                outcome = self._swap_in(stream)
                self.sender.send(StageMessage(MessageKind.SWAP_IN, (), SessionUpdate(stream, outcome=outcome)))

    def _swap_in(self, stream: int) -> Outcome:
        """Restore what is remembered of a stream, or drop it if lost. Mutates: self."""
        name = _swapped(stream)
        if name not in self._swaps:  # it had none
            return Outcome.DONE
        outcome = readiness(self._swaps, name)
        if outcome is Outcome.LOST:
            self._swaps.drop(name)
        elif outcome is Outcome.DONE:
            self.memories[stream] = self._swaps.take(name, self._decoder.new_memory())
            self._swaps.follow()
        return outcome

    def _begin_save(self, stream: int) -> None:
        memory = self.memories[stream] if stream in self.memories else self._decoder.new_memory()
        self._copies[stream] = HostCopy(self._swaps.copies, memory)

    def _save_on(self, stream: int) -> State | None:
        """What was remembered of a stream when the save began, copied a piece with each call: None before the last.
        Where it is lost, why, as `broken`. Mutates: self."""
        if stream not in self._copies and _swapped(stream) in self._swaps:
            try:
                return self._swaps.read(_swapped(stream))
            except Lost as error:
                return {}, {"broken": f"what the decoder remembered is lost: {error}"}
        if stream not in self._copies:  # another save of it has just ended
            self._begin_save(stream)
        copy = self._copies[stream]
        done = copy.go_on(_PIECE)
        state = copy.result()  # the next piece is not to be in the way of a decode on its way to the device
        if not done:
            return None
        del self._copies[stream]
        return state

    def _outlined(self, chunk_shape: tuple[int, ...]) -> list[Any]:
        """See `memory_outlines`. Decodes some chunks of nothing, once."""
        if not self._outlines:
            latents = torch.zeros((1, *chunk_shape), device=self._decoder.network.device)
            decode = partial(self._decoder.decode, latents)
            self._outlines = memory_outlines(self._decoder.new_memory, decode, chunk_shape[1])
        return self._outlines

    def _decode(self, message: StageMessage) -> None:
        """Decode a chunk, and answer with its pictures, or that it failed. Mutates: self."""
        (row,) = message.rows
        self.now = message
        try:
            for index, pictures in enumerate(self._pictures(row.session, row.chunk, message.tensors[0][0])):
                rows = (MicroStep(row.session, row.chunk, index, row.steps, 0),) * len(pictures)
                self.sender.send(StageMessage(MessageKind.ROWS, rows, None, (pictures,)))
        except ROW_ERRORS as error:
            check_own(error)
            self._exchange.post_text(_fault_key(row.session), describe(error, f"decoding chunk {row.chunk}"))
            self.sender.send(StageMessage(MessageKind.CLOSE, (), SessionUpdate(row.session, row.chunk)))
        self.done += 1
        self.now, self.last = None, message

    def _pictures(self, stream: int, chunk: int, latents: Tensor) -> Iterator[Tensor]:
        """Pictures of each latent frame, see `decode_chunk`. Mutates: self."""
        if stream not in self.memories:
            self.memories[stream] = self._decoder.new_memory()
        if stream in self._copies:
            self._copies[stream].go_on()
            self._swaps.follow()
        timed, finite = partial(self._timed.work, f"decoding chunk {chunk}"), self._transfer_stream.finite(latents)
        for pictures in decode_chunk(
            self._decoder, latents, self.memories[stream], self._transfer_stream, self._at_once, timed
        ):  # fmt: skip
            if not finite():
                raise ArithmeticError(f"its latents are {NOT_FINITE}")
            yield pictures

    def where(self) -> str:
        at = self.now or self.last
        return f"decoding chunk {at.rows[0].chunk}" if at is not None else "before its first chunk"
