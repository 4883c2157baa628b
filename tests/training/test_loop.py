"""Training: budgets, the optimizer, and checkpoints."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.small import CPU
from training import autoencoder as train_autoencoder
from training import loop

steps_taken = st.integers(0, 10_000)


@given(st.floats(1e-5, 1.0), st.floats(0, 1), steps_taken)
def test_the_learning_rate_warms_up_and_cools_down_to_zero(peak: float, progress: float, step: int) -> None:
    rate = loop.learning_rate(peak, progress, step)
    assert 0 <= rate <= peak
    assert loop.learning_rate(peak, 1.0, step) == 0.0
    assert loop.learning_rate(peak, 0.0, 30 + step) == peak
    assert rate <= loop.learning_rate(peak, progress, step + 1)
    assert loop.learning_rate(peak, 0.0, 0) == pytest.approx(peak / 30)


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 100), st.floats(1e-3, 1e3))
def test_an_update_has_singular_values_near_one_whatever_the_gradient_was(
    rows: int, columns: int, seed: int, size: float
) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    spread = torch.linalg.svdvals(matrix)
    (made,) = loop.orthogonal(matrix[None] * size)
    assert made.shape == matrix.shape
    # Five steps lift singular values from about 1/100 of the norm up to the band that Muon is content with.
    lifted = torch.linalg.svdvals(made)[spread > 0.03 * matrix.norm()]
    assert ((lifted > 0.6) & (lifted < 1.3)).all()
    both = loop.orthogonal(torch.stack([torch.eye(columns, rows), matrix.T * size]))
    torch.testing.assert_close(both[1], made.T, rtol=1e-3, atol=1e-3)


def test_muon_goes_downhill_in_matrices_and_convolutions_and_leaves_the_rest() -> None:
    torch.manual_seed(0)
    matrix, kernel, idle = (torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 9), (4, 3, 3, 3), (2, 2)))
    aims = torch.zeros(6, 9), torch.ones(4, 3, 3, 3)
    optimizer = loop.Muon([matrix, kernel, idle], lr=0.05)
    untouched = idle.detach().clone()
    losses = []
    for _ in range(200):
        loss = (matrix - aims[0]).square().mean() + (kernel - aims[1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]
    assert torch.equal(idle, untouched)
    assert optimizer.state[kernel]["momentum"].shape == kernel.shape


def test_matrices_go_to_muon_and_the_rest_to_adam() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    optimizer = loop.Optimizer(module, 1e-2, 1e-3, adam=("2",))
    muon, adam = (part.param_groups[0]["params"] for part, _ in optimizer.parts)
    assert [p.shape for p in muon] == [torch.Size([4, 3])]
    assert len(adam) == 5
    optimizer.step(module(torch.ones(1, 3)).sum(), progress=0.5, step=100)
    assert [part.param_groups[0]["lr"] for part, _ in optimizer.parts] == pytest.approx([5e-3, 5e-4])


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    checkpoint = loop.Checkpoint(tmp_path / "deep" / "run.pt")
    assert checkpoint.load(CPU) is None
    checkpoint.save(1, weight=torch.ones(3))
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        checkpoint.save(2, bad=lambda: None)  # cannot be written
    state = checkpoint.load(CPU)
    assert state is not None and state["step"] == 1 and torch.equal(state["weight"], torch.ones(3))


def test_steps_end_by_number_and_by_the_clock() -> None:
    progress = loop.Progress()
    seen = list(loop.steps(loop.Budget(5), progress, "test"))
    assert seen == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8]) and progress.step == 5
    resumed = loop.Progress(3, 100.0)
    assert len(list(loop.steps(loop.Budget(5), resumed, "test"))) == 2
    assert list(loop.steps(loop.Budget(5, minutes=1.0), loop.Progress(0, 61.0), "test")) == []


class Stops(loop.Budget):
    """A budget whose run is told to end at its first step."""

    def progress(self, step: int, spent_s: float) -> float:
        if step == 0:
            loop.stopping.set()
        return super().progress(step, spent_s)


def autoencoder(out: Path, budget: loop.Budget) -> dict[str, torch.Tensor]:
    return train_autoencoder.train(out, budget, seed=3, device=CPU, batch=1).state_dict()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_run_that_is_told_to_end_writes_its_step_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "stopping", threading.Event())
    autoencoder(tmp_path / "parts", Stops(3))
    assert torch.load(tmp_path / "parts" / "autoencoder.pt", weights_only=True)["step"] == 1
    loop.stopping.clear()
    assert equal(autoencoder(tmp_path / "whole", loop.Budget(3)), autoencoder(tmp_path / "parts", loop.Budget(3)))
