"""A session that is swapped out and comes back goes on to the bit as one left alone, and so do others beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from streamdiff.core import Frames
from streamdiff.device import embedded_autoencoder_dtype
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.snapshot.file import Snapshot, mapped
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.session_state.swap_store import SwapStore
from tests.pipeline import rest_process as process
from tests.pipeline.processes import run_ranks
from tests.saving import save
from tests.small import CPU, RED, WHITE, small_model
from tests.swap_files import swap_files
from training.embedded import WEIGHTS, load_model

MODEL = small_model(4, layers=4, sink=2)
CHUNK = MODEL.spec.chunk_frames
CONTEXTS = ("clean", "staircase", "same_step")
CHUNKS = 7


def stages_of(pipeline: StreamingPipeline) -> list[ModelRunner]:
    return [pipeline.stage, *(worker.stage for worker in pipeline.local)]


def started(stages: int, state_dir: Path | None = None, host_bytes: int | None = None) -> StreamingPipeline:
    """A pipeline, whose ranks each have a store of their own."""
    parts = local_parts(MODEL, CPU, stages)
    for stage in (parts.stage, *(worker.stage for worker in parts.local)):
        stage.swaps = SwapStore(CPU, host_bytes, state_dir)
    return StreamingPipeline(MODEL, CPU, parts=parts)


def ended(pipeline: StreamingPipeline) -> None:
    pipeline.close()
    for stage in stages_of(pipeline):
        stage.swaps.close()


def opened(pipeline: StreamingPipeline, kv_context: str) -> None:
    pipeline.open(0, pipeline.text.encode(RED), seed=3, epoch=5, steps=4, kv_context=kv_context)
    pipeline.open(1, pipeline.text.encode(WHITE), seed=1, epoch=0, steps=4, kv_context="clean")


class Streams:
    """What two sessions have shown."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self.pipeline = pipeline
        self.pictures: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def take(self, frames: list[Frames]) -> None:
        for each in frames:
            self.pictures[each.session] += list(each.pictures)

    def play(self, chunks: int, *sessions: int) -> None:
        """Go on until these have shown so many chunks; the ring runs ahead of them."""
        while any(len(self.pictures[session]) < chunks * CHUNK for session in sessions):
            for session in sessions:
                self.pipeline.set_frame_credit(session, 6 * CHUNK)
            self.take(self.pipeline.step(0.1))

    def shown(self, session: int) -> np.ndarray:
        return np.stack(self.pictures[session][: CHUNKS * CHUNK])


_ALONE: dict[str, Streams] = {}


def alone(kv_context: str) -> Streams:
    """The same sessions on one stage, never swapped."""
    if kv_context not in _ALONE:
        pipeline = started(1)
        opened(pipeline, kv_context)
        streams = _ALONE[kv_context] = Streams(pipeline)
        streams.play(CHUNKS, 0, 1)
        ended(pipeline)
    return _ALONE[kv_context]


def swap(streams: Streams, place: str) -> None:
    """Swap session 0 out, let session 1 go on until all that the former has is in this place, and bring it back."""
    pipeline, stages = streams.pipeline, stages_of(streams.pipeline)
    for stage in stages:
        stage.swaps.host_bytes = None if place == "host" else 0
    pipeline.resting.swap_out(0)
    shown = len(streams.pictures[1]) // CHUNK
    streams.play(shown + 1, 1)
    while {stage.swaps.location(name) for stage in stages for name in stage.swaps._kept} != {place} or any(
        0 in stage.sessions for stage in stages
    ):
        streams.take(pipeline.step(0.01))
    assert pipeline.resting.place(0) == place
    pipeline.resting.swap_in(0)
    while pipeline.resting.is_away(0):
        streams.take(pipeline.step(0.01))


def until_mid_chunk(streams: Streams) -> None:
    scheduled = streams.pipeline.scheduler.session(0)
    while not any(chunk.back >= 0 for chunk in scheduled.chunks):
        streams.pipeline.set_frame_credit(0, 6 * CHUNK)
        streams.take(streams.pipeline.step(0.01))


def until_at_rest(streams: Streams) -> None:
    streams.pipeline.set_frame_credit(0, 0)
    while not streams.pipeline.resting.at_rest(0):
        streams.take(streams.pipeline.step(0.01))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_context", "stages"),
    [
        ("clean", 1),
        *((context, 4) for context in CONTEXTS),
        *(pytest.param(context, 1, marks=pytest.mark.soak) for context in CONTEXTS[1:]),
    ],
)
def test_in_mid_chunk_and_between_chunks_in_host_memory_and_on_disk(
    kv_context: str, stages: int, tmp_path: Path
) -> None:
    pipeline = started(stages, tmp_path)
    opened(pipeline, kv_context)
    streams = Streams(pipeline)
    streams.play(2, 0, 1)
    for chunks, until, place in (
        (3, until_mid_chunk, "host"),
        (4, until_at_rest, "disk"),
        (5, until_mid_chunk, "disk"),
        (6, until_at_rest, "host"),
    ):
        until(streams)
        swap(streams, place)
        streams.play(chunks, 0, 1)
    assert not swap_files(tmp_path), "what is back leaves no file"
    streams.play(CHUNKS, 0, 1)
    ended(pipeline)
    for session in (0, 1):
        assert np.array_equal(streams.shown(session), alone(kv_context).shown(session)), f"session {session}"


@pytest.mark.slow
def test_a_snapshot_of_a_session_that_is_away_is_whole_and_its_end_leaves_nothing() -> None:
    pipeline = started(2)
    opened(pipeline, "staircase")
    streams = Streams(pipeline)
    streams.play(2, 0, 1)
    until_at_rest(streams)
    pipeline.resting.swap_out(0)
    snapshot, frames = save(pipeline, 0)
    streams.take(frames)
    assert pipeline.resting.is_away(0), "it stays where it is"
    pipeline.close_session(0)
    streams.take(pipeline.resting.load(0, snapshot))
    assert not any(stage.swaps._kept for stage in stages_of(pipeline))
    streams.play(CHUNKS, 0, 1)
    ended(pipeline)
    for session in (0, 1):
        assert np.array_equal(streams.shown(session), alone("staircase").shown(session)), f"session {session}"


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
def test_one_that_restarts_while_it_is_away_waits_for_nothing_of_it(stages: int, tmp_path: Path) -> None:
    """Its file is not read, and what is said to its stages meanwhile does not break them."""
    pipeline = started(stages, tmp_path, host_bytes=0)
    opened(pipeline, "staircase")
    streams = Streams(pipeline)
    streams.play(2, 0, 1)
    pipeline.resting.swap_out(0)
    while any(0 in stage.sessions for stage in stages_of(pipeline)) or pipeline.resting.place(0) != "disk":
        streams.take(pipeline.step(0.01))
    pipeline.resting.swap_in(0)
    pipeline.set_steps(0, 4, epoch=6)
    pipeline.reset(0, pipeline.text.encode(RED), seed=3, epoch=7)
    assert not pipeline.resting.is_away(0)
    streams.pictures[0].clear()
    streams.play(CHUNKS, 0, 1)
    assert not swap_files(tmp_path), "what it was is gone"
    ended(pipeline)
    for session in (0, 1):
        assert np.array_equal(streams.shown(session), alone("staircase").shown(session)), f"session {session}"


RINGS = [
    pytest.param((3, 1, "dedicated"), "host"),
    pytest.param((3, 1, "dedicated"), "disk", marks=pytest.mark.soak),
    pytest.param((1, 2, "dedicated"), "disk damage"),
]


@pytest.mark.slow
@pytest.mark.xdist_group("ring processes")
@pytest.mark.parametrize(("ring", "how"), RINGS)
def test_on_a_ring_of_processes_over_rough_links(ring: tuple[int, int, str], how: str, tmp_path: Path) -> None:
    """Messages leave late, and slots hold rubbish once they are free: nothing is swapped or copied in the middle of a
    send. Where ranks share a stage they agree when all have read their files, and what one of them has lost is lost to
    all. What is saved in the ring goes on in one process, and the other way round."""
    stages, shares, decode = ring
    for word in how.split():
        (tmp_path / word).touch()
    with torch.inference_mode():
        pipeline = StreamingPipeline(load_model(WEIGHTS, CPU, decoder_dtype=embedded_autoencoder_dtype(CPU)), CPU)
    process.opened(pipeline)
    alone = process.Shown(pipeline)
    alone.play(2, 0)
    snapshot, frames = save(pipeline, 0)
    snapshot.write(tmp_path / "alone")
    alone.take(frames)
    begin = len(alone.pictures[0])
    arguments = [str(tmp_path), str(stages), str(shares), decode]
    run_ranks("tests.pipeline.rest_process", arguments, stages * shares + (decode == "dedicated"), 200)
    there = dict(np.load(tmp_path / "shown.npz"))
    saved_at = int(there.pop("saved_at"))
    alone.play(max(saved_at + 1, *map(len, there.values()), begin + len(there["2"])) / pipeline.info.chunk_frames, 0, 1)
    pipeline.close_session(0)
    alone.take(pipeline.resting.load(2, Snapshot.from_bytes(mapped(tmp_path / "ring"))))
    alone.play(1, 2)
    pipeline.close()
    there["from the ring"] = np.stack(alone.pictures[2])
    for name, shown in there.items():
        first = {"2": begin, "from the ring": saved_at}.get(name, 0)
        expected = np.stack(alone.pictures[1 if name == "1" else 0][first : first + len(shown)])
        count = min(len(expected), len(shown))
        worst = int(np.abs(shown[:count].astype(int) - expected[:count].astype(int)).max())
        assert count and worst <= (shares > 1), f"{name}: ranks that share sums may round the last bit otherwise"
