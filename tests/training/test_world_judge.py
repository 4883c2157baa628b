"""The judge of the embedded model's world is right about rendered truth, and is not fooled by what is not there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from streamdiff.models.tiny.scene import Scene, Thing
from training.judges.world_judge import ATTRIBUTES, Verdict, describe, judge, mistake, shares
from training.scene_rows import row_of
from training.world.render import render
from training.world.tracks import SIZE, Streams, Track

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("judge of the embedded model's world")]


def film(scene: Scene, seed: int | None = None, things: bool = True) -> tuple[torch.Tensor, Track]:
    """A chunk of a stream: its first, or one in the middle of its life."""
    rows = torch.tensor([row_of(scene)])
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    track = Streams(rows, generator).play(rows)
    return render(track.flat(), things=things).frames, track


@cache
def judged(scene: Scene) -> Verdict:
    """Of the first chunk of a stream."""
    return judge(film(scene)[0])


# Together they hold every name of every table.
PAIR = Scene(Thing("red", "circle", "right"), Thing("blue", "star", "down", "small", "slow"))
SCENES = [
    PAIR,
    Scene(Thing("orange", "square", "left", "small", "fast"), None, "desert", "dusk", "wind", "left"),
    Scene(Thing("white", "heart", "bouncing", "large", "slow"), None, "sea", "night", "rain", "right"),
    Scene(Thing("green", "triangle", "spinning", speed="fast"), Thing("purple", "circle", "still"), "sky", "dawn"),
    Scene(Thing("yellow", "star", "spinning", "small"), None, "city", "passing", "snow"),
    Scene(Thing("purple", "heart", "up", "large", "fast"), None, "sea", "passing", camera="left"),
    Scene(Thing("blue", "circle", "spinning", "small", "slow"), Thing("red", "square", "up"), "city", "night"),
    Scene(Thing("green", "star", "bouncing", "small", "fast"), None, "meadow", "day", "snow", "right"),
]


@pytest.mark.parametrize(
    "scene",
    [pytest.param(scene, marks=pytest.mark.soak if number % 2 else ()) for number, scene in enumerate(SCENES)],
    ids=range(len(SCENES)),
)
def test_it_reads_every_attribute_from_rendered_pictures(scene: Scene) -> None:
    verdict = judged(scene)
    assert all(verdict.right(scene).values()), describe(verdict)


def test_it_sees_through_softness_and_noise() -> None:
    frames, _ = film(SCENES[0])
    soft = F.interpolate(F.avg_pool2d(frames, 3), size=SIZE, mode="bilinear")
    noisy = (soft + 0.03 * torch.randn(soft.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    verdict = judge(noisy)
    assert all(verdict.right(SCENES[0]).values()), describe(verdict)


def test_a_wrong_scene_is_wrong_in_what_differs_and_right_in_the_rest() -> None:
    verdict = judged(SCENES[0])
    asked = replace(SCENES[0], first=replace(SCENES[0].first, color="blue"), hour="night")
    right = verdict.right(asked)
    assert [name for name in ATTRIBUTES if not right[name]] == ["color", "hour"]
    assert mistake(verdict, right, "asked so") == f"color, hour: asked asked so, seen {describe(verdict)}"
    assert shares([right, dict.fromkeys(ATTRIBUTES, True)])["hour"] == 0.5
    assert shares([right, dict.fromkeys(ATTRIBUTES, True)])["all"] == 0.5
    alone = replace(SCENES[0], second=None)
    assert [name for name, good in verdict.right(alone).items() if not good] == ["count"]
