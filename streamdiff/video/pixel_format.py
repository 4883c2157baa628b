"""Pixel formats of pictures, RGB and YUV420, which an array's shape tells apart. Needs no torch.

- *RGB*: uint8 `[H, W, 3]`.
- *YUV420*: uint8 `[3 H / 2, W]`, H and W even: H rows of brightness, then the two planes of colour, `[H / 2, W / 2]`
  each, one value for 2 x 2 pixels, their mean. BT.709, limited range (16 to 235, colour to 240): what H.264 is set to
  here, and half the bytes of RGB. `streamdiff.models.autoencoder.picture_decoder.yuv420p` makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

PictureKind = Literal["rgb", "yuv420"]


def kind_of(shape: Sequence[int]) -> PictureKind:
    """The format of a picture of this shape. Raises ValueError for neither."""
    if len(shape) == 3 and shape[2] == 3 and 0 not in shape:
        return "rgb"
    if len(shape) == 2 and shape[0] % 3 == 0 and shape[1] % 2 == 0 and 0 not in shape:
        return "yuv420"
    raise ValueError(f"a picture is of shape {list(shape)}; expected [H, W, 3] for RGB or [3 H / 2, W] for YUV420")


def shape_of(kind: PictureKind, height: int, width: int) -> tuple[int, ...]:
    """Array shape of a picture of this format and size. Raises ValueError for sides that YUV420 cannot have."""
    if kind == "rgb":
        return height, width, 3
    if height % 2 or width % 2:
        raise ValueError(f"a picture of {width} x {height} has no YUV420, as both sides must be even")
    return height * 3 // 2, width


def size_of(shape: Sequence[int]) -> tuple[int, int]:
    """Height and width of a picture of that shape. Raises ValueError for what is none."""
    return (shape[0], shape[1]) if kind_of(shape) == "rgb" else (shape[0] * 2 // 3, shape[1])
