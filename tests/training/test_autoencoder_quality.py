"""The autoencoder's figures mean what they say: perfect for truth, and none for one that has learnt nothing."""

from __future__ import annotations

import pytest
import torch

from streamdiff.models.tiny.scene import Scene, Thing
from training.judges import autoencoder_quality as quality
from training.judges.world_judge import ATTRIBUTES
from training.scene_rows import row_of
from training.world.tracks import Streams, Track

pytestmark = pytest.mark.xdist_group("judge of the embedded model's world")


def still(*places: tuple[int, int]) -> tuple[Scene, Track]:
    """A chunk of things that stand still at `places`, (y, x)."""
    things = [Thing(motion="still") for _ in places]
    scene = Scene(things[0], things[1] if len(things) > 1 else None)
    rows = torch.tensor([row_of(scene)])
    track = Streams(rows).play(rows)
    for thing, place in enumerate(places):
        track.place[:, :, thing] = torch.tensor(place)
    return scene, track


@pytest.mark.parametrize(
    ("places", "hide"),
    [
        ([(100, 100), (100, 150)], True),
        ([(10, 100), (250, 100)], True),  # across the border
        ([(60, 60), (180, 180)], False),
        ([(100, 100)], False),
    ],
)
def test_things_that_are_near_hide_each_other(places: list[tuple[int, int]], hide: bool) -> None:
    assert quality.hidden(*still(*places)) is hide


def test_chunks_whose_things_hide_each_other_are_held_to_no_bar() -> None:
    good, bad = dict.fromkeys(ATTRIBUTES, 1.0), dict.fromkeys(ATTRIBUTES, 0.5)
    assert all(quality.bars_met({"psnr_db": 31.0, "apart": good, "hidden": bad}).values())
    met = quality.bars_met({"psnr_db": 29.0, "apart": {**good, "shape": 0.96}, "hidden": good})
    assert met == {"psnr >= 30 dB": False, "every verdict >= 0.97": False}
    assert quality.bars_met({"apart": {**good, "hour": 0.98}}) == {"every verdict on truth >= 0.99": False}


@pytest.mark.slow
def test_truth_is_right_in_everything() -> None:
    found, strips = quality.measure(None, 2, seed=1)
    assert found["chunks"] == 2 and found["hidden_chunks"] == 0 and not found["wrong"]
    assert all(found["apart"][name] == 1.0 for name in (*ATTRIBUTES, "all"))
    assert all(quality.bars_met(found).values())
    assert [strip.good for strip in strips] == [True] * 4
