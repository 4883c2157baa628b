"""A time drawn into a picture is read again after enlarging, encoding and decoding."""

from __future__ import annotations

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import time_code
from streamdiff.server.media.encoder import Codec, Format, VideoEncoder


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


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["vp8"])
def test_a_code_survives_enlarging_and_encoding(codec: Codec) -> None:
    encoder = VideoEncoder(codec, Format(128, 128, 40.0, 2, 1_000_000))
    decoder = av.CodecContext.create(codec, "r")
    noise = np.random.default_rng(0)
    for number in range(40):
        picture = noise.integers(60, 200, (128, 128, 3)).astype(np.uint8)
        ms = 16_000_000 + 25 * number
        time_code.draw(picture, ms)
        [encoded] = encoder.encode(picture, number * 2250, number == 0)
        [frame] = decoder.decode(encoded.packet)  # type: ignore[attr-defined]
        assert time_code.read(frame.to_ndarray(format="rgb24")) == ms
