"""A live session sent to files and servers: each output takes the encoded packets as a viewer does, and a process
of its own (`muxing`) writes them; to a WHIP server a peer connection (`whip`) sends them. What is slow or gone is
skipped and tried again; nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from streamdiff import child_process, clock
from streamdiff.server.media.fanout import Fanout
from streamdiff.server.media.packets import EncodedFrame, PacketQueue
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.outputs.muxer import RECORD, Header
from streamdiff.server.outputs.target import Target
from streamdiff.server.outputs.whip import Publication, WhipError
from streamdiff.server.sessions.live_session import LiveSession

logger = logging.getLogger(__name__)

QUEUE_PACKETS = 80
"""Encoded frames that may wait for one output, 2 s at 40 FPS; beyond that it goes on at the next key frame."""
BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
STUCK_S = 15.0
"""A writer that takes nothing for so long is ended and started again."""
KEY_S = 2.0
"""An address is sent a key frame this often: who joins there cannot ask for one."""
LOOK_S = 1.0
FAREWELL_S = 3.0


@dataclass
class Sent:
    """How an output is doing."""

    name: str
    state: Literal["waiting", "sending", "retrying", "ended"] = "waiting"
    frames: int = 0
    dropped: int = 0
    restarts: int = 0
    reason: str = ""


class Output:
    """One target. `view` gives the session, or None while there is none."""

    def __init__(self, target: Target, view: Callable[[], LiveSession | None], metrics: Metrics) -> None:
        self.sent = Sent(target.name)
        self._target = target
        self._view = view
        self._metrics = metrics
        self._queue = PacketQueue(QUEUE_PACKETS)
        self._arrived = asyncio.Event()
        self._fanout: Fanout | None = None
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"output-{target.name}")

    def put(self, encoded: EncodedFrame) -> None:
        """Take one packet, or skip to the next key frame; called by the fan-out."""
        dropped = self._queue.dropped
        if self._queue.put(encoded) and self._fanout is not None:
            self._fanout.request_key(self._target.codec)
        self._count(0, self._queue.dropped - dropped)
        self._arrived.set()

    def line_bps(self, now_s: float) -> None:
        """An output does not say what its line carries: it must not lower the viewers' picture."""

    async def stop(self) -> None:
        """Write what came so far, and end."""
        self._stopping.set()
        self._arrived.set()
        if self._target.container == "whip":  # nothing is left to write, and an answer may be long in coming
            self._task.cancel()
        _, late = await asyncio.wait({self._task}, timeout=2 * FAREWELL_S)
        for task in late:
            task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.sent.state = "ended"

    async def _run(self) -> None:
        attempt, failures = 0, 0
        while not self._stopping.is_set():
            view = self._view()
            if view is None or view.closed:
                await self._sleep(BACK_OFF_S[0])
                continue
            begun_s = clock.monotonic_s()
            reason = await (self._publish(view) if self._target.container == "whip" else self._send(view, attempt))
            self._metrics.output_up.labels(self.sent.name).set(0)
            if self._stopping.is_set():
                break
            if reason is None:
                self.sent.state, attempt = "waiting", attempt + 1
                continue
            failures = 1 if clock.monotonic_s() - begun_s > BACK_OFF_S[-1] else failures + 1
            attempt += 1
            self.sent.state, self.sent.reason, self.sent.restarts = "retrying", reason, attempt
            wait_s = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
            logger.warning("Output %s broke off: %s. Tried again in %g s.", self.sent.name, reason, wait_s)
            await self._sleep(wait_s)

    async def _sleep(self, seconds: float) -> None:
        """Wait, or until the end is asked for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._stopping.is_set():
                    self._arrived.clear()
                    await self._arrived.wait()

    async def _send(self, view: LiveSession, attempt: int) -> str | None:
        """Write the session until something fails; says what. None: the session has ended."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "streamdiff.server.outputs.muxer"),
            env=child_process.environment(),
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None and process.stderr is not None
        complaints = asyncio.create_task(process.stderr.read())
        self._queue = PacketQueue(QUEUE_PACKETS)
        self._fanout = view.fanout
        view.fanout.attach(self._target.codec, self)
        reason = ""
        try:
            process.stdin.write(self._header(view, attempt).line())
            await self._feed(process, view)
        except TimeoutError:
            reason = f"the other side took nothing for {STUCK_S:g} s"
        except OSError:
            pass  # the writer has ended; it says why
        finally:
            view.fanout.detach(self._target.codec, self)
            self._fanout = None
            process.stdin.close()
            await _end(process)
        if view.closed:
            return None
        lines = (await complaints).decode(errors="replace").splitlines()
        return reason or (lines[-1] if lines else f"the writer ended with code {process.returncode}")

    def _header(self, view: LiveSession, attempt: int) -> Header:
        fmt, target = view.format, self._target
        width, height = fmt.width * fmt.scale, fmt.height * fmt.scale
        return Header(
            target.attempt(attempt), target.container, target.codec, width, height, fmt.fps, dict(target.options)
        )

    async def _feed(self, process: asyncio.subprocess.Process, view: LiveSession) -> None:
        """Hand over packets until the end is asked for, the session ends or the writer does.

        Raises:
            TimeoutError: the writer takes nothing. OSError: it is gone.
        """
        assert process.stdin is not None
        key_s = clock.monotonic_s()
        while not self._stopping.is_set() and not view.closed and process.returncode is None:
            encoded = self._queue.get()
            if encoded is None:
                self._arrived.clear()
                with contextlib.suppress(TimeoutError):  # nothing is made; perhaps the session or the writer has ended
                    async with asyncio.timeout(LOOK_S):
                        await self._arrived.wait()
                continue
            now_s = clock.monotonic_s()
            if encoded.key:
                key_s = now_s
            elif not self._target.is_file and now_s - key_s > KEY_S:
                view.fanout.request_key(self._target.codec)
            data = bytes(encoded.packet)
            process.stdin.write(RECORD.pack(encoded.pts, encoded.key, len(data)) + data)
            async with asyncio.timeout(STUCK_S):
                await process.stdin.drain()
            self._count(1, 0)

    async def _publish(self, view: LiveSession) -> str | None:
        """Publish the session until something fails; says what. None: the session has ended."""
        publication = Publication(self._target.url, view.fanout, self._target.codec)
        frames, dropped = CounterDelta(), CounterDelta()
        try:
            await publication.open()
            while not self._stopping.is_set() and not view.closed:
                if reason := publication.fault(clock.monotonic_s()):
                    return reason
                self._arrived.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._arrived.wait()
                track = publication.track
                self._count(int(frames.more(track.sent)), int(dropped.more(track.dropped)))
        except WhipError as error:
            return str(error)
        finally:
            await publication.close()
        return None

    def _count(self, frames: int, dropped: int) -> None:
        """What went out and what did not. Mutates: self."""
        if frames:
            self.sent.state, self.sent.frames = "sending", self.sent.frames + frames
            self._metrics.output_up.labels(self.sent.name).set(1)
            self._metrics.output_frames.labels(self.sent.name).inc(frames)
        if self.sent.frames:  # what came before the first key frame is not missing
            self.sent.dropped += dropped
            self._metrics.output_dropped.labels(self.sent.name).inc(dropped)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for a writer whose input has ended; one that hangs is killed."""
    try:
        async with asyncio.timeout(FAREWELL_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


class Outputs:
    """All outputs of a server. Made on the running event loop."""

    def __init__(self, targets: Sequence[Target], view: Callable[[], LiveSession | None], metrics: Metrics) -> None:
        self._outputs = [Output(target, view, metrics) for target in targets]

    def states(self) -> list[Sent]:
        """How each is doing."""
        return [output.sent for output in self._outputs]

    async def stop(self) -> None:
        """Write what came so far, and end."""
        await asyncio.gather(*(output.stop() for output in self._outputs))
