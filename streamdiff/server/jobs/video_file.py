"""A job's frames into a file while they come, on a thread that yields to everything that is live."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from streamdiff.errors import StreamdiffError
from streamdiff.server.jobs.store import sync
from streamdiff.server.media.encoder import Picture, as_rgb
from streamdiff.video.files import write_video

NICENESS = 10
"""How much less of the CPU an encoder gets than the server's other threads, where they compete (Linux)."""


class EncodingAborted(StreamdiffError):
    """A video is not wanted any more."""


def encoding_threads(count: int) -> ThreadPoolExecutor:
    """Threads for so many `VideoFile.write`, of lower priority than others where the system can do that."""
    return ThreadPoolExecutor(count, "job-encoder", initializer=_yield_to_others)


def _yield_to_others() -> None:
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class VideoFile:
    """One video. `put` and `abort` from any thread; `write` on a thread of its own, once."""

    def __init__(self, path: Path, fps: float, frames: int, encoded: Callable[[int], object]) -> None:
        """`frames` are expected; `encoded` is called on the writing thread with the number of frames encoded so far."""
        self._path, self._fps, self._frames, self._encoded = path, fps, frames, encoded
        self._pictures: queue.SimpleQueue[Picture | None] = queue.SimpleQueue()

    def put(self, pictures: NDArray[np.uint8]) -> None:
        """The next pictures, uint8 `[n, *P]`, P as in `streamdiff.video.pixel_format`. Never waits: whoever makes them
        is told by `encoded` how many may come."""
        for picture in pictures:
            self._pictures.put(picture)

    def abort(self) -> None:
        """Let `write` end without a file."""
        self._pictures.put(None)

    def write(self) -> None:
        """Encode until all frames have come; the file has its name when it is complete and on the disk.

        Raises:
            EncodingAborted: `abort` came first.
            OSError, FFmpegError: it cannot be written.
        """
        write_video(self._path, self._rgb(), self._fps, private=True)
        sync(self._path)

    def _rgb(self) -> Iterator[NDArray[np.uint8]]:
        for number in range(self._frames):
            picture = self._pictures.get()
            if picture is None:
                raise EncodingAborted("the video was given up")
            yield as_rgb(picture)
            self._encoded(number + 1)
