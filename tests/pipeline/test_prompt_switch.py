"""What a new prompt does to the past, against streams computed without scheduler, ring or caches; of LongLive v1.0's
`recache` in plain float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamdiff.commands.reference import PromptSwitch, ReferenceRun, run_reference
from streamdiff.core import MicroStep
from streamdiff.models import sampling
from streamdiff.models.model import Model
from streamdiff.models.transformer.wan import KeyValue
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.sampler import Noise, PrefetchedNoise
from tests.pipeline.plain_longlive import plain_stream
from tests.pipeline.playing import local_ring
from tests.pipeline.reference import Explicit
from tests.small import BLUE, CPU, RED, WHITE, small_model

SEED, STEPS, CHUNKS = 11, 2, 9


def streamed(model: Model, policy: str, at: int, kv_context: str = "clean", make: Callable[..., Ring] = Ring) -> Tensor:
    """Latents `[CHUNKS, C, F, h, w]` of a stream whose prompt changes at chunk `at`."""
    ring = make(model, CPU)
    ring.open(0, model.text.encode(RED), seed=SEED, epoch=0, steps=STEPS, kv_context=kv_context)
    done: dict[int, Tensor] = {}
    changed = False
    while len(done) < CHUNKS:
        if not changed and ring.scheduler.next_chunk(0) == at:
            ring.set_conditioning(0, model.text.encode(BLUE), epoch=1, switch=policy)
            changed = True
        ring.scheduler.set_frame_credit(0, model.spec.chunk_frames)
        rows, finished = ring.step_latents()
        assert rows or finished or ring.waiting, "the stream stands still"
        done |= {row.chunk: latents for row, latents in finished if row.chunk < CHUNKS}
    return torch.stack([done[chunk] for chunk in range(CHUNKS)])


@torch.inference_mode()
def next_chunk(model: Model, chunk: int, past: Tensor, hidden: int = 0) -> Tensor:
    """Latents of `chunk` under the new prompt with nothing but the clean latents `past` `[n, C, F, h, w]` before it,
    each of which is run through the clean pass under the new prompt too: in one forward per step. The first `hidden`
    latent frames are out of the chunk's own sight."""
    spec, denoiser = model.spec, model.denoiser
    sigmas, count = sampling.schedule(STEPS, spec.shift), len(past)
    grid = (spec.latent_height // denoiser.patch[1], spec.latent_width // denoiser.patch[2])
    text = [KeyValue(*layer) for layer in denoiser.text(model.text.encode(BLUE)[None].expand(count + 1, -1, -1))]
    draw = lambda step: sampling.noise(spec.chunk_shape, seed=SEED, chunk=chunk, step=step)  # noqa: E731
    x0 = torch.zeros(spec.chunk_shape)
    for step, sigma in enumerate(sigmas):
        x_t = sampling.add_noise(x0, draw(step), sigma)
        level = torch.tensor([0.0] * count + [1000 * sigma])[:, None].expand(-1, spec.chunk_latents)
        seen: list[list[int | tuple[int, range]]] = [list(range(row + 1)) for row in range(count + 1)]
        seen[-1][0] = (0, range(hidden, spec.chunk_latents))
        tokens = denoiser.embed(torch.cat([past, x_t[None]]), level)
        tokens = denoiser.run_blocks(tokens, text, Explicit(seen, spec.chunk_latents, grid))
        x0 = sampling.clean_from_flow(x_t, denoiser.output_layer(tokens, spec.chunk_shape[1:])[-1], sigma)
    return x0


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", ["clean", "staircase"])
@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("at", [1, 2, 6])
def test_recache_causal_equals_the_window_run_afresh_under_the_new_prompt(at: int, sink: int, kv_context: str) -> None:
    """A window of three chunks; at chunk 6 the caches have rolled over."""
    model = small_model(1, sink=sink)
    got = streamed(model, "recache-causal", at, kv_context)
    window, first = model.spec.window_chunks(kv_context), sink // model.spec.chunk_latents
    seen = [chunk for chunk in range(at) if chunk < first or chunk > at - (window - first)]
    torch.testing.assert_close(got[at], next_chunk(model, at, got[seen]), rtol=1e-4, atol=1e-4)
    kept = streamed(model, "keep", at, kv_context)
    assert torch.equal(got[:at], kept[:at]), "what was shown already stays"
    assert (got[at] - kept[at]).abs().max() > 1e-3, "the policy makes a difference"


def test_recache_causal_of_a_window_that_cuts_a_chunk() -> None:
    """Chunk 6, of frames 12 and 13, sees frames 9 to 13: chunk 4 runs again whole, and shows its last frame."""
    model = small_model(1, window=5)
    got = streamed(model, "recache-causal", 6)
    torch.testing.assert_close(got[6], next_chunk(model, 6, got[4:6], hidden=1), rtol=1e-4, atol=1e-4)
    assert (got[6] - next_chunk(model, 6, got[4:6])).abs().max() > 1e-3


def test_flush_keeps_the_sink_and_nothing_else() -> None:
    """What the chunks between sink and change were does not matter; what the sink was does."""
    model = small_model(1, sink=2)

    def last(change: int) -> Tensor:
        """Chunk 6 after a flush, with the latents of chunk `change` made with another noise."""
        ring = Ring(model, CPU)
        ring.open(0, model.text.encode(RED), seed=SEED, epoch=0, steps=STEPS, kv_context="clean")
        while True:
            chunk = ring.scheduler.next_chunk(0)
            if chunk == 6 and 1 not in ring.stage.sessions[0].text:
                ring.set_conditioning(0, model.text.encode(BLUE), epoch=1, switch="flush")
            noise = Noise(model.spec.chunk_shape, 99 if chunk == change else SEED)
            ring.sampler.sessions[0].noise = PrefetchedNoise(noise, CPU, 0, ring.sampler._thread)
            ring.scheduler.set_frame_credit(0, model.spec.chunk_frames)
            finished = {}
            while ring.scheduler.next_chunk(0) == chunk or ring.scheduler.has_work:
                finished |= {row.chunk: latents for row, latents in ring.step_latents()[1]}
            if 6 in finished:
                return finished[6]

    assert torch.equal(last(change=4), last(change=-1))
    assert not torch.equal(last(change=0), last(change=-1))


@pytest.mark.slow
@pytest.mark.parametrize(("kv_context", "kept"), [("clean", [0, 17, 18, 19]), ("same_step", [])])
def test_only_what_the_next_chunk_may_see_is_kept(kv_context: str, kept: list[int]) -> None:
    """Of `same_step`, which has no clean pass, nothing is."""
    model = small_model(1, sink=2)
    ring = Ring(model, CPU)
    ring.open(0, model.text.encode(RED), seed=SEED, epoch=0, steps=STEPS, kv_context=kv_context)
    done = 0
    while done < 20:
        ring.scheduler.set_frame_credit(0, model.spec.chunk_frames)
        done += len(ring.step_latents()[1])
    assert sorted(ring.sampler.sessions[0].kept) == kept


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
