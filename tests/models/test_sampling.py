"""Schedules, the sampler's arithmetic, and noise that is a function of its counters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.errors import ConfigError
from streamdiff.models import sampling


def test_noise_has_known_values() -> None:
    """The values of every recorded stream: if this fails, seeds no longer give the streams they gave."""
    drawn = sampling.noise((4, 3, 16, 16), seed=1234, chunk=7, step=2)
    assert drawn.dtype == torch.float32
    expected = torch.tensor([[1.877813, -0.153809, 1.746626, -0.362715]])
    torch.testing.assert_close(drawn.flatten()[None, :4], expected, rtol=0, atol=1e-5)
    assert sampling.counter_seed(0) == 3793791033
    assert sampling.counter_seed(1234, 7, 2) == 3589142827


def test_noise_of_neighbours_is_normal_and_unrelated() -> None:
    rows = torch.stack(
        [sampling.noise((4096,), seed=0, chunk=chunk, step=step) for chunk in range(8) for step in range(4)]
    )
    assert rows.mean().abs() < 0.02 and abs(rows.std() - 1) < 0.02
    related = torch.corrcoef(rows).fill_diagonal_(0)
    assert related.abs().max() < 0.08


def test_the_embedded_models_schedules_stay_as_they_are() -> None:
    """To the last bit, also as the head tells them: sigmas in float32, times 1,000."""
    assert sampling.schedule(4) == (1.0, 0.9375, 0.8333333333333334, 0.625)
    assert sampling.schedule(2) == (1.0, 0.8333333333333334)
    for steps, raw in ((4, (1000, 750, 500, 250)), (2, (1000, 500))):
        made = sampling.published(raw, shift=5.0, warp=True)
        assert made.sigmas == sampling.schedule(steps)
        head = torch.tensor(sampling.schedule(steps)) * sampling.TIMESTEPS
        assert torch.equal(torch.tensor(made.timesteps), head)


def authors_grid(shift: float) -> torch.Tensor:
    """The noise levels of Self-Forcing's scheduler: float32, from 1 to the last one above 0."""
    raw = torch.linspace(1.0, 0.0, 1001)[:-1]
    return shift * raw / (1 + (shift - 1) * raw)


@given(st.floats(0.5, 1000.0), st.sampled_from([1.0, 3.0, 5.0, 8.0]))
def test_rounding_is_that_of_the_authors_grid(timestep: float, shift: float) -> None:
    grid = authors_grid(shift).double()
    theirs = grid[(grid * 1000 - timestep).abs().argmin()].item()
    ours = sampling.nearest_sigma(timestep, shift)
    wanted = timestep / 1000
    # Half way between two points either may win, as float32 falls.
    assert abs(abs(ours - wanted) - abs(theirs - wanted)) < 2e-7
    assert (grid - ours).abs().min() < 1e-7


@given(st.floats(1e-3, 1000.0))
def test_rounding_to_bfloat16_is_torchs(value: float) -> None:
    rounded = sampling.rounded_to_bfloat16(float(torch.tensor(value)))
    assert rounded == torch.tensor(value).to(torch.bfloat16).item()


@pytest.mark.parametrize(
    ("timesteps", "indices", "shift"),
    [((999, 967, 908, 768), (0, 250, 500, 750), 10.0), ((999, 978, 947, 825), (0, 179, 358, 679), 10.0)],
)
def test_truncated_timesteps_have_two_noise_levels(
    timesteps: tuple[float, ...], indices: tuple[int, ...], shift: float
) -> None:
    """LingBot-World's table: a timestep is that of several entries; x0 is made with the first, x_t with the second."""
    raw = torch.linspace(0.999, 0, 1001, dtype=torch.float64)[:-1]
    table = shift * raw / (1 + (shift - 1) * raw)
    told = (1000 * table).long()
    assert told[list(indices)].tolist() == list(timesteps)
    alike = [table[told == timestep].tolist() for timestep in timesteps]
    made = sampling.published(timesteps, shift=shift, truncated=True)
    assert made.timesteps == timesteps
    assert made.sigmas == pytest.approx([each[0] for each in alike], abs=1e-12)
    assert [made.renoise_sigma(step) for step in (1, 2, 3)] == pytest.approx([each[1] for each in alike[1:]], abs=1e-12)
    with pytest.raises(ConfigError, match="steps has 1000"):
        sampling.published((1000, 967), shift=shift, truncated=True)


def test_levels_that_noise_is_mixed_at_again_need_one_for_every_later_step() -> None:
    plain = sampling.from_timesteps((999, 500), (0.99, 0.5))
    assert plain.renoise_sigma(1) == 0.5
    with pytest.raises(ConfigError, match="renoise_sigmas are 2 and steps 2"):
        dataclasses.replace(plain, renoise=(0.6, 0.4))


def test_a_zero_at_the_end_is_no_step() -> None:
    assert sampling.from_timesteps((1000, 500, 0)) == sampling.from_timesteps((1000, 500))
    assert sampling.from_timesteps((1000, 500, 0), (0.9, 0.4, 0)) == sampling.from_timesteps((1000, 500), (0.9, 0.4))
    assert sampling.published((1000, 500, 0), shift=5.0, warp=True).steps == 2


def test_a_zero_at_the_end_that_has_a_noise_level_is_a_step() -> None:
    made = sampling.from_timesteps((1000, 500, 0), (1, 0.5, 0.01))
    assert (made.timesteps, made.sigmas) == ((1000, 500, 0), (1, 0.5, 0.01))
    kept = sampling.published((1000, 500, 0), shift=5.0, nearest=True, keep_end=True)
    assert kept.timesteps == (1000, 500, 0)
    assert kept.sigmas[2] == pytest.approx(authors_grid(5.0)[-1].item(), abs=1e-7)
    assert kept.sigmas[:2] == sampling.published((1000, 500, 0), shift=5.0, nearest=True).sigmas


@pytest.mark.parametrize(
    "given", [{"shift": 0.0}, {"shift": float("nan")}, {"first_noise_scale": 0.0}, {"first_noise_scale": 1.001}]
)
def test_a_shift_or_a_factor_on_the_noise_that_cannot_be_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        sampling.published((1000, 500), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "nearest"), [((1000, 500), True), ((1000, 500, 0), False), ((0,), True), ((1000, 0, 0), True)]
)
def test_an_end_that_cannot_be_kept_is_refused(steps: tuple[float, ...], nearest: bool) -> None:
    with pytest.raises(ConfigError):
        sampling.published(steps, shift=5.0, nearest=nearest, keep_end=True)


@pytest.mark.parametrize(
    ("timesteps", "sigmas"),
    [
        ((), None),
        ((0,), None),
        ((1001, 5), None),
        ((500, -1), None),
        ((float("nan"),), None),
        ((500, 500), None),
        ((500, 750), None),
        ((500, 0, 250), None),
        ((1000, 500), (1.0,)),
        ((1000, 500), (1.5, 0.5)),
        ((1000, 500), (0.5, 0.7)),
    ],
)
def test_a_list_that_is_no_schedule_is_refused(timesteps: tuple[float, ...], sigmas: tuple[float, ...] | None) -> None:
    with pytest.raises(ConfigError):
        sampling.from_timesteps(timesteps, sigmas)
    if sigmas is None:
        with pytest.raises(ConfigError):
            sampling.published(timesteps, shift=5.0, warp=True, nearest=True)


def test_a_first_chunk_may_have_steps_of_its_own_but_not_fewer() -> None:
    two, four = sampling.embedded_schedule(2, 5.0), sampling.embedded_schedule(4, 5.0)
    made = sampling.Schedule(two.timesteps, two.sigmas, four)
    assert (made.of(0), made.of(1), made.of(9), two.of(0)) == (four, made, made, two)
    assert made.steps == 2
    with pytest.raises(ConfigError):
        sampling.Schedule(four.timesteps, four.sigmas, two)
