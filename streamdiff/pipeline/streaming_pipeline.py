"""The streaming pipeline that the engine drives: stages for the transformer, a thread or rank for decoding."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamdiff import clock
from streamdiff.core import Chunk, Frames, ModelInfo, StreamProgress, min_ahead_frames
from streamdiff.errors import EngineFailure, RequestError
from streamdiff.models.autoencoder.autoencoder import ImageEncoder
from streamdiff.models.camera import FRAMES, track_cameras
from streamdiff.models.clip_vision import ClipVision
from streamdiff.models.headers import CAMERA_SHAPES
from streamdiff.models.model import Model
from streamdiff.models.sampling import Schedule, blended
from streamdiff.models.spec import choose_steps
from streamdiff.pipeline.decode.decode_worker import Decoding, Piece
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.loras import LoraFolder
from streamdiff.pipeline.planner.kv_budget import KVCacheBudget
from streamdiff.pipeline.ring import Ring, RingParts
from streamdiff.pipeline.row_faults import OnFault, Streak, fail_all, fault_key
from streamdiff.pipeline.runner.init_latents import LOWEST, GivenVideo, motion_levels
from streamdiff.pipeline.runner.sampler import Finished, StreamInputs
from streamdiff.pipeline.snapshot.resting import RestingStates
from streamdiff.pipeline.throughput import PipelineFigures
from streamdiff.pipeline.video_input.feeding import VideoInputs
from streamdiff.pipeline.worker_group import WorkerGroup

if TYPE_CHECKING:
    from streamdiff.pipeline.profiler import Profiler


class StreamingPipeline(Ring):
    """A ring whose finished chunks are decoded. Sessions have numbers; `step` is called repeatedly from one thread."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        steps: int | None = None,
        kv_context: str = "clean",
        *,
        max_rows: int = 1,
        parts: RingParts | None = None,
        workers: WorkerGroup | None = None,
        budget: KVCacheBudget | None = None,
        at_once: int = 1,
        watchdog_s: float = 60.0,
        pictures: ImageEncoder | None = None,
    ) -> None:
        """`steps` and `kv_context` are those of a session that does not name its own (None: what the model was made
        for). `max_rows` and `parts` as in `Ring`; `workers` are the other ranks, where there are some. `budget` is the
        memory for caches; None: without limit. `at_once` latent frames are decoded by one call. With one stage,
        `watchdog_s` is how long the device may be at one work; in a ring `workers` knows. `pictures` encodes start
        pictures; None: there are none.

        Raises:
            ConfigError: steps that the model does not have.
        """
        super().__init__(model, device, max_rows, parts)
        spec = model.spec
        assert model.text is not None, "a live stream takes texts"
        self.model, self.text = model, model.text
        self.profiler: Profiler | None = None
        """Traces some chunks, if there is one."""
        self.info = ModelInfo(
            spec.name, str(device), spec.width, spec.height, spec.native_fps, spec.chunk_frames,
            choose_steps(steps, spec.steps, spec.name), kv_context, spec.steps, spec.switch,
            spec.text_shape, spec.chunk_shape, spec.first_chunks, spec.controls, spec.condition_channels > 0,
            spec.has_camera,
        )  # fmt: skip
        self.budget, self._workers, self._watchdog_s, self._pictures = budget, workers, watchdog_s, pictures
        self.streams: dict[int, StreamProgress] = {}  # by session
        self._numbers = count()
        self._ready: queue.SimpleQueue[tuple[Piece, float] | None] = queue.SimpleQueue()
        self._began_s = clock.monotonic_s()  # the present step
        self._pending = 0  # chunks that are decoding
        self._put_off: deque[tuple[int, int, Tensor]] = deque()  # background chunks that wait for an idle decoder
        self._given: deque[tuple[int, int, Tensor]] = deque()  # chunks that streams begin with, to be decoded
        self.undelivered: list[Frames] = []  # that came while a session was saved or loaded
        self._finished_costs: list[float] = []  # of the chunks that this step finished
        self.on_fault: OnFault = fail_all
        """Called within `step` with a session that has failed and is to be closed, and why."""
        self._decoding_streak = Streak()
        self.faults.on_fault = lambda session, why: self.on_fault(session, why)
        self.decoding = self._decode_where(model, workers, device, at_once)
        self.notify(self.wake)
        if workers is not None:
            workers.start(self, self.wake)
        self.figures = PipelineFigures(self.info, self, workers, budget)
        self.resting = RestingStates(self)
        self.video = VideoInputs(pictures, spec, self.wake)
        self.loras = LoraFolder(self)
        """What sessions may load while they play."""

    def min_ahead_frames(self, *, steps: int, kv_context: str) -> int:
        """Frames that must be allowed ahead of those shown, at least, for the ring to run."""
        stages = self.stage.stages
        chunk_frames, first = self.info.chunk_frames, self.model.spec.first_chunks
        return min_ahead_frames(kv_context, steps=steps, stages=stages, chunk_frames=chunk_frames, first_chunks=first)

    def open(
        self, session: int, conditioning: Tensor, *, epoch: int, steps: int | Schedule, kv_context: str, **more: Any
    ) -> None:
        """As `Ring.open`; nothing is made before `set_frame_credit`. A session in the `background` takes what others
        leave of the decoder's time too. What it starts from is shown.

        Raises:
            ValueError: a bad KV context, or the session is open.
            RequestError: bad steps, or its caches do not fit.
        """
        if not isinstance(steps, int) or steps not in self.model.spec.steps:
            raise RequestError(
                "steps", f"steps is {steps}; model {self.info.model} has {', '.join(map(str, self.model.spec.steps))}"
            )
        need = self.budget.need(steps=steps, kv_context=kv_context) if self.budget is not None else []
        more = self._with_picture(more)
        super().open(session, conditioning, epoch=epoch, steps=steps, kv_context=kv_context, **more)
        if self.budget is not None:
            self.budget.take(session, need)
        self._begin(session, more.get("background", False), epoch)

    def encode_picture(self, picture: NDArray[np.uint8]) -> Tensor:
        """A start picture, RGB `[H, W, 3]` of the model's size, as `open` and `reset` take it. From any thread.

        Raises:
            RequestError: the model encodes none.
            ConfigError: its autoencoder has no encoder.
        """
        if self._pictures is None:
            raise RequestError("image", f"model {self.info.model} encodes no pictures; begin from a prompt alone")
        return self._pictures.encode(picture)

    def image_features(self, picture: NDArray[np.uint8]) -> Tensor | None:
        """Features of a start picture, of a model that takes these in a prompt's place; None: it takes a prompt. From
        any thread. Raises ConfigError as `ClipVision.image_features`."""
        return self.text.image_features(picture) if isinstance(self.text, ClipVision) else None

    def features_of(
        self,
        embeddings: NDArray[np.float32] | None,
        latents: NDArray[np.float32] | None,
        video: NDArray[np.float32] | None,
        strength: float,
        motion: NDArray[np.float64] | None,
    ) -> tuple[Tensor | None, Tensor | None, GivenVideo | None]:
        """Conditioning, `start` and `video`, as `open` takes them, of features that were made elsewhere; from any
        thread; their shapes have been checked.

        `embeddings` are a prompt's, `[L, D]`; they are padded with zero rows as the text encoder pads them. `latents`
        `[n, C, F, h, w]` are those of a stream's first chunks, and `video` those that chunks start from: the more it
        moves, the less noise is mixed in, as live video has it. `motion` `[n]` is that of its pixels; None: that of
        the latents counts.
        """
        spec, conditioning, given = self.model.spec, None, None
        if spec.condition_channels and latents is not None:
            raise RequestError("image_latents", f"model {spec.name} begins with a picture, not with finished latents")
        if embeddings is not None:
            conditioning = torch.zeros(spec.text_shape)
            conditioning[: len(embeddings)] = torch.from_numpy(np.array(embeddings))
        if video is not None:
            encoded, moves = torch.from_numpy(np.array(video)), None if motion is None else torch.from_numpy(motion)
            levels = motion_levels(encoded, strength, spec.first_chunks, moves).clamp(LOWEST, 1)
            given = GivenVideo(encoded, tuple(levels.tolist())).on(self.sampler.device)
        return conditioning, None if latents is None else torch.from_numpy(np.array(latents)), given

    def reset(self, session: int, conditioning: Tensor, *, epoch: int, **more: Any) -> None:
        """As `Ring.reset`; the frame credit is 0 until it is set again. A swapped-out session is swapped in
        first (`swap_in`), as that takes memory."""
        self.resting.forget(session)
        self.scheduler.hold(session, False)
        super().reset(session, conditioning, epoch=epoch, **self._with_picture(more))
        self._begin(session, self.streams[session].background, epoch)

    def _with_picture(self, more: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `open` and `reset`: an encoded picture is the condition of a model that has one, and elsewhere
        what the stream continues from; `controls` are given."""
        controls, condition = more.pop("controls", None), None
        if self.model.spec.condition_channels:
            condition, more = more.get("start"), {**more, "start": None}
        if controls is None and condition is None:
            return more
        return {**more, "given": StreamInputs(condition=condition, controls=controls)}

    def cameras_of(self, track: Mapping[str, NDArray[Any]]) -> Tensor:
        """What `open` takes as `controls` of a camera's `poses` and, if there are some, `intrinsics`, see
        `camera.track_cameras`. From any thread. Raises RequestError for less than a chunk of them."""
        spec = self.model.spec
        own = {name: torch.from_numpy(np.array(track[name])) for name in CAMERA_SHAPES if name in track}
        found = track_cameras(own, spec.chunk_latents, spec.width, spec.height)
        if not len(found):
            least = FRAMES * (spec.chunk_latents - 1) + 1
            raise RequestError("poses", f"poses is of {len(own['poses'])} frames, and a chunk takes {least} of them")
        return found

    def next_chunk(self, session: int) -> int:
        """The chunk that is admitted next."""
        return self.scheduler.next_chunk(session)

    def blended(self, before: Tensor, after: Tensor, share: float, along: str) -> Tensor:
        """As `sampling.blended`."""
        return blended(before, after, share, along)

    def set_paused(self, session: int, paused: bool) -> None:
        self.scheduler.set_paused(session, paused)

    def set_frame_credit(self, session: int, frames: int) -> None:
        """Let `frames` frames come beyond those `step` has returned; those in flight or decoding count.

        A chunk is admitted when it fits whole.
        """
        self.streams[session].frame_credit = frames
        self._limit_credit(session)

    def _limit_credit(self, session: int) -> None:
        """Let as many frames be admitted as may be ahead, and no more than there is input for. Mutates: scheduler."""
        credit = self.streams[session].frame_credit - self.streams[session].ahead_frames
        if session in self.video.inputs and (ready := self.video.frames_ready(session)) is not None:
            credit = min(credit, ready)
        self.scheduler.set_frame_credit(session, credit)

    def set_input(self, session: int, strength: float | None, *, epoch: int) -> None:
        """As `VideoInputs.set_input`; chunks admitted from now on are of `epoch`."""
        self.video.set_input(session, self.sampler.sessions[session], strength)
        self.set_epoch(session, epoch)
        self._limit_credit(session)

    def close_session(self, session: int) -> None:
        """End a stream and free its state; no more frames of it come out."""
        self.resting.forget(session)
        self.video.forget(session)
        super().close_session(session)
        if self.budget is not None:
            self.budget.give_back(session)
        self._end(session)

    # ---- one step, as `Engine.step` takes it -------------------------------------------------------------------------

    def step(self, wait_s: float = 0.0) -> list[Frames]:
        """A step for those that have no engine: run at most one forward and hand out what is decoded; when nothing can
        run, wait for what comes back.

        Raises:
            EngineFailure: a rank of the ring is gone, failed or hangs; names it, with session and chunk.
        """
        self.attend()
        with self.watched():
            message = self.schedule()
            self.run(message)
            finished = self.sample()
        self.decode(message, finished)
        return self.collect(0.0 if message or finished else wait_s)

    def attend(self) -> None:
        """Begin a step: continue with live video, where there is any. Mutates: self, ring."""
        self._began_s = clock.monotonic_s()
        if self.video.inputs:
            self.video.poll()
            for session in self.video.inputs:
                self._limit_credit(session)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raises the EngineFailure that ends the ring: one that is known already, or a link that closes within."""
        if self._workers is not None:
            self._workers.check()
        # In a ring each rank's monitor checks its device.
        elif (stuck := self.worker.timer.stuck(clock.monotonic_s(), self._watchdog_s)) is not None:
            raise EngineFailure(f"rank 0 hangs: {stuck}; in the ring: {self.contents}")
        try:
            yield
        except LinkClosed as error:
            if self._workers is None:
                raise
            raise self._workers.broken(error) from error

    def decode(self, message: StageMessage | None, finished: Sequence[Finished]) -> None:
        """Have finished chunks decoded, and those that streams begin with. `message` has entered the ring: its new
        chunks are ahead of what is shown. Mutates: self."""
        for row in message.rows if message is not None else ():
            if row.step == 0 and row.chunk not in self.streams[row.session].chunks:  # else it runs once more
                cost = (row.steps + 1) / (self.info.steps + 1)  # a pass per step, and the clean one
                control = self.sampler.sessions[row.session].held.changes
                self.streams[row.session].chunks[row.chunk] = Chunk(row.epoch, cost, self._began_s, control)
                self.streams[row.session].ahead_frames += self.info.chunk_frames
        while self._given:
            session, chunk, latents = self._given.popleft()
            self._decode_next(self.streams[session], chunk, latents)
        for row, latents in finished:
            self._decode_next(self.streams[row.session], row.chunk, latents)
        if self._put_off and not self._pending:  # one at a time, so that another's chunk waits for no more than that
            self._decode(*self._put_off.popleft())

    def collect(self, wait_s: float) -> list[Frames]:
        """The frames that are decoded by now; waits up to `wait_s` for some, while any are to come. Mutates: self."""
        if (self.resting.savings or self.resting.away) and self.resting.advance():
            wait_s = 0.0  # the next piece is to be copied, or a session continues
        undelivered, self.undelivered = self.undelivered, []
        frames = undelivered + self._collect(0.0 if undelivered else wait_s)
        if self._finished_costs:
            self.figures.finished(self._finished_costs)
            self._finished_costs = []
        if self.profiler is not None:
            self.profiler.after_step(frames)
        return frames

    @property
    def busy(self) -> bool:
        """Whether a step can run now, or something is decoding or decoded and not handed out yet."""
        waiting = self._given or self._put_off or self.undelivered or self._others_busy
        return self.has_work or self._pending > 0 or bool(waiting) or not self._ready.empty()

    @property
    def _others_busy(self) -> bool:
        """Whether something will come of saving, swapping or encoding video."""
        resting = (self.resting.savings or self.resting.away) and self.resting.busy
        return bool(resting or (self.video.inputs and self.video.encoding))

    def memory_bytes(self) -> int:
        """Bytes that this process has taken of its GPU, or without one of the machine's memory."""
        on_gpu = self.info.device.startswith("cuda")
        return torch.cuda.memory_reserved(self.info.device) if on_gpu else psutil.Process().memory_info().rss

    def check(self, wait_s: float = 0.0) -> None:
        """Raise the `EngineFailure` that ends the ring, if there is one or comes within `wait_s`."""
        if self._workers is not None:
            self._workers.check(wait_s)

    def close(self) -> None:
        """End decoding and the other ranks."""
        if self.profiler is not None:
            self.profiler.close()
        hung = self.worker.timer.hung
        self.video.close(abandon=hung)
        self.resting.close()
        self.decoding.close(abandon=hung)
        self.stage.swaps.close()
        if self._workers is not None:
            self._workers.leave()

    def _decode_next(self, stream: StreamProgress, chunk: int, latents: Tensor) -> None:
        """Have a stream's next chunk decoded, at once or when no one else's is. Mutates: self, stream."""
        stream.decoding += 1
        if stream.background:
            self._put_off.append((stream.number, chunk, latents))
        else:
            self._decode(stream.number, chunk, latents)

    def _decode(self, stream: int, chunk: int, latents: Tensor) -> None:
        self._pending += 1
        self.decoding.submit(stream, chunk, latents)

    def wake(self) -> None:
        """Wake a waiting `step`. From any thread."""
        self._ready.put(None)

    def _decode_where(self, model: Model, workers: WorkerGroup | None, device: torch.device, at_once: int) -> Decoding:
        stage = self.stage
        if workers is not None and (links := workers.decode_links) is not None:
            return Decoding.elsewhere(*links, self._deliver, self.wake, stage.exchange, stage.device)
        assert model.decoder is not None, "the head decodes"
        return Decoding.here(
            model.decoder, self._deliver, self.wake, device, at_once, self.worker.timer, stage.swaps
        )  # fmt: skip

    def _begin(self, session: int, background: bool, epoch: int) -> None:
        """A new stream of a session. What it is given with a clean pass alone never comes back finished, and is decoded
        from here. Mutates: self."""
        self._end(session)
        stream = self.streams[session] = StreamProgress(next(self._numbers), session, background)
        self.video.begin_again(session, self.sampler.sessions[session])
        given = self.sampler.sessions[session].given_latents
        for chunk in range(self.scheduler.next_chunk(session)):
            stream.chunks[chunk] = Chunk(epoch, 1 / (self.info.steps + 1))
            stream.ahead_frames += self.info.chunk_frames
            self._given.append((session, chunk, given[chunk]))

    def _end(self, session: int) -> None:
        if (stream := self.streams.pop(session, None)) is not None:
            self._put_off = deque(each for each in self._put_off if each[0] != stream.number)
            self._given = deque(each for each in self._given if each[0] != session)
            self.decoding.forget(stream.number)

    def _deliver(self, piece: Piece) -> None:
        """Queue a decoded piece. From a decoder thread."""
        self._ready.put((piece, clock.monotonic_s()))

    def _collect(self, wait_s: float) -> list[Frames]:
        """Everything decoded so far; waits up to `wait_s` while something is decoding or in the ring."""
        out: list[Frames] = []
        while True:
            under_way = self._pending or self.waiting or self._others_busy
            wait = wait_s if under_way and not out else 0.0
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
        stream = next((each for each in self.streams.values() if each.number == piece.stream), None)
        if stream is None:
            return []
        if piece.fault:
            stream.decoding -= 1
            name = fault_key(stream.session, stream.chunks[piece.chunk].epoch)
            why = self.stage.exchange.pop_text(name) or piece.fault  # why a stage could not compute it, if that is so
            self.faults.fail_session(stream.session, why, self._decoding_streak)
            return []
        self._decoding_streak.record_success()
        # A piece is one latent frame; a stream's first may show fewer frames than it was admitted for.
        stream.decoding -= piece.last
        stream.ahead_frames -= self.model.spec.frames_per_latent
        chunk = stream.chunks.pop(piece.chunk) if piece.last else stream.chunks[piece.chunk]
        chunk_s = ready_s - chunk.admitted_s if piece.last else None
        if piece.last:
            self._finished_costs.append(chunk.cost)
        pictures = piece.pictures
        return [Frames(stream.session, piece.chunk, chunk.epoch, pictures, piece.last, chunk_s, chunk.control)]

    def _look(self) -> None:
        """Re-raise a decoding error on the caller's thread."""
        try:
            self.decoding.check()
        except LinkClosed as error:
            assert self._workers is not None
            raise self._workers.broken(error) from error
