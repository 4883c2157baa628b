"""A session that is fed with video: what its chunks start from, when they are made, and what becomes of frames that
come too fast, not at all, or cannot be encoded."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamdiff.core import InputFigures
from streamdiff.errors import RequestError
from streamdiff.models.autoencoder.autoencoder import ImageEncoder
from streamdiff.models.autoencoder.picture_decoder import VideoAutoencoder
from streamdiff.models.sampling import Schedule
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.runner.init_latents import FULL_MOTION, REACH, STANDING, GivenVideo, LiveLatents
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.pipeline.video_input.feeding import MAX_UNENCODED
from tests.pipeline.playing import same
from tests.saving import save
from tests.small import CPU, RED, small_encoder, small_model

MODEL = small_model(4, layers=4, sink=2, window=8)
SPEC = MODEL.spec
FRAMES = SPEC.chunk_frames
CONTEXTS = ("clean", "staircase", "same_step")
CHUNKS = 5


def clip(chunks: int, seed: int = 0) -> np.ndarray:
    """Frames `[n, H, W, 3]` for so many chunks."""
    shape = (chunks * FRAMES, SPEC.height, SPEC.width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


class Fed(StreamingPipeline):
    """Keeps the latents that go to the decoder, by session."""

    def __init__(self, stages: int = 1, load: Callable[[], VideoAutoencoder] = lambda: small_encoder(4)) -> None:
        super().__init__(MODEL, CPU, parts=local_parts(MODEL, CPU, stages), pictures=ImageEncoder(load, SPEC))
        self.made: dict[int, list[Tensor]] = {}

    def _decode(self, stream: int, chunk: int, latents: Tensor) -> None:
        session = next(each.session for each in self.streams.values() if each.number == stream)
        self.made.setdefault(session, []).append(latents.clone())
        super()._decode(stream, chunk, latents)

    def begin(self, kv_context: str = "clean", steps: int = 4, session: int = 0) -> None:
        conditioning = self.text.encode(RED)
        self.open(session, conditioning, seed=3, epoch=0, steps=steps, kv_context=kv_context)

    def turn(self, session: int = 0) -> int:
        """One step; the frames that came."""
        self.set_frame_credit(session, 10 * FRAMES)
        return sum(len(each.pictures) for each in self.step(0.01) if each.session == session)

    def settle(self) -> None:
        """Go on until nothing can be made from what was fed."""
        while any(entry.calls for entry in self.video.inputs.values()) or self.busy:
            self.turn()

    def play(self, video: np.ndarray, count: int, piece: int = FRAMES) -> list[Tensor]:
        """The first `count` chunks, of `video` that comes as fast as it is used, in pieces of so many frames."""
        rest = video
        while len(self.made.get(0, [])) < count:
            entry = self.video.inputs[0]
            if len(rest) and not entry.calls and not entry.latents.waiting:
                self.video.feed(0, rest[:piece])
                rest = rest[piece:]
            self.turn()
        return self.made[0][:count]

    def usage(self) -> InputFigures:
        figures = self.video.input_figures(0)
        assert figures is not None
        return figures


@pytest.fixture
def fed() -> Iterator[Callable[..., Fed]]:
    """Makes them."""
    with ExitStack() as ends:
        yield lambda *given, **options: ends.enter_context(closing(Fed(*given, **options)))


@pytest.fixture
def pipeline(fed: Callable[..., Fed]) -> Fed:
    return fed()


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_neither_stages_nor_pieces_change_a_bit(fed: Callable[..., Fed], pipeline: Fed, kv_context: str) -> None:
    pipeline.begin(kv_context)
    pipeline.set_input(0, 0.7, epoch=1)
    alone = pipeline.play(clip(CHUNKS + 4), CHUNKS)
    for stages, piece in ((2, 3), (4, FRAMES + 1)):
        ring = fed(stages)
        ring.begin(kv_context)
        ring.set_input(0, 0.7, epoch=1)
        assert same(ring.play(clip(CHUNKS + 4), CHUNKS, piece), alone)


def test_a_chunk_waits_for_its_video_and_goes_on_when_there_is_more(pipeline: Fed) -> None:
    pipeline.begin()
    pipeline.set_input(0, 0.5, epoch=1)
    pipeline.settle()
    assert not pipeline.made and not pipeline.busy
    pipeline.video.feed(0, clip(1)[:-1])
    pipeline.settle()
    assert not pipeline.made, "a frame is missing"
    pipeline.video.feed(0, clip(1)[-1:])
    pipeline.settle()
    assert len(pipeline.made[0]) == 1
    pipeline.video.feed(0, clip(1, 1))
    pipeline.settle()
    assert len(pipeline.made[0]) == 2
    assert pipeline.usage().used == 2 * FRAMES


def test_of_what_comes_too_fast_the_newest_is_used(fed: Callable[..., Fed]) -> None:
    held = threading.Event()

    def load() -> VideoAutoencoder:
        assert held.wait(240)
        return small_encoder(4)

    pipeline, other = fed(load=load), fed()
    pipeline.begin()
    pipeline.set_input(0, 0.5, epoch=1)
    video = clip(9)
    for begin in range(0, len(video), 3):
        pipeline.video.feed(0, video[begin : begin + 3])
    held.set()
    pipeline.settle()
    assert pipeline.usage().dropped == len(video) - MAX_UNENCODED * FRAMES
    other.begin()
    other.set_input(0, 0.5, epoch=1)
    newest = other.play(video[-MAX_UNENCODED * FRAMES :], MAX_UNENCODED)
    assert same(pipeline.made[0], newest)


def test_a_chunk_that_always_waits_behind_another_is_left_out() -> None:
    live, schedule = LiveLatents(0.5, most=2), Schedule((1000.0,), (1.0,))
    live.add(torch.zeros(1, 1, 1), 0.0)
    shown = []
    for chunk in range(2 * STANDING):
        live.add(torch.full((1, 1, 1), float(chunk + 1)), 0.0)
        taken = live.take(chunk, schedule)
        assert taken is not None
        shown.append(int(taken[0]))
    assert shown == [*range(STANDING - 1), *range(STANDING, 2 * STANDING + 1)], "one late, then none"
    assert live.dropped == 1


def test_when_it_ends_the_session_goes_on_from_its_text(pipeline: Fed) -> None:
    pipeline.begin()
    pipeline.set_input(0, 0.5, epoch=1)
    pipeline.play(clip(3), 2)
    pipeline.set_input(0, None, epoch=2)
    while len(pipeline.made[0]) < 6:
        pipeline.turn()
    assert pipeline.usage().used <= 3 * FRAMES
    pipeline.set_input(0, 0.5, epoch=3)  # and another may come
    assert (pipeline.usage().used, pipeline.usage().level) == (0, None), "it begins afresh"
    pipeline.video.feed(0, clip(1))
    while pipeline.usage().used == 0:
        pipeline.turn()


def test_video_that_cannot_be_encoded_ends_the_input_alone(fed: Callable[..., Fed]) -> None:
    class Broken:
        first_frames = temporal = 4
        device = CPU

        def new_encode_memory(self) -> Any:
            return object()

        def encode(self, video: Tensor, memory: Any) -> Tensor:
            raise RuntimeError("no memory for it")

    pipeline = fed(load=Broken)
    pipeline.begin()
    pipeline.set_input(0, 0.5, epoch=1)
    pipeline.video.feed(0, clip(1))
    while len(pipeline.made.get(0, [])) < 2:
        pipeline.turn()
    assert pipeline.usage().fault == "no memory for it"
    assert pipeline.usage().used == 0


def test_more_motion_less_noise_and_no_later_step_adds_more_than_the_first() -> None:
    schedule = Schedule((1000.0, 750.0, 500.0), (1.0, 0.9, 0.6))
    live, still = LiveLatents(0.8), torch.zeros(1, 1, 1, 1)
    levels = []
    for chunk, motion in enumerate((9.0, 0.0, 9.0, 9.0, FULL_MOTION / 2)):
        live.add(still, motion)
        taken = live.take(chunk, schedule)
        assert taken is not None and live.take(chunk, schedule) is taken
        levels.append(live.level)
        assert live.level is not None
        sigmas, timesteps = taken[1]
        assert sigmas == pytest.approx((live.level, 0.9 * live.level, 0.6 * live.level))
        assert timesteps == pytest.approx([1000 * sigma for sigma in sigmas])
    after = 0.9 * (0.8 - REACH) + 0.1 * 0.8
    last = 0.9 * (0.8 - REACH) + 0.1 * after
    assert levels == pytest.approx([0.8, 0.8, after, last, 0.9 * (0.8 - REACH / 2) + 0.1 * last])
    assert not live.take(9, schedule)
    live.forget(0)
    assert not live.take(0, schedule), "it is over"


def test_what_cannot_be_is_refused(pipeline: Fed) -> None:
    pipeline.begin()
    for strength in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(RequestError, match="strength is"):
            pipeline.set_input(0, strength, epoch=1)
    with closing(StreamingPipeline(MODEL, CPU)) as without, pytest.raises(RequestError, match="encodes no video"):
        without.video.check_input(0.5)
    pipeline.video.feed(0, clip(1))  # to nobody
    assert pipeline.video.input_figures(0) is None


@pytest.mark.parametrize("entered", [0, 1, 2])
def test_a_chunk_that_began_from_given_video_ends_so_when_another_input_comes(
    fed: Callable[..., Fed], entered: int
) -> None:
    latents = torch.randn(4, *SPEC.chunk_shape, generator=torch.Generator().manual_seed(0))

    def first_chunk(made: Fed, changes: bool) -> Tensor:
        video = GivenVideo(latents, (0.3,) * 4)
        made.open(0, made.text.encode(RED), seed=3, epoch=0, steps=4, kv_context="clean", video=video)
        while not made.made.get(0):
            chunks = made.scheduler.session(0).chunks
            if changes and chunks and chunks[0].entered == entered:
                made.set_input(0, 0.6, epoch=1)
                changes = False
            made.turn()
        assert not changes
        return made.made[0][0]

    assert torch.equal(first_chunk(fed(), True), first_chunk(fed(), False))


@pytest.mark.parametrize("kv_context", ["clean", "same_step"])
def test_a_snapshot_has_the_levels_of_a_chunk_that_began_from_video(
    fed: Callable[..., Fed], pipeline: Fed, kv_context: str
) -> None:
    pipeline.begin(kv_context)
    pipeline.set_input(0, 0.5, epoch=1)
    pipeline.video.feed(0, clip(1))
    while not (chunks := pipeline.scheduler.session(0).chunks) or chunks[0].entered < 1:
        pipeline.turn()
    snapshot, _ = save(pipeline, 0)
    loaded = fed()
    loaded.resting.load(0, snapshot)
    for each in (pipeline, loaded):
        while not each.made.get(0):
            each.turn()
    assert torch.equal(pipeline.made[0][0], loaded.made[0][0])
    head = snapshot.trees["head"]["fields"]["sampler"]["fields"]["video_levels"]
    assert "0.5" in json.dumps(head)
