"""A session that is swapped out and comes back goes on to the bit as one left alone, and so do others beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from streamdiff.pipeline.executor import LocalRing
from streamdiff.pipeline.output import Frames
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.session_state.swap_store import SwapStore
from tests.small import BLUE, CPU, RED, WHITE, small_model

PLAIN = small_model(4, layers=4, sink=2)
MODEL = replace(PLAIN, spec=replace(PLAIN.spec, anchor_every=2))
CHUNK = MODEL.spec.chunk_frames
CONTEXTS = ("clean", "staircase", "matched", "anchored")
CHUNKS = 7


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def stages_of(pipeline: StreamingPipeline) -> list[ModelRunner]:
    ring = pipeline.ring
    assert isinstance(ring, LocalRing)
    return [ring.stage, *(worker.stage for worker in ring.others)]


def started(stages: int, state_dir: Path | None = None, host_bytes: int | None = None) -> StreamingPipeline:
    """A pipeline, whose ranks each have a store of their own."""
    ring = LocalRing(MODEL, CPU, stages)
    for stage in (ring.stage, *(worker.stage for worker in ring.others)):
        stage.swaps = SwapStore(CPU, host_bytes, state_dir)
    return StreamingPipeline(MODEL, CPU, ring=ring)


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
        pipeline.close()
    return _ALONE[kv_context]


def swap(streams: Streams, until: Callable[[], bool] = lambda: True) -> None:
    """Swap session 0 out, let session 1 go on until the former is where it is to be, and bring it back."""
    pipeline = streams.pipeline
    pipeline.swap_out(0)
    shown = len(streams.pictures[1]) // CHUNK
    streams.play(shown + 1, 1)
    while any(0 in stage.sessions for stage in stages_of(pipeline)) or not until():  # the device's memory is free
        streams.take(pipeline.step(0.01))
    pipeline.swap_in(0)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_in_mid_chunk_and_between_chunks(kv_context: str, stages: int) -> None:
    pipeline = started(stages)
    opened(pipeline, kv_context)
    streams = Streams(pipeline)
    streams.play(2, 0, 1)
    scheduled = pipeline.ring.scheduler.session(0)
    while not any(chunk.back >= 0 for chunk in scheduled.chunks):  # in mid-chunk
        streams.take(pipeline.step(0.01))
    swap(streams)
    streams.play(4, 0, 1)
    pipeline.set_frame_credit(0, 0)
    while not pipeline.at_rest(0):
        streams.take(pipeline.step(0.01))
    swap(streams)
    streams.play(CHUNKS, 0, 1)
    pipeline.close()
    for session in (0, 1):
        assert np.array_equal(streams.shown(session), alone(kv_context).shown(session)), f"session {session}"
