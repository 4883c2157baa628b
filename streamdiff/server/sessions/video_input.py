"""Video that feeds a session, from a connection or a file, as the frames that its model takes.

Newest wins: at each moment that a frame of the session is due the latest that came is taken, one perhaps twice. When
none comes any more, none is handed on, and the session's picture holds. Knows nothing about connections or sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np

from streamdiff import clock
from streamdiff.engine.messages import InputUsed, Pictures
from streamdiff.errors import ConfigError
from streamdiff.server.tasks import end_tasks
from streamdiff.video.files import upright

PIECE_FRAMES = 4
"""Frames that are handed on together: a latent frame's."""
HOLD_S = 0.5
"""A source that sends nothing for so long has paused."""
MAX_PIXELS = 3840 * 2160
_RATE_S = 2.0
"""Over so long the source's rate is measured."""
_LOOK_S = 0.1
"""Polling interval of a file input whose frames are not wanted."""
_USUAL_RATE = 25.0


class VideoInput:
    """One source's frames. Lives on the event loop, from `begin` to `close`.

    Frames that are larger than MAX_PIXELS, cannot be converted, or come faster than they are decoded, are left out, and
    `left_out` counts them.
    """

    def __init__(
        self,
        kind: str,
        size: tuple[int, int],
        fps: Callable[[], float],
        hand_on: Callable[[Pictures], Awaitable[None]],
        wanted: Callable[[], bool],
        end: Callable[[str], Awaitable[None]],
    ) -> None:
        """`hand_on` gets PIECE_FRAMES frames `[n, height, width, 3]`, RGB, of the `size` (width, height), `fps()` of
        them in a second, while they are `wanted`. `end` ends it for a reason, with what sends it."""
        self.kind, self.end = kind, end
        self.used = InputUsed("", level=None, used=0, dropped=0)
        """The engine's last report."""
        self._size, self._fps, self._hand_on, self._wanted = size, fps, hand_on, wanted
        self._tasks: list[asyncio.Task[None]] = []
        self._newest: av.VideoFrame | None = None
        self._came = asyncio.Event()
        self._came_s = float("-inf")
        self._window: tuple[float, int] = (clock.monotonic_s(), 0)
        self._rate = 0.0  # frames per second that came of late
        self._source_size: tuple[int, int] | None = None
        self.left_out = 0

    def begin(self, *sources: Coroutine[Any, Any, None]) -> None:
        """Hand frames on; `sources` run as long. Mutates: self."""
        self._tasks = [asyncio.create_task(each, name="input") for each in (self._run(), *sources)]

    def end_soon(self, reason: str) -> None:
        """`end` it, without waiting for that. Mutates: self."""
        self._ending = asyncio.ensure_future(self.end(reason))

    @property
    def begun(self) -> bool:
        """Whether it hands frames on."""
        return bool(self._tasks)

    async def close(self) -> None:
        """End the tasks."""
        await end_tasks(*(task for task in self._tasks if task is not asyncio.current_task()))

    @property
    def holds(self) -> bool:
        """Whether nothing has come for HOLD_S."""
        return clock.monotonic_s() - self._came_s > HOLD_S

    def push(self, frame: av.VideoFrame) -> None:
        """A frame has come. Mutates: self."""
        now_s = clock.monotonic_s()
        begin_s, count = self._window
        if now_s - begin_s >= _RATE_S:
            self._rate, self._window = count / (now_s - begin_s), (now_s, 0)
        else:
            self._window = begin_s, count + 1
        self._source_size = frame.width, frame.height
        if frame.width * frame.height > MAX_PIXELS:
            self.left_out += 1
            return
        self._newest, self._came_s = frame, now_s
        self._came.set()

    def leave_out(self, count: int) -> None:
        """So many frames have come and will not be decoded. Mutates: self."""
        self.left_out += count

    def state(self, may_control: bool) -> dict[str, Any]:
        """JSON-able; the reason of a fault is only for callers that `may_control` the session."""
        return {"kind": self.kind, "fault": self.used.fault if may_control or not self.used.fault else "failed"}

    def figures(self) -> dict[str, Any]:
        """JSON-able statistics."""
        return {
            "fps": round(self._rate, 1),
            "size": None if self._source_size is None else list(self._source_size),
            "holds": self.holds,
            "left_out": self.left_out,
            "level": None if self.used.level is None else round(self.used.level, 3),
            "used": self.used.used,
            "dropped": self.used.dropped,
        }

    async def _run(self) -> None:
        taken: av.VideoFrame | None = None
        picture: Pictures | None = None
        pieces: list[Pictures] = []
        due_s = clock.monotonic_s()
        while True:
            if self.holds or not self._wanted():
                self._came.clear()
                await self._came.wait()
                due_s = clock.monotonic_s()
                continue
            if self._newest is not taken:
                taken = self._newest
                assert taken is not None
                try:
                    picture = await asyncio.to_thread(fit_frame, taken, *self._size)
                except (av.FFmpegError, ValueError):
                    self.left_out += 1
            if picture is not None:
                pieces.append(picture)
            if len(pieces) == PIECE_FRAMES:
                await self._hand_on(np.stack(pieces))
                pieces = []
            due_s = max(due_s + 1 / self._fps(), clock.monotonic_s() - HOLD_S)
            await asyncio.sleep(max(0.0, due_s - clock.monotonic_s()))


def fit_frame(frame: av.VideoFrame, width: int, height: int) -> Pictures:
    """A frame as RGB `[height, width, 3]`: scaled to cover that size, and what is over is cut on both sides alike.

    Raises:
        ValueError: it would have more than MAX_PIXELS before it is cut.
        av.FFmpegError: it is damaged, or its pixel format is not known.
    """
    scale = max(width / frame.width, height / frame.height)
    wide, high = max(width, round(frame.width * scale)), max(height, round(frame.height * scale))
    if wide * high > MAX_PIXELS:
        raise ValueError(f"a frame of {frame.width} x {frame.height} is too narrow for {width} x {height}")
    scaled = frame.reformat(wide, high, "rgb24").to_ndarray()
    top, left = (high - height) // 2, (wide - width) // 2
    return np.ascontiguousarray(scaled[top : top + height, left : left + width])


def check_video(path: str) -> None:
    """Raises ConfigError where there is no video file with a frame in it, or the frame has more than MAX_PIXELS."""
    if not Path(path).is_file():
        raise ConfigError(f"session.input: {path} is no file; give a video file")
    first = next(_frames(path), None)
    if first is None:
        raise ConfigError(f"session.input: {path} has no picture in it; give a video file")
    width, height = first[2].width, first[2].height
    if width * height > MAX_PIXELS:
        raise ConfigError(f"session.input: {path} has {width} x {height}; give a video of at most 3840 x 2160")


async def play(path: str, *, push: Callable[[av.VideoFrame], None], wanted: Callable[[], bool]) -> None:
    """Hand a file's frames to `push` at the moments that the file says, or at once where they are late, and wait while
    they are not `wanted`; until the last one has had its time.

    Raises:
        ConfigError: the file cannot be read, or has no frame.
    """
    frames, begun_s, end_s, count = _frames(path), clock.monotonic_s(), 0.0, 0
    while (timed := await asyncio.to_thread(next, frames, None)) is not None:
        time_s, end_s, frame = timed
        count += 1
        while not wanted():
            await asyncio.sleep(_LOOK_S)
            begun_s = clock.monotonic_s() - time_s
        await _until(begun_s + time_s)
        push(frame)
    if not count:
        raise ConfigError(f"{path} has no picture in it")
    await _until(begun_s + end_s)


async def _until(time_s: float) -> None:
    if (wait_s := time_s - clock.monotonic_s()) > 0:
        await asyncio.sleep(wait_s)


def _frames(path: str) -> Iterator[tuple[float, float, av.VideoFrame]]:
    """The frames, each with its begin and end in seconds from the begin of the first one. Blocking. Packets that cannot
    be decoded are left out, and so is what comes after a place from which nothing more can be read, as at the end of a
    file that was cut off. Raises ConfigError for what is no video."""
    first_s: float | None = None
    last_s: float | None = None
    try:
        with av.open(path, metadata_errors="replace") as container:
            if not container.streams.video:
                raise ConfigError(f"{path} has no video in it")
            stream = container.streams.video[0]
            step_s = 1 / (float(stream.average_rate or 0) or _USUAL_RATE)
            for packet in container.demux(stream):
                try:
                    decoded = packet.decode()
                except av.FFmpegError:
                    continue
                for frame in decoded:
                    first_s = frame.time if first_s is None else first_s
                    next_s = 0.0 if last_s is None else last_s + step_s
                    due_s = next_s if frame.time is None or first_s is None else frame.time - first_s
                    last_s = due_s if last_s is None else max(last_s, due_s)
                    yield last_s, last_s + step_s, upright(frame)
    except av.FFmpegError as error:
        if last_s is None:
            raise ConfigError(f"{path} cannot be read as a video: {error.strerror or error}") from None
