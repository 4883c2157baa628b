"""A video file, or a folder of PNG pictures, as frames: the way back from `video/writer.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from av.error import FFmpegError
from PIL import Image, UnidentifiedImageError

from streamdiff.errors import ConfigError
from streamdiff.video.writer import Frame


@dataclass(frozen=True)
class Clip:
    """Frames that can be read once or again; `frames` is None where the file does not say how many it has."""

    path: Path
    frames: int | None
    width: int
    height: int

    def __iter__(self) -> Iterator[Frame]:
        """uint8 `[H, W, 3]`, RGB, all of one size.

        Raises:
            ConfigError: a picture that is damaged or of another size than the first.
        """
        read = _pictures(self.path) if self.path.is_dir() else _decoded(self.path)
        for number, frame in enumerate(read):
            if frame.shape != (self.height, self.width, 3):
                raise ConfigError(
                    f"{self.path}: frame {number} is {frame.shape[1]} x {frame.shape[0]}, the first one "
                    f"{self.width} x {self.height}"
                )
            yield frame


def open_clip(path: Path) -> Clip:
    """What is at `path`: a folder of PNG pictures, in the order of the numbers in their names, or a video file.

    Raises:
        ConfigError: nothing there, no pictures in the folder, or a file that is no video.
    """
    if path.is_dir():
        count = len(_names(path))
        if not count:
            raise ConfigError(f"the folder {path} has no .png pictures")
        height, width, _ = next(_pictures(path)).shape
        return Clip(path, count, width, height)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected a video file or a folder of .png pictures")
    frame = next(_decoded(path), None)
    if frame is None:
        raise ConfigError(f"{path} has no frame in it")
    with av.open(str(path), metadata_errors="replace") as container:
        count = container.streams.video[0].frames
    return Clip(path, count or None, frame.shape[1], frame.shape[0])


def _names(folder: Path) -> list[Path]:
    """The pictures by name, numbers in it by size: frame-9 before frame-10."""

    def key(path: Path) -> list[str | int]:
        # Odd places are numbers, even ones are not, so no number is ever compared with a text.
        return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", path.name))]

    return sorted((path for path in folder.iterdir() if path.suffix.lower() == ".png"), key=key)


def _pictures(folder: Path) -> Iterator[Frame]:
    for path in _names(folder):
        try:
            with Image.open(path) as picture:
                yield np.asarray(picture.convert("RGB"))
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ConfigError(f"{path} cannot be read as a picture: {error}") from None


def upright(frame: av.VideoFrame) -> av.VideoFrame:
    """A frame as it is to be seen: phones write what they took upright lying, with a matrix that turns it. One that
    turns it by something else than quarters is not heeded."""
    quarters = round(frame.rotation / 90)
    if not quarters or abs(frame.rotation - 90 * quarters) > 1:
        return frame
    turned: Frame = np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), quarters))
    made = av.VideoFrame.from_ndarray(turned, format="rgb24")
    made.pts, made.time_base = frame.pts, frame.time_base
    return made


def _decoded(path: Path) -> Iterator[Frame]:
    try:
        with av.open(str(path), metadata_errors="replace") as container:
            if not container.streams.video:
                raise ConfigError(f"{path} has no video in it")
            for frame in container.decode(container.streams.video[0]):
                yield upright(frame).to_ndarray(format="rgb24").astype(np.uint8, copy=False)
    except FFmpegError as error:
        raise ConfigError(f"{path} cannot be read as a video: {error.strerror or error}") from None
