"""How many sessions fit, from measured time and the pace of viewing, and when one ends by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.server.load import FRESH_S, Capacity, Lifetime


def test_a_share_is_work_over_playing_time() -> None:
    capacity = Capacity(chunk_frames=12, steps=4, limit=0.9, start_work_s=0.15)
    assert capacity.share(40.0, 0.0) == pytest.approx(0.5)  # 0.15 s of work for 0.3 s of video
    assert capacity.share(20.0, 0.0) == pytest.approx(0.25)
    assert capacity.share(40.0, 0.0, 2) == pytest.approx(0.5 * 3 / 5), "fewer passes"


def test_the_one_too_many_is_told_the_numbers_and_the_first_never_refused() -> None:
    capacity = Capacity(12, 4, 0.9, 0.15)
    assert capacity.refusal([], 5.0) == ""
    assert capacity.refusal([0.4], 0.5) == ""
    refusal = capacity.refusal([0.5], 0.5)
    assert "(1)" in refusal and "50%" in refusal and "90%" in refusal
    assert Capacity(12, 4, 0.9).refusal([0.0], 0.0) == "", "nothing is known yet"


def test_sessions_that_take_nothing_stand_in_nobodys_way() -> None:
    capacity = Capacity(12, 4, 0.9, 0.15)
    assert capacity.refusal([0.0, 0.0], 3.48) == "", "the first that plays"
    assert capacity.free_sessions([0.0], 3.48) == 1 and capacity.free_sessions([0.0, 0.5], 3.48) == 0
    refusal = capacity.refusal([0.0, 0.5], 0.5)
    assert "(1)" in refusal and "50%" in refusal


def test_a_measurement_of_a_busy_moment_does_not_hold_for_ever() -> None:
    """What the engine measured last holds while it is fresh; then the start's, unless it was higher still."""
    capacity = Capacity(12, 4, 0.9, 0.15)
    capacity.measured(1.5, 100.0)
    assert capacity.work_s(100.0) == capacity.work_s(100.0 + FRESH_S) == 1.5
    assert capacity.work_s(100.0 + 2 * FRESH_S) == 0.15
    assert capacity.share(40.0, 100.0 + 2 * FRESH_S) == pytest.approx(0.5)
    capacity.measured(0.1, 200.0)
    assert capacity.work_s(200.0 + 2 * FRESH_S) == 0.1, "the start was the busy moment"
    capacity.restart(None)
    assert capacity.work_s(200.0) == 0.1, "an engine that measured nothing changes nothing"
    capacity.restart(0.3)
    assert capacity.work_s(200.0) == 0.3, "another engine"
    unmeasured = Capacity(12, 4, 0.9)
    unmeasured.measured(1.5, 100.0)
    assert unmeasured.work_s(1000.0) == 1.5, "nothing else is known"


@given(st.floats(0.001, 2), st.floats(0.05, 4), st.integers(0, 20))
def test_room_is_how_many_are_not_refused(work_s: float, limit: float, opened: int) -> None:
    capacity = Capacity(12, 4, limit, work_s)
    wanted = capacity.share(40.0, 0.0)
    shares = []
    while not capacity.refusal(shares, wanted) and len(shares) < 400:
        shares.append(wanted)
    room = capacity.free_sessions(shares[:opened], wanted)
    assert room is not None
    if len(shares) < 400:
        assert abs(room - len(shares[opened:])) <= (abs(limit / wanted - round(limit / wanted)) < 1e-6)


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
