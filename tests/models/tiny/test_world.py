"""The procedural world: truth for every pixel, and the same truth however it is rendered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.models.tiny import world

scenes = st.sampled_from(world.all_scenes())
places = st.integers(-300, 300)


def picture(scene: world.Scene, y: int, x: int, crop: world.Crop | None = None) -> torch.Tensor:
    color, shape, _, background = (torch.tensor([i]) for i in scene.indices())
    return world.render(color, shape, background, torch.tensor([y]), torch.tensor([x]), crop)


def plain(scene: world.Scene) -> torch.Tensor:
    return world.empty(torch.tensor([scene.indices()[3]]))


@settings(max_examples=20)
@given(scenes, places, places)
def test_the_world_wraps_around(scene: world.Scene, y: int, x: int) -> None:
    here = picture(scene, y, x)
    assert here.shape == (1, 3, world.SIZE, world.SIZE)
    assert here.min() >= 0 and here.max() <= 1
    assert torch.equal(here, picture(scene, y + world.SIZE, x - 2 * world.SIZE))


@settings(max_examples=20)
@given(scenes, places, places, st.integers(0, 64), st.integers(0, 64), st.sampled_from([16, 64]))
def test_a_crop_is_a_cut_out_of_the_full_picture(
    scene: world.Scene, y: int, x: int, top: int, left: int, size: int
) -> None:
    cut = picture(scene, y, x, (torch.tensor([top]), torch.tensor([left]), size))
    assert torch.equal(cut, picture(scene, y, x)[:, :, top : top + size, left : left + size])
    empty = world.empty(torch.tensor([scene.indices()[3]]), (torch.tensor([top]), torch.tensor([left]), size))
    assert torch.equal(empty, plain(scene)[:, :, top : top + size, left : left + size])


def test_rendering_many_equals_rendering_each() -> None:
    some = world.all_scenes()[::97]
    fields = torch.tensor([scene.indices() for scene in some])
    y, x = torch.arange(len(some)) * 13, torch.arange(len(some)) * 7
    together = world.render(fields[:, 0], fields[:, 1], fields[:, 3], y, x)
    for i, scene in enumerate(some):
        assert torch.equal(together[i], picture(scene, int(y[i]), int(x[i]))[0])


@pytest.mark.parametrize("motion", world.MOTION_NAMES)
@pytest.mark.parametrize("shape", world.SHAPES)
def test_the_shape_moves_as_the_caption_says(shape: str, motion: str) -> None:
    """Over the plain night, the pixels that differ from the background move `SPEED` pixels per frame."""
    scene = world.Scene("white", shape, motion, "desert")
    dy, dx = world.velocities()[scene.indices()[2]].tolist()
    assert (dx, dy) == tuple(world.SPEED * component for component in world.MOTIONS[motion])
    alpha = world.palette().alpha[scene.indices()[1]]
    for frame in (0, 3):
        y, x = world.SIZE // 2 + frame * dy, world.SIZE // 2 + frame * dx
        changed = (picture(scene, y, x) - plain(scene)).abs().amax(1)[0] > 0.02
        covered = torch.roll(alpha, (frame * dy, frame * dx), (0, 1)) > 0
        assert not (changed & ~covered).any(), "nothing outside the shape changes"
        assert (changed & covered).sum() > 0.9 * covered.sum()


@pytest.mark.parametrize("color", world.COLOR_NAMES)
def test_the_shape_has_the_colour_its_caption_says(color: str) -> None:
    """The middle of the shape is nearer to its own colour than to any other, light and shade aside."""
    for shape in world.SHAPES:
        centre = picture(world.Scene(color, shape, "still", "sky"), 64, 64)[0, :, 58:70, 58:70].mean((1, 2))
        directions = torch.tensor([world.COLORS[name] for name in world.COLOR_NAMES])
        nearest = int((directions - centre).norm(dim=1).argmin())
        assert world.COLOR_NAMES[nearest] == color, shape


def test_shapes_and_backgrounds_are_far_apart() -> None:
    look = world.palette()
    for tensors in (look.alpha.flatten(1), look.backgrounds.flatten(1)):
        distance = torch.cdist(tensors, tensors) / tensors.shape[1] ** 0.5
        assert distance.fill_diagonal_(1).min() > 0.1


def test_a_latent_frame_moves_one_cell() -> None:
    assert world.SPEED * world.FRAMES_PER_LATENT == world.LATTICE
    assert world.CELLS * world.LATTICE == world.SIZE


def test_every_scene_is_listed_once() -> None:
    every = world.all_scenes()
    assert len(set(every)) == len(every) == 7 * 5 * 5 * 5
