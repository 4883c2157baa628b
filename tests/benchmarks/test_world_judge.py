"""The judge is right about rendered truth, sure-footed on soft and noisy pictures, and not fooled by wrong ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.world_clips import ATTRIBUTES, NAMES, draw_scenes, film, rows_of, shares
from benchmarks.world_judge import NONE, as_frames, judge
from streamdiff.models.tiny import world

pytestmark = pytest.mark.slow

SCENE = world.Scene("red", "star", "right", "desert")


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def off_by(seen: Tensor, true: Tensor) -> Tensor:
    """Distance per axis on the torus."""
    half = world.SIZE / 2
    return ((seen - true + half).remainder(world.SIZE) - half).abs()


def one(scene: world.Scene = SCENE, start: tuple[int, int] = (64, 64), frames: int = 12) -> Tensor:
    return film(rows_of([scene]), torch.tensor([start]), frames).frames


def blurred(frames: Tensor, sigma: float) -> Tensor:
    axis = torch.arange(-5.0, 6.0)
    weight = torch.exp(-(axis**2) / (2 * sigma**2))
    kernel = (weight[:, None] * weight / weight.sum() ** 2).expand(3, 1, 11, 11)
    flat = F.pad(frames.flatten(0, 1), (5, 5, 5, 5), mode="replicate")
    return F.conv2d(flat, kernel, groups=3).view(frames.shape)


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.soak)])
def test_truth_of_every_scene_from_everywhere_on_the_lattice(every: int) -> None:
    """Of each eighth all values of every attribute are there; all of them in the soak test."""
    scenes = rows_of(world.all_scenes())[::every]
    start = torch.randint(world.CELLS, (len(scenes), 2), generator=dice()) * world.LATTICE
    right, far = [], []
    for rows in torch.arange(len(scenes)).split(50):
        true = film(scenes[rows], start[rows], 3)
        verdict = judge(true.frames)
        right.append(verdict.right(scenes[rows]))
        far.append(off_by(verdict.position, true.position))
    figures = shares(torch.cat(right))
    assert all(figures[name] >= 0.99 for name in (*ATTRIBUTES, "all")), figures
    assert torch.cat(far).max() < 0.05


def test_whole_chunks_from_any_pixel_across_the_borders() -> None:
    scenes = rows_of(draw_scenes(48, dice(1)))
    start = torch.randint(world.SIZE, (48, 2), generator=dice(2))
    start[:24] %= 12  # here every shape hangs over a border or a corner
    true = film(scenes, start, 12)
    verdict = judge(true.frames)
    assert verdict.right(scenes).all()
    assert (verdict.step - true.step).abs().max() < 0.05


def test_soft_and_noisy_pictures_are_still_understood() -> None:
    scenes = rows_of(draw_scenes(60, dice(3)))
    start = torch.randint(world.CELLS, (60, 2), generator=dice(4)) * world.LATTICE
    true = film(scenes, start, 6)
    soft = blurred(true.frames, 1.5)
    verdict = judge(soft + 0.04 * torch.randn(soft.shape, generator=dice(5)))
    figures = shares(verdict.right(scenes))
    assert all(figures[name] >= 0.95 for name in ATTRIBUTES), figures
    assert torch.linalg.vector_norm(verdict.step - true.step, dim=2).mean() < 0.1


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_displacement_is_measured_to_a_fraction_of_a_pixel(fraction: float) -> None:
    scenes = rows_of([world.Scene("blue", shape, "right", "meadow") for shape in world.SHAPES])
    start = torch.full((len(scenes), 2), 40)
    near, next_ = (film(scenes, start + torch.tensor([0, shift]), 1).frames for shift in (0, 1))
    between = near + fraction * (next_ - near)
    step = judge(torch.cat([near, between], 1)).step[:, 0]
    assert (step - torch.tensor([0.0, fraction])).abs().max() < 0.05


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_another_scene_is_wrong_in_just_the_attribute_that_differs(attribute: str) -> None:
    column = ATTRIBUTES.index(attribute)
    for other in range(1, len(NAMES[attribute])):
        asked = rows_of([SCENE])
        shown = asked.clone()
        shown[0, column] = (asked[0, column] + other) % len(NAMES[attribute])
        right = judge(film(shown, torch.tensor([[64, 64]]), 6).frames).right(asked)
        assert right[0].tolist() == [index != column for index in range(4)]


def test_a_frozen_shape_does_not_move_and_a_film_run_backwards_moves_back() -> None:
    frames = one()
    frozen = judge(frames[:, :1].expand(-1, 12, -1, -1, -1))
    assert frozen.motion.item() == world.MOTION_NAMES.index("still")
    assert judge(frames.flip(1)).motion.item() == world.MOTION_NAMES.index("left")


def test_a_speed_the_world_does_not_have_is_no_motion() -> None:
    assert judge(one(frames=24)[:, ::2]).motion.item() == NONE


def test_noise_and_grey_are_nothing() -> None:
    noise = torch.rand(2, 4, 3, world.SIZE, world.SIZE, generator=dice())
    noise[1] = 0.5
    assert (judge(noise).right(rows_of([SCENE] * 2)) == torch.zeros(2, 4, dtype=torch.bool)).all()
    assert set(judge(noise).background.tolist()) == {NONE}


@pytest.mark.parametrize("background", world.BACKGROUNDS)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_an_empty_background_is_seen_without_a_shape(background: str, noise: float) -> None:
    row = torch.full((4,), world.BACKGROUNDS.index(background))
    plain = world.empty(row).unsqueeze(0)
    verdict = judge(plain + noise * torch.randn(plain.shape, generator=dice()))
    assert verdict.background.tolist() == [row[0].item()]
    assert {verdict.color.item(), verdict.shape.item(), verdict.motion.item()} == {NONE}


def test_a_shapeless_blob_is_not_a_shape() -> None:
    axis = torch.arange(world.SIZE) - 64.0
    blob = 0.8 * torch.exp(-(axis[:, None] ** 2 + (axis / 3) ** 2) / 200)
    ground = world.empty(torch.tensor([1]))
    frames = (ground + (torch.tensor([0.9, 0.2, 0.2]).view(3, 1, 1) - ground) * blob).expand(1, 4, -1, -1, -1)
    assert judge(frames).fit.item() < 0.8


def test_bytes_and_floats_are_judged_alike() -> None:
    frames = one(frames=4)
    pictures = (frames * 255).round().to(torch.uint8).movedim(2, -1)
    assert judge(pictures).right(rows_of([SCENE])).all()
    assert torch.allclose(as_frames(pictures), frames, atol=0.003)


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[N, T, 3, 128, 128\]"):
        judge(torch.zeros(1, 4, 3, 64, 64))
    with pytest.raises(ValueError, match="at least one chunk of two frames"):
        judge(torch.zeros(1, 1, 3, 128, 128))
