"""Videos and pictures come back as the frames they were written from."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from streamdiff.errors import ConfigError
from streamdiff.video.reader import open_clip
from streamdiff.video.writer import write_video


def paint(count: int, height: int = 32, width: int = 48) -> list[np.ndarray]:
    """Plain pictures, brighter and brighter."""
    return [np.full((height, width, 3), 20 + number * 10, np.uint8) for number in range(count)]


@pytest.mark.parametrize("name", ["a.mp4", "a.webm"])
def test_a_video_is_read_in_order_and_may_be_read_again(tmp_path: Path, name: str) -> None:
    pictures = paint(12)
    write_video(tmp_path / name, pictures, 20)
    clip = open_clip(tmp_path / name)
    assert (clip.width, clip.height) == (48, 32)
    assert clip.frames == (12 if name == "a.mp4" else None), "webm does not say"
    for _ in range(2):
        frames = list(clip)
        assert len(frames) == 12
        for picture, frame in zip(pictures, frames, strict=True):
            assert frame.dtype == np.uint8
            assert abs(picture.mean() - frame.mean()) < 3


def test_pictures_are_read_by_their_numbers(tmp_path: Path) -> None:
    pictures = paint(12)
    write_video(tmp_path / "frame-%d.png", pictures, 20)
    (tmp_path / "notes.txt").write_text("not a picture")
    clip = open_clip(tmp_path)
    assert (clip.frames, clip.width, clip.height) == (12, 48, 32)
    assert all(np.array_equal(a, b) for a, b in zip(clip, pictures, strict=True))


@pytest.mark.parametrize(("degrees", "quarters"), [
    (90, 1), (89.4, 1), (-90, 3), (180, 2), (179.5, 2), (-179.5, 2), (0.5, 0), (-1, 0), (45, 0), (-45, 0), (80, 0),
    (135, 0),
])  # fmt: skip
def test_what_a_phone_took_upright_is_upright(tmp_path: Path, degrees: float, quarters: int) -> None:
    """A matrix of something else than quarters turns nothing."""
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:8, :12] = 250  # the corner at the top left, which a quarter turn puts at the top right
    write_video(tmp_path / "a.mp4", [picture] * 4, 20)
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    matrix = data.index(b"tkhd") + 44
    cosine, sine = (round(part(math.radians(degrees)) * (1 << 16)) for part in (math.cos, math.sin))
    turn = (cosine, sine, 0, -sine, cosine, 0, 0, 0, 1 << 30)
    data[matrix : matrix + 36] = b"".join(number.to_bytes(4, "big", signed=True) for number in turn)
    (tmp_path / "a.mp4").write_bytes(data)
    clip = open_clip(tmp_path / "a.mp4")
    expected = np.rot90(picture, -quarters)  # the matrix turns clockwise
    assert (clip.height, clip.width) == expected.shape[:2]
    for frame in clip:
        assert np.abs(frame.astype(int) - expected).mean() < 5


def test_other_kinds_of_pictures_become_rgb(tmp_path: Path) -> None:
    Image.fromarray(paint(1)[0]).convert("L").save(tmp_path / "0.png")
    Image.fromarray(paint(1)[0]).convert("RGBA").save(tmp_path / "1.PNG")
    assert all(np.array_equal(frame, paint(1)[0]) for frame in open_clip(tmp_path))


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "mixed").mkdir()
    Image.fromarray(paint(1)[0]).save(tmp_path / "mixed" / "0.png")
    Image.fromarray(paint(1, 16, 16)[0]).save(tmp_path / "mixed" / "1.png")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0.png").write_bytes(b"\x89PNG no more")
    (tmp_path / "bomb").mkdir()
    said = PngInfo()
    said.add_text("said", "a" * 2_000_000, zip=True)
    Image.fromarray(paint(1)[0]).save(tmp_path / "bomb" / "0.png", pnginfo=said)
    for name, message in (
        ("none.mp4", "does not exist; expected a video file or a folder"),
        ("empty", r"the folder .*empty has no \.png pictures"),
        ("text.mp4", r"text\.mp4 cannot be read as a video"),
        ("mixed", "frame 1 is 16 x 16, the first one 48 x 32"),
        ("broken", r"0\.png cannot be read as a picture"),
        ("bomb", r"0\.png cannot be read as a picture"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(open_clip(tmp_path / name))


def test_a_video_that_breaks_off_is_told(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", paint(12), 20)
    whole = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"a\.mp4"):
        list(open_clip(tmp_path / "a.mp4"))
