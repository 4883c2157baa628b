"""No row depends on the rows beside it: sessions of the embedded model that share forwards, over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamdiff import clock
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.tiny.model import load_model
from streamdiff.pipeline.executor import RingExecutor
from tests.pipeline.playing import play, same
from tests.pipeline.processes import run_ranks
from tests.pipeline.ring_rows_process import CHUNKS, ORDERS
from tests.small import CPU, RED, small_model

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


def test_a_ready_row_waits_for_others_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    model, now_s = small_model(1), [100.0]
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s[0])
    ring = RingExecutor(model, CPU, max_rows=2, wait_s=5.0)
    for name in (0, 1):
        ring.open(name, model.text.encode(RED), seed=name, epoch=0, steps=4, kv_context="clean")
    ring.step()
    ring.scheduler.set_frame_credit(0, model.spec.chunk_frames)
    assert ring.step()[0] == [] and ring.held_s == 5.0
    ring.scheduler.set_frame_credit(1, model.spec.chunk_frames)
    assert [row.session for row in ring.step()[0]] == [0, 1] and ring.held_s == 0.0
    ring.scheduler.set_paused(1, True)
    assert [row.session for row in ring.step()[0]] == [0], "nobody is left to wait for"
    ring.scheduler.set_paused(1, False)
    while ring.scheduler.in_flight or len(ring.step()[0]) == 2:
        ring.step()
    ring.close(1)
    ring.open(1, model.text.encode(RED), seed=3, epoch=9, steps=4, kv_context="clean")
    ring.scheduler.set_frame_credit(0, 9 * model.spec.chunk_frames)
    assert ring.step()[0] == []
    now_s[0] += 4.9
    assert ring.step()[0] == []
    now_s[0] += 0.2
    assert [row.session for row in ring.step()[0]] == [0], "it has waited as long as it may"
