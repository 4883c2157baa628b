"""No row depends on the rows beside it: sessions of the embedded model that share forwards, over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.tiny.model import load_model
from streamdiff.pipeline.executor import RingExecutor
from tests.pipeline.playing import play, same
from tests.pipeline.processes import run_ranks
from tests.pipeline.ring_rows_process import CHUNKS, ORDERS
from tests.small import CPU

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ring processes")]
LIMIT_S = 900.0  # ends what hangs


@pytest.fixture(scope="module")
def alone() -> dict[int, list[torch.Tensor]]:
    """Every session by itself, in this process, with nothing that knows of rows."""
    torch.set_num_threads(1)
    model = load_model(EMBEDDED_WEIGHTS, CPU)
    return {name: play(RingExecutor(model, CPU), model, {name: order}, CHUNKS)[name] for name, order in ORDERS.items()}


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_sessions_in_shared_forwards_equal_each_alone(
    stages: int, tmp_path: Path, alone: dict[int, list[torch.Tensor]]
) -> None:
    """On one stage and on four: what would sum in another order with more rows runs row by row."""
    out = tmp_path / "latents.pt"
    run_ranks("tests.pipeline.ring_rows_process", [str(out)], stages, LIMIT_S)
    found = torch.load(out, weights_only=True)
    assert sum(count for rows, count in found["rows"].items() if rows > 1) > 20, "forwards were really shared"
    for name, latents in found["latents"].items():
        worst = max(float((one - other).abs().max()) for one, other in zip(latents, alone[name], strict=True))
        assert worst < 1e-6, f"session {name}: {worst:.2e}"


def test_a_session_alone_is_bit_identical_whatever_max_rows(alone: dict[int, list[torch.Tensor]]) -> None:
    torch.set_num_threads(1)
    model = load_model(EMBEDDED_WEIGHTS, CPU)
    for name in (0, 3):  # clean and same_step: one row at a time on one stage
        ring = RingExecutor(model, CPU, max_rows=8)
        assert same(play(ring, model, {name: ORDERS[name]}, CHUNKS)[name], alone[name])
        assert set(ring.scheduler.counts.rows) == {1}
