"""Events per second over a sliding window."""

from __future__ import annotations

import pytest

from streamdiff.serve.rate import RATE_WINDOW_S, Rate


def test_a_steady_stream_has_its_rate_and_an_ended_one_none() -> None:
    rate = Rate()
    for number in range(400):
        rate.add(1, number / 40)
    assert rate.per_s(399 / 40) == pytest.approx(40, abs=0.5)
    assert rate.per_s(399 / 40 + RATE_WINDOW_S) == 0


def test_bursts_count_as_what_they_hold() -> None:
    rate = Rate()
    for number in range(20):
        rate.add(12, number * 0.3)
    assert rate.per_s(19 * 0.3) == pytest.approx(40, rel=0.2)
