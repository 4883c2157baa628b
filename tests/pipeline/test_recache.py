"""`recache` as LongLive v1.0 does it: against a stream in plain float64, on one stage and on several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamdiff.commands.reference import PromptSwitch, ReferenceRun, run_reference
from streamdiff.core import MicroStep
from streamdiff.models import sampling
from streamdiff.models.model import Model
from streamdiff.pipeline.ring import Ring
from tests.pipeline.plain_longlive import plain_stream
from tests.pipeline.playing import local_ring
from tests.small import BLUE, CPU, RED, WHITE, small_model

SEED, STEPS, CHUNKS = 11, 2, 8
TOLERANCE = 1e-5
"""Of latents in float32; what a wrong key, text or place changes is a thousand times as much."""


def made(model: Model, switches: dict[int, str], policy: str = "recache", stages: int = 1) -> Tensor:
    """Latents `[CHUNKS, C, F, h, w]` as `streamdiff generate` makes them from files."""
    changes = tuple(PromptSwitch(chunk, model.text.encode(text), policy) for chunk, text in switches.items())
    schedule = sampling.embedded_schedule(STEPS, model.spec.shift)
    script = ReferenceRun(model.text.encode(RED), CHUNKS, schedule, seed=SEED, switches=changes)
    return torch.stack([latents for latents, _ in run_reference(local_ring(model, CPU, stages), script)])


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["relative", "absolute"])
@pytest.mark.parametrize(
    ("chunk", "window", "sink", "full"),
    [(3, 12, 3, 4), (2, 5, 1, 3), (2, 6, 0, 3), (3, 8, 1, 3)],
    ids=["as LongLive", "a window that cuts chunks", "no sink", "a sink whose slot the window holds too"],
)
def test_it_is_the_published_stream(chunk: int, window: int, sink: int, full: int, rope: str) -> None:
    """Before the window is full, when it just is, and twice in a row after it has moved on."""
    model = small_model(1, layers=3, chunk=chunk, window=window, sink=sink)
    model = replace(model, spec=replace(model.spec, rope=rope))
    switches = {2: BLUE, full: WHITE, 6: BLUE, 7: RED}
    expected = plain_stream(model, RED, switches, CHUNKS, SEED, STEPS)
    got = made(model, switches)
    assert float((got - expected).abs().max()) < TOLERANCE
    assert torch.equal(got, made(model, switches, stages=3))
    assert float((made(model, switches, "recache-causal") - expected).abs().max()) > 1e-3


@torch.inference_mode()
def test_after_a_flush_it_shows_nothing_that_was_forgotten() -> None:
    """Chunk 3 of the flushed stream is as good as forgotten: another noise there changes nothing behind."""
    model = small_model(1, sink=2)
    schedule = sampling.embedded_schedule(STEPS, model.spec.shift)
    red, blue = model.text.encode(RED), model.text.encode(BLUE)
    switches = (PromptSwitch(4, red, "flush"), PromptSwitch(5, blue, "recache"))
    noise = torch.stack([sampling.noise(model.spec.chunk_shape, seed=SEED, chunk=chunk, step=0) for chunk in range(8)])
    other = noise.clone()
    other[3] = -other[3]
    script = ReferenceRun(red, 8, schedule, switches=switches)
    one, two = (
        [x for x, _ in run_reference(local_ring(model, CPU), replace(script, initial=each))] for each in (noise, other)
    )
    assert not torch.equal(one[3], two[3])
    assert all(torch.equal(a, b) for a, b in zip(one[4:], two[4:], strict=True))


def played(ring: Ring, policy: str) -> tuple[int, list[list[MicroStep]]]:
    """Session 0's prompt changes; how many turns session 1 takes for 14 chunks, and the forwards' rows."""
    model_text = small_model(3, layers=3, chunk=2, window=8, sink=2).text.encode
    for session in (0, 1):
        ring.open(session, model_text(RED), seed=session, epoch=0, steps=2, kv_context="clean")
    turns = done = 0
    changed, forwards = False, []
    while done < 14:
        if not changed and ring.scheduler.next_chunk(0) == 8:
            changed = True
            ring.set_conditioning(0, model_text(BLUE), epoch=1, switch=policy)
        for session in (0, 1):
            ring.scheduler.set_frame_credit(session, ring.scheduler.chunk_frames)
        rows, finished = ring.step_latents()
        forwards += [rows] if rows else []
        done += sum(row.session == 1 for row, _ in finished)
        turns += 1
    return turns, forwards


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [1, 4])
def test_another_session_waits_no_longer_than_the_long_forward_takes(max_rows: int) -> None:
    """A turn is a message's time on a stage, and the long forward is one message per row."""
    model, stages = small_model(3, layers=3, chunk=2, window=8, sink=2), 3
    plain, _ = played(local_ring(model, CPU, stages, max_rows), "keep")
    turns, forwards = played(local_ring(model, CPU, stages, max_rows), "recache")
    [long] = [rows for rows in forwards if any(row.recaches for row in rows)]
    assert [(row.session, row.chunk, row.recache_end) for row in long] == [(0, 5, 7), (0, 6, 7), (0, 7, 7)]
    assert turns - plain <= len(long) * stages
