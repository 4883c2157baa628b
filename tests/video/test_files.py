"""Frames come back from the files they were written to, and nothing half-written stays behind."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from streamdiff.errors import ConfigError
from streamdiff.models.tensor_file import write_tensor
from streamdiff.video.files import check_target, open_clip, write_video
from tests.full_disk import fill


def paint(count: int, height: int = 32, width: int = 48) -> list[np.ndarray]:
    """Plain pictures, brighter and brighter, with a red left half."""
    pictures = []
    for number in range(count):
        picture = np.full((height, width, 3), 20 + number * 8, np.uint8)
        picture[:, : width // 2, 0] = 220
        pictures.append(picture)
    return pictures


def read(path: Path) -> tuple[list[np.ndarray], av.video.stream.VideoStream, list[float]]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        return [frame.to_ndarray(format="rgb24") for frame in frames], stream, [frame.time or 0.0 for frame in frames]


@pytest.mark.parametrize(("name", "codec"), [("a.mp4", "h264"), ("b.webm", "vp9"), ("c.MP4", "h264")])
@pytest.mark.parametrize("fps", [20, 30000 / 1001])
def test_a_video_holds_the_frames_at_their_times(tmp_path: Path, name: str, codec: str, fps: float) -> None:
    pictures = paint(20)
    write_video(tmp_path / name, iter(pictures), fps)
    frames, stream, times = read(tmp_path / name)
    assert stream.codec_context.name.removeprefix("lib") in (codec, "vpx-" + codec)
    assert stream.codec_context.pix_fmt == "yuv420p"
    assert len(frames) == 20
    assert np.allclose(times, np.arange(20) / fps, atol=2e-3)
    for picture, frame in zip(pictures, frames, strict=True):
        assert np.abs(picture.astype(int) - frame.astype(int)).mean() < 6
    assert os.listdir(tmp_path) == [name]


def test_odd_sizes_are_made_even(tmp_path: Path) -> None:
    write_video(tmp_path / "odd.mp4", paint(3, 33, 47), 10)
    frames, _, _ = read(tmp_path / "odd.mp4")
    assert frames[0].shape == (34, 48, 3)


@pytest.mark.parametrize("name", ["pictures", "pictures/", "existing"])
def test_a_folder_of_pictures(tmp_path: Path, name: str) -> None:
    (tmp_path / "existing").mkdir()
    pictures = paint(3)
    write_video(f"{tmp_path}/{name}", pictures, 10)
    folder = tmp_path / name
    assert sorted(os.listdir(folder)) == ["00000.png", "00001.png", "00002.png"]
    assert np.array_equal(np.asarray(Image.open(folder / "00002.png")), pictures[2])


def test_a_shorter_video_replaces_the_pictures_in_a_folder_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("pictures")
    write_video(tmp_path / "pictures", paint(3), 10)
    inode = (tmp_path / "pictures").stat().st_ino  # it may be a volume of a container, which cannot be renamed
    write_video(f"{tmp_path}/link/", paint(2), 10)
    assert sorted(os.listdir(tmp_path / "pictures")) == ["00000.png", "00001.png"]
    assert (tmp_path / "pictures").stat().st_ino == inode and sorted(os.listdir(tmp_path)) == ["link", "pictures"]


@pytest.mark.parametrize(("name", "exists"), [
    ("a.mp4", "a.mp4"), ("link.webm", "link.webm"), ("pictures", "pictures/00000.png"),
])  # fmt: skip
def test_without_overwrite_what_exists_is_refused(tmp_path: Path, name: str, exists: str) -> None:
    check_target(tmp_path / name, overwrite=False)
    (tmp_path / exists).parent.mkdir(exist_ok=True)
    if exists.startswith("link"):
        (tmp_path / exists).symlink_to("x.webm")
        (tmp_path / "x.webm").touch()
    else:
        (tmp_path / exists).touch()
    check_target(tmp_path / name)
    with pytest.raises(ConfigError, match="--overwrite"):
        check_target(tmp_path / name, overwrite=False)


@pytest.mark.parametrize("target", ["out.mp4", "out.webm", "out"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_on_the_way_leaves_nothing(tmp_path: Path, target: str, error: type[BaseException]) -> None:
    def frames() -> Iterator[np.ndarray]:
        yield from paint(5)
        raise error

    with pytest.raises(error):
        write_video(tmp_path / target, frames(), 10)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["out.mp4", "out", "out.safetensors"])
def test_a_full_disk_is_an_error_that_names_the_target(small_disk: Path, target: str) -> None:
    fill(small_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        if target.endswith("safetensors"):
            write_tensor(small_disk / target, "latents", torch.zeros(3, 256, 256))
        write_video(small_disk / target, paint(3, 256, 256), 10)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small_disk / target))
    assert os.listdir(small_disk) == ["filler"]


def test_an_error_keeps_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "out.mp4"
    write_video(target, paint(3), 10)
    before = target.read_bytes()
    with pytest.raises(ValueError, match=r"frame 1 has shape \[16, 16, 3\], the first one \[32, 48, 3\]"):
        write_video(target, [paint(1)[0], paint(1, 16, 16)[0]], 10)
    assert target.read_bytes() == before
    assert os.listdir(tmp_path) == ["out.mp4"]
    write_video(target, paint(4), 10)
    assert len(read(target)[0]) == 4


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("one.png", "unknown ending"),
        ("file/", "is a file"),
        ("full", "is not empty"),
    ],
)
def test_targets_that_cannot_be_written(tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old.png").write_text("")

    def never() -> Iterator[np.ndarray]:
        pytest.fail("a frame was asked for")
        yield

    with pytest.raises(ConfigError, match=message):
        write_video(f"{tmp_path}/{target}", never(), 10)


@pytest.mark.parametrize("fps", [0, -1, 1e-4, float("nan"), float("inf"), 5000])
def test_an_fps_that_cannot_be(tmp_path: Path, fps: float) -> None:
    with pytest.raises(ConfigError, match=r"it must be at least 0\.001 and at most 1000"):
        write_video(tmp_path / "a.mp4", paint(1), fps)


def test_no_frames(tmp_path: Path) -> None:
    for target in ("a.mp4", "pictures"):
        with pytest.raises(ValueError, match="no frames"):
            write_video(tmp_path / target, [], 10)
    assert os.listdir(tmp_path) == []


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
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / f"frame-{number}.png")
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
