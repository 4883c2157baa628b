"""Events per second over a sliding window, and how many are let through."""

from __future__ import annotations

import pytest

from streamdiff.server import rate_limit as module
from streamdiff.server.rate_limit import RATE_WINDOW_S, PerAddressLimiter, Rate, TokenBucket


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


def test_allowance_lets_a_burst_through_and_then_the_rate() -> None:
    allowance = TokenBucket(per_s=10, burst=3)
    assert [allowance.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert allowance.take(0.1)
    assert not allowance.take(0.15)
    assert sum(allowance.take(100.0) for _ in range(10)) == 3


def test_every_address_has_its_own_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ADDRESSES", 2)
    allowances = PerAddressLimiter(per_s=1, burst=1)
    assert allowances.of("a").take(0.0)
    assert allowances.of("b").take(0.0)
    assert not allowances.of("a").take(0.0)
    assert allowances.of("c").take(0.0), "which takes the place of a"
    assert not allowances.of("b").take(0.0)
    assert allowances.of("a").take(0.0), "as if never heard of"
