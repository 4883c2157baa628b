"""Input video in the place of pure noise, against the formulas in plain loops and against streams without it."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import Tensor

from streamdiff.commands.reference import PromptSwitch, ReferenceRun
from streamdiff.errors import ConfigError
from streamdiff.models import sampling
from streamdiff.models.model import Model
from streamdiff.pipeline.runner.init_latents import InitLatents, motion_levels
from tests.pipeline.reference_cases import played
from tests.small import RED, small_model

CHUNKS = 5


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(3, layers=3, sink=2)


@pytest.fixture
def video(model: Model) -> Tensor:
    """Chunks that move more and more, from a little to far more than counts."""
    draw = torch.randn(CHUNKS, *model.spec.chunk_shape, generator=torch.Generator().manual_seed(2))
    return draw * torch.linspace(0.02, 0.5, CHUNKS).view(-1, 1, 1, 1, 1)


@pytest.fixture
def plain(model: Model) -> ReferenceRun:
    return ReferenceRun(model.text.encode(RED), CHUNKS, sampling.from_timesteps([700, 500, 400]), seed=11)


def by_hand(frames: Tensor, strength: float) -> list[float]:
    """The published controller, frame by frame."""
    levels = [strength]
    flat = [chunk[:, f].flatten().tolist() for chunk in frames for f in range(frames.shape[2])]
    per = frames.shape[2]
    for n in range(1, len(frames)):
        pairs = [(flat[n * per + f - 1], flat[n * per + f]) for f in range(per)]
        moved = max(sqrt(sum((b - a) ** 2 for a, b in zip(one, two, strict=True)) / len(one)) for one, two in pairs)
        levels.append(0.9 * (strength - 0.1 * min(max(moved / 0.2, 0), 1)) + 0.1 * levels[-1])
    return levels


@pytest.mark.parametrize("strength", [0.8, 0.95])
def test_the_level_follows_motion_as_published(video: Tensor, strength: float) -> None:
    expected = by_hand(video, strength)
    assert len({round(level, 3) for level in expected}) >= 4, "the motion makes a difference"
    levels = motion_levels(video, strength)
    assert levels.tolist() == pytest.approx(expected, abs=1e-6)
    source = InitLatents.following_motion(video, strength)
    assert source.noise_level.tolist() == pytest.approx(expected, abs=1e-6)
    assert source.timestep.tolist() == [int(1000 * level) - 100 for level in levels.tolist()]


def test_the_first_step_starts_from_input_and_noise(model: Model, plain: ReferenceRun, video: Tensor) -> None:
    """As if what the first step receives had been mixed before, at the first level of the schedule."""
    draw = lambda chunk: sampling.noise(model.spec.chunk_shape, seed=11, chunk=chunk, step=0)  # noqa: E731
    mixed = torch.stack([0.3 * video[chunk] + 0.7 * draw(chunk) for chunk in range(CHUNKS)])
    got = played(model, replace(plain, video=video))
    torch.testing.assert_close(got, played(model, replace(plain, initial=mixed)), rtol=1e-5, atol=1e-5)
    assert (got - played(model, plain)).abs().max() > 0.1


def test_strength_takes_the_place_of_the_first_level(model: Model, plain: ReferenceRun, video: Tensor) -> None:
    got = played(model, replace(plain, video=video, strength=0.6))
    same = replace(plain, video=video, schedule=sampling.from_timesteps([600, 500, 400]))
    torch.testing.assert_close(got, played(model, same), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_motion_noise_is_told_less_than_is_mixed_in(model: Model, plain: ReferenceRun, video: Tensor) -> None:
    """The last chunk alone, in one step: x0 from the told level, whatever was mixed in."""
    one_step = replace(plain, schedule=sampling.from_timesteps([700]), video=video, strength=0.8, motion_noise=True)
    flush = tuple(PromptSwitch(chunk, plain.embeddings, "flush") for chunk in range(1, CHUNKS))
    alone = small_model(3, layers=3)
    got = played(alone, replace(one_step, switches=flush))
    for chunk, level in enumerate(by_hand(video, 0.8)):
        told = int(1000 * level + 1e-9) - 100
        fresh = sampling.noise(model.spec.chunk_shape, seed=11, chunk=chunk, step=0)
        x_t = (1 - level) * video[chunk] + level * fresh
        single = replace(plain, chunks=1, schedule=sampling.from_timesteps([told]), initial=x_t[None])
        torch.testing.assert_close(got[chunk], played(alone, single)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"strength": 0.5}, "strength"),
        ({"strength": 1.2}, "strength"),
        ({"strength": 0.7, "motion_noise": True}, "strength"),
        ({"chunks": 6}, "video_latents"),
    ],
)
def test_what_cannot_be_is_refused(plain: ReferenceRun, video: Tensor, changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(plain, **{"video": video, **changes})  # type: ignore[arg-type]
    assert caught.value.field == field
