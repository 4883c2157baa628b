"""Scenes and how streams of them go on: everything that a frame shows follows from the scene and the chunk before.
Pictures of them; and random keys."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.models.tiny.scene import COLOR_NAMES, PLACES, SHAPES, SPEEDS, Scene, Thing
from tests.small import dice
from training import keys
from training.keys import PAN, Player, draw_controls
from training.scene_rows import FIELD_SIZES, FIELDS, from_row, row_of
from training.windows import CHUNK
from training.world import tracks
from training.world.render import Window, render
from training.world.render_batch import render_batch
from training.world.scenes import draw_scenes, redraw
from training.world.tracks import CONTROLS, SIZE, Streams, Track, join

seeds = st.integers(0, 10_000)
TWO = Scene(Thing(), Thing("blue", "star", "down"))


def rows(*scenes: Scene) -> torch.Tensor:
    return torch.tensor([row_of(scene) for scene in scenes])


def play(*scenes: Scene) -> Track:
    """One stream from its start, a chunk for each scene."""
    streams = Streams(rows(scenes[0]))
    return join([streams.play(rows(scene)) for scene in scenes])


def short_way(distance: torch.Tensor) -> torch.Tensor:
    return (distance + SIZE // 2).remainder(SIZE) - SIZE // 2


@given(seeds)
def test_a_row_stands_for_its_scene_and_back(seed: int) -> None:
    drawn = draw_scenes(8, dice(seed))
    assert drawn.shape == (8, len(FIELDS))
    assert (drawn >= 0).all() and (drawn < torch.tensor(FIELD_SIZES)).all()
    for row in drawn.tolist():
        assert row_of(from_row(row)) == row


@pytest.mark.parametrize("motion", ["left", "right", "up", "down"])
@pytest.mark.parametrize("speed", SPEEDS)
def test_things_move_as_their_motion_and_speed_say(motion: str, speed: str) -> None:
    scene = Scene(Thing(motion=motion, speed=speed), Thing("blue", "star", "still"))
    place = play(*[scene] * 3).place[0]
    direction = torch.tensor({"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}[motion])
    stride = tracks.STRIDE[SPEEDS.index(speed)]
    assert (short_way(place[12:, 0] - place[:-12, 0]) == direction * stride).all(), "so far per chunk"
    step = short_way(place[1:, 0] - place[:-1, 0])
    assert ((step - direction * stride / 12).abs() < 1).all(), "evenly, to whole pixels"
    assert (short_way(place[1:, 1] - place[:-1, 1]) == 0).all()


@pytest.mark.slow
@settings(max_examples=15)
@given(seeds)
def test_every_chunk_begins_on_the_lattice(seed: int) -> None:
    """A latent cell, and whole steps of the camera, of turns and of the weather: few states to be learnt."""
    generator = dice(seed)
    scenes = draw_scenes(16, generator)
    streams = Streams(scenes, generator)
    for _ in range(4):
        streams.play(scenes)
        scenes = redraw(scenes, 0.3, generator)
        assert (streams.place.remainder(tracks.LATTICE * tracks.PARTS) == 0).all()
        assert (streams.place >= 0).all() and (streams.place < SIZE * tracks.PARTS).all()
        assert (streams.scroll.remainder(tracks.PAN * tracks.PARTS) == 0).all()
        assert (streams.angle.remainder(12) == 0).all() and (streams.fall == 0).all()


@pytest.mark.parametrize(("camera", "side"), [("left", -1), ("right", 1), ("still", 0)])
def test_the_camera_moves_the_scenery(camera: str, side: int) -> None:
    track = play(*[Scene(camera=camera)] * 2)
    steps = (track.scroll[0, 1:] - track.scroll[0, :-1] + tracks.SCROLL // 2) % tracks.SCROLL - tracks.SCROLL // 2
    assert ((steps - side * tracks.PAN / 12).abs() < 1).all()
    assert (track.scroll[0, 12] - track.scroll[0, 0] - side * tracks.PAN) % tracks.SCROLL == 0


def test_a_new_hour_has_come_when_a_chunk_is_over() -> None:
    track = play(Scene(), Scene(hour="night"), Scene(hour="night"))
    day, night = track.light[0, :, 0], track.light[0, :, 2]
    assert (day[:12] == 1).all() and (night[24:] == 1).all()
    assert ((night[13:24] - night[12:23]) > 0).all() and night[23] == pytest.approx(1)
    torch.testing.assert_close(track.light.sum(-1), torch.ones(1, 36))


def test_time_that_passes_goes_through_all_hours_and_around() -> None:
    light = play(*[Scene(hour="passing")] * 25).light[0]
    hours = light.argmax(1)
    assert [int(hours[frame]) for frame in (0, 72, 144, 216, 287)] == [0, 1, 2, 3, 0]
    assert (light[1:] - light[:-1]).abs().max() < 0.02, "slowly"


KEYS = {
    "right": ([(1, 0, 0, 0)] * 3, (0, 32), "still"),
    "up and left": ([(-1, -1, 0, 0)] * 3, (-32, -32), "still"),
    "a tap, then as prompted": ([(1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)], (-16, 16), "up"),
    "pressed late": ([(0, 0, 0, 0), (0, 0, 0, 0), (-1, 0, 0, 0)], (16, -16), "down"),
    "stop": ([(0, 0, 0, 1)] * 3, (0, 0), "bouncing"),
    "stop and a way": ([(1, 1, 0, 1)] * 3, (0, 0), "right"),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_move_the_first_thing_in_place_of_its_motion_and_it_goes_on_from_there(name: str) -> None:
    keys, way, motion = KEYS[name]
    scene = replace(TWO, first=Thing(motion=motion))
    streams = Streams(rows(scene))
    begin = streams.play(rows(scene))
    track = streams.play(rows(scene), controls=torch.tensor([keys], dtype=torch.float32))
    after = streams.play(rows(scene))
    alone = play(scene, scene, scene)
    first = short_way(after.place[0, 0] - track.place[0, 0])
    assert first[0].tolist() == list(way)
    assert (after.place[0, 0] % tracks.LATTICE == 0).all(), "every chunk begins on the lattice"
    assert torch.equal(track.place[0, :, 1], alone.place[0, 12:24, 1]), "the second thing is not steered"
    assert torch.equal(track.place[0, 0, 0], begin.place[0, -1, 0]) or motion != "still"
    one, other = (short_way(each[0, -1, 0] - each[0, 0, 0]) for each in (after.place, alone.place[:, 24:]))
    assert motion == "bouncing" or torch.equal(one, other), "released, it goes on as its scene says"


@pytest.mark.slow
@settings(max_examples=5)
@given(seeds)
def test_a_stream_without_keys_goes_on_as_one_that_has_none(seed: int) -> None:
    scenes = draw_scenes(8, dice(seed))
    plain, steered = (Streams(scenes, dice(seed)) for _ in range(2))
    for _ in range(3):
        one = plain.play(scenes)
        other = steered.play(scenes, controls=torch.zeros(8, 3, len(tracks.CONTROLS)))
        assert all(torch.equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Track))


def test_keys_are_held_over_chunks_and_tapped_within_and_some_streams_have_none() -> None:
    drawn = draw_controls(400, 5, dice())
    assert drawn.shape == (400, 5, CHUNK, len(CONTROLS)) and drawn.abs().max() == 1
    played = (drawn != 0).flatten(1).any(1).float().mean()
    assert 0.4 < played < keys.PLAYED, "some play and press nothing"
    assert (drawn[..., PAN] == drawn[:, :, :1, PAN]).all(), "a camera pans for whole chunks"
    inside = (drawn[:, :, 1:] != drawn[:, :, :1]).flatten(2).any(2).float().mean()
    assert 0.02 < inside < 0.2
    held = (drawn[:, 1:, -1] == drawn[:, :-1, -1]).all(-1) & (drawn[:, 1:, -1] != 0).any(-1)
    assert held.any()
    assert {0.5, -0.5} <= set(drawn.unique().tolist())
    assert (drawn[..., CONTROLS.index("stop")] >= 0).all()


def test_a_tap_does_not_stay_and_what_is_held_does() -> None:
    player = Player(torch.tensor([[1.0, 0, 0, 0]]).repeat(200, 1), torch.ones(200, dtype=torch.bool))
    chunk = player.next_chunk(torch.arange(200), dice())
    tapped = (chunk[:, 0] != chunk[:, 1]).any(1) & (chunk[:, 1] == chunk[:, 2]).all(1)
    assert tapped.any() and torch.equal(player.held, chunk[:, -1])


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
