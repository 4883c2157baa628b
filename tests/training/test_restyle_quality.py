"""Clips that go in as a camera's frames, and what comes out, as the benchmark tells it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import streamdiff
from training.judges.restyle_quality import CHUNKS, NEAR_PX, draw_clip, in_place, measure, restyled_scene
from training.judges.thing_judge import Seen
from training.judges.world_judge import judge
from training.world.scenes import random_scene
from training.world.tracks import CHUNK_FRAMES, SIZE

pytestmark = pytest.mark.xdist_group("judge of the embedded model's world")


def seen(y: int, x: int) -> Seen:
    """A thing at (y, x)."""
    return Seen(0, 0, 0, 0, 0, (y % SIZE, x % SIZE), 1.0)


def test_another_scene_has_another_look_and_moves_the_same() -> None:
    chance = random.Random(0)
    for _ in range(60):
        scene = random_scene(chance)
        other = restyled_scene(scene, chance)
        assert other.place != scene.place and len(other.things) == len(scene.things)
        for old, new in zip(scene.things, other.things, strict=True):
            assert old.color != new.color and old.shape != new.shape
            assert replace(new, color=old.color, shape=old.shape) == old
        assert replace(other, first=scene.first, second=scene.second, place=scene.place) == scene


def test_things_are_in_place_in_any_order_and_across_the_border() -> None:
    places = torch.tensor([[4, 100], [200, 30]])
    assert in_place((seen(4, 100), seen(200, 30)), places)
    assert in_place((seen(200, 30), seen(-5, 100)), places)
    assert not in_place((seen(4, 100), seen(200, 30 + int(NEAR_PX) + 1)), places)
    assert not in_place((seen(4, 100),), places)
    assert not in_place((seen(4, 100), seen(4, 100)), places)


@pytest.mark.slow
def test_a_clip_says_where_its_things_are_in_its_last_chunk() -> None:
    clip = draw_clip(random.Random(0))
    assert clip.frames.shape == (CHUNKS * CHUNK_FRAMES, SIZE, SIZE, 3)
    verdict = judge(torch.from_numpy(clip.frames[-CHUNK_FRAMES:]).movedim(-1, 1) / 255)
    assert all(verdict.right(clip.scene).values()) and in_place(verdict.things, clip.places)


@pytest.mark.slow
def test_with_little_noise_what_comes_out_is_what_went_in() -> None:
    with streamdiff.open("a red circle", steps=2) as session:
        found = measure(session, clips=1, strength=0.02, with_motion=True, seed=0)
    assert (found["where"], found["motion"], found["camera"]) == (1.0, 1.0, 1.0)
    assert (found["color"], found["shape"], found["place"]) == (0.0, 0.0, 0.0), "those of the prompt"
