"""Events per second over a sliding window, how many are let through, and which names of a server are its own."""

from __future__ import annotations

import pytest

from streamdiff.config import ServeConfig
from streamdiff.server import peers
from streamdiff.server.middleware import HostPolicy
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


POLICY = HostPolicy(ServeConfig(host="Studio.local", hosts=["stream.example.org"]))
OWN = "localhost LOCALHOST:8000 localhost. localhost: 127.0.0.1 127.8.9.1:80 [::1] [::1]:8000 192.0.2.7:8000"
OWN += " [2001:db8::7] studio.local:9 stream.example.org Stream.Example.ORG.:443"
OTHERS = f"evil.example localhost.evil.example 127.0.0.1.evil.example:8000 example.org 127.1 {'a' * 5000}"
NO_NAMES = "::1 [127.0.0.1] [::g] [1::2::3] [::1 é localhost:80x user@localhost localhost/x localhost:123456"


@pytest.mark.parametrize(
    ("status", "hosts"),
    [(200, (host,)) for host in OWN.split()]
    + [(421, (host,)) for host in OTHERS.split()]
    + [(400, (host,)) for host in ("", "a b", *NO_NAMES.split())]
    + [(400, ()), (400, ("localhost", "localhost"))],
)
def test_own_names_and_addresses_alone_are_answered(status: int, hosts: tuple[str, ...]) -> None:
    try:
        POLICY.check([(b"host", host.encode("latin-1")) for host in hosts])
    except Problem as problem:
        assert (problem.status, problem.code) == (status, "host")
    else:
        assert status == 200
