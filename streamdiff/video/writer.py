"""Frames to a file: mp4, webm, or numbered PNG pictures. The target is replaced only by a complete file.

Everything is written beside the target under a temporary name and moved into place at the end; an error or Ctrl-C on
the way leaves nothing. Knows nothing about sessions or models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import Path

import av
import numpy as np
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

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
_PICTURE = "%05d.png"
_NUMBER = re.compile(r"\*|%0?\d*d")
_HOW = (
    "use a name that ends in .mp4 or .webm, a folder for PNG pictures (out/), "
    "or a pattern for their names (out/frame-%05d.png)"
)


@dataclass(frozen=True)
class _Plan:
    """`write` puts frames at a temporary path, `place` moves that to where it belongs."""

    write: Callable[[Path, Iterator[Frame], Fraction], None]
    place: Callable[[Path], None]


def write_video(path: str | Path, frames: Iterable[Frame], fps: float, *, private: bool = False) -> None:
    """Write `frames` to `path`, which says the format.

    - `.mp4`: H.264, yuv420p. `.webm`: VP9, yuv420p. A picture with an odd side gets its last row or column twice.
    - a folder: `00000.png`, `00001.png` and so on. One that exists is empty, or has such pictures only, and they are
      replaced.
    - `name-%05d.png` or `name-*.png`: pictures with these names; those of the same name are replaced.

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
    target, plan = _target(path)
    with atomic_write.temporary_sibling(target) as temporary:
        if private:
            atomic_write.open_private(temporary).close()
        plan.write(temporary, _checked(frames), Fraction(fps).limit_denominator(1001))
        plan.place(temporary)


def check_target(path: str | Path, overwrite: bool = True) -> None:
    """Find out early, before frames are made, whether `write_video` would refuse `path`.

    Raises:
        ConfigError: a target that cannot be written, or without `overwrite` a video that exists.
    """
    target, _ = _target(path)
    if overwrite:
        return
    before, *after = _NUMBER.split(target.name) if target.suffix.lower() == ".png" else (target.name,)
    if not after:
        atomic_write.check_free(target)
        return
    for name in os.listdir(target.parent):
        if re.fullmatch(f"{re.escape(before)}[0-9]+{re.escape(after[0])}", name):
            atomic_write.check_free(target.with_name(name))


def _target(path: str | Path) -> tuple[Path, _Plan]:
    """Where to write, links followed, and how; pictures into a folder that exists are a pattern in it."""
    target = Path(os.path.realpath(path))
    is_folder = target.is_dir()
    plan = _plan(target, is_folder=is_folder or str(path).endswith(("/", os.sep)))
    target = target / _PICTURE if is_folder else target
    atomic_write.check_parent(target)
    return target, plan


def _plan(target: Path, is_folder: bool) -> _Plan:
    """How to write to `target`; ConfigError when its name says nothing that can be done."""
    suffix = target.suffix.lower()
    if is_folder or not (suffix or _NUMBER.search(target.name)):
        write = partial(_write_pngs, _PICTURE)
        if not os.path.lexists(target):
            return _Plan(write, partial(os.replace, dst=target))
        if not target.is_dir():
            raise ConfigError(f"{target} is a file, so it cannot be a folder of pictures; {_HOW}")
        if not all(re.fullmatch(r"[0-9]{5,}\.png", name) for name in os.listdir(target)):
            raise ConfigError(f"the folder {target} is not empty; name a new one, so that pictures do not mix")
        return _Plan(write, partial(_spread, folder=target, alone=True))
    if suffix == ".png":
        pattern = target.name.replace("*", "%05d")
        if len(_NUMBER.findall(pattern)) != 1 or pattern.count("%") != 1:
            raise ConfigError(f"{target} is one name for many pictures; {_HOW}")
        return _Plan(partial(_write_pngs, pattern), partial(_spread, folder=target.parent, alone=False))
    if suffix not in _VIDEO:
        raise ConfigError(f"{target} has the unknown ending {target.suffix!r}; {_HOW}")
    return _Plan(partial(_write_video, suffix), partial(os.replace, dst=target))


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


# ---- writers ----------------------------------------------------------------------------------------------------


def _write_video(suffix: str, path: Path, frames: Iterator[Frame], rate: Fraction) -> None:
    codec, options = _VIDEO[suffix]
    first = next(frames)  # before the file is opened: with no frames there is none
    with av.open(str(path), "w", format=suffix[1:], options=_CONTAINER_OPTIONS[suffix]) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        assert isinstance(stream, VideoStream)
        height, width = first.shape[:2]
        stream.height, stream.width, stream.pix_fmt = height + height % 2, width + width % 2, "yuv420p"
        for number, frame in enumerate(chain((first,), frames)):
            picture = av.VideoFrame.from_ndarray(_even(frame), format="rgb24")
            picture.pts, picture.time_base = number, 1 / rate
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


def _even(frame: Frame) -> Frame:
    """The frame with even sides, its last row or column repeated where needed."""
    height, width = frame.shape[:2]
    return np.ascontiguousarray(np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge"))


def _write_pngs(pattern: str, path: Path, frames: Iterator[Frame], rate: Fraction) -> None:
    path.mkdir()
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(path / (pattern % number), format="PNG", compress_level=3)


# ---- moving into place ------------------------------------------------------------------------------------------


def _spread(temporary: Path, folder: Path, alone: bool) -> None:
    """Move the pictures to `folder`; `alone`: pictures of an earlier, longer video there are removed."""
    names = sorted(os.listdir(temporary))
    for name in names:
        os.replace(temporary / name, folder / name)
    for old in {*os.listdir(folder)} - {*names, temporary.name} if alone else ():
        (folder / old).unlink()
