"""A video file that feeds a session at its own pace. Knows nothing about sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import av

from streamdiff import clock
from streamdiff.errors import ConfigError
from streamdiff.server.media.video_input import MAX_PIXELS
from streamdiff.video.reader import upright

_LOOK_S = 0.1
"""Polling interval of a file input whose frames are not wanted."""
_USUAL_RATE = 25.0


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


async def play(path: str, *, loop: bool, push: Callable[[av.VideoFrame], None], wanted: Callable[[], bool]) -> None:
    """Hand a file's frames to `push` at the moments that the file says, or at once where they are late, and wait while
    they are not `wanted`; until the last one has had its time, or with `loop` for ever.

    Raises:
        ConfigError: the file cannot be read any more, or has no frame.
    """
    while True:
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
        if not loop:
            return


async def _until(time_s: float) -> None:
    if (wait_s := time_s - clock.monotonic_s()) > 0:
        await asyncio.sleep(wait_s)


def _frames(path: str) -> Iterator[tuple[float, float, av.VideoFrame]]:
    """The frames, each with its begin and end in seconds from the begin of the first one. Blocking. Raises ConfigError
    for what is no video."""
    try:
        with av.open(path, metadata_errors="replace") as container:
            if not container.streams.video:
                raise ConfigError(f"{path} has no video in it")
            stream = container.streams.video[0]
            rate = float(stream.average_rate or 0) or _USUAL_RATE
            first_s: float | None = None
            last_s = -1 / rate
            for frame in container.decode(stream):
                frame_s = frame.time
                first_s = frame_s if first_s is None else first_s
                due_s = last_s + 1 / rate if frame_s is None or first_s is None else frame_s - first_s
                last_s = max(last_s, due_s)
                yield last_s, last_s + 1 / rate, upright(frame)
    except av.FFmpegError as error:
        raise ConfigError(f"{path} cannot be read as a video: {error.strerror or error}") from None
