"""Schedules, the sampler's arithmetic, and noise that is a function of its counters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.models import sampling

counters = st.integers(-(2**31), 2**40)


def test_four_steps_have_the_published_timesteps() -> None:
    timesteps = [sigma * sampling.TIMESTEPS for sigma in sampling.schedule(4)]
    assert timesteps == pytest.approx([1000.0, 937.5, 833.3333, 625.0], abs=1e-3)


def test_fewer_steps_use_levels_that_four_steps_have() -> None:
    assert sampling.schedule(2) == (sampling.schedule(4)[0], sampling.schedule(4)[2])
    assert sampling.schedule(1) == (1.0,)


@pytest.mark.parametrize("steps", [-1, 0, 3, 5])
def test_other_numbers_of_steps_are_refused_with_what_is_allowed(steps: int) -> None:
    with pytest.raises(ValueError, match=rf"steps is {steps}.*1, 2 or 4"):
        sampling.schedule(steps)


@given(st.sampled_from([1, 2, 4]), st.floats(1.0, 12.0))
def test_every_schedule_falls_from_one_and_stays_above_zero(steps: int, shift: float) -> None:
    sigmas = sampling.schedule(steps, shift)
    assert len(sigmas) == steps and sigmas[0] == 1.0 and sigmas[-1] > 0
    assert list(sigmas) == sorted(sigmas, reverse=True) and len(set(sigmas)) == steps


@given(st.floats(0.0, 1.0), st.integers(0, 100))
def test_the_true_flow_leads_back_to_the_clean_latents(sigma: float, seed: int) -> None:
    clean, noise = torch.randn(2, 4, 2, 3, 3, generator=torch.Generator().manual_seed(seed))
    noisy = sampling.add_noise(clean, noise, sigma)
    torch.testing.assert_close(sampling.clean_from_flow(noisy, noise - clean, sigma), clean, rtol=0, atol=1e-5)


def test_ends_of_the_noise_scale() -> None:
    clean, noise = torch.randn(2, 4, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sampling.add_noise(clean, noise, 0.0), clean)
    assert torch.equal(sampling.add_noise(clean, noise, 1.0), noise)
    levels = torch.tensor([0.0, 1.0, 0.25, 0.5]).view(4, 1, 1, 1)
    mixed = sampling.add_noise(clean, noise, levels)
    torch.testing.assert_close(mixed[2], 0.75 * clean[2] + 0.25 * noise[2])


def test_noise_has_known_values() -> None:
    """The values of every recorded stream: if this fails, seeds no longer give the streams they gave."""
    drawn = sampling.noise((4, 3, 16, 16), seed=1234, chunk=7, step=2)
    assert drawn.dtype == torch.float32
    expected = torch.tensor([[1.877813, -0.153809, 1.746626, -0.362715]])
    torch.testing.assert_close(drawn.flatten()[None, :4], expected, rtol=0, atol=1e-5)
    assert sampling.counter_seed(0) == 3793791033
    assert sampling.counter_seed(1234, 7, 2) == 3589142827


@given(counters, st.integers(0, 10**7), st.integers(0, 4))
def test_noise_is_a_pure_function_of_its_counters(seed: int, chunk: int, step: int) -> None:
    torch.manual_seed(chunk % 17)  # the global generator has no say
    first = sampling.noise((2, 8), seed=seed, chunk=chunk, step=step)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    assert torch.equal(first, sampling.noise((2, 8), seed=seed, chunk=chunk, step=step))
    assert torch.equal(torch.random.get_rng_state(), before)


@given(counters, st.integers(0, 10**7), st.integers(0, 4))
def test_every_counter_matters_and_their_order_does(seed: int, chunk: int, step: int) -> None:
    base = sampling.counter_seed(seed, chunk, step)
    assert base != sampling.counter_seed(seed + 1, chunk, step)
    assert base != sampling.counter_seed(seed, chunk + 1, step)
    assert base != sampling.counter_seed(seed, chunk, step + 1)
    assert base != sampling.counter_seed(seed, chunk)
    if chunk != step:
        assert base != sampling.counter_seed(seed, step, chunk)


def test_noise_of_neighbours_is_normal_and_unrelated() -> None:
    rows = torch.stack(
        [sampling.noise((4096,), seed=0, chunk=chunk, step=step) for chunk in range(8) for step in range(4)]
    )
    assert rows.mean().abs() < 0.02 and abs(rows.std() - 1) < 0.02
    related = torch.corrcoef(rows).fill_diagonal_(0)
    assert related.abs().max() < 0.08
