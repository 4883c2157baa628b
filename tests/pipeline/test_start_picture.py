"""A stream that begins with a picture: shown first, seen by what follows, and on four stages what it is on one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from streamdiff.commands.reference import ReferenceRun, run_reference
from streamdiff.models.autoencoder.autoencoder import ImageEncoder
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.playing import local_ring, same
from tests.small import CPU, RED, small_encoder, small_model

MODEL = small_model(4, layers=4, sink=2, window=8)
SPEC = MODEL.spec
CONTEXTS = ("clean", "staircase", "same_step")
CHUNKS = 4


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (SPEC.height, SPEC.width, 3), np.uint8)


def encoder(model_seed: int = 4) -> ImageEncoder:
    return ImageEncoder(lambda: small_encoder(model_seed), SPEC)


def latents(seed: int) -> Tensor:
    """As of a picture: the small model's own encoder makes much the same of every one."""
    return 3 * torch.randn((1, *SPEC.chunk_shape), generator=torch.Generator().manual_seed(seed))


class Recording(StreamingPipeline):
    """On four stages; keeps the latents that go to the decoder, by stream."""

    def __init__(self) -> None:
        super().__init__(MODEL, CPU, parts=local_parts(MODEL, CPU, 4), pictures=encoder())
        self.decoded: dict[int, list[Tensor]] = {}

    def _decode(self, stream: int, chunk: int, latents: Tensor) -> None:
        assert chunk == len(self.decoded.setdefault(stream, []))
        self.decoded[stream].append(latents.clone())
        super()._decode(stream, chunk, latents)


@pytest.fixture
def pipeline() -> Iterator[Recording]:
    made = Recording()
    yield made
    made.close()


def begin(pipeline: Recording, start: Tensor | None, session: int = 0, kv_context: str = "clean") -> None:
    conditioning = pipeline.text.encode(RED)
    pipeline.open(session, conditioning, seed=3, epoch=0, steps=4, kv_context=kv_context, start=start)


def chunks_of(pipeline: Recording, session: int = 0, count: int = CHUNKS) -> list[Tensor]:
    """The latents of a stream's first chunks, all of whose frames have to come, in order."""
    frames, finished = 0, 0
    while finished < count:
        pipeline.set_frame_credit(session, 10 * SPEC.chunk_frames)
        for piece in pipeline.step():
            if piece.session == session and finished < count:
                assert piece.chunk == finished
                frames += len(piece.pictures)
                finished += piece.last
    assert frames == count * SPEC.chunk_frames
    return pipeline.decoded[pipeline.streams[session].number][:count]


def test_the_picture_stands_still_in_the_latents_of_whole_chunks() -> None:
    """Encoded like a clip of that picture by the same encoder, in one piece."""
    latents = encoder().encode(pixels(1))
    half = encoder().encoder
    clip = torch.from_numpy(pixels(1)).permute(2, 0, 1).float()[None, :, None] / 127.5 - 1
    whole = half.encode(clip.repeat(1, 1, SPEC.chunk_frames, 1, 1), half.new_encode_memory())
    assert latents.shape == (1, *SPEC.chunk_shape)
    assert torch.equal(latents[0], whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_it_is_shown_first_and_the_stream_goes_on_from_it_as_a_reference_run_does(
    pipeline: Recording, kv_context: str
) -> None:
    begin(pipeline, latents(1), kv_context=kv_context)
    run = ReferenceRun(
        pipeline.text.encode(RED), CHUNKS, SPEC.schedule(4), kv_context, seed=3, given_latents=latents(1)
    )
    expected = [chunk for chunk, _ in run_reference(local_ring(MODEL, CPU), run)]
    shown = chunks_of(pipeline)
    assert torch.equal(shown[0], latents(1)[0])
    assert same(shown, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_a_reset_to_a_picture_is_a_fresh_stream_and_so_is_one_without(pipeline: Recording, kv_context: str) -> None:
    conditioning = pipeline.text.encode(RED)
    begin(pipeline, latents(1), 7, kv_context)
    fresh = chunks_of(pipeline, 7)
    begin(pipeline, None, 0, kv_context)
    without = chunks_of(pipeline, 0, 2)
    pipeline.reset(0, conditioning, seed=3, epoch=1, start=latents(1))
    assert same(chunks_of(pipeline, 0), fresh)
    pipeline.reset(0, conditioning, seed=3, epoch=2)
    assert same(chunks_of(pipeline, 0, 2), without)


def test_a_stream_that_is_reset_before_its_picture_is_decoded_shows_nothing_of_it(pipeline: Recording) -> None:
    begin(pipeline, latents(1))
    pipeline.reset(0, pipeline.text.encode(RED), seed=3, epoch=1, start=latents(2))
    assert torch.equal(chunks_of(pipeline, 0, 1)[0], latents(2)[0])
