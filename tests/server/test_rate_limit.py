"""Events per second over a sliding window, and how many are let through."""

from __future__ import annotations

import pytest

from streamdiff.server import peers
from streamdiff.server.peers import RATE_WINDOW_S, PerAddressLimiter, Rate, TokenBucket
from streamdiff.server.problem import Problem


@pytest.mark.parametrize(("count", "period_s"), [(1, 1 / 40), (12, 0.3)])
def test_a_steady_stream_has_its_rate_also_in_bursts_and_an_ended_one_none(count: int, period_s: float) -> None:
    rate, end_s = Rate(), 10.0
    for number in range(round(end_s / period_s) + 1):
        rate.add(count, number * period_s)
    assert rate.per_s(end_s) == pytest.approx(40, rel=0.2)
    assert rate.per_s(end_s + RATE_WINDOW_S) == 0


def test_a_bucket_lets_a_burst_through_and_then_the_rate() -> None:
    bucket = TokenBucket(per_s=10, burst=3)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.take(0.1)
    assert not bucket.take(0.15)
    assert sum(bucket.take(100.0) for _ in range(10)) == 3


def test_every_address_has_its_own_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_ADDRESSES", 2)
    limiter = PerAddressLimiter(per_s=1, burst=1)

    def is_let_through(address: str) -> bool:
        try:
            limiter.check(address, "requests", 0.0)
        except Problem as problem:
            assert (problem.status, problem.code) == (429, "rate")
            return False
        return True

    assert is_let_through("a")
    assert is_let_through("b")
    assert not is_let_through("a")
    assert is_let_through("c"), "which takes the place of a"
    assert not is_let_through("b")
    assert is_let_through("a"), "as if never heard of"
