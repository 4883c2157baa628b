"""A video file that feeds a session at its own pace. Knows nothing about sessions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
_AGAIN_S = 1.0
"""Pause before a loop tries a file again that could not be read."""

logger = logging.getLogger(__name__)


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
    they are not `wanted`; until the last one has had its time, or with `loop` for ever, also while the file is away.

    Raises:
        ConfigError: the file cannot be read, or has no frame, and is not to be played again.
    """
    said = ""
    while True:
        try:
            await _play_once(path, push, wanted)
            said = ""
        except ConfigError as error:
            if not loop:
                raise
            if str(error) != said:
                logger.warning("%s. It is tried again every %g s.", error, _AGAIN_S)
            said = str(error)
            await asyncio.sleep(_AGAIN_S)
        if not loop:
            return


async def _play_once(path: str, push: Callable[[av.VideoFrame], None], wanted: Callable[[], bool]) -> None:
    """See `play`."""
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
    be decoded are left out, and so is what comes after a place from which nothing more can be read. Raises ConfigError
    for what is no video."""
    try:
        with av.open(path, metadata_errors="replace") as container:
            if not container.streams.video:
                raise ConfigError(f"{path} has no video in it")
            stream = container.streams.video[0]
            rate = float(stream.average_rate or 0) or _USUAL_RATE
            first_s: float | None = None
            last_s = -1 / rate
            for frame in _decoded(container, stream):
                frame_s = frame.time
                first_s = frame_s if first_s is None else first_s
                due_s = last_s + 1 / rate if frame_s is None or first_s is None else frame_s - first_s
                last_s = max(last_s, due_s)
                yield last_s, last_s + 1 / rate, upright(frame)
    except av.FFmpegError as error:
        raise ConfigError(f"{path} cannot be read as a video: {error.strerror or error}") from None


def _decoded(container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[av.VideoFrame]:
    packets, decoded = container.demux(stream), False
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError:
            if decoded:  # as at the end of a file that was cut off
                return
            raise
        if packet is None:
            return
        with contextlib.suppress(av.FFmpegError):
            for frame in packet.decode():
                decoded = True
                yield frame
