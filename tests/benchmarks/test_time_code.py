"""A time drawn into a picture is read again, and a damaged one is not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import time_code


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
