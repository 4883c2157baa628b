"""The simulated ring: nobody does two things at once, order is kept, and the figures are those of the design. Traces
and plots of it take the place of earlier ones only when they are whole."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.core import KV_CONTEXTS
from streamdiff.pipeline.planner.simulator import Run, Setup, Stream, WorkSpan, simulate, write_trace

CLOSE = 1e-9


def equal(
    kv_context: str, *, stages: int, steps: int, sessions: int = 1, max_rows: int = 1, forwards: int | None = None
) -> Setup:
    """Equal stages that make a whole forward last 1 s, whatever its rows; free links and decode."""
    times = ((1 / stages,) * max_rows,) * stages
    streams = (Stream(steps, kv_context),) * sessions
    return Setup(times, streams, max_rows=max_rows, forwards=forwards)


def work_of(run: Run, stage: int | None) -> list[WorkSpan]:
    """What a stage did, in order of begin."""
    return sorted((job for job in run.jobs if job.stage == stage), key=lambda job: job.begin_s)


def forwards_of(run: Run, stage: int) -> list[WorkSpan]:
    return [job for job in work_of(run, stage) if not job.is_decode]


def steps_of(run: Run) -> dict[tuple[int, int], dict[int, dict[int, WorkSpan]]]:
    """(session, chunk) to step to stage to the forward."""
    found: dict[tuple[int, int], dict[int, dict[int, WorkSpan]]] = defaultdict(lambda: defaultdict(dict))
    for job in run.jobs:
        for session, chunk, step in job.rows:
            if step is not None:
                assert job.stage is not None
                assert job.stage not in found[session, chunk][step], "no micro-step runs twice"
                found[session, chunk][step][job.stage] = job
    return found


seconds = st.integers(1, 40).map(lambda n: n / 16)
free_seconds = st.integers(0, 8).map(lambda n: n / 16)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    stages, max_rows = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    row_times = st.lists(seconds, min_size=max_rows, max_size=max_rows).map(tuple)
    streams = st.builds(Stream, st.integers(1, 4), st.sampled_from(KV_CONTEXTS), st.sampled_from([None, 4, 6]))
    links = st.lists(free_seconds, min_size=stages, max_size=stages).map(tuple)
    return Setup(
        stage_s=draw(st.lists(row_times, min_size=stages, max_size=stages).map(tuple)),
        streams=draw(st.lists(streams, min_size=1, max_size=3).map(tuple)),
        link_s=draw(links) if stages > 1 else (),
        decode_s=draw(free_seconds),
        decode_stage=draw(st.none() | st.integers(0, stages - 1)),
        max_rows=max_rows,
        forwards=draw(st.none() | st.integers(1, 6)),
        chunks=8,
    )


@pytest.mark.slow
@settings(max_examples=60)
@given(setups())
def test_nobody_does_two_things_at_once_and_order_is_kept(setup: Setup) -> None:
    run, stages = simulate(setup), len(setup.stage_s)
    links = setup.link_s or (0.0,) * stages
    for stage in [*range(stages), None]:
        work = work_of(run, stage)
        assert all(a.end_s <= b.begin_s + CLOSE for a, b in pairwise(work)), f"stage {stage} overlaps"
    order = [job.rows for job in forwards_of(run, 0)]
    for stage in range(1, stages):
        later = [job.rows for job in forwards_of(run, stage)]
        assert later == order[: len(later)], "a forward overtook another on a link"
    for stage in range(stages):
        for job in forwards_of(run, stage):
            assert job.end_s - job.begin_s == pytest.approx(setup.stage_s[stage][len(job.rows) - 1])
    for steps in steps_of(run).values():
        for step, at in steps.items():
            for stage in range(1, stages):
                if stage in at:
                    assert at[stage].begin_s >= at[stage - 1].end_s + links[stage - 1] - CLOSE
            if step > 0:
                back_s = steps[step - 1][stages - 1].end_s + links[-1]
                assert at[0].begin_s >= back_s - CLOSE, "a step begins when the one before has come back"


@pytest.mark.slow
@settings(max_examples=60)
@given(setups())
def test_every_chunk_is_denoised_then_decoded_and_the_ring_is_never_overfull(setup: Setup) -> None:
    run, stages = simulate(setup), len(setup.stage_s)
    back_link = setup.link_s[-1] if setup.link_s else 0.0
    decodes = {job.rows[0][:2]: job for job in run.jobs if job.is_decode}
    work = steps_of(run)
    assert len({(done.session, done.chunk) for done in run.chunks}) == len(run.chunks) >= 8 * len(setup.streams)
    for done in run.chunks:
        key, stream = (done.session, done.chunk), setup.streams[done.session]
        last = (stream.first_steps if done.chunk == 0 and stream.first_steps else stream.steps) - 1
        assert all(set(work[key][step]) == set(range(stages)) for step in range(last + 1))
        latents_s = work[key][last][stages - 1].end_s + back_link
        assert done.admitted_s <= work[key][0][0].begin_s + CLOSE
        if setup.decode_s:
            decode = decodes[key]
            assert decode.stage == setup.decode_stage
            assert decode.begin_s >= latents_s - CLOSE
            assert decode.end_s - decode.begin_s == pytest.approx(setup.decode_s)
            assert done.finished_s == decode.end_s
        else:
            assert done.finished_s >= latents_s - CLOSE and not decodes
    limit = setup.forwards or stages + 1
    inside = [(job.begin_s, 1) for job in forwards_of(run, 0)]
    inside += [(job.end_s + back_link, -1) for job in forwards_of(run, stages - 1)]
    count = 0
    for _, change in sorted((round(time, 9), change) for time, change in inside):
        count += change
        assert count <= limit


@pytest.mark.parametrize(
    ("kv_context", "sessions", "ideal"), [("same_step", 1, 1.0), ("clean", 4, 4 / 5), ("staircase", 1, 4 / 5)]
)
def test_four_equal_stages_reach_the_designs_throughput_and_latency(
    kv_context: str, sessions: int, ideal: float
) -> None:
    """P = S = 4, a whole forward = 1 s: P / S or P / (S + 1) chunks per second, S seconds per chunk (one device's)."""
    figures = simulate(equal(kv_context, stages=4, steps=4, sessions=sessions)).figures
    assert figures.chunks_per_s == pytest.approx(ideal, rel=0.03)
    assert figures.latency_s == pytest.approx(4, rel=0.1)
    assert figures.longest_latency_s == pytest.approx(4, rel=0.1)
    assert figures.occupancy == pytest.approx((1, 1, 1, 1), abs=0.03)
    assert figures.first_chunk_s <= 4 + (sessions - 1) / 4 + CLOSE


@pytest.mark.slow
def test_decode_costs_the_stage_on_which_it_runs_and_no_other() -> None:
    def figures(stage: int | None) -> tuple[float, tuple[float, ...], float]:
        setup = Setup(((0.25,),) * 4, (Stream(4, "clean"),) * 5, decode_s=0.5, decode_stage=stage, forwards=6)
        found = simulate(setup).figures
        return found.chunks_per_s, found.occupancy, found.decode_occupancy

    beside, free, decoder = figures(None)
    assert beside == pytest.approx(4 / 5, rel=0.03)
    assert decoder == pytest.approx(0.5 * 4 / 5, abs=0.03)
    for stage in (0, 3):
        rate, busy, decoder = figures(stage)
        assert rate == pytest.approx(1 / (5 * 0.25 + 0.5), rel=0.03)
        assert busy[stage] == pytest.approx(1, abs=0.03)
        assert decoder == 0
        assert all(share < free[0] for n, share in enumerate(busy) if n != stage)


def test_rows_that_share_a_forward_take_its_time_together() -> None:
    """Four sessions, one stage, a forward as fast with four rows as with one: four times the chunks."""
    figures = simulate(equal("clean", stages=1, steps=4, sessions=4, max_rows=4, forwards=1)).figures
    assert figures.chunks_per_s == pytest.approx(4 / 5, rel=0.03)
    assert figures.rows_per_forward == pytest.approx(4, rel=0.03)


def test_a_trace_has_a_track_per_stage_and_one_for_decoding(tmp_path: Path) -> None:
    setup = Setup(((0.25,),) * 4, (Stream(4, "same_step"),), decode_s=0.1, decode_stage=3, chunks=8)
    write_trace(tmp_path / "trace.json", simulate(setup).jobs, 4)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1", 2: "stage 2", 3: "stage 3", 4: "decode"}
    work = [e for e in events if e["ph"] == "X"]
    first = {"name": "session 0 chunk 0 step 0", "tid": 0, "ts": 0.0, "dur": 250_000.0}
    assert first.items() <= work[0].items()
    assert work[0]["args"] == {"rows": [{"session": 0, "chunk": 0, "step": 0}]}
    for track in names:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["tid"] == track)
        assert spans and all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(spans))
    assert {e["tid"] for e in work if e["name"].endswith("decode")} == {3, 4}
