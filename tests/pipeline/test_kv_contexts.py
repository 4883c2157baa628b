"""The ring, the scheduler and the caches against streams computed the plain way, without any of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from streamdiff.core import MicroStep
from streamdiff.models.model import Model
from streamdiff.models.transformer.wan import KeyValue
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.pipeline.reference import Explicit, Reference, window
from tests.small import BLUE, CPU, RED, small_model

CHUNKS = 7
CHANGE_AT = 4


def streamed(
    model: Model, *, steps: int, kv_context: str, max_rows: int = 1, chunks: int = CHUNKS, seed: int = 11
) -> list[torch.Tensor]:
    """Latents of a stream whose prompt changes at chunk `CHANGE_AT`."""
    ring = Ring(model, CPU, max_rows=max_rows)
    ring.open(0, model.text.encode(RED), seed=seed, epoch=0, steps=steps, kv_context=kv_context)
    done: dict[int, torch.Tensor] = {}
    while len(done) < chunks:
        if ring.scheduler.next_chunk(0) == CHANGE_AT:
            ring.set_conditioning(0, model.text.encode(BLUE), epoch=1)
        ring.scheduler.set_frame_credit(0, model.spec.chunk_frames)
        rows, finished = ring.step_latents()
        assert rows, "the stream stands still"
        done |= {row.chunk: latents for row, latents in finished}
    return [done[chunk] for chunk in range(chunks)]


def referenced(model: Model, *, steps: int, kv_context: str) -> list[torch.Tensor]:
    """The same stream from the reference."""
    text = lambda chunk: RED if chunk < CHANGE_AT else BLUE  # noqa: E731
    return Reference(model, text, seed=11, steps=steps, kv_context=kv_context).chunks(CHUNKS)


CUT = [
    ("clean", 3, 7, 0),  # the oldest chunk with its last frame
    ("clean", 3, 8, 2),  # the sink ends within a chunk
    ("clean", 2, 7, 3),
    ("clean", 3, 5, 1),
    ("staircase", 2, 5, 0),
    ("staircase", 2, 6, 1),
    ("same_step", 3, 8, 2),
    ("same_step", 2, 5, 2),
]
"""Windows and sinks that are no whole chunks: KV context; latent frames of a chunk, of the window, of the sink."""


@pytest.mark.slow
@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize(
    ("kv_context", "steps"),
    [
        ("clean", 4),
        ("staircase", 4),
        ("same_step", 2),
        *(pytest.param(context, 2, marks=pytest.mark.soak) for context in ("clean", "staircase")),
    ],
)
def test_a_stream_equals_the_uncached_reference(kv_context: str, steps: int, sink: int) -> None:
    """Seven chunks with a window of three: four evictions, one prompt change."""
    model = small_model(1, sink=sink)
    got = streamed(model, steps=steps, kv_context=kv_context)
    for one, expected in zip(got, referenced(model, steps=steps, kv_context=kv_context), strict=True):
        assert expected.std() > 0.1
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_context", "chunk", "window", "sink", "rope"),
    [
        *((*case, "relative") for case in CUT),
        ("clean", 3, 8, 2, "absolute"),
        ("staircase", 2, 6, 1, "absolute"),
        *(pytest.param(*case, "absolute", marks=pytest.mark.soak) for case in CUT if case not in (CUT[1], CUT[5])),
    ],
)
def test_windows_and_sinks_need_not_be_whole_chunks(
    kv_context: str, chunk: int, window: int, sink: int, rope: str
) -> None:
    model = small_model(1, chunk=chunk, window=window, sink=sink)
    model = replace(model, spec=replace(model.spec, rope=rope))
    got = streamed(model, steps=2, kv_context=kv_context)
    for one, expected in zip(got, referenced(model, steps=2, kv_context=kv_context), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    whole = replace(model, spec=replace(model.spec, window_latents=window - 1))
    far = streamed(whole, steps=2, kv_context=kv_context)
    assert (got[-1] - far[-1]).abs().max() > 1e-3, "a single frame more is seen"


@pytest.mark.slow
def test_a_model_may_see_less_where_its_past_is_clean() -> None:
    """Of three chunks' window two in `clean`; in `staircase` nothing changes."""
    model = small_model(1)
    short = replace(model, spec=replace(model.spec, clean_window_latents=4))
    assert (short.spec.window_chunks("clean"), short.spec.window_chunks("staircase")) == (2, 3)
    got, far = streamed(short, steps=2, kv_context="clean"), streamed(model, steps=2, kv_context="clean")
    for one, expected in zip(got, referenced(short, steps=2, kv_context="clean"), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    assert [torch.equal(one, other) for one, other in zip(got[:3], far[:3], strict=True)] == [True, True, False]
    noisy = [streamed(one, steps=2, kv_context="staircase") for one in (short, model)]
    assert torch.equal(torch.stack(noisy[0]), torch.stack(noisy[1]))


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", ["clean", "staircase"])
def test_the_past_may_be_shown_with_a_little_noise(kv_context: str) -> None:
    model = small_model(1)
    noisy = replace(model, spec=replace(model.spec, context_sigma=0.1))
    got = streamed(noisy, steps=2, kv_context=kv_context)
    for one, expected in zip(got, referenced(noisy, steps=2, kv_context=kv_context), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    plain = streamed(model, steps=2, kv_context=kv_context)
    assert torch.equal(got[0], plain[0]), "a first chunk has no past"
    assert not torch.allclose(got[-1], plain[-1], atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "sink"), [(4, 0), (7, 3), *(pytest.param(*more, marks=pytest.mark.soak) for more in ((5, 0), (6, 2)))]
)
@pytest.mark.parametrize("kv_context", ["clean", "staircase"])
def test_a_past_may_be_kept_without_what_was_before_it(kv_context: str, window: int, sink: int) -> None:
    plain = small_model(1, window=window, sink=sink)
    model = replace(plain, spec=replace(plain.spec, context_alone=True))
    got = streamed(model, steps=2, kv_context=kv_context)
    for one, expected in zip(got, referenced(model, steps=2, kv_context=kv_context), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    assert (got[-1] - streamed(plain, steps=2, kv_context=kv_context)[-1]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [2, 3, 5])
def test_a_round_of_a_staircase_in_one_forward_equals_its_rows_one_by_one(max_rows: int) -> None:
    model = small_model(1)
    alone = streamed(model, steps=4, kv_context="staircase", chunks=6)
    together = streamed(model, steps=4, kv_context="staircase", chunks=6, max_rows=max_rows)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sink", [0, 2])
@torch.inference_mode()
def test_a_causal_forward_over_chunks_equals_one_block_causal_forward(sink: int) -> None:
    model = small_model(2, layers=3, sink=sink)
    spec, denoiser = model.spec, model.denoiser
    count = 8
    generator = torch.Generator().manual_seed(4)
    latents = torch.randn(count, *spec.chunk_shape, generator=generator)
    timestep = 1000 * torch.rand(count, spec.chunk_latents, generator=generator)
    embeddings = model.text.encode(RED)

    stage = ModelRunner(model, CPU)
    stage.open(0, steps=4, kv_context="clean")
    stage.set_text(0, 0, embeddings, oldest=0)
    parts = []
    for chunk in range(count):
        given = latents[chunk : chunk + 1], denoiser.time_embedding(timestep[chunk : chunk + 1])
        parts += stage.forward([MicroStep(0, chunk, 4, 4, 0)], given)

    text = [KeyValue(*layer) for layer in denoiser.text(embeddings[None].expand(count, -1, -1))]
    attention = Explicit([window(model, chunk, "clean") for chunk in range(count)], spec.chunk_latents, (2, 2))
    whole = denoiser.run_blocks(denoiser.embed(latents, timestep), text, attention)
    torch.testing.assert_close(
        torch.cat(parts), denoiser.output_layer(whole, spec.chunk_shape[1:]), rtol=1e-4, atol=1e-4
    )


@torch.inference_mode()
def test_a_chunk_far_into_a_stream_is_computed_as_one_of_the_first() -> None:
    """A window that holds the same chunks gives the same result at chunk 3,000,000 as at chunk 5."""
    model = small_model(2, window=8, sink=2)

    def last(first: int) -> torch.Tensor:
        stage = ModelRunner(model, CPU)
        stage.open(0, steps=4, kv_context="clean")
        stage.set_text(0, 0, model.text.encode(RED), oldest=0)
        generator = torch.Generator().manual_seed(4)
        time = model.denoiser.time_embedding(torch.zeros(1, model.spec.chunk_latents))
        for chunk in [0, *range(first, first + 5)]:  # the sink, then chunks until none of those skipped is in view
            latents = torch.randn(1, *model.spec.chunk_shape, generator=generator)
            (flow,) = stage.forward([MicroStep(0, chunk, 4, 4, 0)], (latents, time))
        return flow

    early, late = last(5), last(3_000_000)
    torch.testing.assert_close(late, early, rtol=1e-4, atol=1e-4)
