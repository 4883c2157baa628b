"""An endless stream takes no more memory, files or list entries at its end than at its beginning; nor does a ring of
real processes: legs of ten chunks, and in `make soak` 10,000 chunks in legs of a hundred."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import psutil
import pytest

from streamdiff.models.model import Model
from streamdiff.pipeline.decode import decode_worker
from streamdiff.pipeline.decode.decode_worker import DecodeWorker
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.session_state import walk
from tests.pipeline.decode.draining import drain
from tests.pipeline.growth_process import faults, grow
from tests.small import BLUE, CPU, RED, small_model

pytestmark = pytest.mark.slow

PROCESS = psutil.Process()
MEBIBYTE = 1 << 20


def run(ring: Ring, model: Model, chunks: int, first_epoch: int) -> None:
    """Make `chunks` more chunks of session 0, with a prompt change now and then."""
    texts = [model.text.encode(RED), model.text.encode(BLUE)]
    done = 0
    while done < chunks:
        ring.scheduler.set_frame_credit(0, model.spec.chunk_frames)
        finished = ring.step_latents()[1]
        if finished and done % 50 == 0:
            ring.set_conditioning(0, texts[done // 50 % 2], epoch=first_epoch + done)
        done += len(finished)


@pytest.mark.parametrize("kv_context", ["clean", "same_step"])
def test_noise_that_no_clean_pass_takes_does_not_stay(kv_context: str) -> None:
    model = small_model(6, layers=1)
    model = replace(model, spec=replace(model.spec, context_sigma=0.1))
    ring = Ring(model, CPU)
    ring.open(0, model.text.encode(RED), seed=1, epoch=0, steps=2, kv_context=kv_context)
    run(ring, model, 40, 1)
    assert len(ring.sampler.sessions[0].noise._drawn) <= 5


def test_the_decoding_side_is_flat_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DecodeWorker] = []

    def noted(*given: Any) -> DecodeWorker:
        made.append(DecodeWorker(*given))
        return made[-1]

    monkeypatch.setattr(decode_worker, "DecodeWorker", noted)
    model = small_model(6, layers=1)
    runtime = StreamingPipeline(model, CPU)
    runtime.open(0, model.text.encode(RED), seed=1, epoch=0, steps=2, kv_context="clean")

    def play(chunks: int) -> None:
        done = 0
        while done < chunks:
            runtime.set_frame_credit(0, 3 * model.spec.chunk_frames)
            done += sum(piece.last for piece in runtime.step(wait_s=5.0))

    play(40)
    gc.collect()
    stream, memories = runtime.streams[0], made[0]._memories._memories
    size, memory, files = walk.nbytes(memories[stream.number]), PROCESS.memory_info().rss, PROCESS.num_fds()
    play(120)
    gc.collect()
    assert walk.nbytes(memories[stream.number]) == size
    assert len(stream.chunks) <= 4 and runtime._pending <= 3
    assert stream.ahead_frames <= 3 * model.spec.chunk_frames
    assert PROCESS.num_fds() == files
    assert PROCESS.memory_info().rss - memory < 8 * MEBIBYTE
    for epoch in range(1, 9):
        runtime.reset(0, model.text.encode(RED), seed=epoch, epoch=epoch)
        play(2)
    runtime.close_session(0)
    drain(runtime.decoding)
    assert not memories, "a stream that ended is forgotten"
    runtime.close()


LIMIT_S = 6 * 3600.0


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "legs", "leg"), [(2, 12, 10), pytest.param(4, 100, 100, marks=pytest.mark.soak)])
def test_ranks_are_flat_while_prompts_change_and_sessions_come_and_go(stages: int, legs: int, leg: int) -> None:
    ranks = grow(stages, legs, leg, LIMIT_S)
    assert [len(found) for found in ranks] == [legs] * stages
    for rank, found in enumerate(ranks):
        assert not faults(found), f"rank {rank}"
    assert all(found[-1]["sessions"] >= 3 and found[-1]["tensors"] > 10 for found in ranks), "nothing was counted"
