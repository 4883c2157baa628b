"""Adaptive sessions: what the policy takes and gives back. How many sessions fit, from measured time, and when one
ends by itself."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.server.load import (
    FRESH_S,
    FULL_S,
    HOLD_S,
    SETTLE_S,
    UNLIMITED,
    Capacity,
    Lifetime,
    LoadLimit,
    LoadPolicy,
    ViewerDemand,
    degradation_levels,
    least_share,
)

KNOWN = (4, 2)
CHUNK_S = 0.3


def _share(fps: float, steps: int) -> float:
    """A session in 4 steps and 40 frames per second takes half of the time."""
    return 0.5 * fps / 40 * (steps + 1) / 5


def _demand(count: int, **changes: object) -> dict[str, ViewerDemand]:
    return {
        f"s{number}": ViewerDemand(**{"steps": 4, "fps": 40.0, "adaptive": True, **changes}) for number in range(count)
    }  # type: ignore[arg-type]


def _late(policy: LoadPolicy, session: str, now_s: float) -> None:
    for _ in range(2):
        policy.chunk(session, -0.1, CHUNK_S, now_s)


def test_steps_go_before_frame_rate_and_what_cannot_give_keeps_all() -> None:
    assert degradation_levels(ViewerDemand(4, 40.0, True), (8, 4, 2, 1)) == [
        UNLIMITED, LoadLimit(2), LoadLimit(1), LoadLimit(1, Fraction(3, 4)), LoadLimit(1, Fraction(1, 2)),
    ]  # fmt: skip
    assert degradation_levels(ViewerDemand(2, 40.0, True), KNOWN)[1] == LoadLimit(None, Fraction(3, 4)), (
        "it has the fewest already"
    )
    assert degradation_levels(ViewerDemand(4, 40.0, False), KNOWN) == [UNLIMITED]
    assert least_share(ViewerDemand(4, 40.0, True), KNOWN, _share) == pytest.approx(0.5 * 0.6 / 2)
    assert least_share(ViewerDemand(4, 40.0, False), KNOWN, _share) == 0.5


def test_no_more_is_taken_than_load_needs_and_the_last_to_come_gives_first() -> None:
    policy = LoadPolicy(KNOWN, limit=0.99)
    assert policy.decide(_demand(1), _share, 0.0) == {}
    assert policy.decide(_demand(2), _share, 1.0) == {"s1": LoadLimit(2)}
    assert policy.decide(_demand(3), _share, 2.0) == {"s0": LoadLimit(2), "s2": LoadLimit(2)}
    assert policy.decide(_demand(4), _share, 3.0) == {
        "s1": LoadLimit(2, Fraction(3, 4)), "s2": LoadLimit(2, Fraction(3, 4)), "s3": LoadLimit(2, Fraction(3, 4)),
    }  # fmt: skip


def test_it_comes_back_in_the_opposite_order_after_a_while() -> None:
    policy = LoadPolicy(KNOWN, limit=0.9)
    policy.decide(_demand(4), _share, 0.0)
    assert policy.decide(_demand(2), _share, HOLD_S - 1) == {}, "it may be too much again soon"
    assert policy.decide(_demand(2), _share, HOLD_S + 1) == {"s0": UNLIMITED, "s1": LoadLimit(2)}
    assert policy.decide(_demand(1), _share, HOLD_S + 2) == {}
    policy = LoadPolicy(KNOWN, limit=1.0)
    policy.decide(_demand(3), _share, 0.0)
    assert policy.decide(_demand(2), _share, FULL_S - 1) == {"s0": UNLIMITED}
    assert policy.decide(_demand(2), _share, 2 * FULL_S - 2) == {}, "it fits only just"
    assert policy.decide(_demand(2), _share, 2 * FULL_S) == {"s1": UNLIMITED}


def test_chunks_that_come_late_take_more_than_the_measured_load() -> None:
    policy, demands = LoadPolicy(KNOWN, limit=2.0), _demand(3)
    policy.decide(demands, _share, 0.0)
    _late(policy, "s1", SETTLE_S / 2)
    assert policy.decide(demands, _share, SETTLE_S / 2) == {}, "what is opened settles first"
    policy.chunk("s1", -0.1, CHUNK_S, SETTLE_S)
    policy.chunk("s1", 0.2, CHUNK_S, SETTLE_S)
    policy.chunk("s1", -0.1, CHUNK_S, SETTLE_S)
    assert policy.decide(demands, _share, SETTLE_S) == {}, "not two in a row"
    policy.chunk("s1", 0.01, CHUNK_S, SETTLE_S)
    assert policy.decide(demands, _share, SETTLE_S) == {"s1": LoadLimit(2), "s2": LoadLimit(2)}, "the late one first"
    _late(policy, "s0", 1.5 * SETTLE_S)
    assert policy.decide(demands, _share, 1.5 * SETTLE_S) == {}, "its chunk was begun before the others gave up steps"
    _late(policy, "s0", 2 * SETTLE_S)
    assert policy.decide(demands, _share, 2 * SETTLE_S) == {"s0": LoadLimit(2)}


def test_what_made_chunks_late_comes_back_later_each_time() -> None:
    policy, demands = LoadPolicy(KNOWN, limit=2.0), _demand(1)
    now_s, backs = 0.0, []
    while now_s < 600:
        for limit in policy.decide(demands, _share, now_s).values():
            if limit == UNLIMITED:
                backs.append(now_s)
        if not policy._sessions["s0"].level:
            _late(policy, "s0", now_s)
        now_s += 0.5
    gaps = [after - before for before, after in pairwise(backs)]
    assert 5 <= len(backs) <= 12 and gaps[:3] == sorted(gaps[:3]) and max(gaps) > 4 * gaps[0]


def test_a_changed_wish_keeps_what_is_given_up_as_far_as_it_is_less() -> None:
    policy = LoadPolicy(KNOWN, limit=0.4)
    assert policy.decide(_demand(1), _share, 0.0) == {"s0": LoadLimit(2)}
    assert policy.decide(_demand(1, steps=2), _share, 1.0) == {"s0": UNLIMITED}, "2 was asked for, and is given"
    assert policy.decide(_demand(1), _share, 2.0) == {"s0": LoadLimit(2)}
    assert policy.decide(_demand(1, adaptive=False), _share, 3.0) == {"s0": UNLIMITED}
    assert policy.decide({}, _share, 4.0) == {}


def test_who_is_not_watched_gives_nothing_and_who_may_not_either() -> None:
    policy = LoadPolicy(KNOWN, limit=0.9)
    demands = {
        "stays": ViewerDemand(4, 40.0, False),
        "idle": ViewerDemand(4, 40.0, True, plays=False),
        "gives": ViewerDemand(4, 40.0, True),
    }
    assert policy.decide(demands, _share, 0.0) == {"gives": LoadLimit(2)}


# ---- capacity and lifetime -------------------------------------------------------------------------------------


def test_the_one_too_many_is_told_the_numbers_and_the_first_never_refused() -> None:
    capacity = Capacity(12, 4, 0.9, 0.15)
    assert capacity.refusal([], 5.0) == ""
    assert capacity.refusal([0.4], 0.5) == ""
    refusal = capacity.refusal([0.5, 0.0], 0.5)
    assert "(1)" in refusal and "50%" in refusal and "90%" in refusal
    assert Capacity(12, 4, 0.9).refusal([0.0], 0.0) == "", "nothing is known yet"
    assert capacity.refusal([0.0, 0.0], 3.48) == "", "the first that plays"
    assert capacity.free_sessions([0.0], 3.48) == 1 and capacity.free_sessions([0.0, 0.5], 3.48) == 0


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
    life = Lifetime(100.0, idle_limit_s=10.0)
    assert life.end() == (110.0, "idle"), "nobody has come yet"
    life.watch(True, 105.0)
    assert life.end() is None
    life.watch(False, 120.0)
    life.watch(False, 125.0)
    assert life.end() == (130.0, "idle"), "since the last one left, not since it was looked at"
    assert Lifetime(0.0).end() is None
