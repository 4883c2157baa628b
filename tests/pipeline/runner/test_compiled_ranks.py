"""`compile: on` over real ranks: each makes the graphs of its own blocks before the ring is warm, the stream runs them
once its window is full, nothing is compiled later, and the stream is the plain ring's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from streamdiff.config import Config, ModelConfig
from streamdiff.engine.process import ipc
from tests.pipeline.processes import ROOT
from tests.pipeline.runner import compiled_process
from tests.pipeline.runner.compiled_process import CHUNKS
from tests.pipeline.runner.test_compiled_stage import TOLERANCE, worst
from tests.small import save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("compiled stage"),
    pytest.mark.usefixtures("forked"),
]  # they share compiled kernels
RANKS = 2
FULL, AGAIN = 2, 1
"""While the window fills, two chunks of two streams (one warms up) run the plain path, and so do those two of a window
whose clean pass runs again, before a newer one."""
LIMIT_S = 900.0  # ends what hangs; a busy machine takes minutes
Made = dict[str, list[torch.Tensor]]


def play(folder: Path, parallel: str, **options: Any) -> tuple[Made, list[dict[str, int]], str]:
    """What the head made, what each rank says of its forwards, and what all wrote to standard error."""
    ipc.write_config(folder, Config(model=ModelConfig(parallel=parallel, device="cpu", **options)))
    told = ("--module", "tests.pipeline.runner.compiled_process", "--address", str(folder))
    process = subprocess.run(
        [sys.executable, "-m", "streamdiff.engine.process.launcher", *told],
        cwd=ROOT, text=True, stderr=subprocess.PIPE, timeout=LIMIT_S,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    return torch.load(folder / "made.pt"), ranks, process.stderr


@pytest.mark.soak
@pytest.mark.parametrize("parallel", ["2x1", "1x2"])
def test_ranks_run_their_own_graphs_and_make_the_plain_stream(
    parallel: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """That of one stage, of which others make the same (`test_ring_processes`), as ranks do that share it."""
    save_model(tmp_path / "model")
    options: dict[str, Any] = {"kv_context": "clean", "name": str(tmp_path / "model")}
    expected = compiled_process.play(ModelConfig(device="cpu", **options))
    assert "compiling:" not in capfd.readouterr().err, "the bar of graphs that are made"
    got, ranks, shown = play(tmp_path, parallel, compile="on", **options)
    for rank in ranks:
        assert rank["graphs"] == 1 and rank["breaks"] == 0
        assert rank["ran"] > 5 * (CHUNKS - FULL) and rank["plain"] == 2 * 5 * FULL + AGAIN
    assert len(got["latents"]) == CHUNKS and len(got["frames"]) >= 4 * CHUNKS
    largest = max(float(each.abs().max()) for each in expected["latents"])
    assert worst(got["latents"], expected["latents"]) <= TOLERANCE * largest, "as one part in so many"
    assert worst([each.float() for each in got["frames"]], [each.float() for each in expected["frames"]]) <= 1
    bars = re.findall(r"compiling:[^\r\n]* (\d+)/(\d+) ", shown)
    window = max(int(total) for _, total in bars)
    assert bars[0] == ("0", str(window)) and bars[-1] == (str(window), str(window)), "of all ranks, to the end"
