"""Rows of several sessions in one forward: who may share one, and the record of one, follow from `MicroStep`; and
nobody is worse off for it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamdiff.core import KV_CONTEXTS, PER_ROW, MicroStep, differing_field, pack, record_length, shared_fields, unpack
from streamdiff.pipeline.planner.simulator import Figures, Setup, Stream, simulate
from streamdiff.pipeline.scheduler.row_limit import RingSlots, RowLimit, RowsNow
from streamdiff.pipeline.scheduler.scheduler import SchedulerState, StreamBatchScheduler

OTHER = {
    "kv_context": "same_step", "background": True, "paused": True, "rerun_as_one": True, "draining": True,
    "stale": False, "chunks": [None], "rerun": [1],
}  # fmt: skip
"""Of a field that is no number: a value other than `session` has."""


def session() -> SchedulerState:
    return SchedulerState(0, 4, 0, "clean", 0, 1, 4, 1, 0)


@pytest.mark.parametrize("name", [each.name for each in fields(SchedulerState)])
def test_a_sessions_field_keeps_rows_apart_exactly_when_it_is_declared_shared(name: str) -> None:
    one, other = session(), session()
    setattr(other, name, OTHER.get(name, 77))
    declared = next(each.metadata for each in fields(SchedulerState) if each.name == name)
    assert differing_field(one, other) == (name if declared["in_a_forward"] == "shared" else None)


@pytest.mark.parametrize("name", [each.name for each in fields(MicroStep)])
def test_a_micro_steps_field_keeps_rows_apart_exactly_when_it_is_declared_shared(name: str) -> None:
    values = dict.fromkeys((each.name for each in fields(MicroStep)), 3)
    one, other = MicroStep(**values), MicroStep(**{**values, name: 4})
    assert differing_field(one, other) == (name if name in shared_fields(MicroStep) else None)


def opened(sessions: int, *, stages: int = 1, max_rows: int = 4, jobs: int = 0) -> StreamBatchScheduler:
    scheduler = StreamBatchScheduler(stages=stages, chunk_frames=1, max_rows=max_rows)
    for name in range(sessions + jobs):
        scheduler.open(name, steps=4, kv_context="clean", epoch=0, background=name >= sessions)
        scheduler.set_frame_credit(name, 2)
    return scheduler


def test_what_the_scheduler_refuses_is_what_the_field_says_and_is_counted() -> None:
    scheduler = opened(1, jobs=1)
    assert [row.session for row in scheduler.next()] == [0]
    assert [row.session for row in scheduler.next()] == [1]
    assert scheduler.counts.alone == {"background": 1, "none_ready": 1}


def test_rows_are_spread_over_the_places_of_the_ring() -> None:
    """Four clean sessions on four stages take a place each: as rows of one forward three stages would be idle."""
    scheduler = opened(4, stages=4)
    sizes = [len(scheduler.next(slots=RingSlots(5 - taken, 5 - taken, 5))) for taken in range(5)]
    assert sizes == [1, 1, 1, 1, 0]
    assert scheduler.counts.alone == {"ring": 3, "none_ready": 1}
    scheduler = opened(16, stages=4, max_rows=8)
    sizes = [len(scheduler.next(slots=RingSlots(5 - taken, 5 - taken, 5))) for taken in range(5)]
    assert sizes == [3, 3, 3, 3, 3]
    assert scheduler.counts.rows == {3: 5}


def test_a_job_changes_nothing_for_live_rows() -> None:
    alone, beside = opened(2, stages=2), opened(2, stages=2, jobs=6)
    for slots in (RingSlots(3, 3, 3), RingSlots(1, 2, 3)):
        rows = alone.next(slots=RingSlots(slots.free_of_live, slots.free_of_live, slots.all))
        assert beside.next(slots=slots) == rows


def run(stages: int, streams: tuple[Stream, ...], max_rows: int, marginal: float) -> Figures:
    """Equal stages and free links; each row beyond the first costs `marginal` of it. Long enough for the beginning to
    have passed, where all sessions are at the same place."""
    times = tuple((1 + marginal * more) / stages for more in range(max_rows))
    forwards = 1 if stages == 1 else None  # as `Ring` has it
    return simulate(
        Setup((times,) * stages, streams, max_rows=max_rows, forwards=forwards, chunks=max(12, 48 // streams[0].steps))
    ).figures


@pytest.mark.slow
# Rings that were once worse off.
@example(6, 2, 9, "staircase", 6, 0.9)  # forwards of two rows and of one in turns: 0.96 of the chunks
@example(3, 1, 12, "same_step", 5, 0.9)  # five of twelve: the next round ends a forward later, gaps of 1.15
@example(1, 2, 13, "same_step", 6, 1.0)  # nothing to gain, and numbers that do not divide: 1.15
@example(6, 4, 2, "same_step", 8, 0.25)  # nothing is shared, only the order was another one: 1.11
@settings(max_examples=25, deadline=None)
@given(
    stages=st.integers(1, 8),
    steps=st.integers(1, 6),
    sessions=st.integers(1, 16),
    kv_context=st.sampled_from(KV_CONTEXTS),
    max_rows=st.integers(2, 8),
    marginal=st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]),
)
def test_nobody_is_worse_off(
    stages: int, steps: int, sessions: int, kv_context: str, max_rows: int, marginal: float
) -> None:
    """As many chunks as with forwards of one row, and no longer gaps."""
    streams = (Stream(steps, kv_context),) * sessions
    plain, shared = run(stages, streams, 1, marginal), run(stages, streams, max_rows, marginal)
    assert shared.chunks_per_s >= 0.99 * plain.chunks_per_s
    longest = [max(gap.longest_s for gap in figures.gaps) for figures in (plain, shared)]
    assert longest[1] <= 1.1 * longest[0] + 1e-9


def test_rows_that_cost_in_full_stay_apart_and_say_so() -> None:
    scheduler, slots = opened(8), RingSlots(1, 1, 1)
    scheduler.set_row_costs([1.0, 2.0, 3.0, 4.0])
    assert [len(scheduler.next(slots=slots)) for _ in range(8)] == [1] * 8
    assert scheduler.counts.alone == {"cost": 8}
    scheduler = opened(8)
    scheduler.set_row_costs([1.0, 1.5, 2.0, 2.5])
    assert [len(scheduler.next(slots=slots)) for _ in range(2)] == [4, 4]


def test_of_rows_that_pay_so_many_share_a_forward_that_nobody_waits_longer() -> None:
    """Of five sessions, which have five passes a chunk: forwards of four take 3.7, and 25 rows fill 7 of them, which is
    longer than 25 by themselves; 9 forwards of three are not. Where four take 2.5 it is shorter."""
    limit = RowLimit(4, [1.0, 1.9, 2.7, 3.7])
    assert limit.of(RowsNow(5, 0, 25), 1, 1) == (3, "none_ready")
    assert RowLimit(4, [1.0, 1.5, 2.0, 2.5]).of(RowsNow(8, 0, 40), 1, 1) == (4, "none_ready")


def test_two_rows_go_together_once_there_were_enough_for_every_place() -> None:
    """A ring of three places whose forwards have two rows and one in turns waits for the longer ones."""
    limit = RowLimit(4, [1.0, 1.2, 1.4, 1.6])
    assert [limit.of(RowsNow(ready, 3, 30), 1, 3)[0] for ready in (2, 3, 3, 3, 2)] == [1, 1, 1, 2, 1]


NAMES = [each.name for each in fields(MicroStep)]
int64 = st.integers(-(2**63), 2**63 - 1)
microsteps = st.builds(MicroStep, *[int64 for _ in NAMES])


@pytest.mark.parametrize("metadata", [{}, {"in_a_forward": "maybe"}, {"note": "shared"}])
def test_a_field_that_does_not_say_so_is_refused(metadata: dict[str, str]) -> None:
    @dataclass(frozen=True)
    class Forgetful:
        step: int = field(metadata=PER_ROW)
        guidance: int = field(metadata=metadata)

    with pytest.raises(TypeError):
        shared_fields(Forgetful)
    with pytest.raises(TypeError):
        differing_field(Forgetful(1, 2), Forgetful(1, 2))


@given(st.lists(microsteps, max_size=5), st.integers(0, 3), int64)
def test_what_is_packed_is_unpacked_and_the_length_never_changes(
    rows: list[MicroStep], spare: int, sequence: int
) -> None:
    max_rows = len(rows) + spare
    record = pack(rows, max_rows, sequence)
    assert len(record) == record_length(max_rows) == 2 + len(NAMES) * max_rows
    assert all(type(value) is int for value in record)
    assert unpack(record) == (sequence, rows)
