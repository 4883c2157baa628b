"""Clips that go in as a camera's frames, and what comes out, as the benchmark tells it."""

from __future__ import annotations

import pytest
import torch

import streamdiff
from benchmarks import world_clips
from benchmarks.restyle_quality import measure, other_scenes, prompt_of
from streamdiff.models.tiny import world


def test_another_scene_has_another_look_and_the_same_motion() -> None:
    generator = torch.Generator().manual_seed(0)
    scenes = world_clips.rows_of(world_clips.draw_scenes(60, generator))
    other = other_scenes(scenes, generator)
    assert torch.equal(scenes[:, 2], other[:, 2])
    assert all((scenes[:, column] != other[:, column]).all() for column in (0, 1, 3))
    sizes = [len(names) for names in (world.COLOR_NAMES, world.SHAPES, world.MOTION_NAMES, world.BACKGROUNDS)]
    assert ((other >= 0) & (other < torch.tensor(sizes))).all()


def test_a_prompt_names_the_motion_or_leaves_it_to_the_video() -> None:
    row = torch.tensor(world.Scene("red", "star", "left", "meadow").indices())
    assert prompt_of(row, True) == "a red star moving left over a meadow"
    assert prompt_of(row, False) == "a red star over a meadow"


@pytest.mark.slow
def test_with_little_noise_what_comes_out_is_what_went_in() -> None:
    with streamdiff.open("a red circle", steps=2) as session:
        found = measure(session, clips=2, strength=0.02, with_motion=True, seed=0)
    assert (found["place"], found["motion"]) == (1.0, 1.0)
    assert (found["color"], found["background"]) == (0.0, 0.0), "those of the prompt"
