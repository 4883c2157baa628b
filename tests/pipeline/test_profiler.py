"""What a trace says: counts of hand-made events, and a real trace of a real stream that is otherwise unchanged."""

from __future__ import annotations

import gzip
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.pipeline import profiler
from streamdiff.pipeline.build import load_pipeline
from streamdiff.pipeline.output import Frames
from streamdiff.pipeline.profiler import SUMMARY, TRACE, Profiler, describe, summarise
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.small import CPU, RED, save_model, small_model

STREAM, DECODE = 7, 8


def event(name: str, cat: str, ts: float, dur: float, tid: Any = STREAM) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid}


def test_a_cpus_operations_count_once_and_for_themselves() -> None:
    events = [
        event("streamdiff.step", "user_annotation", 0, 50),
        event("streamdiff.step", "user_annotation", 60, 40),
        event("aten::linear", "cpu_op", 1, 30),
        event("aten::addmm", "cpu_op", 2, 20),
        event("aten::copy_", "cpu_op", 3, 5),
        event("aten::item", "cpu_op", 62, 8),
        event("aten::_local_scalar_dense", "cpu_op", 63, 6),
        event("aten::addmm", "cpu_op", 5, 90, DECODE),
        event("aten::nonzero", "cpu_op", 99, 1, DECODE),
        {"ph": "M", "name": "thread_name", "tid": STREAM},
    ]
    found = summarise(events)
    assert (found.wall_us, found.ops, found.launches, found.kernels) == (100, 2, None, None)
    assert dict(found.waits) == {"aten::_local_scalar_dense": 1}
    own = {(cost.name, cost.where): (cost.self_us, cost.calls) for cost in found.costs}
    assert own["aten::addmm", "other threads"] == (90, 1) and own["aten::addmm", "stream"] == (15, 1)
    assert own["aten::linear", "stream"] == (10, 1) and own["aten::item", "stream"] == (2, 1)
    assert found.costs[0].name == "aten::addmm"


def test_on_cuda_launches_and_waits_of_the_streams_thread_count() -> None:
    events = [
        event("streamdiff.step", "user_annotation", 0, 100),
        event("cudaLaunchKernel", "cuda_runtime", 1, 2),
        event("cudaLaunchKernelExC", "cuda_runtime", 4, 2),
        event("cuLaunchKernelEx", "cuda_driver", 6, 2),
        event("cudaGraphLaunch", "cuda_runtime", 7, 2),
        event("cudaMemcpyAsync", "cuda_runtime", 8, 2),
        event("cudaStreamSynchronize", "cuda_runtime", 9, 2),
        event("cudaMemcpy", "cuda_runtime", 11, 2),
        event("cudaLaunchKernel", "cuda_runtime", 1, 2, DECODE),
        event("cudaEventSynchronize", "cuda_runtime", 3, 2, DECODE),
        event("aten::item", "cpu_op", 9, 2),
        *(event("gemm", "kernel", 10 * n, 5, tid="stream 7") for n in range(3)),
        event("Memcpy DtoH", "gpu_memcpy", 50, 40, tid="stream 20"),
    ]
    found = summarise(events)
    assert (found.launches, found.graphs, found.kernels) == (3, 1, 3)
    assert dict(found.waits) == {"cudaStreamSynchronize": 1, "cudaMemcpy": 1}
    assert [(cost.name, cost.self_us, cost.calls) for cost in found.costs] == [("Memcpy DtoH", 40, 1), ("gemm", 15, 3)]
    text = describe(found, title="t", chunks=1, micro_steps=2)
    assert "1.5  kernel launches" in text and "0.5  graph launches" in text and "1.0  host syncs" in text


def play(pipeline: StreamingPipeline, chunks: int) -> list[Frames]:
    """All frames of so many chunks, two of them ahead of what is taken, as an engine has it."""
    pipeline.open(0, pipeline.text.encode(RED), seed=3, epoch=0, steps=2, kv_context="clean")
    made: list[Frames] = []
    while (done := sum(frames.last for frames in made)) < chunks:
        begun = sum(len(frames.pictures) for frames in made) % pipeline.info.chunk_frames
        pipeline.set_frame_credit(0, min(2, chunks - done) * pipeline.info.chunk_frames - begun)
        made += pipeline.step(1.0)
    return made


def runtime() -> StreamingPipeline:
    return StreamingPipeline(small_model(), CPU, steps=2)


def profiled(folder: Path, chunks: int) -> StreamingPipeline:
    pipeline = runtime()
    Profiler(pipeline, folder, chunks)
    return pipeline


@pytest.mark.slow
def test_a_traced_stream_is_the_same_and_leaves_its_files(tmp_path: Path) -> None:
    plain, traced = runtime(), profiled(tmp_path / "new", 2)
    before = play(plain, 8)
    after = play(traced, 8)
    assert all(np.array_equal(a.pictures, b.pictures) for a, b in zip(before, after, strict=True))
    plain.close()
    traced.close()
    with gzip.open(tmp_path / "new" / TRACE, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {event["name"] for event in events}
    assert {"streamdiff.step", "aten::scaled_dot_product_attention", "aten::convolution"} <= names
    threads = {event["tid"] for event in events if event.get("cat") == "cpu_op"}
    assert len(threads) >= 2, "decoding's thread is missing"
    text = (tmp_path / "new" / SUMMARY).read_text()
    counted = re.search(r"2 chunks, (\d+) micro-steps", text)
    # Two steps and a clean pass each; one chunk had begun before, and another is made while the last is decoded.
    assert counted is not None and 6 <= int(counted[1]) <= 12
    assert sum(event["name"] == "streamdiff.step" for event in events) >= 6
    assert "ten largest costs" in text and "aten::" in text


def test_a_short_stream_says_that_there_is_no_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traced = profiled(tmp_path, 2)
    play(traced, 2)
    traced.close()
    assert list(tmp_path.iterdir()) == []
    assert "no profile: the stream ended before a chunk was made after the first 4" in caplog.text


@pytest.mark.slow
def test_what_cannot_be_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run left is gone, and what this one cannot finish is not there either."""
    (tmp_path / f"{profiler._UNFINISHED}old").mkdir()
    traced = profiled(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
    seen: list[set[str]] = []

    def unreadable(events: Any) -> Any:
        seen.append({path.name for path in tmp_path.glob("*/*")})
        raise RuntimeError("no such trace")

    monkeypatch.setattr(profiler, "summarise", unreadable)
    told: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda what: told.append(str(what.exc_value)))
    play(traced, 6)
    traced.close()
    assert told == ["no such trace"] and TRACE in seen[0] and list(tmp_path.iterdir()) == []


def test_chunks_without_a_folder_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is 8, but nothing is traced: say where to, with --profile DIR"):
        load_pipeline(ModelConfig(trace_chunks=8))


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--profile .*file: cannot be made"):
        profiled(tmp_path / "file", 1)


@pytest.mark.slow
def test_a_configuration_with_a_folder_is_traced(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    name = str(tmp_path / "model")
    plain, traced = (
        load_pipeline(ModelConfig(name=name)),
        load_pipeline(ModelConfig(name=name, trace=str(tmp_path / "new"), trace_chunks=3)),
    )
    try:
        assert plain.hook is None
        assert isinstance(traced.hook, Profiler) and traced.hook.folder.is_dir() and traced.hook.chunks == 3
        assert traced.min_ahead_frames(steps=4, kv_context="clean") == plain.min_ahead_frames(
            steps=4, kv_context="clean"
        )
    finally:
        plain.close()
        traced.close()
