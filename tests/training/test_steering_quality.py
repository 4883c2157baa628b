"""The judge of keys reads from the world's own pictures that it was steered, and how."""

from __future__ import annotations

import pytest
import torch

from streamdiff.models.tiny.scene import Scene, Thing
from training.judges import steering_quality as quality
from training.judges.world_judge import Verdict, judge
from training.keys import PAN, STOP
from training.scene_rows import from_row, row_of
from training.world.render import render
from training.world.tracks import CONTROLS, Streams

ALONE = Scene(Thing("red", "star", "left"), camera="right")
TWO = Scene(
    Thing("yellow", "square", "bouncing", speed="fast"), Thing("blue", "circle", "left"), "city", "dusk", "rain"
)
PLAYED = {
    "none": (ALONE, (0.0, 0.0, 0.0, 0.0)),
    "right": (ALONE, (1.0, 0.0, 0.0, 0.0)),
    "pan left": (ALONE, (0.0, 0.0, -1.0, 0.0)),
    "up and left": (TWO, (-1.0, -1.0, 0.0, 0.0)),
    "stop": (TWO, (0.0, 0.0, 0.0, 1.0)),
}


def seen(scene: Scene, controls: torch.Tensor) -> tuple[Verdict, Verdict]:
    """What is seen of a chunk under `controls`, and of the one after it."""
    rows = torch.tensor([row_of(scene)])
    streams = Streams(rows)
    streams.play(rows)
    tracks = [streams.play(rows, controls=controls[None]), streams.play(rows)]
    now, after = (judge(render(track.flat()).frames) for track in tracks)
    return now, after


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYED)
def test_the_world_obeys_its_keys_and_no_others(name: str) -> None:
    scene, keys = PLAYED[name]
    controls = torch.tensor(keys).expand(3, -1)
    verdicts = seen(scene, controls)
    right = quality.look(scene, controls, *verdicts)
    assert right.thing and right.camera
    assert right.thing_steered == (name not in ("none", "pan left")) and right.camera_steered == (name == "pan left")
    away = torch.tensor((0.0, 1.0, -1.0 if scene.camera == "right" and keys[PAN] == 0 else 1.0, 0.0)).expand(3, -1)
    other = quality.look(scene, away, *verdicts)
    assert not other.thing and not other.camera


def test_what_is_played_can_be_told_apart_and_keys_are_new_at_the_marks() -> None:
    generator = torch.Generator().manual_seed(0)
    for row in quality.draw_played(20, generator).tolist():
        scene = from_row(row)
        assert scene.hour != "passing" and (scene.second is None or scene.second.color != scene.first.color)
    keys = quality.draw_played_keys(30, 14, (3, 9), generator)
    assert keys.shape == (30, 14, len(CONTROLS))
    for mark in (3, 9):
        assert (keys[:, mark] != 0).any(1).all() and torch.equal(keys[:, mark], keys[:, mark + 1])
        assert not keys[:, mark + 2 : mark + 4].any()
    assert keys[..., PAN].any() and keys[..., STOP].any()


def test_figures_count_what_is_steered_apart() -> None:
    looks = [
        quality.Look(True, True, True, False),
        quality.Look(False, True, True, True),
        quality.Look(True, False, False, False),
    ]
    found = quality.figures(looks)
    assert found == {
        "thing": 2 / 3, "camera_right": 2 / 3, "thing_steered": 0.5, "camera_steered": 1.0, "obeyed": 2 / 3,
    }  # fmt: skip
    assert quality.figures(looks[2:])["obeyed"] is None
