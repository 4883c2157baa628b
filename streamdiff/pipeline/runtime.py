"""Runtime: what the engine drives. A ring for the transformer, a thread for decoding, and nothing about viewers."""

from __future__ import annotations

import queue
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamdiff import clock
from streamdiff.config import ModelConfig
from streamdiff.models.base import Model, StreamDecoder, TextEncoder
from streamdiff.pipeline import loading, ranks
from streamdiff.pipeline.budget import Budget
from streamdiff.pipeline.company import Company
from streamdiff.pipeline.facts import read_facts
from streamdiff.pipeline.group import check_world
from streamdiff.pipeline.head import Finished
from streamdiff.pipeline.links import LinkClosed
from streamdiff.pipeline.microstep import MicroStep
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.scheduler import minimum_lead


@dataclass(frozen=True)
class ModelInfo:
    """What runs here; sizes in pixels."""

    name: str
    device: str
    width: int
    height: int
    native_fps: float
    chunk_frames: int
    steps: int
    kv_context: str


@dataclass(frozen=True)
class Frames:
    """Decoded frames of one chunk, in order, possibly several pieces per chunk.

    pictures are uint8 `[n, H, W, 3]`; `last` marks a chunk's last piece, which also tells the seconds from the chunk's
    admission until now.
    """

    session: int
    chunk: int
    epoch: int
    pictures: NDArray[np.uint8]
    last: bool
    chunk_s: float | None


@dataclass
class _Stream:
    """Decoder side of a session. A reset makes a new one, so that late pieces of the old stream can be told apart."""

    memory: object
    admitted_s: dict[int, float]
    ahead_frames: int = 0  # admitted and not handed out yet


class Runtime:
    """Sessions by number; call `step` again and again from one thread."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        steps: int = 4,
        kv_context: str = "clean",
        company: Company | None = None,
        budget: Budget | None = None,
    ) -> None:
        """`company` are the other ranks of the ring; without them all blocks of `model` run here. `budget` is the
        memory for caches; None: without limit."""
        spec = model.spec
        self.model, self.text = model, model.text
        self.info = ModelInfo(
            spec.name, str(device), spec.width, spec.height, spec.native_fps, spec.chunk_frames, steps, kv_context
        )
        self._company, self._budget = company, budget
        self._ring = company.ring if company else Ring(model, device)
        self._streams: dict[int, _Stream] = {}
        self._ready: queue.SimpleQueue[tuple[_Stream, Frames] | None] = queue.SimpleQueue()
        self._decoding: set[Future[None]] = set()
        self._pool = ThreadPoolExecutor(1, "decode", initializer=torch.set_num_threads, initargs=(1,))
        self._ring.notify(self._wake)
        if company is not None:
            company.start(self._wake)

    text: TextEncoder

    def minimum_lead(self, *, steps: int, kv_context: str) -> int:
        """Frames that a session's lead must allow at least."""
        stages = self._ring.stage.stages
        return minimum_lead(kv_context, steps=steps, stages=stages, chunk_frames=self.info.chunk_frames)

    def open(self, session: int, conditioning: Tensor, *, seed: int, epoch: int, steps: int, kv_context: str) -> None:
        """Start a stream; it makes nothing before it has room.

        Raises:
            ValueError: bad steps or KV context, the session is open, or its caches do not fit.
        """
        if steps not in self.model.spec.steps:
            raise ValueError(
                f"steps is {steps}; model {self.info.name} has {', '.join(map(str, self.model.spec.steps))}"
            )
        need = self._budget.need(steps=steps, kv_context=kv_context) if self._budget is not None else []
        self._ring.open(session, conditioning, seed=seed, epoch=epoch, steps=steps, kv_context=kv_context)
        if self._budget is not None:
            self._budget.take(session, need)
        self._streams[session] = _Stream(self.model.decoder.new_memory(), {})

    def set_conditioning(self, session: int, conditioning: Tensor, *, epoch: int) -> None:
        """Use this conditioning from the next admitted chunk on."""
        self._ring.set_text(session, epoch, conditioning)

    def reset(self, session: int, conditioning: Tensor, *, seed: int, epoch: int) -> None:
        """Drop what is in flight and start afresh at chunk 0; the session has no room until it is set again."""
        self._ring.reset(session, conditioning, seed=seed, epoch=epoch)
        self._streams[session] = _Stream(self.model.decoder.new_memory(), {})

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
        self._streams.pop(session, None)

    def step(self, wait_s: float = 0.0) -> list[Frames]:
        """Run at most one forward and hand out what is decoded; when nothing can run, wait for what comes back.

        Raises:
            EngineFailure: a rank of the ring is gone, failed or hangs; names it, with session and chunk.
        """
        now_s = clock.monotonic_s()
        rows, finished = self._turn()
        for row in rows:
            if row.step == 0:
                self._streams[row.session].admitted_s[row.chunk] = now_s
                self._streams[row.session].ahead_frames += self.info.chunk_frames
        for done in finished:
            self._submit(done)
        return self._collect(wait_s if not rows and not finished else 0.0)

    @property
    def busy(self) -> bool:
        """Whether a step can run now, or something is decoding or decoded and not handed out yet."""
        return self._ring.has_work or bool(self._decoding) or not self._ready.empty()

    def check(self, wait_s: float = 0.0) -> None:
        """Raise the `EngineFailure` that ends the ring, if there is one or comes within `wait_s`."""
        if self._company is not None:
            self._company.check(wait_s)

    def occupancy(self) -> list[float]:
        """Share of the time since loading that each stage has spent in its blocks; empty with one stage."""
        return self._company.occupancy() if self._company is not None else []

    def close(self) -> None:
        """End the other ranks and the decoding thread."""
        if self._company is not None:
            self._company.leave()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _turn(self) -> tuple[list[MicroStep], list[Finished]]:
        if self._company is None:
            return self._ring.turn()
        self._company.check()
        try:
            return self._ring.turn()
        except LinkClosed as error:
            raise self._company.broken(error) from error

    def _wake(self) -> None:
        """Let a waiting `step` look again. From any thread."""
        self._ready.put(None)

    def _submit(self, done: Finished) -> None:
        stream = self._streams[done.row.session]
        future = self._pool.submit(self._decode, stream, done)
        self._decoding.add(future)
        future.add_done_callback(lambda _: self._wake())

    def _decode(self, stream: _Stream, done: Finished) -> None:
        """Decode latent frame by latent frame, so that the first picture is out early. Runs on the decoding thread."""
        row, decoder = done.row, self._decoder
        count = done.latents.shape[1]
        for index in range(count):
            pictures = decoder.decode(done.latents[None, :, index : index + 1], stream.memory).cpu().numpy()
            last = index == count - 1
            spent_s = clock.monotonic_s() - stream.admitted_s.pop(row.chunk) if last else None
            self._ready.put((stream, Frames(row.session, row.chunk, row.epoch, pictures, last, spent_s)))

    @property
    def _decoder(self) -> StreamDecoder:
        return self.model.decoder

    def _collect(self, wait_s: float) -> list[Frames]:
        """Everything decoded so far; waits up to `wait_s` while something is decoding or in the ring."""
        out: list[Frames] = []
        while True:
            try:
                wait = wait_s if (self._decoding or self._ring.waiting) and not out else 0.0
                item = self._ready.get(timeout=wait) if wait > 0 else self._ready.get_nowait()
            except queue.Empty:
                return out
            if item is None:
                self._reap()
                wait_s = 0.0  # something came back: it may let something enter
            elif self._streams.get(item[1].session) is item[0]:
                # A piece is one latent frame; a stream's first may show fewer frames than it was admitted for.
                item[0].ahead_frames -= self.model.spec.frames_per_latent
                out.append(item[1])

    def _reap(self) -> None:
        """Forget finished decodes; an error in one is raised here, on the caller's thread."""
        for future in [f for f in self._decoding if f.done()]:
            self._decoding.discard(future)
            future.result()


def load_runtime(config: ModelConfig) -> Runtime:
    """Load the model's weights, as the head of a ring if there are several stages, and warm up with one chunk.

    Raises:
        ConfigError: unknown model, a device that is not there, or a ring that cannot be built.
    """
    device = loading.pick_device(config.device)
    company: Company | None = None
    runs: tuple[loading.Run, ...]
    if config.stages == 1:
        check_world(1)
        model = loading.load_model(config, device)
        runs, rooms = ((0, model.blocks),), [loading.own_room(config, device)]
    else:
        member = loading.join(config)
        model, runs = loading.load_share(
            config, member, device, lambda blocks: loading.load_model(config, device, blocks)
        )
        member.tell_room(loading.own_room(config, device))
        company = Company(member, ranks.head_ring(model, ranks.Place(0, config.stages), device), config.hang_s)
        rooms = member.hear_rooms()
    counts = [last - first for first, last in runs]
    budget = Budget(read_facts(config.name), rooms, counts, model.denoiser.dtype.itemsize)
    runtime = Runtime(model, device, config.steps, config.kv_context, company, budget)
    _warm_up(runtime)
    runtime.occupancy()  # counts from here
    return runtime


def _warm_up(runtime: Runtime) -> None:
    """Make one chunk, so that the first viewer does not pay for first calls."""
    conditioning = runtime.text.encode(runtime.text.read(runtime.text.examples[0], None).text)
    runtime.open(0, conditioning, seed=0, epoch=0, steps=runtime.info.steps, kv_context="clean")
    runtime.set_room(0, runtime.info.chunk_frames)
    while not any(frames.last for frames in runtime.step(wait_s=1.0)):
        pass
    runtime.close_session(0)
    runtime.step()
