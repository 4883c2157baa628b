"""Numbers and times that are drawn into pictures: what is drawn is read back, blurred and dim too, and what is damaged
is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import time_code
from benchmarks.camera_code import CODES, FPS, HEIGHT, HELD_FRAMES, PERIOD_S, WIDTH, picture, read, write_y4m
from streamdiff.video.files import open_clip


def square(code: int) -> np.ndarray:
    grey = picture(code)[:, (WIDTH - HEIGHT) // 2 : (WIDTH + HEIGHT) // 2]
    return np.repeat(grey[..., None], 3, 2)


@pytest.mark.parametrize("code", range(CODES))
def test_a_code_is_read_back_small_dim_and_noisy(code: int) -> None:
    noise = np.random.default_rng(code).normal(0, 40, (120, 120, 3))
    seen = (square(code)[::4, ::4] * 0.5 + 60 + noise).clip(0, 255).astype(np.uint8)
    assert read(square(code)) == read(seen) == code


def test_the_file_is_a_video_of_all_codes(tmp_path: Path) -> None:
    frames = list(open_clip(write_y4m(tmp_path / "codes.y4m")))
    assert len(frames) == CODES * HELD_FRAMES == round(PERIOD_S * FPS)
    for number in (0, HELD_FRAMES - 1, HELD_FRAMES, len(frames) - 1):
        assert read(frames[number][:, (WIDTH - HEIGHT) // 2 : (WIDTH + HEIGHT) // 2]) == number // HELD_FRAMES


@given(st.integers(0, 2**40))
def test_what_is_drawn_is_read(ms: int) -> None:
    picture = np.full((128, 128, 3), 90, np.uint8)
    time_code.draw(picture, ms)
    assert time_code.read(picture) == ms % time_code.PERIOD_MS


def test_a_damaged_code_is_not_taken_for_another() -> None:
    picture = np.zeros((128, 128, 3), np.uint8)
    time_code.draw(picture, 1_234_567)
    picture[: time_code.SIDE, : time_code.SIDE] = 255
    assert time_code.read(picture) is None
