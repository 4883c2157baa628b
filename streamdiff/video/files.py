"""Frames to and from a file: mp4, webm (others are read too), or numbered PNG pictures. Knows nothing about sessions or
models.

Everything is written beside the target under a temporary name and moved into place at the end, so the target is
replaced only by a complete file; an error or Ctrl-C on the way leaves nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from streamdiff import atomic_write
from streamdiff.errors import ConfigError

LOWEST_FPS, HIGHEST_FPS = 0.001, 1000
"""A rate is written as a fraction whose denominator is at most 1001: one much lower would be 0."""
Frame = NDArray[np.uint8]

_VIDEO: dict[str, tuple[str, dict[str, str]]] = {
    ".mp4": ("libx264", {"preset": "medium", "crf": "18"}),
    ".webm": ("libvpx-vp9", {"crf": "24", "b": "0", "deadline": "good", "cpu-used": "5", "row-mt": "1"}),
}
_CONTAINER_OPTIONS: dict[str, dict[str, str]] = {".mp4": {"movflags": "+faststart"}, ".webm": {}}
_PICTURES = ""
_HOW = "use a name that ends in .mp4 or .webm, or a folder for PNG pictures (out/)"


def write_video(path: str | Path, frames: Iterable[Frame], fps: float, *, private: bool = False) -> None:
    """Write `frames` to `path`, which says the format.

    - `.mp4`: H.264, yuv420p. `.webm`: VP9, yuv420p. A picture with an odd side gets its last row or column twice.
    - a folder: `00000.png`, `00001.png` and so on. One that exists is empty, or has such pictures only, and they are
      replaced.

    Args:
        frames: uint8 `[H, W, 3]`, RGB, all of one size, at least one.
        fps: frames per second, `LOWEST_FPS` to `HIGHEST_FPS`; PNG pictures do not use it.
        private: a video file is for its user alone to read, whatever the umask says.

    Raises:
        ConfigError: a target that cannot be written, or an fps that cannot be; raised before a frame is taken.
        ValueError: no frames, or frames that are not as above.
    """
    if not LOWEST_FPS <= fps <= HIGHEST_FPS:
        raise ConfigError(f"fps is {fps}; it must be at least {LOWEST_FPS} and at most {HIGHEST_FPS}")
    target, kind = _target(path)
    # Into a folder that is there pictures are moved one by one: it may be a volume, which cannot be replaced.
    is_there = target.is_dir()
    with atomic_write.temporary_sibling(target / "pictures" if is_there else target) as temporary:
        if private:
            atomic_write.open_private(temporary).close()
        if kind == _PICTURES:
            temporary.mkdir()
            for number, frame in enumerate(_checked(frames)):
                Image.fromarray(frame).save(temporary / f"{number:05d}.png", compress_level=3)
        else:
            _write_video(kind, temporary, _checked(frames), Fraction(fps).limit_denominator(1001))
        if not is_there:
            os.replace(temporary, target)
            return
        names = os.listdir(temporary)
        for name in names:
            os.replace(temporary / name, target / name)
        for old in {*os.listdir(target)} - {*names, temporary.name}:  # of an earlier, longer video
            (target / old).unlink()


def check_target(path: str | Path, overwrite: bool = True) -> None:
    """Find out early, before frames are made, whether `write_video` would refuse `path`.

    Raises:
        ConfigError: a target that cannot be written, or without `overwrite` a video that exists.
    """
    target, _ = _target(path)
    if not overwrite and not (target.is_dir() and not os.listdir(target)):
        atomic_write.check_free(target)


def _target(path: str | Path) -> tuple[Path, str]:
    """Where to write, links followed, and what: `.mp4`, `.webm`, or `_PICTURES`, a folder, which may be there.

    Raises:
        ConfigError: nothing can be written there, or the name says nothing that can be done.
    """
    target = Path(os.path.realpath(path))
    kind = target.suffix.lower()
    if target.is_dir():
        if not all(re.fullmatch(r"[0-9]{5,}\.png", name) for name in os.listdir(target)):
            raise ConfigError(f"the folder {target} is not empty; name a new one, so that pictures do not mix")
        atomic_write.check_parent(target / "pictures")
        return target, _PICTURES
    if str(path).endswith(("/", os.sep)) or not kind:
        kind = _PICTURES
        if os.path.lexists(target):
            raise ConfigError(f"{target} is a file, so it cannot be a folder of pictures; {_HOW}")
    elif kind not in _VIDEO:
        raise ConfigError(f"{target} has the unknown ending {target.suffix!r}; {_HOW}")
    atomic_write.check_parent(target)
    return target, kind


def _checked(frames: Iterable[Frame]) -> Iterator[Frame]:
    """The frames, each of the kind and size of the first.

    Raises:
        ValueError: another kind or size, or no frame at all.
    """
    size: tuple[int, ...] | None = None
    for number, frame in enumerate(frames):
        size = frame.shape if size is None else size
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or frame.size == 0:
            raise ValueError(f"frame {number} is {frame.dtype} {list(frame.shape)}; frames are uint8 [H, W, 3]")
        if frame.shape != size:
            raise ValueError(f"frame {number} has shape {list(frame.shape)}, the first one {list(size)}")
        yield frame
    if size is None:
        raise ValueError("there are no frames to write")


def _write_video(suffix: str, path: Path, frames: Iterator[Frame], rate: Fraction) -> None:
    codec, options = _VIDEO[suffix]
    first = next(frames)  # before the file is opened: with no frames there is none
    with av.open(str(path), "w", format=suffix[1:], options=_CONTAINER_OPTIONS[suffix]) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        assert isinstance(stream, av.VideoStream)
        height, width = first.shape[:2]
        stream.height, stream.width, stream.pix_fmt = height + height % 2, width + width % 2, "yuv420p"
        for number, frame in enumerate(chain((first,), frames)):
            even = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")
            picture.pts, picture.time_base = number, 1 / rate
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


# ---- reading ----------------------------------------------------------------------------------------------------


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
    except av.FFmpegError as error:
        raise ConfigError(f"{path} cannot be read as a video: {error.strerror or error}") from None
