"""What the fast paths of a micro-step are worth: each beside the plain path, in turns, so a busy machine hurts all.

    python -m benchmarks.hot_path                      # the embedded model: two to four minutes, most of it compiling
    python -m benchmarks.hot_path --paths plain --chunks 20

Paths: `plain`; `compiled` (`--compile on`). Seconds are those of a chunk in steady state with KV context clean,
transformer only: neither decoding nor text is in them. `ratio` is how many times as fast as `plain` a path is, by the
medians; each path's latents are compared with `plain`'s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import paths, report
from streamdiff import clock
from streamdiff.config import ModelConfig
from streamdiff.device import pick_device
from streamdiff.models.model import Model
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.load_plan import plan_load, plan_rank
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches
from streamdiff.pipeline.rank_loader import load_rank

SUMMARY = "Seconds per chunk of each fast path beside the plain one, taking turns."
PATHS = ("plain", "compiled")
WARM_UP = 2  # chunks beyond the window, whose times do not count


class Run:
    """One stream on one path."""

    def __init__(self, model: Model, device: torch.device, path: str, steps: int) -> None:
        self.device = device
        self.latents: list[Tensor] = []
        self.seconds: list[float] = []
        self.ring = RingExecutor(model, device)
        begun_s = clock.monotonic_s()
        if path == "compiled":
            self.ring.stage.compile(PreallocatedCaches(1, steps, "clean"))
        self.compile_s = clock.monotonic_s() - begun_s
        text = model.text.encode(model.text.examples[0])
        self.ring.open(0, text, seed=1, epoch=0, steps=steps, kv_context="clean")

    def make(self, chunks: int) -> None:
        """Make so many chunks and note the seconds of one. Mutates: self."""
        self._rest()
        begun_s, end = clock.monotonic_s(), len(self.latents) + chunks
        while len(self.latents) < end:
            self.ring.scheduler.set_frame_credit(0, 2 * self.ring.scheduler.chunk_frames)
            self.latents += [latents for _, latents in self.ring.turn()[1]]
        self._rest()
        self.seconds.append((clock.monotonic_s() - begun_s) / chunks)

    def _rest(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.inference_mode()
def measure(
    model: Model, device: torch.device, names: list[str], steps: int, rounds: int, chunks: int
) -> list[dict[str, report.Value]]:
    """A row per path; see the module."""
    runs = {path: Run(model, device, path, steps) for path in names}
    for run in runs.values():
        run.make(model.spec.window_chunks("clean") + WARM_UP)
        run.seconds.clear()
    for _ in range(rounds):
        for run in runs.values():
            run.make(chunks)
    plain = runs["plain"]
    rows: list[dict[str, report.Value]] = []
    for path, run in runs.items():
        pairs = zip(run.latents, plain.latents, strict=True)
        off_by = f"{max(float((one - other).abs().max()) for one, other in pairs):.1e}"
        rows.append({**paths.row(path, run.seconds, plain.seconds, run.compile_s), "off_by": off_by})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--model", default="tiny", help="as for `streamdiff serve` (default: tiny)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    paths.add_option(parser, PATHS)
    parser.add_argument("--steps", type=int, help="denoise steps per chunk (default: what the model was made for)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each path (default: 10)")
    parser.add_argument("--chunks", type=int, default=2, help="chunks per turn (default: 2)")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    names = paths.chosen(parser, options.paths, PATHS)
    device = pick_device(options.device)
    config = ModelConfig(name=options.model, steps=options.steps)
    plan = plan_load(config, device)
    options.steps = plan.steps
    head = report.header(warm_up=f"a window of chunks and {WARM_UP} more")
    model = load_rank(plan_rank(plan)).model
    assert isinstance(model, Model)
    with paths.no_compiled_code():
        rows = measure(model, device, names, options.steps, options.rounds, options.chunks)
    paths.tell(rows, head, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
