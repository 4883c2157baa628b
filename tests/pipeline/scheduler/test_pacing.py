"""Paced admission: chunks finish one by one at full throughput, and no session waits for anything it need not wait for.

The ring under virtual time has equal stages of one tick, so a whole forward (the unit of docs/design.md, section 4) is
P ticks.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.pipeline.scheduler.scheduler import timetable_tick
from tests.pipeline.scheduler.judge import FRAMES, Judge, VirtualRing, timetable

PLENTY = 100 * FRAMES


def ring_of(kv_context: str, stages: int, steps: int, *, sessions: int = 1, ahead: bool = False) -> VirtualRing:
    judge = Judge(stages, 1)
    for session in range(sessions):
        judge.open(session, steps, kv_context)
    return VirtualRing(judge, [1] * stages, ahead=ahead)


def play(ring: VirtualRing, chunks: int, outage: tuple[int, int] = (0, 0), *, pause: bool = False) -> None:
    """Until each session has finished `chunks` chunks; no room (or, with `pause`, paused) in ticks `outage`."""
    ring.wake(outage[1])

    def rooms() -> None:
        out = outage[0] <= ring.now < outage[1]
        for session in ring.judge.logs:
            if pause:
                ring.judge.set_paused(session, out)
            ring.judge.set_frame_credit(session, 0 if out and not pause else PLENTY)

    ring.run(lambda: all(len(ring.finished[name]) >= chunks for name in ring.judge.logs), rooms)


def gaps(ticks: list[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(ticks)]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("stages", range(1, 9))
def test_same_step_is_even_full_and_as_fast_as_one_device(stages: int, steps: int, ahead: bool) -> None:
    """From the first chunk on: nothing is left out as a warm-up but for the latency."""
    ring = ring_of("same_step", stages, steps, ahead=ahead)
    rounds = 8
    play(ring, rounds * stages + 1)
    finished, unit = ring.finished[0], stages
    assert finished[0] == steps * unit, "the first chunk is ready after S units"
    mean = (finished[rounds * stages] - finished[0]) / (rounds * stages)
    assert unit / mean == pytest.approx(stages / steps, rel=0.03), "throughput P / S"
    assert max(gaps(finished)) <= 1.5 * mean
    latencies = ring.latencies[0]
    assert sum(latencies) / len(latencies) <= 1.1 * steps * unit
    assert max(latencies[4 * stages :]) <= 1.1 * steps * unit


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(1, 6), st.integers(0, 100), st.integers(1, 60), st.booleans())
def test_it_is_even_again_after_room_was_missing_or_a_pause(
    stages: int, steps: int, begin: int, length: int, pause: bool
) -> None:
    ring = ring_of("same_step", stages, steps)
    play(ring, (begin + length) // steps + 16 * stages, (begin, begin + length), pause=pause)
    settled = [tick for tick in ring.finished[0] if tick >= begin + length + 2 * stages * steps][: 10 * stages + 1]
    assert len(settled) == 10 * stages + 1
    mean = (settled[-1] - settled[0]) / (len(settled) - 1)
    assert mean == pytest.approx(steps, rel=0.03), "throughput P / S"
    assert max(gaps(settled)) <= 1.5 * mean
    late = [tick for tick in ring.finished[0] if tick > begin + length]
    assert late[0] <= begin + length + stages * steps + stages, "it goes on at once"


def test_a_chunk_that_nothing_in_flight_stands_before_is_admitted_at_once() -> None:
    """One chunk of room at a time: each enters the moment there is room, wherever the timetable would have it."""
    judge = Judge(4, 1)
    judge.open(0, 4, "same_step")
    for chunk in range(9):
        assert judge.forward() == []
        judge.set_frame_credit(0, FRAMES)
        for step in range(4):
            assert [(row.chunk, row.step) for row in judge.forward()] == [(chunk, step)]
            judge.come_back()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_context", "stages", "steps", "sessions", "rate", "gap"),
    [
        ("staircase", 4, 4, 1, 4 / 5, 1.25),  # P / (S + 1), the ideal
        ("staircase", 4, 3, 1, 4 / 5, 1.25),  # one chunk per 1 + 1 / P
        ("staircase", 2, 4, 1, 2 / 5, 2.5),
        ("clean", 4, 4, 1, 1 / 5, 5.0),
        ("clean", 4, 4, 4, 4 / 5, 5.0),
        ("clean", 8, 2, 8, 8 / 3, 3.0),
    ],
)
def test_staircase_and_clean_space_themselves(
    kv_context: str, stages: int, steps: int, sessions: int, rate: float, gap: float
) -> None:
    """Rates are chunks of all sessions per unit; every gap of every session is the same. Units are P ticks."""
    ring = ring_of(kv_context, stages, steps, sessions=sessions)
    play(ring, 40)
    if stages >= steps and sessions == 1:
        assert ring.finished[0][0] == steps * stages, "the first chunk is ready after S units"
    for finished in ring.finished.values():
        settled = finished[8:]
        assert set(gaps(settled)) == {round(gap * stages)}
        assert sessions * stages * (len(settled) - 1) / (settled[-1] - settled[0]) == pytest.approx(rate, rel=0.03)


@pytest.mark.slow
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(1, 6))
@settings(max_examples=25)
def test_unequal_stages_run_at_the_pace_of_the_slowest(ticks: list[int], steps: int) -> None:
    judge = Judge(len(ticks), 1)
    judge.open(0, steps, "same_step")
    ring = VirtualRing(judge, ticks)
    play(ring, 16 * len(ticks))
    finished = ring.finished[0][6 * len(ticks) :]
    mean = (finished[-1] - finished[0]) / (len(finished) - 1)
    ideal = max(max(ticks), sum(ticks) / len(ticks)) * steps
    assert mean == pytest.approx(ideal, rel=0.05)
    assert max(gaps(finished)) <= 1.6 * mean


@given(st.integers(1, 10), st.integers(1, 10))
@settings(max_examples=100)
def test_the_timetable_is_the_first_that_fits_and_has_no_hole(stages: int, passes: int) -> None:
    rounds = 3
    starts = [timetable_tick(chunk, stages=stages, passes=passes) for chunk in range(rounds * stages)]
    assert tuple(starts) == timetable(stages, passes, rounds * stages)
    steps = sorted(start + step * stages for start in starts for step in range(passes))
    assert len(set(steps)) == len(steps), "every micro-step has a tick of its own"
    full = range((passes - 1) * stages, starts[-1])
    assert set(full) <= set(steps), "no hole once the ring is full"
    assert max(gaps(starts), default=0) <= passes + 1
