"""A real trace of a real stream that is otherwise unchanged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamdiff.core import Frames
from streamdiff.pipeline.profiler import TRACE, Profiler, check_folder
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.small import CPU, RED, small_model


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
    check_folder(folder)
    Profiler(pipeline, folder, chunks)
    return pipeline


@pytest.mark.slow
def test_a_traced_stream_is_the_same_and_leaves_its_files(tmp_path: Path) -> None:
    plain, traced = runtime(), profiled(tmp_path / "new", 2)
    given: dict[str, Any] = {"steps": 4, "kv_context": "clean"}
    assert traced.min_ahead_frames(**given) == plain.min_ahead_frames(**given)
    before = play(plain, 8)
    after = play(traced, 8)
    assert all(np.array_equal(a.pictures, b.pictures) for a, b in zip(before, after, strict=True))
    plain.close()
    traced.close()
    with gzip.open(tmp_path / "new" / TRACE, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {event["name"] for event in events}
    assert {"aten::scaled_dot_product_attention", "aten::convolution"} <= names
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#4", "ProfilerStep#5"}
    threads = {event["tid"] for event in events if event.get("cat") == "cpu_op"}
    assert len(threads) >= 2, "decoding's thread is missing"
    assert [path.name for path in (tmp_path / "new").iterdir()] == [TRACE]
