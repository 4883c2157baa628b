"""The simulated server: alone a visitor waits for what it must, many wait for each other, and jobs for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import arrivals, slo
from benchmarks.arrivals import JobArrival, Load, Visitor
from benchmarks.load_simulation import EngineTimes, LoadSimulation, ServerSettings
from benchmarks.slo import Video, Visit

# Forwards of 20 ms and a quarter of that for each row more; a chunk is 4 of them and a clean one, decoded in 60 ms.
TIMES = EngineTimes(tuple(0.02 + 0.005 * more for more in range(8)), 0.06, 0.16, 12, 3, 4, "clean")
FPS = 10.0


def play(
    who: list[Visitor], what: list[JobArrival] | None = None, times: EngineTimes = TIMES, **settings: Any
) -> tuple[list[Visit], list[Video], list[int]]:
    simulation = LoadSimulation(times, ServerSettings(FPS, **settings))
    return *simulation.run(who, what or []), simulation.forwards


def test_alone_a_visitor_sees_the_first_frame_when_a_chunk_is_made_and_enough_of_it_decoded() -> None:
    [visit], _, forwards = play([Visitor(1.0, 10.0, 0, (3.0,))])
    # Four steps, two of three latent frames decoded, and the buffer has the six frames that it waits for.
    assert visit.first_frame_s == pytest.approx(4 * 0.02 + 0.06 * 2 / 3, abs=1e-4)
    assert visit.stalls(FPS) == 0 and visit.rate(FPS) == 1.0
    # Two chunks are ahead at most (2.4 s), and it holds from the next one on.
    [lag_s] = visit.controls
    assert 1.2 <= lag_s <= 2.5
    at_s, shown = visit.looks[-1]
    assert shown == pytest.approx(FPS * (at_s - 1.12), abs=1.01)
    assert set(forwards) == {1}


def test_too_many_sessions_stall_and_rows_that_share_a_forward_carry_more_of_them() -> None:
    slow = replace(TIMES, forward_s=tuple(0.05 + 0.01 * more for more in range(8)))
    who = [Visitor(0.1 * number, 30.0, number, ()) for number in range(7)]  # 7 x 10/12 x 0.25 s = 1.46 of the time
    alone, shared = (play(who, times=slow, max_rows=rows) for rows in (1, 8))
    assert max(alone[2]) == 1 and max(shared[2]) > 2
    rates = [[visit.rate(FPS) or 0.0 for visit in visits] for visits in (alone[0], shared[0])]
    assert max(rates[0]) < 0.85 and min(rates[1]) > 0.95


def test_adaptive_sessions_lose_steps_where_too_many_have_come_and_show_more() -> None:
    slow = replace(TIMES, forward_s=tuple(0.05 + 0.01 * more for more in range(8)), steps_known=(4, 2))
    who = [Visitor(0.1 * number, 40.0, number, ()) for number in range(7)]  # 1.46 of the time, in two steps .88
    plain, lowered = (play(who, times=slow, adaptive=adaptive)[0] for adaptive in (False, True))
    rates = [[visit.rate(FPS) or 0.0 for visit in visits] for visits in (plain, lowered)]
    assert max(rates[0]) < 0.85 < 0.9 < min(rates[1])


@pytest.mark.slow
def test_a_ring_of_stages_carries_more_sessions_than_one_stage() -> None:
    who = [Visitor(0.1 * number, 30.0, number, ()) for number in range(16)]
    quick = replace(TIMES, decode_s=0.01)
    one, four = (play(who, times=quick, stages=stages)[0] for stages in (1, 4))
    assert max(visit.rate(FPS) or 0 for visit in one) < 0.9 < min(visit.rate(FPS) or 0 for visit in four)


def test_a_forward_of_two_rows_takes_its_own_time() -> None:
    visits, _, forwards = play([Visitor(0.0, 1.0, 0, ()), Visitor(0.0, 1.0, 1, ())], max_rows=2)
    assert forwards[:4] == [2, 2, 2, 2]
    assert visits[0].first_frame_s == pytest.approx(4 * 0.025 + 0.04, abs=1e-4)
    assert visits[1].first_frame_s == pytest.approx(4 * 0.025 + 0.06 + 0.04, abs=1e-4)


def test_a_chunk_of_a_job_waits_for_those_of_visitors_to_be_decoded() -> None:
    [visit], _, _ = play([Visitor(0.3, 5.0, 0, ())], [JobArrival(0.0, 6.0, 0)], replace(TIMES, decode_s=1.0))
    # The job's first chunk is decoded from 0.08 to 1.08 s, its second waits since 0.18 s, the visitor's since 0.38 s.
    assert visit.first_frame_s == pytest.approx(1.08 + 2 / 3 - 0.3, abs=1e-4)


def test_nothing_differs_between_two_runs() -> None:
    load = Load(5, 30.0, jobs_per_minute=20)
    runs = [play(arrivals.visitors(load, 7), arrivals.jobs(load, 7), max_rows=4) for _ in range(2)]
    assert runs[0] == runs[1] and len(runs[0][0]) > 10


@pytest.mark.slow
def test_jobs_take_what_is_left_and_a_full_engine_leaves_nothing() -> None:
    who = [Visitor(0.0, 30.0, number, ()) for number in range(6)]
    jobs = [JobArrival(2.0, 2.4, 0), JobArrival(2.5, 2.4, 1)]
    without, (visits, videos, _) = play(who)[0], play(who, jobs)
    assert [visit.rate(FPS) for visit in visits] == [visit.rate(FPS) for visit in without] == [1.0] * 6
    assert all(video.total_s is not None for video in videos)
    # One after the other.
    assert (videos[1].at_s + (videos[1].total_s or 0)) > (videos[0].at_s + (videos[0].total_s or 0))
    crowd = [Visitor(0.0, 30.0, number, ()) for number in range(20)]
    assert [video.total_s for video in play(crowd, jobs)[1]] == [None, None]


def test_sessions_that_the_limit_has_no_room_for_are_refused_as_the_server_does() -> None:
    who = [Visitor(float(number), 20.0, number, ()) for number in range(12)]
    visits, _, _ = play(who, load_limit=0.9)  # each takes 10 x 0.16 / 12 = 0.133 of the time
    assert [visit.refused for visit in visits] == [""] * 6 + ["time"] * 6
    found = slo.live_figures(visits, {"first_frame": 1.0}, FPS, 0.0, 20.0)
    assert (found["served_well"], found["broken"]) == (6, {"time": 6})


def test_more_rows_than_there_are_times_for_are_refused() -> None:
    with pytest.raises(ValueError, match="max_rows is 9"):
        LoadSimulation(TIMES, ServerSettings(FPS, max_rows=9))
