"""What an engine's forwards and decoding take on this machine, each alone, for the simulator. Imports torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median

from benchmarks import stream_parts
from benchmarks.load_simulation import EngineTimes
from streamdiff.config import ModelConfig
from streamdiff.models.model import Model
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.load_plan import plan_load


def widened(folder: Path, times: int) -> Path:
    """The embedded model in `folder`, with pictures so many times as wide: so many times the tokens, the same weights.
    What it shows is not what it was trained for; what it costs is real."""
    shutil.copytree(EMBEDDED_WEIGHTS, folder)
    index = folder / "model_index.json"
    facts = json.loads(index.read_text())
    facts["stream"]["latent_width"] *= times
    index.write_text(json.dumps(facts))
    return folder


def measure(config: ModelConfig, max_rows: int, rounds: int = 3) -> EngineTimes:
    """Medians over `rounds` chunks: forwards of 1 to `max_rows` rows through all blocks, with full windows and without
    graphs, and a chunk's decoding.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    runtime = build_pipeline(config)
    try:
        device, model, info = runtime.ring.stage.device, runtime.model, runtime.info
        work_s = runtime.work_s()
        parts, _ = stream_parts.measure(runtime, rounds, plan_load(config, device).decode_latents, lambda part: None)
        decode_s = median(parts["decode"]) + median(parts["copy"])
        ring = RingExecutor(model, device, max_rows)
        _fill(ring, model, max_rows, info.steps, info.kv_context)
        forward_s = tuple(_forward_s(ring, rows, rounds * (info.steps + 1)) for rows in range(1, max_rows + 1))
    finally:
        runtime.close()
    alone_s = forward_s[0] * (info.steps + 1)
    return EngineTimes(
        forward_s, decode_s, work_s or alone_s + decode_s, info.chunk_frames, model.spec.chunk_latents, info.steps,
        info.kv_context, model.spec.steps,
    )  # fmt: skip


def _fill(ring: RingExecutor, model: Model, sessions: int, steps: int, kv_context: str) -> None:
    """Open so many sessions, and play each until its window is full. Mutates: ring."""
    for session in range(sessions):
        text = model.text.encode(model.text.examples[session % len(model.text.examples)])
        ring.open(session, text, seed=session, epoch=0, steps=steps, kv_context=kv_context)
    full = model.spec.window_chunks(kv_context) + 1
    left = dict.fromkeys(range(sessions), full)
    while any(left.values()):
        for session, chunks in left.items():
            ring.scheduler.set_frame_credit(session, chunks * ring.scheduler.chunk_frames)
        for row, _ in ring.turn()[1]:
            left[row.session] -= 1
    while ring.has_work:  # clean passes
        ring.turn()


def _forward_s(ring: RingExecutor, rows: int, forwards: int) -> float:
    """Seconds of a forward of so many rows, the median of so many. Mutates: ring."""
    took: list[float] = []
    while len(took) < forwards:
        for session in range(rows):
            ring.scheduler.set_frame_credit(session, 10 * ring.scheduler.chunk_frames)
        took_s, (taken, _) = stream_parts.timed(ring.stage.device, ring.turn)
        if len(taken) == rows:
            took.append(took_s)
    for session in range(rows):
        ring.scheduler.set_frame_credit(session, 0)
    while ring.has_work:
        ring.turn()
    return median(took)
