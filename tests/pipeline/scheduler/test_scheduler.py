"""The scheduler against the rules of docs/design.md, section 4, under random histories; `judge.py` has the rules.

A history is a list of events: time passes, results come back late, rooms change, sessions pause, change their prompt
or their number of steps, are reset and closed. Paced admission is tested in `test_pacing.py`.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.core import KV_CONTEXTS, MicroStep, min_ahead_frames
from streamdiff.pipeline.scheduler import scheduler as scheduler_module
from streamdiff.pipeline.scheduler.scheduler import PATIENCE, StreamBatchScheduler
from tests.pipeline.scheduler.judge import FRAMES, Judge, VirtualRing

sessions = st.integers(0, 3)
events = st.one_of(
    st.just(("forward",)),
    st.just(("forward",)),
    st.just(("back",)),
    st.just(("turn",)),
    st.just(("turn",)),
    st.tuples(
        st.just("open"), sessions, st.integers(1, 5), st.sampled_from(KV_CONTEXTS), st.sampled_from([0, 0, 1, 3])
    ),
    st.tuples(st.just("room"), sessions, st.integers(-30, 60)),
    st.tuples(st.just("room"), sessions, st.just(200)),
    st.tuples(st.just("pause"), sessions, st.booleans()),
    st.tuples(st.just("prompt"), sessions),
    st.tuples(st.just("steps"), sessions, st.integers(1, 5), st.sampled_from([0, 0, 2])),
    st.tuples(st.just("rerun"), sessions),
    st.tuples(st.just("reset"), sessions),
    st.tuples(st.just("close"), sessions),
)


def play(judge: Judge, event: tuple[object, ...]) -> None:
    name, *rest = event
    if name == "forward":
        judge.forward()
    elif name == "back":
        judge.come_back()
    elif name == "turn":
        judge.forward()
        while judge.ring:
            judge.come_back()
    elif name == "open":
        session, steps, kv_context, extra = rest
        if session not in judge.logs:
            number = int(str(session))
            judge.open(number, int(str(steps)), str(kv_context), int(str(extra)))
    elif rest[0] in judge.logs:
        session = int(str(rest[0]))
        if name == "room":
            judge.set_frame_credit(session, int(str(rest[1])))
        elif name == "pause":
            judge.set_paused(session, bool(rest[1]))
        elif name == "steps":
            judge.change_steps(session, int(str(rest[1])), int(str(rest[2])))
        else:
            change = {"prompt": judge.change_prompt, "rerun": judge.rerun, "reset": judge.reset, "close": judge.close}
            change[str(name)](session)


@pytest.mark.slow
@pytest.mark.parametrize("histories", [100, pytest.param(5000, marks=pytest.mark.soak)])
def test_no_history_breaks_the_rules_and_everything_admitted_finishes(histories: int) -> None:
    any_history = st.lists(events, min_size=80, max_size=200)
    check = given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), any_history)(keeps_the_rules_and_finishes)
    settings(max_examples=histories)(check)()


def keeps_the_rules_and_finishes(stages: int, max_rows: int, late: int, history: list[tuple[object, ...]]) -> None:
    """After the history every session gets room and runs on, with results that come back up to `late` rows late."""
    judge = Judge(stages, max_rows)
    for event in history:
        play(judge, event)
    admitted = {name: len(log.entered) for name, log in judge.logs.items()}
    for name in judge.logs:
        judge.set_paused(name, False)
    for _ in range(1200):
        ends = {name: admitted[name] + 1 for name in judge.logs}
        if all(log.back.get(ends[name], -1) == log.passes - 1 for name, log in judge.logs.items()):
            return
        for name, log in judge.logs.items():
            judge.set_frame_credit(name, 200 if len(log.entered) < admitted[name] + 12 else 0)
        if len(judge.ring) > late or not judge.forward():
            judge.come_back()
    raise AssertionError("chunks that were admitted, or that there was room for, never finished")


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", KV_CONTEXTS)
@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("extra", [0, 3])
def test_with_exactly_the_minimum_lead_the_ring_never_stands_still(kv_context: str, stages: int, extra: int) -> None:
    """Frames are shown one by one; what is made and not shown stays within the lead."""
    judge = Judge(stages, 1)
    judge.open(0, 4, kv_context, extra)
    lead = min_ahead_frames(kv_context, steps=4, stages=stages, chunk_frames=FRAMES)
    log, shown = judge.logs[0], 0
    for _ in range(6000):
        unshown = len(log.entered) * FRAMES - shown
        assert unshown <= lead
        judge.set_frame_credit(0, lead - unshown)
        if judge.forward():
            continue
        if judge.ring:
            judge.come_back()
        else:
            made = sum(1 for step in log.back.values() if step >= log.steps - 1) * FRAMES
            assert made > shown, "nothing runs and nothing is left to show"
            shown += 1
        if shown > 30 * FRAMES:
            return
    raise AssertionError("too slow")


@pytest.mark.parametrize("kv_context", KV_CONTEXTS)
def test_a_first_chunk_may_have_more_steps(kv_context: str) -> None:
    """Four and two: the second chunk begins when the first is as far as a chunk of two steps would have to be."""
    scheduler = StreamBatchScheduler(stages=4, chunk_frames=FRAMES)
    scheduler.open(0, steps=2, first_steps=4, kv_context=kv_context, epoch=0)
    scheduler.set_frame_credit(0, 10 * FRAMES)
    handed = []
    for _ in range(20):
        for row in scheduler.next():
            handed.append(row)
            scheduler.returned(row)
    clean = kv_context in ("clean", "staircase")
    first, second = ([row for row in handed if row.chunk == chunk] for chunk in (0, 1))
    assert [row.step for row in first] == list(range(4 + clean)) and {row.steps for row in first} == {4}
    assert [row.step for row in second] == list(range(2 + clean)) and {row.steps for row in second} == {2}
    before = {"clean": 4, "staircase": 3}.get(kv_context, 2)
    assert handed.index(second[0]) > handed.index(MicroStep(0, 0, before, 4, 0))


def test_the_session_with_the_least_slack_goes_first() -> None:
    judge = Judge(1, 1)
    for session, room in ((0, 24), (1, 96), (2, 48)):
        judge.open(session, 4, "clean")
        judge.set_frame_credit(session, room)
    assert [judge.forward()[0].session for _ in range(3)] == [1, 2, 0]


def test_results_of_a_stream_that_is_gone_are_ignored() -> None:
    judge = Judge(2, 1)
    judge.open(0, 4, "clean")
    judge.set_frame_credit(0, 100)
    stale = judge.forward()[0]
    judge.reset(0)
    judge.set_frame_credit(0, 100)
    fresh = judge.forward()[0]
    assert (stale.chunk, stale.step) == (fresh.chunk, fresh.step) == (0, 0)
    judge.come_back()  # the stale one
    assert judge.scheduler.in_flight == 1 and not judge.scheduler.has_work
    judge.come_back()
    assert judge.scheduler.has_work
    judge.scheduler.returned(fresh)  # a second time: no effect
    assert judge.forward()[0].step == 1
    judge.close(0)
    judge.scheduler.returned(fresh)
    assert judge.scheduler.in_flight == 0 and judge.scheduler.next() == []


@pytest.mark.slow
@settings(max_examples=60)
@given(
    ticks=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    max_rows=st.integers(1, 4),
    ahead=st.booleans(),
    streams=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(KV_CONTEXTS), st.integers(0, 90), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    ),
)
def test_every_session_gets_through_a_ring_of_any_times(
    ticks: list[int], max_rows: int, ahead: bool, streams: list[tuple[int, str, int, int]]
) -> None:
    """Sessions arrive at any time and have unlike rooms that never change; each still finishes its chunks."""
    judge = Judge(len(ticks), max_rows)
    ring = VirtualRing(judge, ticks, ahead=ahead)
    for *_, arrival, _ in streams:
        ring.wake(arrival)

    def rooms() -> None:
        for name, (steps, kv_context, arrival, chunks) in enumerate(streams):
            if name not in judge.logs and ring.now >= arrival:
                judge.open(name, steps, kv_context)
            if name in judge.logs:
                judge.set_frame_credit(name, chunks * FRAMES)

    ring.run(lambda: all(len(ring.finished[name]) >= 6 for name in range(len(streams))), rooms)


def test_unlike_rooms_that_never_change_starve_nobody() -> None:
    """One device, more work than it can do: the greedy session has the most, the others have their bound."""
    judge = Judge(1, 1)
    for session in range(3):
        judge.open(session, 4, "clean")
    served = []
    for _ in range(300):
        for session, room in enumerate((FRAMES, 1000, FRAMES)):
            judge.set_frame_credit(session, room)
        served.append(judge.forward()[0].session)
        judge.come_back()
    longest = max(later - earlier for name in (0, 2) for earlier, later in _pairs(served, name))
    assert longest <= (PATIENCE + 1) * 3
    assert served.count(1) > 300 * 0.7, "slack still decides"


def _pairs(served: list[int], name: int) -> list[tuple[int, int]]:
    places = [-1, *(place for place, session in enumerate(served) if session == name), len(served)]
    return list(pairwise(places))


def test_equal_rooms_are_served_in_turn() -> None:
    judge = Judge(1, 1)
    for session in (2, 0, 1):
        judge.open(session, 4, "clean")
    served = []
    for _ in range(30):
        for session in judge.logs:
            judge.set_frame_credit(session, FRAMES)
        served += [row.session for row in judge.forward()]
        judge.come_back()
    # A chunk under way has used up its room, so room is set afresh for all before each forward, and is equal.
    assert all(sorted(served[i : i + 3]) == [0, 1, 2] for i in range(0, 30, 3)), served


def test_who_has_a_row_in_the_forward_already_waits_less_than_who_has_none() -> None:
    """Session 0 has the most room until its first row has used some up; then both have the same."""
    judge = Judge(4, 3)
    for session, chunks in ((0, 3), (1, 2)):
        judge.open(session, 1, "same_step")
        judge.set_frame_credit(session, chunks * FRAMES)
    assert [row.session for row in judge.forward()] == [0, 1, 0]


def test_a_reset_takes_back_what_was_due_and_not_handed_out() -> None:
    judge = Judge(1, 1)
    for session in range(2):
        judge.open(session, 4, "clean")
        judge.set_frame_credit(session, FRAMES)
    assert [row.session for row in judge.forward()] == [0]
    judge.reset(1)  # it was ready, and passed over
    assert judge.forward() == []


def test_rows_that_are_not_compatible_take_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the number of steps had to be equal in a forward: two sessions of 2 steps never meet one of 3."""
    monkeypatch.setattr(
        scheduler_module, "differing_field", lambda one, other: "steps" if one.steps != other.steps else None
    )
    scheduler = StreamBatchScheduler(stages=1, chunk_frames=FRAMES, max_rows=3)
    steps = {0: 2, 1: 3, 2: 2}
    for session, count in steps.items():
        scheduler.open(session, steps=count, kv_context="clean", epoch=0)
    served: list[list[int]] = []
    for _ in range(40):
        for session in steps:
            scheduler.set_frame_credit(session, FRAMES * (1 + 9 * (steps[session] == 2)))
        rows = scheduler.next()
        assert len({row.steps for row in rows}) == 1, "nothing else shares the forward"
        served.append([row.session for row in rows])
        for row in rows:
            scheduler.returned(row)
    assert [0, 2] in [sorted(forward) for forward in served], "what may share a forward does"
    waits = _pairs([1 if forward == [1] else 0 for forward in served], 1)
    assert max(later - earlier for earlier, later in waits) <= (PATIENCE + 1) * 3


def test_a_row_of_an_epoch_that_is_gone_is_not_taken_for_a_new_one() -> None:
    scheduler = StreamBatchScheduler(stages=1, chunk_frames=FRAMES)
    scheduler.open(0, steps=2, kv_context="same_step", epoch=5)
    scheduler.set_frame_credit(0, FRAMES)
    assert scheduler.next() == [MicroStep(0, 0, 0, 2, 5)]
    for stale in (
        MicroStep(0, 0, 0, 2, 4),
        MicroStep(0, 1, 0, 2, 5),
        MicroStep(0, -1, 0, 2, 5),
        MicroStep(0, 0, 1, 2, 5),
    ):
        scheduler.returned(stale)
        assert scheduler.in_flight == 1 and scheduler.next() == []
    scheduler.returned(MicroStep(0, 0, 0, 2, 5))
    assert scheduler.next() == [MicroStep(0, 0, 1, 2, 5)]
