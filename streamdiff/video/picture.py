"""A start picture: the bytes of a picture file, checked and fitted to a model's size. Needs no torch.

The bytes are a stranger's: the format is one of a few that are listed, size and pixels are read from the file's head
before anything is decoded, and whatever a decoder finds wrong becomes a `RequestError` for the field `image`. Nothing
is ever fetched: an address in place of a picture is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image as pillow
from PIL import ImageOps, UnidentifiedImageError, features

from streamdiff.errors import RequestError

Fit = Literal["cover", "contain"]
"""How a picture of other proportions comes to the model's: `cover` fills it and cuts what is over, `contain` shows all
of it and leaves the rest black."""
FITS: tuple[str, ...] = get_args(Fit)
Picture = NDArray[np.uint8]
"""RGB, uint8 `[H, W, 3]`."""
Image = str | Path | bytes | Picture
"""A picture as a caller has it: a file, its bytes, or RGB uint8 `[H, W, 3]`; of any size."""

MAX_BYTES = 10 * 1024 * 1024
MAX_PIXELS, MAX_SIDE = 50_000_000, 16_384
MAX_SCANS = 100
"""Scans of a JPEG: of a large picture each takes milliseconds, and as few as eighty bytes. Encoders make up to ten."""
_FORMATS = ("JPEG", "PNG", "WEBP", *(("AVIF",) if features.check("avif") else ()))
_PAPER = (255, 255, 255)
"""What shows through transparent pixels."""
_MARKER, _SCAN, _END = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]"), b"\xff\xda", b"\xff\xd9"
"""Markers of a JPEG's segments; in compressed data 255 is followed by 0 or a restart marker."""
_ORIENTATION = 0x0112
_TURNS = {
    2: pillow.Transpose.FLIP_LEFT_RIGHT,
    3: pillow.Transpose.ROTATE_180,
    4: pillow.Transpose.FLIP_TOP_BOTTOM,
    5: pillow.Transpose.TRANSPOSE,
    6: pillow.Transpose.ROTATE_270,
    7: pillow.Transpose.TRANSVERSE,
    8: pillow.Transpose.ROTATE_90,
}
"""By the orientation that EXIF says."""


def formats() -> str:
    """The formats that are read, for people."""
    names = [{"WEBP": "WebP"}.get(name, name) for name in _FORMATS]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a picture file, for `decode_picture`.

    Raises:
        RequestError: it cannot be read, or is larger than MAX_BYTES.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise _refusal(f"the picture {path} cannot be read: {why}") from error
    if len(data) > MAX_BYTES:
        raise _too_large(Path(path).stat().st_size)
    return data


def from_base64(text: str) -> bytes:
    """The bytes of a picture as JSON carries it: base64, or a `data:` URL of base64.

    Raises:
        RequestError: anything else; an address is not fetched.
    """
    if text[:5].lower() == "data:":
        head, found, text = text.partition(",")
        if not found or not head.lower().endswith(";base64"):
            raise _refusal("the picture is a data: URL, but not of base64; write data:image/png;base64,...")
    if "://" in text[:64]:
        raise _refusal("the picture is an address, and addresses are never fetched; send the picture itself, as base64")
    if len(text) > 4 * (MAX_BYTES // 3 + 1):
        raise _too_large(len(text) * 3 // 4)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal(f"the picture is not base64: {error}") from error


def decode_picture(data: bytes, width: int, height: int, fit: str = "cover") -> Picture:
    """A picture file as RGB of `width` x `height`, uint8 `[height, width, 3]`: turned as its EXIF says, transparent
    pixels over white, resampled with Lanczos. The same bytes give the same picture.

    Raises:
        RequestError: larger than MAX_BYTES, MAX_PIXELS, MAX_SIDE or MAX_SCANS, another format, animated, cut off or
            broken.
    """
    if len(data) > MAX_BYTES:
        raise _too_large(len(data))
    if not data:
        raise _refusal(f"the picture is empty; send a {formats()} file")
    try:
        return _decoded(data, width, height, fit)
    except RequestError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:  # Pillow's own limit, higher
        raise _too_many_pixels("") from error
    except UnidentifiedImageError as error:
        raise _refusal(f"the picture is of a format that is not read here; send {formats()}") from error
    except Exception as error:  # decoders have many words for a file that is cut off or made up
        why = str(error)[:120] or type(error).__name__
        raise _refusal(f"the picture cannot be decoded, it is cut off or broken: {why}") from error


def fit_picture(image: Image, width: int, height: int, fit: str = "cover") -> Picture:
    """A picture of any kind and size as RGB of `width` x `height`, uint8 `[height, width, 3]`.

    Raises:
        RequestError: an array of another shape or dtype, or as `read_bytes` and `decode_picture`.
    """
    if not isinstance(image, np.ndarray):
        return decode_picture(image if isinstance(image, bytes) else read_bytes(image), width, height, fit)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise _refusal(f"the picture is {image.dtype} {list(image.shape)}; it must be RGB, uint8 [height, width, 3]")
    return _fitted(pillow.fromarray(image), width, height, fit)


def _fitted(image: pillow.Image, width: int, height: int, fit: str) -> Picture:
    if fit not in FITS:
        raise RequestError("fit", f"fit is {fit[:40]!r}; it can be {' or '.join(FITS)}")
    to_size = ImageOps.fit if fit == "cover" else ImageOps.pad
    return np.asarray(to_size(image, (width, height), pillow.Resampling.LANCZOS), dtype=np.uint8)


def _decoded(data: bytes, width: int, height: int, fit: str) -> Picture:
    with pillow.open(BytesIO(data), formats=_FORMATS) as image:
        columns, rows = image.size
        if columns * rows > MAX_PIXELS:
            raise _too_many_pixels(f" of {columns:,} x {rows:,}")
        if max(columns, rows) > MAX_SIDE:
            why = f"has a side of more than {MAX_SIDE:,} pixels, the most that is read. Shrink it"
            raise _refusal(f"the picture of {columns:,} x {rows:,} {why}")
        if image.format in ("JPEG", "MPO") and _scans(data) > MAX_SCANS:
            raise _refusal(f"the picture is a JPEG of more than {MAX_SCANS} scans, which are not read. Save it again")
        # A phone's JPEG may carry further views behind the first one (MPO), which is the picture.
        if image.format != "MPO" and (count := getattr(image, "n_frames", 1)) > 1:
            raise _refusal(f"the picture is animated, with {count} frames; send a still one")
        image.draft(None, (2 * max(width, height),) * 2)  # JPEG: decodes at a fraction of its size, if that is enough
        # `ImageOps.exif_transpose` writes the rest of the EXIF again as well, and fails where a camera has written
        # something odd there.
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
        return _fitted(_rgb(image if turn is None else image.transpose(turn)), width, height, fit)


def _scans(data: bytes) -> int:
    """The scans of a JPEG's first picture, counted up to one more than are read; what lies behind it, as a phone's
    video does, is not looked at."""
    at, scans = 2, 0
    while scans <= MAX_SCANS and (marker := _MARKER.search(data, at)) is not None and marker[0] != _END:
        scans += marker[0] == _SCAN
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return scans


def _rgb(image: pillow.Image) -> pillow.Image:
    """Any mode as RGB: 16 bits keep their upper 8, CMYK is converted without colour management."""
    if image.mode.startswith("I"):
        values: Any = np.asarray(image).clip(0, 65535)
        image = pillow.fromarray((values >> 8).astype(np.uint8))
    if image.has_transparency_data:
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        image = pillow.new("RGB", layer.size, _PAPER)
        image.paste(layer, mask=layer)
    return image if image.mode == "RGB" else image.convert("RGB")


def _refusal(message: str) -> RequestError:
    return RequestError("image", message)


def _too_many_pixels(size: str) -> RequestError:
    return _refusal(f"the picture{size} has too many pixels: at most {MAX_PIXELS // 10**6} million are read. Shrink it")


def _too_large(size: int) -> RequestError:
    return _refusal(f"the picture has {size / 2**20:.1f} MiB; at most {MAX_BYTES // 2**20} are read. Make it smaller")
