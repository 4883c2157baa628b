"""The judge of keys reads from the world's own pictures that it was steered, and how."""

from __future__ import annotations

import pytest
import torch

from streamdiff.models.tiny.scene import Scene, Thing
from training.judges import steering_quality as quality
from training.judges.world_judge import Verdict, judge
from training.keys import PAN
from training.scene_rows import row_of
from training.world.render import render
from training.world.tracks import Streams

ALONE = Scene(Thing("red", "star", "left"), camera="right")
TWO = Scene(
    Thing("yellow", "square", "bouncing", speed="fast"), Thing("blue", "circle", "left"), "city", "dusk", "rain"
)
PLAYED = {
    "right": (ALONE, (1.0, 0.0, 0.0, 0.0)),
    "pan left": (ALONE, (0.0, 0.0, -1.0, 0.0)),
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
    assert right.thing_steered == (name != "pan left") and right.camera_steered == (name == "pan left")
    away = torch.tensor((0.0, 1.0, -1.0 if scene.camera == "right" and keys[PAN] == 0 else 1.0, 0.0)).expand(3, -1)
    other = quality.look(scene, away, *verdicts)
    assert not other.thing and not other.camera


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
