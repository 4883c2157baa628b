"""Scenes and how streams of them go on: everything that a frame shows follows from the scene and the chunk before."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.models.tiny.scene import MOTIONS, SPEEDS, WEATHERS, Scene, Thing
from training.scene_rows import COLUMN, FIELD_SIZES, FIELDS, from_row, row_of
from training.world import tracks
from training.world.scenes import draw_scenes, redraw
from training.world.tracks import SIZE, Streams, Track, join

seeds = st.integers(0, 10_000)
TWO = Scene(Thing(), Thing("blue", "star", "down"))


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(*scenes: Scene) -> torch.Tensor:
    return torch.tensor([row_of(scene) for scene in scenes])


def play(*scenes: Scene) -> Track:
    """One stream from its start, a chunk for each scene."""
    streams = Streams(rows(scenes[0]))
    return join([streams.play(rows(scene)) for scene in scenes])


def play_chunk(scene: Scene, number: int) -> Track:
    """Chunk `number` of a stream of one scene."""
    streams = Streams(rows(scene))
    for _ in range(number):
        streams.play(rows(scene))
    return streams.play(rows(scene))


def short_way(distance: torch.Tensor) -> torch.Tensor:
    return (distance + SIZE // 2).remainder(SIZE) - SIZE // 2


@given(seeds)
def test_a_row_stands_for_its_scene_and_back(seed: int) -> None:
    drawn = draw_scenes(8, dice(seed))
    assert drawn.shape == (8, len(FIELDS))
    assert (drawn >= 0).all() and (drawn < torch.tensor(FIELD_SIZES)).all()
    for row in drawn.tolist():
        assert row_of(from_row(row)) == row


def test_what_has_no_second_thing_has_nothing_in_its_columns() -> None:
    drawn = torch.cat([draw_scenes(200, dice()), redraw(draw_scenes(200, dice(1)), 0.5, dice(2))])
    alone = drawn[drawn[:, COLUMN["second"]] == 0]
    assert 50 < len(alone) < 200, "two of three have one"
    assert (alone[:, COLUMN["second"] : COLUMN["place"]] == 0).all()


def test_what_is_hard_to_learn_is_drawn_more_often() -> None:
    drawn = draw_scenes(4000, dice())[:, COLUMN["motion"]]
    often = {name: (drawn == row).sum() for row, name in enumerate(MOTIONS)}
    assert min(often["bouncing"], often["spinning"]) > 1.5 * max(often["left"], often["down"], often["still"])


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


@pytest.mark.slow
@pytest.mark.parametrize("camera", ["still", "left"])
@pytest.mark.parametrize("motion", [motion for motion in MOTIONS if motion != "bouncing"])
def test_a_chunk_shows_what_the_one_before_showed_moved_by_whole_cells(motion: str, camera: str) -> None:
    scene = Scene(Thing(motion=motion), weather="snow", camera=camera)
    first, second, third = (track.flat() for track in map(play_chunk, [scene] * 3, range(3)))
    for field in ("place", "scroll"):
        before, after = (getattr(b, field) - getattr(a, field) for a, b in ((first, second), (second, third)))
        assert (before.remainder(tracks.LATTICE) == 0).all()
        assert ((before - after).remainder(SIZE) == 0).all()
    assert torch.equal(first.fall, second.fall)


@pytest.mark.slow
@settings(max_examples=15)
@given(seeds)
def test_a_chunk_follows_from_the_state_and_the_scene_alone(seed: int) -> None:
    generator = dice(seed)
    scenes = draw_scenes(4, generator)
    one, other = Streams(scenes, dice(seed)), Streams(scenes, dice(seed))
    for _ in range(3):
        scenes = redraw(scenes, 0.4, generator)
        first, second = one.play(scenes), other.play(scenes)
        for field in fields(Track):
            assert torch.equal(getattr(first, field.name), getattr(second, field.name)), field.name


@pytest.mark.slow
@settings(max_examples=5)
@given(seeds, st.sampled_from(SPEEDS))
def test_what_bounces_stays_between_its_bounds_and_turns_there(seed: int, speed: str) -> None:
    scene = rows(Scene(Thing(motion="bouncing", speed=speed)))
    streams = Streams(scene, dice(seed))
    track = join([streams.play(scene) for _ in range(40)]).place[0, :, 0]
    steps = track[1:] - track[:-1]
    assert (steps.abs() <= tracks.STRIDE[SPEEDS.index(speed)] / 12 + 1).all(), "it does not wrap around"
    later = track[len(track) // 2 :]
    for axis, (low, high) in enumerate(tracks.BOUNDS):
        assert later[:, axis].min() >= low and later[:, axis].max() <= high
        assert later[:, axis].max() - later[:, axis].min() > 0.8 * (high - low)


def test_only_what_spins_turns() -> None:
    scene = Scene(Thing(motion="spinning", speed="fast"), Thing("blue", "star", "left"))
    track = play(scene, scene, replace(scene, first=Thing(motion="up")))
    turned = (track.angle[0, 1:24, 0] - track.angle[0, :23, 0]).remainder(tracks.ANGLES)
    assert (turned == tracks.SPIN[SPEEDS.index("fast")]).all()
    assert (track.angle[0, :, 1] == 0).all() and (track.angle[0, 24:, 0] == 0).all()


def test_a_second_thing_appears_beside_the_first() -> None:
    track = play(Scene(), TWO)
    assert (track.place[0, 12, 1] - track.place[0, 11, 0]).tolist() != [0, 0]
    away = short_way(track.place[0, 12, 1] - track.place[0, 12, 0])
    assert away.float().norm() > 90, "nothing hides it"


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


def test_light_tells_its_phase() -> None:
    phase = torch.arange(48) / 12
    torch.testing.assert_close(tracks.phase_of(tracks.shares_of_light(phase)), phase)


def test_new_weather_begins_at_its_beginning_and_goes_on() -> None:
    track = play(Scene(), Scene(weather="snow"), Scene(weather="snow"), Scene(weather="rain"))
    assert (track.fall[0, :12] == 0).all() or track.scenes[0, 0, COLUMN["weather"]] == WEATHERS.index("clear")
    assert track.fall[0, 12:36].tolist() == [frame % tracks.FALL for frame in range(24)]
    assert track.fall[0, 36] == 0


def test_still_things_stay_and_all_motions_are_known() -> None:
    for motion in MOTIONS:
        place = play(Scene(Thing(motion=motion))).place[0, :, 0]
        moved = bool((place[1:] != place[:-1]).any())
        assert moved == (motion not in ("still", "spinning"))


KEYS = {
    "right": ([(1, 0, 0, 0)] * 3, (0, 32), "still"),
    "up and left": ([(-1, -1, 0, 0)] * 3, (-32, -32), "still"),
    "half way down": ([(0, 0.5, 0, 0)] * 3, (16, 0), "still"),
    "a tap": ([(1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)], (0, 16), "still"),
    "a tap, then as prompted": ([(1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)], (-16, 16), "up"),
    "a tap while another key is held": ([(1, -1, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0)], (-16, 32), "down"),
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


@pytest.mark.parametrize("side", [-1, 1])
def test_a_key_pans_the_camera_whatever_the_scene_says(side: int) -> None:
    scene = replace(TWO, camera="left")
    streams, prompted = Streams(rows(scene)), Streams(rows(scene))
    keys = torch.tensor([[[0.0, 0, side, 0]] * 3])
    track, same = streams.play(rows(scene), controls=keys), prompted.play(rows(scene))
    assert torch.equal(track.place, same.place)
    way = (track.scroll[0, -1] - track.scroll[0, 0] + tracks.SCROLL // 2) % tracks.SCROLL - tracks.SCROLL // 2
    assert way == side * round(tracks.PAN * 11 / 12)


@given(seeds)
def test_a_stream_without_keys_goes_on_as_one_that_has_none(seed: int) -> None:
    scenes = draw_scenes(8, dice(seed))
    plain, steered = (Streams(scenes, dice(seed)) for _ in range(2))
    for _ in range(3):
        one = plain.play(scenes)
        other = steered.play(scenes, controls=torch.zeros(8, 3, len(tracks.CONTROLS)))
        assert all(torch.equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Track))


@given(seeds)
def test_what_spins_keeps_its_angle_while_it_is_moved_and_bounces_on_the_way_it_went(seed: int) -> None:
    scene = replace(TWO, first=Thing(motion="spinning", speed=SPEEDS[seed % 3]))
    streams = Streams(rows(scene))
    angle = streams.play(rows(scene)).angle[0, -1, 0]
    held = streams.play(rows(scene), controls=torch.tensor([[[-1.0, 0, 0, 0]] * 3])).angle[0, :, 0]
    assert len(set(held.tolist())) == 1 and held[0] != angle
    bounces = replace(TWO, first=Thing(motion="bouncing"))
    streams.play(rows(bounces))
    streams.play(rows(bounces), controls=torch.tensor([[[1.0, -1.0, 0, 0]] * 3]))
    after = streams.play(rows(bounces)).place[0, :3, 0]
    assert short_way(after[2] - after[0])[0] < 0 < short_way(after[2] - after[0])[1]
