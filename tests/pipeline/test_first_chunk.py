"""A stream whose first chunk is longer: its parts are made together, as rows of one forward that see each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamdiff.commands.reference import PromptSwitch, ReferenceRun
from streamdiff.models import sampling
from streamdiff.models.model import Model
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.scheduler.scheduler import StreamBatchScheduler
from tests.pipeline.reference import Reference
from tests.pipeline.reference_cases import played
from tests.small import BLUE, CPU, RED, small_model

CHUNKS, SEED = 7, 11
CONTEXTS = ("clean", "staircase", "same_step")


def beginning_with(first: int, *, chunk: int = 1, window: int = 5, sink: int = 0, rope: str = "relative") -> Model:
    model = small_model(3, layers=3, chunk=chunk, window=window, sink=sink)
    return replace(model, spec=replace(model.spec, first_chunks=first, rope=rope))


def script_of(model: Model, kv_context: str, steps: int = 2) -> ReferenceRun:
    schedule = sampling.embedded_schedule(steps, model.spec.shift)
    return ReferenceRun(model.text.encode(RED), CHUNKS, schedule, kv_context, SEED)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["relative", pytest.param("absolute", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("first", "chunk", "window", "sink"),
    [
        (2, 1, 6, 3),
        (3, 1, 5, 0),
        (2, 2, 7, 3),
        *(pytest.param(*more, marks=pytest.mark.soak) for more in ((2, 1, 4, 1), (2, 2, 4, 0))),
    ],
)
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_a_stream_equals_the_uncached_reference(
    kv_context: str, first: int, chunk: int, window: int, sink: int, rope: str
) -> None:
    """Block-causal attention with a longer first block, through evictions, with sinks within it and beyond it."""
    model = beginning_with(first, chunk=chunk, window=window, sink=sink, rope=rope)
    expected = Reference(model, lambda chunk: RED, seed=SEED, steps=2, kv_context=kv_context).chunks(CHUNKS)
    assert expected[-1].std() > 0.1
    got = played(model, script_of(model, kv_context))
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-4)
    alone = played(replace(model, spec=replace(model.spec, first_chunks=1)), script_of(model, kv_context))
    assert (got[0] - alone[0]).abs().max() > 1e-3, "the first part sees the second"


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_together_they_are_one_chunk_of_their_length(kv_context: str) -> None:
    """Of a model that has such chunks from the start, with the same noise: one row in place of three."""
    model = beginning_with(3)
    long = small_model(3, layers=3, chunk=3, window=6)
    script = script_of(model, kv_context)
    draw = lambda step: [sampling.noise(model.spec.chunk_shape, seed=SEED, chunk=c, step=step) for c in range(3)]  # noqa: E731
    initial, renoise = (torch.cat(draw(step), 1)[None] for step in (0, 1))
    whole = played(long, replace(script, chunks=1, initial=initial, renoise=renoise[None]))[0]
    got = played(model, script)
    torch.testing.assert_close(torch.cat(list(got[:3]), 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_any_number_of_stages_gives_the_same(kv_context: str, stages: int) -> None:
    """Also after a reset, which begins with as many again, and with input that moves."""
    model = beginning_with(2, window=6, sink=3)
    model = replace(model, spec=replace(model.spec, adaptive_sink=0.9))
    video = torch.randn(CHUNKS, *model.spec.chunk_shape, generator=torch.Generator().manual_seed(4)) / 9
    other = PromptSwitch(4, model.text.encode(BLUE), "reset")
    script = replace(
        script_of(model, kv_context),
        schedule=sampling.from_timesteps((700, 500)),
        switches=(other,),
        video=video,
        strength=0.8,
        motion_noise=True,
    )
    one = played(model, script)
    assert torch.equal(played(model, script, stages), one)
    fresh = replace(script, embeddings=other.embeddings, chunks=3, switches=(), video=video[4:])
    assert torch.equal(played(model, fresh), one[4:])


def test_all_passes_of_those_made_together_enter_before_the_next_chunk() -> None:
    scheduler = StreamBatchScheduler(stages=4, chunk_frames=4, first_chunks=2)
    scheduler.open(0, steps=3, kv_context="same_step", epoch=0)
    scheduler.set_frame_credit(0, 7)
    assert not scheduler.has_work, "there is room for one of them"
    scheduler.set_frame_credit(0, 100)
    for step in range(3):
        rows = scheduler.next()
        assert [(row.chunk, row.step) for row in rows] == [(0, step), (1, step)]
        assert not scheduler.next() or step == 2
        for row in rows:
            scheduler.returned(row)
    assert scheduler.next_chunk(0) > 2
    scheduler = StreamBatchScheduler(stages=4, chunk_frames=4, first_chunks=2)
    scheduler.open(0, steps=1, kv_context="same_step", epoch=0)
    scheduler.set_frame_credit(0, 100)
    assert [[row.chunk for row in scheduler.next()] for _ in range(3)] == [[0, 1], [2], [3]]


@pytest.mark.slow
def test_sessions_beside_it_are_as_if_alone() -> None:
    """Two streams of all contexts in one ring, with two rows to a forward and with one."""
    model = beginning_with(2, window=6, sink=3)
    alone = {context: played(model, script_of(model, context)) for context in CONTEXTS}
    for max_rows in (1, 2, 3):
        ring, done = Ring(model, CPU, max_rows=max_rows), dict[tuple[int, int], Tensor]()
        for name, context in enumerate(CONTEXTS):
            ring.open(name, model.text.encode(RED), seed=SEED, epoch=0, steps=2, kv_context=context)
        while any((name, CHUNKS - 1) not in done for name in range(3)):
            for name in range(3):
                ring.scheduler.set_frame_credit(name, model.spec.admitted_frames(ring.scheduler.next_chunk(name)))
            done |= {(row.session, row.chunk): latents for row, latents in ring.step_latents()[1]}
        for name, context in enumerate(CONTEXTS):
            got = torch.stack([done[name, chunk] for chunk in range(CHUNKS)])
            torch.testing.assert_close(got, alone[context], rtol=1e-3, atol=1e-4)
