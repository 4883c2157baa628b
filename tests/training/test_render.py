"""Pictures of the world: the same however they are drawn, and each attribute is seen in them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.models.tiny.scene import COLOR_NAMES, PLACES, SHAPES, SIZES, WEATHERS, Scene, Thing
from training.scene_rows import row_of
from training.world import shapes, weather
from training.world.painting import scenery
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
@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_rendering_many_equals_rendering_each(seed: int) -> None:
    track = some(seed)
    together = render(track).frames
    for index in range(len(together)):
        one = track.rows(slice(index, index + 1))
        torch.testing.assert_close(render(one).frames[0], together[index])


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


def test_things_wrap_around() -> None:
    track = track_of(Scene(Thing("red", "circle")))
    track.place[0, 0] = torch.tensor([128, 0])
    things = render(track).things[0, 0]
    assert things[128, 0] == 1 and things[128, 30] == 1 and things[128, SIZE - 30] == 1 and things[128, 128] == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_thing_fits_its_square_at_every_angle_and_keeps_its_area(shape: str, size: str) -> None:
    alpha, shading, _, _ = shapes.stencil(shape, size, torch.arange(0, 128, 5))
    assert alpha[:, 0].max() == alpha[:, -1].max() == alpha[:, :, 0].max() == alpha[:, :, -1].max() == 0
    area = alpha.sum((1, 2))
    assert area.max() / area.min() < 1.02
    assert shading.min() >= 0.3 and shading.max() <= 1


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


def test_shadows_and_light_fit_the_hour() -> None:
    """By day a shadow lies below its thing, in the evening beside it; by night a thing is darker than by day."""

    def shadow(hour: str) -> float:
        track = track_of(Scene(Thing("white", "circle", "still"), hour=hour))
        darker = (render(track, things=False).frames - render(track).frames)[0].sum(0)[220:248].clamp(min=0)
        return float((darker.sum(0) * torch.arange(SIZE)).sum() / darker.sum()) - 128

    assert abs(shadow("day")) < 4
    assert shadow("dusk") < -20 and shadow("dawn") > 20
    day, night = (picture(Scene(Thing("white", "square", "still"), hour=hour)) for hour in ("day", "night"))
    assert night[:, 120:136, 120:136].mean() < 0.9 * day[:, 120:136, 120:136].mean()


def test_near_scenery_scrolls_twice_as_fast_as_far_scenery() -> None:
    track = track_of(Scene(place="city"), 2)
    moved = track.rows(slice(1))
    moved = replace(moved, scroll=torch.tensor([32]))
    before, after = (render(t, things=False).frames[0] for t in (track, moved))
    street = slice(236, 246)
    torch.testing.assert_close(after[:, street], before[:, street].roll(-32, -1))
    far = slice(150, 160)
    torch.testing.assert_close(after[:, far], before[:, far].roll(-16, -1), atol=0.02, rtol=0)


@pytest.mark.parametrize("name", ["rain", "snow", "wind"])
def test_weather_moves_and_repeats(name: str) -> None:
    kind = WEATHERS.index(name)
    period = 12 if name == "snow" else 4
    axis = 1 if name == "wind" else 0
    step = weather.PERIOD[name] // period
    covers = [weather.cover(kind, fall) for fall in range(period + 1)]
    for now, then in pairwise(covers):
        assert now is not None and then is not None
        assert not torch.equal(now, then)
        down, far = then.narrow(axis, step, SIZE - step), now.narrow(axis, 0, SIZE - step)
        torch.testing.assert_close(down, far, atol=1e-3, rtol=0)
    assert torch.equal(covers[0], covers[-1])  # type: ignore[arg-type]
    assert weather.cover(WEATHERS.index("clear"), 3) is None


@pytest.mark.slow
def test_the_scenery_is_painted_once() -> None:
    assert scenery() is scenery()
    assert scenery().sky.shape == (4, 3, SIZE, SIZE)
