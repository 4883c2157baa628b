"""Runs the video jobs of a store on the running engine: each is a session of lowest priority, without viewers.

Frames are encoded as they arrive, and encoded frames are reported to the engine as shown, so it is never far ahead of
the encoder. Independent of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import sqlite3
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from av.error import FFmpegError

from streamdiff import clock
from streamdiff.atomic_write import NO_ROOM
from streamdiff.config import ServeConfig
from streamdiff.engine import messages
from streamdiff.engine.messages import Command, Data, Event, Ready, Refused
from streamdiff.engine.process.supervisor import Restarting
from streamdiff.errors import EngineFailure, RequestError, StreamdiffError
from streamdiff.server.jobs.store import ATTEMPTS, Job, JobStore, Order, VideoRequest, sync
from streamdiff.server.media.encoder import Picture, as_rgb
from streamdiff.server.metrics import Metrics
from streamdiff.server.peers import share_of
from streamdiff.server.problem import Unavailable
from streamdiff.server.tasks import end_tasks, wait_at_most
from streamdiff.video.files import write_video

logger = logging.getLogger(__name__)

SESSION = "job:"
"""Sessions of jobs have names that begin so."""
AHEAD_CHUNKS = 2
NO_MEMORY_RETRY_S = 2.0
ENGINE_RETRY_S = 1.0
DISK_RETRY_S = 10.0
TELL_S = 60.0
"""How often the log says that the disk has no room."""
EXPIRE_S = 60.0
"""How often jobs that have been kept long enough are deleted."""
NICENESS = 10
"""How much less of the CPU an encoder gets than the server's other threads, where they compete (Linux)."""
QUEUE = 64
"""Jobs that wait or run, at most."""
LONGEST_JOB_S = 60.0
"""Of a job's video, at the model's own rate."""

_T = TypeVar("_T")


def _yield_to_others() -> None:
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class _RequeueJob(Exception):
    """A job returns to the queue. `attempt`: what happened counts as one that it did not end; `wait_s`: no job begins
    for so long."""

    def __init__(self, *, attempt: str = "", wait_s: float = 0.0) -> None:
        super().__init__()
        self.attempt, self.wait_s = attempt, wait_s


@dataclass(eq=False)
class _Run:
    """A job that is being made. `inbox` takes its session's events, and how many frames are encoded; `pictures` are on
    their way to the encoder's thread, which ends without a file at None."""

    job: Job
    session: str
    inbox: asyncio.Queue[Event | Restarting | int] = field(default_factory=asyncio.Queue)
    pictures: queue.SimpleQueue[Picture | None] = field(default_factory=queue.SimpleQueue)
    encoded: int = 0
    in_engine: bool = False
    preempted: bool = False
    inference_s: float | None = None
    peak_memory_mb: float | None = None
    end: str = "aborted"
    """How it ended: completed, failed, put_back or aborted; label of a metric."""


class JobRunner:
    """The jobs of one server. Lives on the event loop; the store has a thread of its own."""

    def __init__(
        self,
        store: JobStore,
        config: ServeConfig,
        send: Callable[[Command], Awaitable[None]],
        ready: Callable[[], Ready],
        metrics: Metrics,
        at_once: int = 1,
    ) -> None:
        """`send` hands a command to the engine, `ready` says what it is; so many jobs run `at_once`."""
        self._store, self._config, self._send, self._ready, self._metrics = store, config, send, ready, metrics
        self._at_once = at_once
        self._disk = ThreadPoolExecutor(1, "jobs")
        self._encoders = ThreadPoolExecutor(at_once, "job-encoder", initializer=_yield_to_others)
        self._runs: dict[asyncio.Task[None], _Run] = {}
        self._numbers = count()  # so that no frame of a job's earlier session is taken for one of its next
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._engine_runs = True
        self._not_before_s = 0.0
        self._told_s = -math.inf

    # ---- for the routes -----------------------------------------------------------------------------------------

    async def submit(
        self, request: VideoRequest, owner: str, given: Mapping[str, Data], key: tuple[str, str] | None = None
    ) -> Job:
        """Put a job of `owner` into the queue, with what is `given` for it, see `JobStore.add`. Where a request with
        this `key` came before, its job is returned; see `JobStore.of_key`.

        Raises:
            Problem: the queue or the disk is full, or that request was another one.
        """

        def add() -> Job:
            if key is not None and (known := self._store.of_key(*key)) is not None:
                return known
            self._check_room(owner)
            return self._store.add(request, owner, given, key)

        job = await self._changed(add)
        logger.info("Job %(job)s waits: %(frames)d frames.", {"job": job.id, "frames": request.frames})
        self._wake.set()
        return job

    def _check_room(self, owner: str) -> None:
        """Raises Unavailable where the queue, the owner's share of it, or the disk is full."""
        serve = self._config
        owner_share = share_of(QUEUE, serve.address_share)
        if self._store.count() >= QUEUE:
            raise Unavailable("queue", f"All {QUEUE} places are taken.", 10, 429)
        if self._store.count(owner) >= owner_share:
            why = f"One address may have {owner_share} jobs of {QUEUE} that wait (serve.address_share), and yours does."
            raise Unavailable("address", why, 10, 429)
        used_gb = self._store.used_bytes() / 1e9
        if used_gb >= serve.jobs_disk_gb:
            soonest_s = self._store.next_expiry_s()
            wait_s = 60 if soonest_s is None else round(min(max(soonest_s - clock.wall_s(), 1), 3600))
            raise Unavailable(
                "disk", f"The videos kept here take {used_gb:.2f} GB of {serve.jobs_disk_gb:g} (serve.jobs_disk_gb). "
                "DELETE some, or wait until they expire.", wait_s, 429,
            )  # fmt: skip

    async def get(self, id: str) -> Job | None:
        return await self._stored(self._store.get, id)

    async def page(self, *, after: str | None, limit: int, order: Order) -> list[Job] | None:
        """See `JobStore.page`."""
        return await self._stored(partial(self._store.page, after=after, limit=limit, order=order))

    async def delete(self, id: str) -> bool:
        """Delete a job and its file, and stop making it; False if there is none. Raises Unavailable."""
        deleted = False
        for _ in range(2):  # it may be begun while the store's thread is on its way to delete it
            await end_tasks(*(task for task, run in self._runs.items() if run.job.id == id))
            deleted = await self._changed(self._store.delete, id) or deleted
        self._wake.set()
        return deleted

    def progress(self, job: Job) -> int:
        """Per cent of a job's frames that are encoded; 100 only when its file is complete."""
        if job.status == "completed":
            return 100
        encoded = next((run.encoded for run in self._runs.values() if run.job.id == job.id), 0)
        return min(99, 100 * encoded // job.frames)

    async def video(self, job: Job) -> Path | None:
        """The file of a completed job's video; None if it is missing."""
        path = self._store.path(job.id)
        return path if await self._stored(path.exists) else None

    # ---- for the session manager --------------------------------------------------------------------------------

    def take(self, event: Event | Restarting) -> None:
        """Take an event of the engine. Mutates: self."""
        if isinstance(event, Restarting | messages.Failed):
            self._engine_runs = False
            for run in self._runs.values():
                run.inbox.put_nowait(event)
        elif isinstance(event, Ready):
            self._engine_runs = True
            self._wake.set()
        elif isinstance(event, messages.LoadFigures):
            for run in self._runs.values():
                run.peak_memory_mb = round(max(run.peak_memory_mb or 0.0, event.memory_bytes / 2**20), 1)
        elif isinstance(event, messages.StreamEvent):
            for run in self._runs.values():
                if run.session == event.session:
                    run.inbox.put_nowait(event)

    async def make_room(self) -> bool:
        """Give back the memory of the jobs that run, for a session that has none; False if none ran. They begin again
        when there is memory."""
        runs = [(task, run) for task, run in self._runs.items() if run.in_engine]
        self._not_before_s = clock.monotonic_s() + NO_MEMORY_RETRY_S
        for _, run in runs:
            run.preempted = True
        await end_tasks(*(task for task, _ in runs))
        return bool(runs)

    # ---- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recover the jobs of the last server, and start to run jobs."""
        waiting = await self._stored(self._store.recover)
        if waiting:
            logger.info("%d jobs of an earlier run begin again.", waiting)
        self._tasks = [
            asyncio.create_task(self._dispatch(), name="jobs"),
            asyncio.create_task(self._expire(), name="jobs-expire"),
        ]

    async def stop(self) -> None:
        """Stop making jobs; those begun begin again with the next server."""
        await end_tasks(*self._tasks, *self._runs)
        self._encoders.shutdown()
        try:
            await self._stored(partial(self._store.put_back, attempt=False))
        except sqlite3.Error as error:
            logger.error("Jobs in progress count as tried once: %s", error)
        await self._stored(self._store.close)
        self._disk.shutdown()

    async def _dispatch(self) -> None:
        """Begin queued jobs while fewer than `at_once` run."""
        while True:
            self._wake.clear()
            try:
                while self._engine_runs and self._wait_s() <= 0 and self._has_place():
                    if (job := await self._stored(self._store.begin)) is None:
                        break
                    if self._wait_s() > 0:  # a session has asked for memory meanwhile
                        await self._stored(partial(self._store.put_back, job.id, attempt=False))
                    else:
                        self._begin(job)
                self._metrics.jobs_waiting.set(await self._stored(self._store.count) - len(self._runs))
            except (sqlite3.Error, OSError) as error:
                self._tell(error)
                self._not_before_s = clock.monotonic_s() + DISK_RETRY_S
            self._metrics.jobs_running.set(len(self._runs))
            await wait_at_most(self._wake, wait_s if (wait_s := self._wait_s()) > 0 else None)

    def _has_place(self) -> bool:
        """Whether one more job may run. One that was tried before runs alone: if it is what ends the engine, it ends no
        others."""
        return len(self._runs) < (1 if any(run.job.attempts > 1 for run in self._runs.values()) else self._at_once)

    def _wait_s(self) -> float:
        """Seconds until jobs may begin, 0 or less: now."""
        return self._not_before_s - clock.monotonic_s()

    def _begin(self, job: Job) -> None:
        run = _Run(job, f"{SESSION}{next(self._numbers)}:{job.id}")
        task = asyncio.create_task(self._run(run), name=f"job {job.id}")
        self._runs[task] = run
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        run = self._runs.pop(task)
        self._metrics.jobs_ended.labels(run.end).inc()
        logger.info("Job %(job)s: %(end)s.", {"job": run.job.id, "end": run.end})
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Job %s stays as it is until the server starts again.", run.job.id, exc_info=error)

    async def _expire(self) -> None:
        while True:
            try:
                for id in await self._stored(self._store.expire):
                    logger.info("Job %(job)s has expired.", {"job": id})
            except (sqlite3.Error, OSError) as error:
                self._tell(error)
            await asyncio.sleep(EXPIRE_S)

    async def _stored(self, call: Callable[..., _T], *given: object) -> _T:
        """Call a method of the store on its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, partial(call, *given))

    async def _changed(self, call: Callable[..., _T], *given: object) -> _T:
        """The same for a request. Raises Unavailable where the disk takes nothing."""
        try:
            return await self._stored(call, *given)
        except (sqlite3.Error, OSError) as error:
            self._tell(error)
            why = getattr(error, "strerror", None) or error  # without paths, which are nobody's business
            raise Unavailable("storage", f"The server cannot write: {why}.", math.ceil(DISK_RETRY_S), 507) from error

    async def _noted(self, call: Callable[..., None], *given: object) -> None:
        """The same for what becomes of a job: tried until the disk takes it."""
        while True:
            try:
                return await self._stored(call, *given)
            except sqlite3.Error as error:
                self._tell(error)
                await asyncio.sleep(DISK_RETRY_S)

    def _tell(self, error: Exception) -> None:
        """Say in the log, once a minute, that the folder cannot be written."""
        now_s = clock.monotonic_s()
        if now_s - self._told_s >= TELL_S:
            self._told_s = now_s
            logger.error("serve.jobs_dir: %s cannot be written; it is tried again: %s", self._store.folder, error)

    # ---- one job ------------------------------------------------------------------------------------------------

    async def _run(self, run: _Run) -> None:
        """Make a job, and store its result. Mutates: self."""
        try:
            await self._make(run)
            await self._noted(self._store.complete, run.job.id, run.inference_s, run.peak_memory_mb)
            run.end = "completed"
        except _RequeueJob as requeue:
            await self._put_back(run, requeue)
        except EngineFailure:
            await self._put_back(run, _RequeueJob(wait_s=ENGINE_RETRY_S))
        except RequestError as error:
            await self._fail(run, str(error))
        except (StreamdiffError, OSError, ValueError, FFmpegError) as error:
            if getattr(error, "errno", None) in NO_ROOM:
                self._tell(error)
                await self._put_back(run, _RequeueJob(attempt="the disk had no room", wait_s=DISK_RETRY_S))
                return
            logger.exception("Job %s could not be encoded.", run.job.id)
            # Without paths: who asked for it need not know where it is kept.
            why = getattr(error, "strerror", None) or type(error).__name__
            await self._fail(run, f"the video could not be written: {why}")
        except asyncio.CancelledError:
            if not run.preempted:
                raise
            await self._put_back(run, _RequeueJob())

    async def _fail(self, run: _Run, why: str) -> None:
        await self._noted(self._store.fail, run.job.id, why)
        run.end = "failed"

    async def _put_back(self, run: _Run, requeue: _RequeueJob) -> None:
        if requeue.attempt and run.job.attempts >= ATTEMPTS:
            await self._fail(run, f"{requeue.attempt} {ATTEMPTS} times while this was made")
            return
        if requeue.wait_s:
            self._not_before_s = clock.monotonic_s() + requeue.wait_s
        await self._noted(partial(self._store.put_back, run.job.id, attempt=bool(requeue.attempt)))
        run.end = "put_back"

    async def _make(self, run: _Run) -> None:
        """Open the job's session, and encode its frames to a complete file.

        Raises:
            RequestError: the engine refuses it for good.
            _RequeueJob: the engine has no memory for it now, or ended meanwhile. EngineFailure: it has ended.
            OSError, FFmpegError: the file cannot be written.
        """
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(
            self._encoders, self._write, run, lambda frames: loop.call_soon_threadsafe(run.inbox.put_nowait, frames)
        )
        # Tells the loop below, which looks why.
        writing.add_done_callback(lambda _: run.inbox.put_nowait(run.job.frames))
        try:
            await self._stream(run, writing)
            await writing
        finally:
            run.pictures.put(None)
            with contextlib.suppress(StreamdiffError, OSError, FFmpegError):
                await asyncio.shield(writing)

    def _write(self, run: _Run, encoded: Callable[[int], object]) -> None:
        """Encode a job's frames until all have come; the file has its name when it is complete and on the disk.
        `encoded` is called with the number of frames encoded so far, on this thread: an encoder's.

        Raises:
            StreamdiffError: it is not wanted any more. OSError, FFmpegError: it cannot be written.
        """

        def frames() -> Iterator[Picture]:
            for number in range(run.job.frames):
                if (picture := run.pictures.get()) is None:
                    raise StreamdiffError("the video is not wanted any more")
                yield as_rgb(picture)
                encoded(number + 1)

        path = self._store.path(run.job.id)
        write_video(path, frames(), run.job.fps, private=True)
        sync(path)

    async def _stream(self, run: _Run, writing: asyncio.Future[None]) -> None:
        """Open the job's session, take all its frames, and close it. Mutates: run."""
        session, job = run.session, run.job
        chunk_frames = self._ready().chunk_frames
        ahead_frames = AHEAD_CHUNKS * chunk_frames
        image, features = await self._stored(self._store.inputs, job)
        opening = messages.Open(
            session, job.prompt, job.seed, job.steps, max_ahead_frames=ahead_frames, background=True,
            image=image, **features.fields(),
        )  # fmt: skip
        run.in_engine, begun_s = True, clock.monotonic_s()
        try:
            await self._send(opening)  # a job that is cancelled here may have reached the engine
            taken = 0
            while taken < job.frames and not writing.done():
                match await run.inbox.get():
                    case messages.FrameBatch() as batch:
                        for picture in batch.pictures[: job.frames - taken]:
                            run.pictures.put(picture)
                            taken += 1
                        run.inference_s = round(clock.monotonic_s() - begun_s, 3)
                    case int() as encoded:
                        run.encoded = max(run.encoded, encoded)
                        # What would be made beyond the end is not asked for.
                        shown = min(encoded, job.frames + chunk_frames - ahead_frames)
                        if shown > 0 and encoded % chunk_frames == 0:
                            await self._send(messages.Shown(session, shown))
                    case Refused(code="memory"):
                        raise _RequeueJob(wait_s=NO_MEMORY_RETRY_S)
                    case Refused() as refused:
                        raise RequestError(refused.field, refused.reason, refused.code)
                    case messages.Closed(reason=why):
                        raise RequestError("session", f"the engine could not resume it: {why}")
                    case Restarting():
                        raise _RequeueJob(attempt="the engine failed")
                    case messages.Failed():
                        raise _RequeueJob
                    case _:
                        pass
        finally:
            with contextlib.suppress(EngineFailure):  # if it has ended, the session has with it
                await self._send(messages.Close(session))
            run.in_engine = False
        while not writing.done():
            if isinstance(encoded_frames := await run.inbox.get(), int):
                run.encoded = max(run.encoded, encoded_frames)
