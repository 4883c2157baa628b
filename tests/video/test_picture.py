"""A start picture from a stranger: what is read is fitted, and everything else is refused with its reason."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, features

from streamdiff.errors import RequestError
from streamdiff.video import picture
from streamdiff.video.picture import decode_picture, fit_picture, from_base64

WIDTH, HEIGHT = 64, 32
RED, BLUE = (220, 30, 30), (30, 30, 220)
FORMATS = ["JPEG", "PNG", "WEBP", *(["AVIF"] if features.check("avif") else [])]


def halves(width: int = 80, height: int = 40, mode: str = "RGB") -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image.convert(mode)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that says it is so large, with these chunks behind its head."""
    head = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in (head, *chunks)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _scans(count: int, video: bytes = b"") -> bytes:
    """A progressive JPEG whose last scan comes `count` times, with something behind its end."""
    data = saved(halves(), "JPEG", progressive=True)
    begin = data.rindex(b"\xff\xda")
    return data[:begin] + data[begin:-2] * count + data[-2:] + video


def close(pixel: np.ndarray, colour: tuple[int, int, int], tolerance: int = 24) -> bool:
    return bool(np.abs(pixel.astype(int) - colour).max() <= tolerance)


def assert_halves(made: np.ndarray) -> None:
    assert made.dtype == np.uint8 and made.shape == (HEIGHT, WIDTH, 3)
    assert close(made[16, 8], RED) and close(made[16, 56], BLUE)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_read(kind: str) -> None:
    assert_halves(decode_picture(saved(halves(), kind), WIDTH, HEIGHT))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(orientation: int) -> None:
    """Stored turned, with the note how to turn it back."""
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    image = halves() if orientation == 1 else halves().transpose(undo[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert_halves(decode_picture(saved(image, "JPEG", exif=exif), WIDTH, HEIGHT))


def test_a_picture_is_turned_whatever_else_its_exif_says() -> None:
    fields = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0) + struct.pack("<HHI4s", 0x011A, 2, 4, b"abc")  # a resolution
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + fields + bytes(4)
    data = saved(halves().transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif)
    assert_halves(decode_picture(data, WIDTH, HEIGHT))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_scans(20, b"\xff\xda" * 500), id="progressive JPEG with a phone's video behind it"),
        pytest.param(saved(halves(mode="CMYK"), "JPEG"), id="CMYK JPEG"),
        pytest.param(saved(halves(mode="P"), "PNG"), id="PNG with a palette"),
        pytest.param(saved(halves(mode="RGBA"), "PNG"), id="PNG with alpha"),
        pytest.param(saved(halves(mode="RGBA"), "WEBP", lossless=True), id="WebP with alpha"),
        pytest.param(saved(halves(81, 41), "JPEG"), id="odd size"),
        pytest.param(saved(halves(2000, 1000), "JPEG", quality=95), id="JPEG much larger"),
        pytest.param(saved(halves(8, 4), "PNG"), id="much smaller"),
        pytest.param(
            saved(halves(), "JPEG", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()),
            id="ICC profile",
        ),
        pytest.param(saved(halves(), "PNG") + b"trailing rubbish", id="something behind the end"),
    ],
)
def test_what_differs_is_brought_to_rgb_of_the_models_size(data: bytes) -> None:
    assert_halves(decode_picture(data, WIDTH, HEIGHT))


def test_grey_of_8_and_16_bits_is_read_alike() -> None:
    ramp = np.linspace(0, 255, WIDTH).astype(np.uint8)[None].repeat(HEIGHT, 0)
    deep = Image.fromarray(ramp.astype(np.uint16) * 257)
    for image in (Image.fromarray(ramp), deep):
        made = decode_picture(saved(image, "PNG"), WIDTH, HEIGHT)
        assert np.array_equal(made, ramp[..., None].repeat(3, 2))


def test_what_is_transparent_is_white() -> None:
    glass = Image.new("RGBA", (WIDTH, HEIGHT), (200, 0, 0, 0))
    glass.paste((*BLUE, 255), (0, 0, 32, HEIGHT))
    made = decode_picture(saved(glass, "PNG"), WIDTH, HEIGHT)
    assert close(made[16, 8], BLUE, 0) and close(made[16, 56], (255, 255, 255), 0)


def test_cover_cuts_and_contain_leaves_bars() -> None:
    tall = Image.new("RGB", (20, 100), RED)
    tall.paste(BLUE, (0, 45, 20, 55))
    covered, whole = (decode_picture(saved(tall, "PNG"), WIDTH, HEIGHT, fit) for fit in ("cover", "contain"))
    assert close(covered[16, 2], BLUE) and close(covered[16, 61], BLUE)  # the middle tenth is all that is left
    assert close(whole[16, 2], (0, 0, 0), 0) and close(whole[16, 32], BLUE) and close(whole[2, 32], RED)


def _frames(kind: str) -> bytes:
    others = [Image.new("RGB", (16, 16), BLUE), Image.new("RGB", (16, 16), (9, 200, 9))]
    return saved(Image.new("RGB", (16, 16), RED), kind, save_all=True, append_images=others)


JPEG = saved(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)), "JPEG")
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "is empty"),
    "GIF": (lambda: saved(halves(), "GIF"), "format that is not read here; send JPEG, PNG, WebP"),
    "EPS, which would start a program": (lambda: saved(halves(), "EPS"), "format that is not read"),
    "JPEG cut off": (lambda: JPEG[: len(JPEG) // 2], "cut off or broken"),
    "JPEG of scans that take minutes": (lambda: _scans(1000), "JPEG of more than 100 scans"),
    "PNG cut off": (lambda: saved(halves(400, 300), "PNG")[:80], "cut off or broken"),
    "PNG with a wrong checksum": (
        lambda: bytes(b ^ (n == 30) for n, b in enumerate(saved(halves(), "PNG"))), "format that is not|broken"
    ),
    "PNG without pixels": (lambda: png(64, 32, (b"IEND", b"")), "cut off or broken"),
    "WebP cut off": (lambda: saved(halves(), "WEBP")[:40], "format that is not read|cut off or broken"),
    "100 megapixels in few bytes": (
        lambda: png(10_000, 10_000, (b"IDAT", zlib.compress(b"\0" * 1000))), "too many pixels: at most 50 million"
    ),
    "60 megapixels, below Pillow's own limit": (
        lambda: png(10_000, 6_000, (b"IDAT", zlib.compress(b"\0" * 1000))), "of 10,000 x 6,000 has too many pixels"
    ),
    "a thread": (lambda: png(1, 50_000_000, (b"IDAT", b"")), "side of more than 16,384"),
    "4 billion pixels": (lambda: png(65_535, 65_535, (b"IDAT", b"")), "too many pixels: at most 50 million"),
    "a bomb in a text": (
        lambda: png(8, 8, (b"zTXt", b"a\0\0" + zlib.compress(b"\0" * 30_000_000)), (b"IEND", b"")), "cut off or broken"
    ),
    "animated PNG": (lambda: _frames("PNG"), "animated, with 3 frames"),
    "animated WebP": (lambda: _frames("WEBP"), "animated, with 3 frames"),
    "too many bytes": (lambda: JPEG + bytes(picture.MAX_BYTES), "at most 10"),
}  # fmt: skip
if features.check("avif"):
    REFUSED["AVIF cut off"] = (lambda: saved(halves(), "AVIF")[:200], "format that is not read|cut off or broken")
    REFUSED["animated AVIF"] = (lambda: _frames("AVIF"), "animated, with 3 frames")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_hostile_or_broken_is_refused_with_its_reason(name: str) -> None:
    made, why = REFUSED[name]
    with pytest.raises(RequestError, match=why) as caught:
        decode_picture(made(), WIDTH, HEIGHT)
    assert caught.value.field == "image"


def test_any_cut_of_a_picture_is_refused_or_read_and_nothing_else() -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        whole = saved(halves(), kind)
        for length in range(1, len(whole), max(1, len(whole) // 40)):
            try:
                decode_picture(whole[:length], WIDTH, HEIGHT)
            except RequestError as error:
                assert error.field == "image"


def test_base64_and_data_urls_are_read_and_addresses_are_not() -> None:
    text = base64.b64encode(JPEG).decode()
    for address in ("", "data:image/jpeg;base64,", "DATA:;Base64,"):
        assert from_base64(address + text) == JPEG
    for wrong, why in (
        ("https://example.com/cat.jpg", "addresses are never fetched"),
        ("file:///etc/passwd", "addresses are never fetched"),
        ("data:image/png,abc", "not of base64"),
        ("no base64!", "is not base64"),
        ("A" * (2 * picture.MAX_BYTES), "at most 10"),
    ):
        with pytest.raises(RequestError, match=why):
            from_base64(wrong)


def test_files_bytes_and_arrays_are_the_same_picture(tmp_path: Path) -> None:
    file, data = tmp_path / "picture.png", saved(halves(), "PNG")
    file.write_bytes(data)
    expected = decode_picture(data, WIDTH, HEIGHT)
    for image in (file, str(file), data, np.asarray(halves())):
        assert np.array_equal(fit_picture(image, WIDTH, HEIGHT), expected)


@pytest.mark.parametrize(
    ("image", "field", "why"),
    [
        ("no such file.png", "image", "cannot be read: No such file"),
        (np.zeros((4, 4), np.uint8), "image", r"uint8 \[4, 4\]; it must be RGB"),
        (np.zeros((4, 4, 3), np.float32), "image", "float32"),
        (np.zeros((0, 4, 3), np.uint8), "image", "must be RGB"),
    ],
)
def test_what_is_no_picture_is_named(image: Any, field: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        fit_picture(image, WIDTH, HEIGHT)
    assert caught.value.field == field


def test_another_fit_is_refused() -> None:
    with pytest.raises(RequestError, match="'stretch'; it can be cover or contain") as caught:
        decode_picture(saved(halves(), "PNG"), WIDTH, HEIGHT, "stretch")
    assert caught.value.field == "fit"
