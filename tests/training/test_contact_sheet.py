"""A contact sheet shows every picture below the whole of its caption."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from training.judges.contact_sheet import GAP, Strip, write_sheet

SIDE = 64


def test_a_long_caption_goes_over_several_lines_above_its_pictures(tmp_path: Path) -> None:
    green = torch.tensor([0.0, 1.0, 0.0]).view(1, 3, 1, 1).expand(2, 3, SIDE, SIDE)
    write_sheet(tmp_path / "new" / "short.png", [Strip("a word", green)])
    write_sheet(tmp_path / "new" / "long.png", [Strip("many words " * 12, green), Strip("a word", green, good=False)])
    short, long = (Image.open(tmp_path / "new" / f"{name}.png").convert("RGB") for name in ("short", "long"))
    assert short.width == long.width == 2 * (SIDE + GAP) + GAP
    assert long.height > 2 * short.height
    for sheet, strips in ((short, 1), (long, 2)):
        painted = (np.asarray(sheet) == (0, 255, 0)).all(2)
        assert painted.sum() == strips * 2 * SIDE * SIDE, "no text lies on a picture"
