"""When a session ends by itself."""

from __future__ import annotations

from streamdiff.server.sessions.spec import Lifetime


def test_a_session_that_nobody_watches_ends() -> None:
    life = Lifetime(100.0, idle_limit_s=10.0, limit_s=60.0)
    assert life.end() == (110.0, "idle"), "nobody has come yet"
    life.watch(True, 105.0)
    assert life.end() == (160.0, "lifetime")
    life.watch(False, 120.0)
    life.watch(False, 125.0)
    assert life.end() == (130.0, "idle"), "since the last one left, not since it was looked at"
    life.watch(False, 155.0)
    life.watch(True, 156.0)
    life.watch(False, 157.0)
    assert life.end() == (160.0, "lifetime")


def test_without_limits_it_lives_on() -> None:
    assert Lifetime(0.0, None, None).end() is None
