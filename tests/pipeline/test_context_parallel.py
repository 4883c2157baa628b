"""Ranks that share a stage make what one rank makes, over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamdiff.pipeline.executor import RingExecutor
from tests.pipeline.context_process import ORDERS, Case, shared_model
from tests.pipeline.playing import play
from tests.pipeline.processes import run_ranks
from tests.small import CPU

LIMIT_S = 900.0  # ends what hangs; a busy machine takes minutes
LAYOUTS = ("1x2", "1x4", "2x2", "4x1", "2x1")
NAMES = ",".join(map(str, ORDERS))


def check(cases: list[str], folder: Path) -> None:
    """Play the cases on four ranks, and compare every session with itself on one, within 1e-6."""
    out = folder / "latents.pt"
    run_ranks("tests.pipeline.context_process", [str(out), *cases], 4, LIMIT_S)
    made = torch.load(out, weights_only=True)
    chunks, model = Case.of(cases[0]).chunks, shared_model()
    for name, order in ORDERS.items():
        alone = play(RingExecutor(model, CPU), model, {name: order}, chunks)[name]
        for case in cases:
            for chunk, (one, other) in enumerate(zip(made[case][name], alone, strict=True)):
                torch.testing.assert_close(
                    one, other, rtol=0, atol=1e-6, msg=lambda why, at=(case, name, chunk): f"{at}: {why}"
                )


@pytest.mark.slow
def test_shared_stages_make_what_one_rank_makes(tmp_path: Path) -> None:
    """Five sessions at once, of all contexts, with a sink, evictions, a prompt switch and both recaches; also over a
    transport with NCCL's manners, where a send waits for its receive."""
    over_nccl = [f"{layout}/12/{NAMES}/nccl" for layout in ("2x2", "1x2")]
    check([*(f"{layout}/12/{NAMES}/gloo" for layout in LAYOUTS), *over_nccl], tmp_path)


@pytest.mark.soak
def test_shared_stages_drift_from_one_rank_in_no_long_stream(tmp_path: Path) -> None:
    check([f"{layout}/60/{NAMES}/gloo" for layout in LAYOUTS], tmp_path)
