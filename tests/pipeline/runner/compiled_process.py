"""One rank of a ring whose stages may be compiled, started by the launcher as an engine process is, loaded as one is.

Rank 0 plays a stream whose prompt changes on the way and keeps its frames and latents. Every rank writes down how many
forwards of the stream ran a graph and how many did not, and fails if anything is compiled once it is warm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from streamdiff.config import ModelConfig
from streamdiff.core import MicroStep
from streamdiff.engine.process import ipc
from streamdiff.pipeline import rank_process
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.kv_cache.attention import AttentionMetadata
from streamdiff.pipeline.runner.compiled_stage import CompiledStage, Texts
from streamdiff.pipeline.runner.graphs import Tensors
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.runner.sampler import Finished
from tests.small import BLUE, RED

CHUNKS, SWITCH_AT = 10, 6
"""With a window of three or five chunks: evictions before the prompt changes, and after it."""

ran: list[bool] = []
graphs: list[int] = []


class WatchedStage(CompiledStage):
    def run(self, given: Tensors, texts: Texts, views: Sequence[AttentionMetadata]) -> Tensors | None:
        done = super().run(given, texts, views)
        if not self.learning:
            ran.append(done is not None)
        return done


def watch() -> None:
    """Note what happens to this rank's stage. Mutates: the classes."""
    compile_stage = ModelRunner.compile

    def compiled_once(stage: ModelRunner, *kind: object, **options: object) -> None:
        compile_stage(stage, *kind, **options)  # type: ignore[arg-type]
        assert stage.compiled is not None
        graphs.append(len(stage.compiled._graphs))
        torch.compiler.set_stance("fail_on_recompile")

    ModelRunner.compile = compiled_once  # type: ignore[method-assign]
    rank_process.compile_decoder = lambda *given: None  # it has tests of its own


def play(config: ModelConfig) -> dict[str, list[torch.Tensor]]:
    """Frames `[n, H, W, 3]` and latents of the stream. Its prompt changes when nothing more can run, for want of
    room, so the same works enter the ring in the same order however long each takes."""
    runtime = build_pipeline(config)
    info, frames, latents = runtime.info, list[torch.Tensor](), list[torch.Tensor]()
    advance = runtime.sampler.advance

    def kept(row: MicroStep, flow: torch.Tensor) -> Finished | None:
        finished = advance(row, flow)
        latents.extend([] if finished is None else [finished.latents.clone()])
        return finished

    runtime.sampler.advance = kept  # type: ignore[method-assign]
    runtime.open(0, runtime.text.encode(RED), seed=4, epoch=0, steps=info.steps, kv_context=info.kv_context)
    runtime.set_frame_credit(0, SWITCH_AT * info.chunk_frames)
    while runtime.has_work:
        frames += [torch.from_numpy(each.pictures) for each in runtime.step(1.0)]
    runtime.set_conditioning(0, runtime.text.encode(BLUE), epoch=1, switch="recache")
    runtime.set_frame_credit(0, 2 * CHUNKS * info.chunk_frames)  # a staircase needs newcomers
    while len(latents) < CHUNKS or sum(len(each) for each in frames) < CHUNKS * info.chunk_frames:
        frames += [torch.from_numpy(each.pictures) for each in runtime.step(1.0)]
    runtime.close()
    return {"frames": list(torch.cat(frames)[: CHUNKS * info.chunk_frames]), "latents": latents[:CHUNKS]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", type=Path, required=True)
    options = parser.parse_args()
    config = ipc.read_config(options.address).model
    rank = int(os.environ["RANK"])
    from streamdiff.pipeline.runner import model_runner

    model_runner.CompiledStage = WatchedStage  # type: ignore[misc]
    watch()
    if rank == 0:
        torch.save(play(config), options.address / "made.pt")
    else:
        rank_process.run_worker(config)
    told = {
        "graphs": sum(graphs),
        "ran": sum(ran),
        "plain": len(ran) - sum(ran),
        "breaks": len(counters["graph_break"]),
    }
    (options.address / f"rank-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
