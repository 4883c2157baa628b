"""The quality benchmark finds what is there: perfect scores for truth, and every planted fault in its own figure. So do
the judges of the autoencoder, of restyled clips and of keys. The judge of the world is right about rendered truth, and
rollouts in one batch are those one by one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import streamdiff
from benchmarks import report
from streamdiff.models.tiny.prompts import scene_of
from streamdiff.models.tiny.scene import Scene, Thing
from tests.small import BLUE, RED, WHITE, small_model
from training.judges import autoencoder_quality, steering_quality, tiny_figures, tiny_quality
from training.judges.restyle_quality import CHUNKS, NEAR_PX, draw_clip, in_place, measure, restyled_scene
from training.judges.rollout import rollout
from training.judges.thing_judge import Seen
from training.judges.tiny_quality import Plan, Subject
from training.judges.world_judge import ATTRIBUTES, Verdict, describe, judge, mistake, shares
from training.keys import PAN
from training.scene_rows import row_of
from training.world.render import render
from training.world.scenes import random_scene
from training.world.tracks import CHUNK_FRAMES, CHUNK_LATENTS, SIZE, Streams, Track

# The judge's pictures to compare with, and verdicts of pictures that several tests show, are made once.
pytestmark = pytest.mark.xdist_group("judge of the embedded model's world")
PLAN = Plan(prompts=2, marks=(1, 4), contexts=("clean",), steps=(4,), batch=1, change_at=2)
"""The first of its two scenes has two things, the second one."""
ONE = replace(PLAN, prompts=1)


@dataclass(frozen=True)
class Painter:
    """A generator of truth, with faults on request: its "latents" are the pictures themselves, packed.

    From chunk `fades_at` on the first thing of every stream is white, or red where white is asked for; a new prompt is
    followed `late` chunks after it was given.
    """

    fades_at: int = 10**9
    late: int = 0

    def rollout(
        self,
        prompts: list[str],
        *,
        chunks: int,
        steps: int,
        kv_context: str,
        seed: int,
        switch: dict[int, list[str]] | None = None,
        keep: set[int],
    ) -> dict[int, Tensor]:
        rows = torch.tensor([row_of(scene_of(prompt)) for prompt in prompts])
        streams, kept = Streams(rows), {}
        for chunk in range(chunks):
            prompts = (switch or {}).get(chunk - self.late, prompts)
            rows = torch.tensor([row_of(self.faded(scene_of(prompt), chunk)) for prompt in prompts])
            track = streams.play(rows)
            if chunk in keep:
                frames = render(track.flat()).frames.unflatten(0, (len(prompts), CHUNK_LATENTS, -1))
                kept[chunk] = frames.flatten(2, 3)
        assert set(kept) == keep
        return kept

    def faded(self, scene: Scene, chunk: int) -> Scene:
        faded = "red" if scene.first.color == "white" else "white"
        return replace(scene, first=replace(scene.first, color=faded)) if chunk >= self.fades_at else scene

    def subject(self) -> Subject:
        return Subject(self.rollout, lambda latents: latents.unflatten(2, (-1, 3)).flatten(1, 2))


@pytest.fixture(scope="module")
def verdicts() -> dict[bytes, Verdict]:
    """Those of chunks that a test has had judged: most tests show the same ones."""
    return {}


@pytest.fixture
def judge_once(verdicts: dict[bytes, Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been judged before is not judged again."""

    def judged(frames: Tensor) -> Verdict:
        key = frames.numpy().tobytes()
        if key not in verdicts:
            verdicts[key] = judge(frames)
        return verdicts[key]

    for module in (tiny_quality, tiny_figures):
        monkeypatch.setattr(module, "judge", judged)


@pytest.fixture
def run(judge_once: None, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Carries a plan out, and gives the results as the JSON file holds them."""

    def carried_out(subject: Subject, kept: tiny_quality.Kept | None = None, plan: Plan = PLAN) -> dict[str, Any]:
        out = tmp_path / "quality.json"
        tiny_quality.run(subject, plan, out, report.header(["quality"], warm_up="none"), kept)
        stored: dict[str, Any] = json.loads(out.read_text())["results"]["clean 4"]
        return stored

    return carried_out


@pytest.mark.slow
def test_truth_scores_everything(
    run: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(Painter().subject())
    for part in (*found["steady"].values(), found["change"]):
        assert all(part[name] == 1.0 for name in (*ATTRIBUTES, "all", "both"))
    assert list(found["steady"]) == ["1", "4"]
    assert found["change"]["color_and_place_at_once"] == found["change"]["color_and_place"] == 1.0
    assert len(found["met"]) == 8 and all(found["met"].values())
    assert not found["wrong"] and not found["wrong after change"]
    assert "| clean   | 4     | chunk 4" in capsys.readouterr().out
    for name in ("quality_clean_4.png", "quality_clean_4_change.png"):
        with Image.open(tmp_path / name) as sheet:
            assert sheet.height > 2 * SIZE // 2 and sheet.width > 6 * SIZE // 2


@pytest.mark.slow
def test_a_color_that_fades_in_the_end_is_drift(run: Callable[..., dict[str, Any]]) -> None:
    found = run(Painter(fades_at=3).subject(), plan=ONE)
    first, last = found["steady"].values()
    assert (first["color"], last["color"], last["both"]) == (1.0, 0.0, 0.0)
    assert last["place"] == last["shape"] == 1.0
    assert {bar for bar, met in found["met"].items() if not met} == {
        "color >= 0.98",
        "both things >= 0.85",
        "drift within 0.02",
        "change within 2 chunks >= 0.95",  # whose second chunk is the faded one
    }
    assert len(found["wrong"]) == 1 and found["wrong"][0].startswith("chunk 4 color: asked ")


@pytest.mark.slow
@pytest.mark.parametrize(("late", "then"), [(1, 1.0), (2, 0.0)])
def test_lateness_after_a_prompt_change_is_seen(late: int, then: float, run: Callable[..., dict[str, Any]]) -> None:
    found = run(Painter(late=late).subject(), plan=ONE)
    assert (found["change"]["color_and_place_at_once"], found["change"]["color_and_place"]) == (0.0, then)
    assert found["met"]["change within 2 chunks >= 0.95"] is bool(then)
    assert found["met"]["color >= 0.98"]


@pytest.mark.slow
@pytest.mark.usefixtures("judge_once")
def test_what_hides_for_one_chunk_of_a_look_is_read() -> None:
    scene = scene_of(
        "a small purple circle moving left and a small purple heart moving up fast in the desert at dusk in the wind, "
        "camera panning left"
    )
    rows = torch.tensor([row_of(scene)])
    streams = Streams(rows)
    for _ in range(5):
        track = streams.play(rows)
    assert not all(judge(render(track.flat()).frames).right(scene).values())
    assert tiny_figures.truth_figures([scene], (4,))["4"]["all"] == 1.0


# ---- the judge of the autoencoder ------------------------------------------------------------------------------------


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
    assert autoencoder_quality.hidden(*still(*places)) is hide


def test_chunks_whose_things_hide_each_other_are_held_to_no_bar() -> None:
    good, bad = dict.fromkeys(ATTRIBUTES, 1.0), dict.fromkeys(ATTRIBUTES, 0.5)
    assert all(autoencoder_quality.bars_met({"psnr_db": 31.0, "apart": good, "hidden": bad}).values())
    met = autoencoder_quality.bars_met({"psnr_db": 29.0, "apart": {**good, "shape": 0.96}, "hidden": good})
    assert met == {"psnr >= 30 dB": False, "every verdict >= 0.97": False}
    assert autoencoder_quality.bars_met({"apart": {**good, "hour": 0.98}}) == {"every verdict on truth >= 0.99": False}


@pytest.mark.slow
def test_truth_is_right_in_everything() -> None:
    found, strips = autoencoder_quality.measure(None, 2, seed=1)
    assert found["chunks"] == 2 and found["hidden_chunks"] == 0 and not found["wrong"]
    assert all(found["apart"][name] == 1.0 for name in (*ATTRIBUTES, "all"))
    assert all(autoencoder_quality.bars_met(found).values())
    assert [strip.good for strip in strips] == [True] * 4


# ---- the judge of restyled clips -------------------------------------------------------------------------------------


def thing_at(y: int, x: int) -> Seen:
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
    assert in_place((thing_at(4, 100), thing_at(200, 30)), places)
    assert in_place((thing_at(200, 30), thing_at(-5, 100)), places)
    assert not in_place((thing_at(4, 100), thing_at(200, 30 + int(NEAR_PX) + 1)), places)
    assert not in_place((thing_at(4, 100),), places)
    assert not in_place((thing_at(4, 100), thing_at(4, 100)), places)


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


# ---- the judge of keys -----------------------------------------------------------------------------------------------


ALONE = Scene(Thing("red", "star", "left"), camera="right")
TWO = Scene(
    Thing("yellow", "square", "bouncing", speed="fast"), Thing("blue", "circle", "left"), "city", "dusk", "rain"
)
PLAYED = {
    "right": (ALONE, (1.0, 0.0, 0.0, 0.0)),
    "pan left": (ALONE, (0.0, 0.0, -1.0, 0.0)),
    "stop": (TWO, (0.0, 0.0, 0.0, 1.0)),
}


def verdicts_of(scene: Scene, controls: torch.Tensor) -> tuple[Verdict, Verdict]:
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
    verdicts = verdicts_of(scene, controls)
    right = steering_quality.look(scene, controls, *verdicts)
    assert right.thing and right.camera
    assert right.thing_steered == (name != "pan left") and right.camera_steered == (name == "pan left")
    away = torch.tensor((0.0, 1.0, -1.0 if scene.camera == "right" and keys[PAN] == 0 else 1.0, 0.0)).expand(3, -1)
    other = steering_quality.look(scene, away, *verdicts)
    assert not other.thing and not other.camera


def test_figures_count_what_is_steered_apart() -> None:
    looks = [
        steering_quality.Look(True, True, True, False),
        steering_quality.Look(False, True, True, True),
        steering_quality.Look(True, False, False, False),
    ]
    found = steering_quality.figures(looks)
    assert found == {
        "thing": 2 / 3, "camera_right": 2 / 3, "thing_steered": 0.5, "camera_steered": 1.0, "obeyed": 2 / 3,
    }  # fmt: skip
    assert steering_quality.figures(looks[2:])["obeyed"] is None


MODEL = small_model(5)
CONTEXTS = ("clean", "staircase", "same_step")


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_streams_together_are_the_streams_alone(kv_context: str) -> None:
    together = rollout(MODEL, [RED, BLUE, WHITE], chunks=4, steps=4, kv_context=kv_context, seed=3)
    assert list(together) == [0, 1, 2, 3]
    for i, text in enumerate((RED, BLUE, WHITE)):
        alone = rollout(MODEL, [text], chunks=4, steps=4, kv_context=kv_context, seed=3 + i)
        for chunk in range(4):
            assert together[chunk].shape == (3, *MODEL.spec.chunk_shape)
            torch.testing.assert_close(together[chunk][i], alone[chunk][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_a_switch_is_in_force_from_its_chunk_on(kv_context: str) -> None:
    plain = rollout(MODEL, [RED, BLUE], chunks=5, steps=2, kv_context=kv_context, seed=0)
    switched = rollout(
        MODEL, [RED, BLUE], chunks=5, steps=2, kv_context=kv_context, seed=0, switch={2: [WHITE, BLUE], 4: [RED, RED]}
    )
    for chunk in range(5):
        torch.testing.assert_close(switched[chunk][1], plain[chunk][1], rtol=1e-4, atol=1e-4) if chunk < 4 else None
        changed = (switched[chunk][0] - plain[chunk][0]).abs().max()
        assert (changed > 1e-3) == (chunk >= 2), f"chunk {chunk}"
    assert (switched[4][1] - plain[4][1]).abs().max() > 1e-3


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene",
    [pytest.param(scene, marks=pytest.mark.soak if number % 2 else ()) for number, scene in enumerate(SCENES)],
    ids=range(len(SCENES)),
)
def test_it_reads_every_attribute_from_rendered_pictures(scene: Scene) -> None:
    verdict = judged(scene)
    assert all(verdict.right(scene).values()), describe(verdict)


@pytest.mark.slow
def test_it_sees_through_softness_and_noise() -> None:
    frames, _ = film(SCENES[0])
    soft = F.interpolate(F.avg_pool2d(frames, 3), size=SIZE, mode="bilinear")
    noisy = (soft + 0.03 * torch.randn(soft.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    verdict = judge(noisy)
    assert all(verdict.right(SCENES[0]).values()), describe(verdict)


@pytest.mark.slow
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
