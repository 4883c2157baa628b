"""An endless stream takes no more memory, files or list entries at its end than at its beginning."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from streamdiff.models.model import Model
from streamdiff.pipeline.decode import decode_worker
from streamdiff.pipeline.decode.decode_worker import DecodeWorker
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.session_state import walk
from tests.pipeline.decode.draining import drain
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


def kept(ring: Ring) -> dict[str, int]:
    """Lengths of everything that could grow, and the addresses of what must stay where it is."""
    stage, head = ring.stage.sessions[0], ring.sampler.sessions[0]
    state = ring.scheduler._sessions[0]
    assert len(stage.text) <= 3 and len(head.latents) <= 5 and len(state.chunks) <= 5
    return {
        "key": stage.state.key.data_ptr(),
        "value": stage.state.value.data_ptr(),
        "bytes": walk.nbytes(stage.state),
        "sessions": len(ring.scheduler._sessions) + len(ring.sampler.sessions) + len(ring.stage.sessions),
        "files": PROCESS.num_fds(),
        "threads": PROCESS.num_threads(),
    }


def flat(chunks: int, kv_context: str) -> None:
    model = small_model(6, layers=1)
    ring = Ring(model, CPU)
    ring.open(0, model.text.encode(RED), seed=1, epoch=0, steps=2, kv_context=kv_context)
    run(ring, model, 120, 1)
    gc.collect()
    before, memory, objects = kept(ring), PROCESS.memory_info().rss, len(gc.get_objects())
    run(ring, model, chunks, 1000)
    gc.collect()
    after = kept(ring)
    for name in ("files", "threads"):  # of the process, where those of tests before may end meanwhile
        assert after.pop(name) <= before.pop(name), name
    assert after == before
    assert len(gc.get_objects()) - objects < 200
    assert PROCESS.memory_info().rss - memory < 8 * MEBIBYTE
    assert all(torch.isfinite(latents).all() for latents in ring.sampler.sessions[0].latents.values())


LONG = (("staircase", 400), ("same_step", 400), ("clean", 10_000), ("staircase", 10_000))


@pytest.mark.parametrize(
    ("kv_context", "chunks"), [("clean", 400), *(pytest.param(*more, marks=pytest.mark.soak) for more in LONG)]
)
def test_memory_files_and_lists_are_flat(kv_context: str, chunks: int, capfd: pytest.CaptureFixture[str]) -> None:
    flat(chunks, kv_context)
    assert capfd.readouterr() == ("", ""), "calm: no micro-step prints a line"


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
