"""Arrivals are the seed's alone, come at the rate asked for, and are the same people at every load."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks import arrivals
from benchmarks.arrivals import LEAST_S, Load


def test_the_same_seed_gives_the_same_arrivals_and_another_one_others() -> None:
    load = Load(6, 60.0, jobs_per_minute=12)
    assert arrivals.visitors(load, 3) == arrivals.visitors(load, 3)
    assert arrivals.jobs(load, 3) == arrivals.jobs(load, 3)
    assert arrivals.visitors(load, 3) != arrivals.visitors(load, 4)
    assert arrivals.jobs(load, 3) != arrivals.jobs(load, 4)


def test_more_load_brings_the_same_people_sooner() -> None:
    few, many = (arrivals.visitors(Load(sessions, 200.0, stay_s=10.0), 0) for sessions in (4, 8))
    assert len(many) > 1.5 * len(few)
    for number in range(4, 20):  # those before are there from the beginning
        assert many[number].seed == few[number].seed and many[number].at_s < few[number].at_s
        assert many[number].prompts_s[:1] == few[number].prompts_s[:1]
        assert many[number].stay_s == few[number].stay_s


def test_as_many_are_there_at_once_as_are_offered() -> None:
    load = Load(10, 2000.0, stay_s=8.0)
    found = arrivals.visitors(load, 1)
    watched_s = sum(min(each.leaves_s, load.end_s) - max(each.at_s, load.begin_s) for each in found)
    assert watched_s / load.seconds == pytest.approx(10, rel=0.1)
    assert all(one.at_s <= later.at_s for one, later in pairwise(found))


@pytest.mark.parametrize("seed", range(6))
def test_short_runs_have_about_the_load_asked_for(seed: int) -> None:
    load = Load(6, 30.0)
    found = arrivals.visitors(load, seed)
    watched_s = sum(max(0.0, min(each.leaves_s, load.end_s) - max(each.at_s, load.begin_s)) for each in found)
    assert watched_s / load.seconds == pytest.approx(6, rel=0.35)


def test_a_visit_is_long_enough_to_say_something_and_ends_with_the_run() -> None:
    load = Load(10, 60.0, stay_s=8.0)
    for visitor in arrivals.visitors(load, 2):
        assert visitor.stay_s >= LEAST_S - 1e-9
        assert visitor.leaves_s <= load.end_s + LEAST_S + 1e-9
        assert all(0 < prompt_s < visitor.stay_s - LEAST_S for prompt_s in visitor.prompts_s)


def test_jobs_come_at_their_rate_and_not_before_the_load_is_there() -> None:
    load = Load(4, 3000.0, jobs_per_minute=30, job_seconds=2.0)
    found = arrivals.jobs(load, 0)
    assert len(found) == pytest.approx(1500, rel=0.1)
    assert found[0].at_s > load.begin_s and {job.seconds for job in found} == {2.0}
    assert arrivals.jobs(Load(4, 60.0), 0) == []


@pytest.mark.parametrize(
    "wrong", [{"sessions": 0.0}, {"seconds": 0.0}, {"stay_s": LEAST_S}, {"jobs_per_minute": -1.0}, {"job_seconds": 0.0}]
)
def test_a_load_that_cannot_be_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Load(**{"sessions": 2.0, "seconds": 10.0} | wrong)
