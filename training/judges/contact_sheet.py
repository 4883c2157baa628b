"""Contact sheets: what was judged, for people to look at. Knows nothing about what the pictures show."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

GAP = 4
LINE = 13
"""Height of a line of text, in pixels."""
LETTER = 6
"""Width of a letter of it, about."""


@dataclass(frozen=True)
class Strip:
    """One line of a contact sheet: pictures `[n, 3, H, W]` in [0, 1] under a caption; `good` tints the caption."""

    caption: str
    pictures: Tensor
    good: bool = True


def write_sheet(path: Path, strips: Sequence[Strip]) -> None:
    """Write the strips, at least one and pictures of one size, one under the other as a PNG."""
    size = strips[0].pictures.shape[-1]
    width = max(len(strip.pictures) for strip in strips) * (size + GAP) + GAP
    captions = [textwrap.wrap(strip.caption, width // LETTER) for strip in strips]
    text_height = max(map(len, captions)) * LINE + GAP
    height = text_height + size + GAP
    sheet = Image.new("RGB", (width, len(strips) * height + GAP), (24, 24, 28))
    pen = ImageDraw.Draw(sheet)
    for row, (strip, lines) in enumerate(zip(strips, captions, strict=True)):
        top = row * height + GAP
        color = (150, 220, 150) if strip.good else (255, 120, 110)
        for line, text in enumerate(lines):
            pen.text((GAP, top + line * LINE), text, fill=color)
        pixels = (strip.pictures.float().clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1)
        for column, picture in enumerate(pixels.numpy()):
            sheet.paste(Image.fromarray(picture), (GAP + column * (size + GAP), top + text_height))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.quantize(256).save(path, optimize=True)  # a quarter of the bytes, and nothing to be seen of it
