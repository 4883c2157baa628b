"""The streaming pipeline that the engine drives: stages for the transformer, a thread or rank for decoding."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from streamdiff import clock
from streamdiff.errors import EngineFailure, RequestError
from streamdiff.models.interfaces import TextEncoder
from streamdiff.models.model import Model
from streamdiff.models.spec import choose_steps
from streamdiff.pipeline.decode.decode_worker import Decoding, LocalDecoding, Piece
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.output import Frames, ModelInfo
from streamdiff.pipeline.planner.kv_budget import KVCacheBudget
from streamdiff.pipeline.runner.sampler import Finished
from streamdiff.pipeline.scheduler.kv_context import minimum_lead
from streamdiff.pipeline.scheduler.step import MicroStep
from streamdiff.pipeline.throughput import ChunkCostMeter
from streamdiff.pipeline.worker_group import WorkerGroup


@dataclass
class _Chunk:
    """A chunk that is in the ring or decoding."""

    admitted_s: float
    epoch: int
    work: float
    """As so many chunks in the default number of steps."""


@dataclass
class _Stream:
    """One run of a session, from open or reset to the next reset. `number` is unique, so late pieces of an earlier run
    are dropped."""

    number: int
    session: int
    chunks: dict[int, _Chunk] = field(default_factory=dict)
    ahead_frames: int = 0  # admitted and not handed out yet


class StepHook(Protocol):
    """Watches the steps of a pipeline whose `hook` it is."""

    def around_step(self) -> AbstractContextManager[object]:
        """Entered for each step."""

    def after_step(self, frames: Sequence[Frames]) -> None:
        """What a step hands out."""

    def close(self) -> None:
        """The pipeline is about to close."""


class StreamingPipeline:
    """Sessions by number; call `step` again and again from one thread."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        steps: int | None = None,
        kv_context: str = "clean",
        workers: WorkerGroup | None = None,
        budget: KVCacheBudget | None = None,
        ring: RingExecutor | None = None,
        at_once: int = 1,
        hang_s: float = 60.0,
    ) -> None:
        """`steps` and `kv_context` are those of a session that does not name its own (None: what the model was made
        for). `workers` are the other ranks of the ring; without them all blocks of `model` run here, on `ring` if that
        was made already. `budget` is the memory for caches; None: without limit. `at_once` latent frames are decoded by
        one call. With one stage, `hang_s` is how long the device may be at one work; in a ring `workers` knows.

        Raises:
            ConfigError: steps that the model does not have.
        """
        spec = model.spec
        self.model, self.text = model, model.text
        self.hook: StepHook | None = None
        self.info = ModelInfo(
            spec.name, str(device), spec.width, spec.height, spec.native_fps, spec.chunk_frames,
            choose_steps(steps, spec.steps, spec.name), kv_context, spec.steps, spec.switch,
        )  # fmt: skip
        self._workers, self._budget, self._hang_s = workers, budget, hang_s
        self._ring = workers.ring if workers else ring or RingExecutor(model, device)
        self._streams: dict[int, _Stream] = {}  # by session
        self._numbers = count()
        self._ready: queue.SimpleQueue[tuple[Piece, float] | None] = queue.SimpleQueue()
        self._pending = 0  # chunks that are decoding
        self._works: list[float] = []  # of the chunks that this turn finished
        self._decoding = self._decode_where(model, workers, device, at_once)
        self._ring.notify(self._wake)
        if workers is not None:
            workers.start(self._wake)
        self._meter = ChunkCostMeter(clock.monotonic_s(), self.busy_s())

    text: TextEncoder

    @property
    def ring(self) -> RingExecutor:
        """What runs the transformer; for who measures."""
        return self._ring

    def minimum_lead(self, *, steps: int, kv_context: str) -> int:
        """Frames that a session's lead must allow at least."""
        stages = self._ring.stage.stages
        chunk_frames, first = self.info.chunk_frames, self.model.spec.first_chunks
        return minimum_lead(kv_context, steps=steps, stages=stages, chunk_frames=chunk_frames, first_chunks=first)

    def open(self, session: int, conditioning: Tensor, *, seed: int, epoch: int, steps: int, kv_context: str) -> None:
        """Start a stream; it makes nothing before it has room.

        Raises:
            ValueError: a bad KV context, or the session is open.
            RequestError: bad steps, or its caches do not fit.
        """
        if steps not in self.model.spec.steps:
            raise RequestError(
                "steps", f"steps is {steps}; model {self.info.name} has {', '.join(map(str, self.model.spec.steps))}"
            )
        need = self._budget.need(steps=steps, kv_context=kv_context) if self._budget is not None else []
        self._ring.open(session, conditioning, seed=seed, epoch=epoch, steps=steps, kv_context=kv_context)
        if self._budget is not None:
            self._budget.take(session, need)
        self._begin(session)

    def check_switch(self, session: int, switch: str) -> None:
        """Raises RequestError for a change of prompt that the session cannot have: an unknown one, or `recache` in a
        KV context without a clean pass."""
        if switch == "reset":
            return
        try:
            self._ring.head.check_switch(session, switch)
        except ValueError as error:
            raise RequestError("switch", str(error)) from error

    def set_conditioning(self, session: int, conditioning: Tensor, *, epoch: int, switch: str = "keep") -> None:
        """Use this conditioning from the next admitted chunk on; `switch` as in `RingExecutor.set_text`."""
        self._ring.set_text(session, epoch, conditioning, switch)

    def reset(self, session: int, conditioning: Tensor, *, seed: int, epoch: int) -> None:
        """Drop what is in flight and start afresh at chunk 0; the session has no room until it is set again."""
        self._ring.reset(session, conditioning, seed=seed, epoch=epoch)
        self._begin(session)

    def check_steps(self, session: int, steps: int) -> None:
        """Raises RequestError for a number of steps that the session cannot go on in."""
        try:
            self._ring.check_steps(session, steps)
        except ValueError as error:
            raise RequestError("steps", str(error)) from error

    def set_steps(self, session: int, steps: int, *, epoch: int) -> None:
        """Make chunks in `steps` steps from the next one on that is admitted after those in flight, see
        `RingExecutor.set_steps`. Needs no more memory."""
        self._ring.set_steps(session, epoch, steps)

    def set_paused(self, session: int, paused: bool) -> None:
        self._ring.scheduler.set_paused(session, paused)

    def set_room(self, session: int, frames: int) -> None:
        """Let `frames` frames come beyond those `step` has returned; those in flight or decoding count.

        A chunk is admitted when it fits whole.
        """
        self._ring.scheduler.set_room(session, frames - self._streams[session].ahead_frames)

    def close_session(self, session: int) -> None:
        """End a stream and free its state; no more frames of it come out."""
        self._ring.close(session)
        if self._budget is not None:
            self._budget.give_back(session)
        self._end(session)

    def step(self, wait_s: float = 0.0) -> list[Frames]:
        """Run at most one forward and hand out what is decoded; when nothing can run, wait for what comes back.

        Raises:
            EngineFailure: a rank of the ring is gone, failed or hangs; names it, with session and chunk.
        """
        if self.hook is None:
            return self._step(wait_s)
        with self.hook.around_step():
            frames = self._step(wait_s)
        self.hook.after_step(frames)
        return frames

    def _step(self, wait_s: float) -> list[Frames]:
        now_s = clock.monotonic_s()
        rows, finished = self._turn()
        for row in rows:
            if row.step == 0:
                self._streams[row.session].chunks[row.chunk] = _Chunk(now_s, row.epoch, self._work(row))
                self._streams[row.session].ahead_frames += self.info.chunk_frames
        for row, latents in finished:
            self._pending += 1
            self._decoding.submit(self._streams[row.session].number, row.chunk, latents)
        frames = self._collect(wait_s if not rows and not finished else 0.0)
        if self._works:
            self._meter.finished(clock.monotonic_s(), self.busy_s(), self._works)
            self._works = []
        return frames

    @property
    def busy(self) -> bool:
        """Whether a step can run now, or something is decoding or decoded and not handed out yet."""
        return self._ring.has_work or self._pending > 0 or not self._ready.empty()

    def unfinished(self) -> set[tuple[int, int, int]]:
        """(session, chunk, epoch) of every chunk that is in the ring or decoding."""
        streams = self._streams.values()
        return {(each.session, number, chunk.epoch) for each in streams for number, chunk in each.chunks.items()}

    def check(self, wait_s: float = 0.0) -> None:
        """Raise the `EngineFailure` that ends the ring, if there is one or comes within `wait_s`."""
        if self._workers is not None:
            self._workers.check(wait_s)

    def occupancy(self) -> list[float]:
        """Share of the time since loading that each stage was at work, its decoding included; empty with one stage."""
        return self._workers.occupancy() if self._workers is not None else []

    def busy_s(self) -> list[float]:
        """Seconds that each rank's device was at work since its process began, decoding included where it is done."""
        return self._workers.busy_s() if self._workers is not None else [self._ring.worker.timer.busy_s]

    def work_s(self) -> float | None:
        """Seconds of work in a chunk in the default number of steps, as the latest ones tell: of the busiest rank."""
        return self._meter.work_s()

    def sessions_fit(self) -> int | None:
        """How many sessions of the default kind the memory for caches holds; None without a budget."""
        if self._budget is None:
            return None
        return self._budget.fits(steps=self.info.steps, kv_context=self.info.kv_context)

    def measure_from_here(self) -> None:
        """Forget what was measured: it was warming up. Mutates: self."""
        if self._workers is not None:
            self._workers.hear()
        self._meter = ChunkCostMeter(clock.monotonic_s(), self.busy_s())

    def measure_to_here(self) -> None:
        """Take in what the ranks have worked until now, of which a ring's tell only now and then. Mutates: self."""
        if self._workers is not None:
            self._workers.hear()
            self._meter.finished(clock.monotonic_s(), self.busy_s(), [])

    def close(self) -> None:
        """End decoding and the other ranks."""
        if self.hook is not None:
            self.hook.close()
        self._decoding.close(abandon=self._ring.worker.timer.hung)
        if self._workers is not None:
            self._workers.leave()

    def _turn(self) -> tuple[list[MicroStep], list[Finished]]:
        if self._workers is None:
            self._check_device()
            return self._ring.turn()
        self._workers.check()
        try:
            return self._ring.turn()
        except LinkClosed as error:
            raise self._workers.broken(error) from error

    def _check_device(self) -> None:
        """Raise EngineFailure if the device of the only rank does not get on; in a ring each rank's watch does."""
        if (stuck := self._ring.worker.timer.stuck(clock.monotonic_s(), self._hang_s)) is not None:
            raise EngineFailure(f"rank 0 hangs: {stuck}; in the ring: {self._ring.contents}")

    def _work(self, row: MicroStep) -> float:
        """What a chunk in the steps of `row` costs: a chunk is so many passes as it has steps, and the clean one."""
        return (row.steps + 1) / (self.info.steps + 1)

    def _wake(self) -> None:
        """Let a waiting `step` look again. From any thread."""
        self._ready.put(None)

    def _decode_where(self, model: Model, workers: WorkerGroup | None, device: torch.device, at_once: int) -> Decoding:
        remote = workers.decoding(model.spec, self._deliver, self._wake) if workers is not None else None
        if remote is not None:
            return remote
        if model.decoder is None:
            raise ValueError("a runtime that decodes needs a model with a decoder")
        timer = self._ring.worker.timer
        return LocalDecoding(model.decoder, self._deliver, self._wake, device, at_once, timer)

    def _begin(self, session: int) -> None:
        self._end(session)
        self._streams[session] = _Stream(next(self._numbers), session)

    def _end(self, session: int) -> None:
        if (stream := self._streams.pop(session, None)) is not None:
            self._decoding.forget(stream.number)

    def _deliver(self, piece: Piece) -> None:
        """Take in what is decoded. From a thread."""
        self._ready.put((piece, clock.monotonic_s()))

    def _collect(self, wait_s: float) -> list[Frames]:
        """Everything decoded so far; waits up to `wait_s` while something is decoding or in the ring."""
        out: list[Frames] = []
        while True:
            wait = wait_s if (self._pending or self._ring.waiting) and not out else 0.0
            try:
                item = self._ready.get(timeout=wait) if wait > 0 else self._ready.get_nowait()
            except queue.Empty:
                return out
            if item is None:
                self._look()
                wait_s = 0.0  # something came back: it may let something enter
            else:
                out += self._frames(*item)

    def _frames(self, piece: Piece, ready_s: float) -> list[Frames]:
        """A decoded piece as frames, none if its stream has ended. Mutates: self."""
        self._pending -= piece.last
        stream = next((each for each in self._streams.values() if each.number == piece.stream), None)
        if stream is None:
            return []
        # A piece is one latent frame; a stream's first may show fewer frames than it was admitted for.
        stream.ahead_frames -= self.model.spec.frames_per_latent
        chunk = stream.chunks.pop(piece.chunk) if piece.last else stream.chunks[piece.chunk]
        chunk_s = ready_s - chunk.admitted_s if piece.last else None
        if piece.last:
            self._works.append(chunk.work)
        return [Frames(stream.session, piece.chunk, chunk.epoch, piece.pictures, piece.last, chunk_s)]

    def _look(self) -> None:
        """Raise what went wrong where decoding is done, on the caller's thread."""
        try:
            self._decoding.check()
        except LinkClosed as error:
            assert self._workers is not None
            raise self._workers.broken(error) from error
