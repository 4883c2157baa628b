"""Partition invariance over real processes and gloo: the numbers do not depend on how many ranks there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streamdiff.pipeline.ring import Ring
from tests.pipeline.playing import CHUNKS_LONG, THREE, play, same
from tests.pipeline.ring_process import model_of, parse
from tests.pipeline.test_links import free_port
from tests.small import CPU

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400.0
ALONE = [f"{dtype}/1/{name}" for dtype in ("float32", "bfloat16") for name in THREE]
TOGETHER = ["float32/1/0,1,2", "bfloat16/1/0,1,2"]
SEVERAL_ROWS = ["float32/4/1", "float32/4/0,1,2"]
LANES = "float32/1/0,1,2/lanes"
CASES = {
    2: [*TOGETHER, "float32/1/1", LANES],
    3: [*TOGETHER, "float32/1/1", LANES],
    4: [*ALONE, *TOGETHER, *SEVERAL_ROWS],
}
Latents = dict[int, list[torch.Tensor]]


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Latents]:
    """What a ring of so many processes makes, by case."""
    stages: int = request.param
    out = tmp_path_factory.mktemp("ring") / "latents.pt"
    arguments = [str(stages), str(free_port()), str(out), *CASES[stages]]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.ring_process", str(rank), *arguments],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, stderr=subprocess.PIPE,
        )
        for rank in range(stages)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * stages, "\n".join(said)
    results: dict[str, Latents] = torch.load(out, weights_only=True)
    assert list(results) == CASES[stages]
    return results


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, int], list[torch.Tensor]]:
    """Every session by itself, in this process, on one stage."""
    torch.set_num_threads(1)
    return {
        (dtype, name): play(Ring(model_of(dtype), CPU), model_of(dtype), {name: order}, CHUNKS_LONG)[name]
        for dtype in ("float32", "bfloat16")
        for name, order in THREE.items()
    }


def test_latents_are_bit_identical(made: dict[str, Latents], plain: dict[tuple[str, int], list[torch.Tensor]]) -> None:
    for case, sessions in made.items():
        dtype, max_rows, names = parse(case)
        if max_rows > 1:
            continue
        for name in names:
            assert len(sessions[name]) == CHUNKS_LONG
            assert same(sessions[name], plain[dtype, name]), f"{case}: session {name}"


def test_several_rows_agree_within_a_rounding(
    made: dict[str, Latents], plain: dict[tuple[str, int], list[torch.Tensor]]
) -> None:
    """Kernels for more rows sum in another order: 1e-4 over 30 chunks, each of which sees the ones before it."""
    for case, sessions in made.items():
        dtype, max_rows, names = parse(case)
        for name in names if max_rows > 1 else []:
            for one, other in zip(sessions[name], plain[dtype, name], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
