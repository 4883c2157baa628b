"""Pictures of the world: the same however they are drawn, and each attribute is seen in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.models.tiny.scene import COLOR_NAMES, PLACES, SHAPES, Scene, Thing
from training.scene_rows import row_of
from training.world.render import Window, render
from training.world.render_batch import render_batch
from training.world.scenes import draw_scenes
from training.world.tracks import SIZE, Streams, Track


def track_of(scene: Scene, frames: int = 1) -> Track:
    rows = torch.tensor([row_of(scene)])
    return Streams(rows).play(rows, frames).flat()


def picture(scene: Scene) -> torch.Tensor:
    return render(track_of(scene)).frames[0]


def some(seed: int, count: int = 3) -> Track:
    generator = torch.Generator().manual_seed(seed)
    scenes = draw_scenes(count, generator)
    return Streams(scenes, generator).play(scenes, 2).flat()


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(0, 1000), st.integers(0, 8), st.integers(0, 8))
def test_a_window_is_a_cut_out_of_the_whole_picture(seed: int, top: int, left: int) -> None:
    track = some(seed)
    whole = render(track)
    assert whole.frames.shape == (6, 3, SIZE, SIZE)
    assert whole.frames.min() >= 0 and whole.frames.max() <= 1
    part = render(track, [Window(top * 16, left * 16, 128)] * 6)
    rows, cols = slice(top * 16, top * 16 + 128), slice(left * 16, left * 16 + 128)
    torch.testing.assert_close(part.frames, whole.frames[:, :, rows, cols])
    torch.testing.assert_close(part.things, whole.things[:, :, rows, cols])


@pytest.mark.slow
@pytest.mark.parametrize("things", [True, False])
def test_all_frames_at_once_are_those_drawn_one_by_one(things: bool) -> None:
    for seed in range(4):
        track = some(seed, 8)
        at_once = render_batch(track, torch.device("cpu"), things)
        torch.testing.assert_close(at_once, render(track, things=things).frames, atol=1e-5, rtol=0)


def test_what_is_drawn_without_things_differs_only_where_things_and_shadows_are() -> None:
    for seed in range(4):
        track = some(seed)
        whole, bare = render(track), render(track, things=False)
        differs = (whole.frames - bare.frames).abs().amax(1, keepdim=True) > 1e-4
        ground = torch.zeros_like(differs)
        ground[:, :, 215:] = True
        assert not (differs & (whole.things == 0) & ~ground).any()
        assert bare.things.sum() == 0


def test_the_first_thing_is_in_front() -> None:
    track = track_of(Scene(Thing("red", "square"), Thing("white", "square")))
    track.place[0, 1] = track.place[0, 0]
    seen = render(track).frames[0, :, track.place[0, 0, 0], track.place[0, 0, 1]]
    assert seen[0] > 2 * seen[1]


def test_everything_that_can_be_said_can_be_seen() -> None:
    """Pictures that differ in one attribute differ visibly."""
    plain = Scene()
    base = picture(plain)
    others = [replace(plain, first=replace(plain.first, color=color)) for color in COLOR_NAMES if color != "red"]
    others += [replace(plain, first=replace(plain.first, shape=shape)) for shape in SHAPES if shape != "circle"]
    others += [replace(plain, first=replace(plain.first, size="small")), replace(plain, second=Thing("blue"))]
    others += [replace(plain, place=place) for place in PLACES if place != "meadow"]
    others += [replace(plain, hour=hour) for hour in ("dusk", "night", "dawn")]
    others += [replace(plain, weather=name) for name in ("rain", "snow", "wind")]
    for scene in others:
        assert (picture(scene) - base).abs().mean() > 0.004, scene
