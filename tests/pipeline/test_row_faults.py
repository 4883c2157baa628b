"""One row's failure is its own: the others are delivered, and its session alone ends, with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamdiff.errors import EngineFailure
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.pipeline.failing import CHUNKS, KINDS, ONCE, play_failing, spoil
from tests.pipeline.playing import end, local_ring, same
from tests.pipeline.processes import run_ranks
from tests.small import CPU, RED, small_model

MODEL = small_model(1, layers=6, sink=2)
CONTEXTS = {0: "clean", 1: "clean", 2: "staircase", 3: "same_step"}
SLOW = pytest.mark.slow
LIMIT_S = 900.0  # ends what hangs


@pytest.fixture(scope="module")
def alone() -> dict[int, list[torch.Tensor]]:
    """Every session by itself."""
    return {name: play_failing(Ring(MODEL, CPU), MODEL, {name: context})[0][name] for name, context in CONTEXTS.items()}


def stage_of(ring: Ring, index: int) -> ModelRunner:
    return ring.local[index - 1].stage if index else ring.stage


def check_others(
    found: dict[int, list[torch.Tensor]], alone: dict[int, list[torch.Tensor]], spoilt: int, exact: bool
) -> None:
    for name, latents in found.items():
        if name != spoilt:
            assert len(latents) == CHUNKS, f"session {name} went on"
            if exact:
                assert same(latents, alone[name]), f"session {name}"
            for one, other in zip(latents, alone[name], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "rows", "spoilt"), [(1, 4, 1), (3, 1, 2)])
def test_the_session_ends_and_the_others_do_not_notice(
    kind: str, stages: int, rows: int, spoilt: int, alone: dict[int, list[torch.Tensor]]
) -> None:
    """Of all KV contexts, also with several of its rows in the ring."""
    ring = local_ring(MODEL, CPU, stages, rows)
    spoil(stage_of(ring, stages // 2), spoilt, kind)
    found, lost = play_failing(ring, MODEL, CONTEXTS)
    assert list(lost) == [spoilt] and KINDS[kind] in lost[spoilt], lost
    assert kind == "open" or "chunk 2, step 1" in lost[spoilt]
    check_others(found, alone, spoilt, exact=rows == 1)
    assert rows == 1 or max(ring.scheduler.counts.rows) > 1
    while ring.has_work:
        ring.step_latents()
    assert spoilt not in ring.stage.sessions and not stage_of(ring, stages // 2).guard.broken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "spoilt"), [(1, 0), (1, 2), pytest.param(4, 1, marks=SLOW), pytest.param(4, 3, marks=SLOW)]
)
def test_numbers_that_are_well_when_tried_alone_cost_nothing(
    stages: int, spoilt: int, alone: dict[int, list[torch.Tensor]]
) -> None:
    """A row runs once more from the same inputs, before anything of its session that could read what it left."""
    ring = local_ring(MODEL, CPU, stages)
    spoil(stage_of(ring, stages // 2), spoilt, ONCE)
    found, lost = play_failing(ring, MODEL, CONTEXTS)
    assert not lost
    check_others(found, alone, -1, exact=True)


def test_a_staircase_whose_later_rows_have_read_the_bad_one_ends() -> None:
    """They cannot be run again to the same result."""
    ring = local_ring(MODEL, CPU, 4)
    spoil(stage_of(ring, 2), 1, ONCE)
    lost = play_failing(ring, MODEL, {0: "clean", 1: "staircase"})[1]
    assert list(lost) == [1] and "NaN" in lost[1]


@pytest.mark.slow
def test_an_error_that_a_forward_of_several_has_is_tried_session_by_session(
    alone: dict[int, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is lost where each is well by itself, as where memory is short for all at once."""
    ring = Ring(MODEL, CPU, max_rows=4)
    forward, refused = ring.stage.forward, []

    def short_of_memory(rows, given):  # type: ignore[no-untyped-def]
        if len(rows) > 1:
            forward(rows, given)  # all is written, and has to be written again
            refused.append(len(rows))
            raise torch.OutOfMemoryError("too many rows")
        return forward(rows, given)

    monkeypatch.setattr(ring.stage, "forward", short_of_memory)
    found, lost = play_failing(ring, MODEL, CONTEXTS)
    assert not lost and refused
    check_others(found, alone, -1, exact=True)  # each row ran alone


def test_a_sink_that_was_on_its_way_is_placed_anew() -> None:
    ring = Ring(MODEL, CPU)
    rotate, calls = ring.stage.attention.rotate_sinks, []

    def short_of_memory(*arguments):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory to rotate in")
        rotate(*arguments)

    ring.stage.attention.rotate_sinks = short_of_memory
    found, lost = play_failing(ring, MODEL, {0: "clean"}, chunks=6)
    expected = play_failing(Ring(MODEL, CPU), MODEL, {0: "clean"}, chunks=6)[0]
    assert not lost and len(calls) > 2 and same(found[0], expected[0])


def test_noise_that_cannot_be_drawn_ends_its_session(alone: dict[int, list[torch.Tensor]]) -> None:
    ring = Ring(MODEL, CPU, max_rows=4)
    inputs = ring.sampler.inputs

    def failing(rows):  # type: ignore[no-untyped-def]
        if any((row.session, row.chunk) == (3, 2) for row in rows):
            raise ValueError("no noise today")
        return inputs(rows)

    ring.sampler.inputs = failing  # type: ignore[method-assign]
    found, lost = play_failing(ring, MODEL, CONTEXTS)
    assert lost == {3: "chunk 2, step 0 could not begin: ValueError: no noise today"}
    check_others(found, alone, 3, exact=False)


def test_a_slot_is_good_again_for_the_next_session(alone: dict[int, list[torch.Tensor]]) -> None:
    ring = local_ring(MODEL, CPU, 4)
    stage = stage_of(ring, 2)
    forward = stage.forward
    spoil(stage, 0, "numbers")
    assert list(play_failing(ring, MODEL, {0: "clean", 1: "clean"})[1]) == [0]
    stage.forward = forward  # type: ignore[method-assign]
    end(ring, 1)
    lost: dict[int, str] = {}
    ring.faults.on_fault = lost.__setitem__
    ring.open(0, MODEL.text.encode(RED), seed=0, epoch=9, steps=2, kv_context="clean")
    ring.scheduler.set_frame_credit(0, CHUNKS * MODEL.spec.chunk_frames)
    latents = []
    while ring.has_work:
        latents += [done.latents for done in ring.step_latents()[1]]
    assert same(latents, alone[0]) and not lost


def test_a_row_that_was_to_run_once_more_is_nobodys_after_a_reset(alone: dict[int, list[torch.Tensor]]) -> None:
    """It fails again, which would end the new stream."""
    ring, text, lost = Ring(MODEL, CPU), MODEL.text.encode(RED), dict[int, str]()
    spoil(ring.stage, 0, "numbers")
    ring.faults.on_fault = lost.__setitem__
    ring.open(0, text, seed=0, epoch=0, steps=2, kv_context="clean")
    ring.scheduler.set_frame_credit(0, CHUNKS * MODEL.spec.chunk_frames)
    while not any(message.rows for message in ring.queued):
        assert ring.has_work and not lost
        ring.step_latents()
    ring.reset(0, text, seed=0, epoch=1)
    ring.scheduler.set_frame_credit(0, 2 * MODEL.spec.chunk_frames)  # no more: its third would fail by itself
    latents = []
    while ring.has_work:
        latents += [done.latents for done in ring.step_latents()[1]]
    assert not lost and same(latents, alone[0][:2])


@pytest.mark.parametrize(
    "error", [LinkClosed("rank 2 is gone"), torch.AcceleratorError("device lost"), TypeError("bug")]
)
def test_what_is_no_row_s_own_ends_everything(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(MODEL, CPU, max_rows=4)

    def broken(rows, given):  # type: ignore[no-untyped-def]
        raise error

    monkeypatch.setattr(ring.stage, "forward", broken)
    with pytest.raises(type(error)):
        play_failing(ring, MODEL, CONTEXTS)


def test_what_strikes_one_session_after_the_other_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(MODEL, CPU)

    def broken(rows, given):  # type: ignore[no-untyped-def]
        raise RuntimeError("a kernel fails")

    monkeypatch.setattr(ring.stage, "forward", broken)
    with pytest.raises(EngineFailure, match=r"one session after the other.*a kernel fails"):
        play_failing(ring, MODEL, CONTEXTS)


def test_a_forward_that_cannot_be_run_again_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sink into which chunks are folded it is not known which layers have them."""
    ring = Ring(MODEL, CPU)
    monkeypatch.setattr(ModelSpec, "repeats", False)
    spoil(ring.stage, 1, "midway")
    with pytest.raises(ArithmeticError, match="too hot"):
        play_failing(ring, MODEL, CONTEXTS)


def test_a_ring_whose_sessions_nobody_ends_fails() -> None:
    ring = Ring(MODEL, CPU)
    spoil(ring.stage, 0, "numbers")
    ring.open(0, MODEL.text.encode(RED), seed=0, epoch=0, steps=4, kv_context="clean")
    ring.scheduler.set_frame_credit(0, 99 * MODEL.spec.chunk_frames)
    with pytest.raises(EngineFailure, match="session 0 failed: chunk 2, step 1"):
        while ring.has_work:
            ring.step_latents()


@pytest.mark.slow
def test_over_four_processes(tmp_path: Path) -> None:
    """Every kind of failure on some rank, beside sessions that are well and share their forwards."""
    from tests.pipeline.ring_faults_process import FAULTS, contexts, small

    out = tmp_path / "faults.pt"
    run_ranks("tests.pipeline.ring_faults_process", [str(out)], 4, LIMIT_S)
    found = torch.load(out, weights_only=True)
    lost = {name: KINDS[kind] for name, (_, kind) in FAULTS.items() if kind != ONCE}
    assert set(found["lost"]) == set(lost), found["lost"]
    assert all(why in found["lost"][name] for name, why in lost.items()), found["lost"]
    model, well = small(), [name for name in contexts() if name not in lost]
    for name in well:
        expected = play_failing(Ring(model, CPU), model, {name: contexts()[name]})[0][name]
        for one, other in zip(found["latents"][name], expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert any(int(rows) > 1 for rows in found["rows"]), "forwards were really shared"
