"""A live session sent to files and servers: each output takes the encoded packets as a viewer does, and a process
of its own (`muxer`) writes them; to a WHIP server a peer connection (`whip`) sends them. What is slow or gone is
skipped and tried again; nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import av

from streamdiff import child_process, clock
from streamdiff.atomic_write import check_room
from streamdiff.server.media.fanout import Fanout
from streamdiff.server.media.packets import EncodedFrame, PacketQueue
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.outputs.muxer import RECORD, Header
from streamdiff.server.outputs.target import Target
from streamdiff.server.outputs.whip import Publication, WhipError
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.webrtc.ice_servers import IceServers

logger = logging.getLogger(__name__)

QUEUE_PACKETS = 80
"""Encoded frames that may wait for one output, 2 s at 40 FPS; beyond that it goes on at the next key frame."""
BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
STUCK_S = 15.0
"""A writer that reads nothing for so many seconds is restarted."""
KEY_S = 2.0
"""Interval of key frames sent to an address, as receivers there cannot request one."""
POLL_S = 1.0
ROOM_S = 1.0
"""How often a recording looks whether the disk has room."""
TELL_S = 60.0
"""How often the log says the same of an output."""
EXIT_S = 3.0


@dataclass
class OutputStatus:
    """State of an output, as `/api/state` shows it."""

    name: str
    state: Literal["waiting", "sending", "retrying", "ended"] = "waiting"
    frames: int = 0
    dropped: int = 0
    restarts: int = 0
    reason: str = ""


class Output:
    """One target. `find_session` returns the session, or None while there is none; `allows`: see `Publication`;
    `ice_servers` are for WHIP."""

    def __init__(
        self,
        target: Target,
        find_session: Callable[[], LiveSession | None],
        metrics: Metrics,
        allows: Callable[[str], bool],
        ice_servers: IceServers | None = None,
    ) -> None:
        self.status, self._allows = OutputStatus(target.name), allows
        self.target, self._find_session, self._metrics = target, find_session, metrics
        self._ice_servers = ice_servers or IceServers(())
        self._queue = PacketQueue(QUEUE_PACKETS)
        self._available = asyncio.Event()
        self._fanout: Fanout | None = None
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"output-{target.name}")

    def put(self, encoded: EncodedFrame) -> None:
        """Take one packet, or skip to the next key frame; called by the fan-out."""
        dropped = self._queue.dropped
        if self._queue.put(encoded) and self._fanout is not None:
            self._fanout.request_key(self.target.codec)
        self._count(0, self._queue.dropped - dropped)
        self._available.set()

    def line_bps(self, now_s: float) -> None:
        """An output does not say what its line carries: it must not lower the viewers' picture."""

    async def stop(self) -> None:
        """Write what came so far, and end."""
        self._stopping.set()
        self._available.set()
        if self.target.container == "whip":  # nothing is left to write, and an answer may be long in coming
            self._task.cancel()
        _, late = await asyncio.wait({self._task}, timeout=2 * EXIT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.status.state = "ended"

    async def _run(self) -> None:
        attempt, failures, told = 0, 0, ("", 0.0)
        while not self._stopping.is_set():
            session = self._find_session()
            if session is None or session.closed:
                await self._sleep(BACK_OFF_S[0])
                continue
            begun_s = clock.monotonic_s()
            reason = await (self._publish(session) if self.target.container == "whip" else self._send(session, attempt))
            self._metrics.output_up.labels(self.status.name).set(0)
            if self._stopping.is_set():
                break
            if reason is None:
                self.status.state, attempt = "waiting", attempt + 1
                continue
            failures = 1 if clock.monotonic_s() - begun_s > BACK_OFF_S[-1] else failures + 1
            attempt += 1
            self.status.state, self.status.reason, self.status.restarts = "retrying", reason, attempt
            wait_s = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
            if reason != told[0] or clock.monotonic_s() - told[1] >= TELL_S:
                told = reason, clock.monotonic_s()
                logger.warning("Output %s broke off: %s. Tried again in %g s.", self.status.name, reason, wait_s)
            await self._sleep(wait_s)

    async def _sleep(self, seconds: float) -> None:
        """Wait, or until the end is asked for."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _poll(self) -> None:
        """Wait for a packet, or `POLL_S`: session and writer may end without one."""
        self._available.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._available.wait()

    async def _send(self, session: LiveSession, attempt: int) -> str | None:
        """Write the session until something fails; says what. None: the session has ended."""
        try:
            await self._check_room()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "streamdiff.server.outputs.muxer"),
                env=child_process.environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:  # no more processes, files or memory
            if error.errno == errno.ENOSPC:
                return str(error.strerror)
            return f"its writer cannot be started: {error.strerror}"
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        stderr = asyncio.create_task(process.stderr.read())
        written = asyncio.create_task(self._count_written(process.stdout))
        self._queue = PacketQueue(QUEUE_PACKETS)
        self._fanout = session.playback.fanout
        reason = ""
        try:
            session.playback.fanout.attach(self.target.codec, self)
            fmt, target = session.playback.format, self.target
            size, options = (fmt.width * fmt.scale, fmt.height * fmt.scale), dict(target.options)
            where = (target.attempt(attempt), target.container, target.codec)
            process.stdin.write(Header(*where, *size, fmt.fps, options).line())
            await self._feed(process, session)
        except av.FFmpegError as error:
            reason = f"its encoder failed: {error}"
        except TimeoutError:
            reason = f"the other side took nothing for {STUCK_S:g} s"
        except OSError as error:  # else the writer has ended, and says why
            reason = str(error.strerror) if error.errno == errno.ENOSPC else ""
        finally:
            session.playback.fanout.detach(self.target.codec, self)
            self._fanout = None
            process.stdin.close()
            await _end(process)
            await written
        if session.closed:
            return None
        lines = (await stderr).decode(errors="replace").splitlines()
        return reason or (lines[-1] if lines else f"the writer ended with code {process.returncode}")

    async def _feed(self, process: asyncio.subprocess.Process, session: LiveSession) -> None:
        """Hand over packets until the end is asked for, the session ends or the writer does.

        Raises:
            TimeoutError: the writer takes nothing. OSError: it is gone, or the disk has no room.
        """
        assert process.stdin is not None
        key_s = looked_s = clock.monotonic_s()
        while not self._stopping.is_set() and not session.closed and process.returncode is None:
            encoded = self._queue.get()
            if encoded is None:
                await self._poll()
                continue
            now_s = clock.monotonic_s()
            if now_s - looked_s >= ROOM_S:
                looked_s = now_s
                await self._check_room()
            if encoded.key:
                key_s = now_s
            elif not self.target.is_file and now_s - key_s > KEY_S:
                session.playback.fanout.request_key(self.target.codec)
            data = bytes(encoded.packet)
            process.stdin.write(RECORD.pack(encoded.pts, encoded.key, len(data)) + data)
            async with asyncio.timeout(STUCK_S):  # `wait_for` would make a task for every packet
                await process.stdin.drain()

    async def _count_written(self, reports: asyncio.StreamReader) -> None:
        """Count what the writer reports: a byte for each packet that its target took. Mutates: self."""
        while written := await reports.read(4096):
            self._count(len(written), 0)

    async def _check_room(self) -> None:
        """Raises OSError (ENOSPC) where this is a recording whose disk has no room for more."""
        if self.target.is_file:
            await asyncio.to_thread(check_room, Path(self.target.url).parent)

    async def _publish(self, session: LiveSession) -> str | None:
        """Publish the session until something fails; says what. None: the session has ended."""
        ice_servers = self._ice_servers.to_ask()
        fanout, codec = session.playback.fanout, self.target.codec
        publication = Publication(self.target.url, fanout, codec, self._allows, ice_servers)
        frames, dropped = CounterDelta(), CounterDelta()
        try:
            await publication.open()
            while not self._stopping.is_set() and not session.closed:
                if reason := publication.fault(clock.monotonic_s()):
                    return reason
                await self._poll()
                track = publication.track
                self._count(int(frames.increase(track.sent)), int(dropped.increase(track.dropped)))
        except WhipError as error:
            return str(error)
        finally:
            await publication.close()
        return None

    def _count(self, frames: int, dropped: int) -> None:
        """What went out and what did not. Mutates: self."""
        if frames:
            self.status.state, self.status.reason = "sending", ""
            self.status.frames += frames
            self._metrics.output_up.labels(self.status.name).set(1)
            self._metrics.output_frames.labels(self.status.name).inc(frames)
        if self.status.frames:  # what came before the first key frame is not missing
            self.status.dropped += dropped
            self._metrics.output_dropped.labels(self.status.name).inc(dropped)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Wait for a writer whose input has ended; one that hangs is killed."""
    try:
        await asyncio.wait_for(process.wait(), EXIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
