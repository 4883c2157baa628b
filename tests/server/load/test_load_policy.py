"""Adaptive sessions: what the policy takes and gives back. How many sessions fit, from measured time, and when one
ends by itself. What a balancer is told."""

from __future__ import annotations

import asyncio
import math
import socket
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff import clock
from streamdiff.config import Config, PlaybackConfig, ServeConfig
from streamdiff.engine.messages import LoadFigures
from streamdiff.errors import ConfigError
from streamdiff.server.load import (
    FULL_S,
    HOLD_S,
    SETTLE_S,
    UNLIMITED,
    Lifetime,
    LoadLimit,
    LoadPolicy,
    ViewerDemand,
    degradation_levels,
    least_share,
    serve_agent,
)
from streamdiff.server.metrics import Metrics
from streamdiff.server.sessions.control import EngineStatus
from streamdiff.server.sessions.manager import FRESH_S, EngineLoad
from tests.server.conftest import open_site
from tests.server.scripted import Painter

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


def _load(demands: list[ViewerDemand], work_s: float | None = 0.15, limit: float = 0.9) -> EngineLoad:
    """Of an engine that makes chunks of 12 frames, by default in 4 steps, in `work_s` seconds each."""
    ready = SimpleNamespace(
        chunk_frames=12, steps=4, steps_known=(), chunk_compute_s=work_s, max_sessions=None, max_swapped_sessions=None
    )

    def sessions() -> Any:
        return [SimpleNamespace(id=str(number), demand=lambda _, own=each: own) for number, each in enumerate(demands)]

    config = Config(playback=PlaybackConfig(fps=40.0), serve=ServeConfig(max_utilization=limit))
    return EngineLoad(config, ready, Metrics(), sessions)  # type: ignore[arg-type]


def _plain(share: float, plays: bool = True) -> ViewerDemand:
    """Of a session that takes so much of the time of an engine that needs 0.15 s for a chunk."""
    return ViewerDemand(4, share * 80, adaptive=False, plays=plays)


def test_the_one_too_many_is_told_the_numbers_and_the_first_never_refused() -> None:
    assert _load([]).refusal(_plain(5.0)) == ""
    assert _load([_plain(0.4)]).refusal(_plain(0.5)) == ""
    refusal = _load([_plain(0.5), _plain(0.5, plays=False)]).refusal(_plain(0.5))
    assert "(1)" in refusal and "50%" in refusal and "90%" in refusal
    assert _load([_plain(0.5)], work_s=None).refusal(_plain(0.5)) == "", "nothing is known yet"
    assert _load([_plain(0.5, plays=False)]).refusal(_plain(3.48)) == "", "the first that plays"
    assert _load([_plain(0.5, plays=False)], work_s=1.5).free_sessions() == 1
    assert _load([_plain(0.5)], work_s=1.5).free_sessions() == 0


def test_a_measurement_of_a_busy_moment_does_not_hold_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine measured last holds while it is fresh; then the start's, unless it was higher still."""
    now_s = [100.0]
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s[0])
    load = _load([])
    load.measured(LoadFigures(1.5))
    assert load.work_s == 1.5
    now_s[0] += FRESH_S
    assert load.work_s == 1.5
    now_s[0] += FRESH_S
    assert load.work_s == 0.15 and load.share(40.0) == pytest.approx(0.5)
    load.measured(LoadFigures(0.1))
    now_s[0] += 2 * FRESH_S
    assert load.work_s == 0.1, "the start was the busy moment"
    again = load._ready
    load.restart(SimpleNamespace(**{**vars(again), "chunk_compute_s": None}))  # type: ignore[arg-type]
    assert load.work_s == 0.1, "an engine that measured nothing changes nothing"
    load.restart(SimpleNamespace(**{**vars(again), "chunk_compute_s": 0.3}))  # type: ignore[arg-type]
    assert load.work_s == 0.3, "another engine"
    unmeasured = _load([], work_s=None)
    unmeasured.measured(LoadFigures(1.5))
    now_s[0] += 1000.0
    assert unmeasured.work_s == 1.5, "nothing else is known"


@given(st.floats(0.001, 2), st.floats(0.05, 4), st.integers(0, 20))
def test_room_is_how_many_are_not_refused(work_s: float, limit: float, opened: int) -> None:
    one, demands = ViewerDemand(4, 40.0, adaptive=False), list[ViewerDemand]()
    load = _load(demands, work_s, limit)
    while not load.refusal(one) and len(demands) < 400:
        demands.append(one)
    fit = len(demands)
    del demands[opened:]
    room, wanted = load.free_sessions(), load.share(40.0)
    assert room is not None
    if fit < 400:
        assert abs(room - max(0, fit - opened)) <= (abs(limit / wanted - round(limit / wanted)) < 1e-6)


def test_a_session_that_nobody_watches_ends() -> None:
    life = Lifetime(100.0, idle_limit_s=10.0)
    assert life.ends_s == 110.0, "nobody has come yet"
    life.watch(True, True, 105.0)
    assert life.ends_s is None
    life.watch(False, True, 120.0)
    assert life.plays_since_s == 105.0, "it plays for a while longer"
    life.watch(False, False, 125.0)
    assert life.plays_since_s == math.inf
    assert life.ends_s == 130.0, "since the last one left, not since it was looked at"
    assert Lifetime(0.0).ends_s is None


async def test_a_balancer_hears_of_the_room_and_of_none_where_nobody_is_let_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def asked() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return (await reader.read()).decode()
        finally:
            writer.close()

    async with open_site(Config(serve=ServeConfig(max_utilization=3.0))) as site:
        manager = site.state.manager
        async with serve_agent("127.0.0.1", port, manager.free_sessions):
            await (await site.watch()).frame()
            await site.until(lambda: manager.load.free_sessions() is not None)
            first = manager.load.free_sessions()
            assert await asked() == f"up {first}%\n" and first
            manager.load.limit = 0.0
            assert await asked() == "up 0%\n"
            manager.load.limit = 1000.0
            assert await asked() == "up 100%\n", "a weight has a bound"
            manager.draining = True
            assert await asked() == "up 0%\n"
            manager.draining, manager.engine = False, EngineStatus("restarting", "it died", 1)
            assert await asked() == "up 0%\n"
            manager.engine = EngineStatus()
            with pytest.raises(ConfigError):
                async with serve_agent("127.0.0.1", port, manager.free_sessions):
                    pass
        with pytest.raises(OSError):
            await asked()


async def test_a_session_that_nobody_watches_takes_a_place_where_none_can_be_swapped_out() -> None:
    async with open_site(Config(serve=ServeConfig(max_utilization=9.0)), Painter(fits=3)) as site:
        await site.until(lambda: site.live.idle)
        load = site.state.manager.load
        assert (load.free_sessions(), load.sessions_limit()) == (2, 3)


async def test_ids_carry_the_server_s_name_and_those_of_an_earlier_run_have_ended() -> None:
    async with open_site(Config(serve=ServeConfig(name="a7"))) as site:
        opened = (await site.http.post("/api/sessions", json={})).json()
        assert opened["id"].startswith("s-a7-") and opened["whep"] == f"/whep/{opened['id']}"
        old = await site.http.get("/api/sessions/s-a7-before")
        assert (old.status_code, old.json()["reason"]) == (410, "restart")
        assert (await site.http.get("/api/sessions/s-a8-other")).status_code == 404
        token = {"Authorization": f"Bearer {opened['control_token']}"}
        ended = await site.http.delete(f"/api/sessions/{opened['id']}", headers=token)
        assert (ended.status_code, ended.json()["ended"]) == (200, "deleted")
        assert site.state.manager.get(opened["id"]) is None
