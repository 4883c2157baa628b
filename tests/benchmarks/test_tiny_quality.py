"""The quality benchmark finds what is there: perfect scores for truth, and every planted fault in its own figure."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks import report, tiny_quality, world_clips
from benchmarks.tiny_quality import Plan, Subject
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.tiny import world
from streamdiff.models.tiny.model import WEIGHTS
from streamdiff.models.tiny.prompts import canonical

pytestmark = pytest.mark.slow

SCENES = {canonical(scene): scene for scene in world.all_scenes()}
FRAMES, LATENTS = 4, 1
PLAN = Plan(prompts=6, marks=(2, 5), contexts=("clean",), steps=(4,), change_at=3, batch=4)


@dataclass(frozen=True)
class Painter:
    """A generator of truth, with faults on request: its "latents" are the pictures themselves, packed.

    From chunk `fades_at` on every shape is white; a new prompt is followed `late` chunks after it was given; between
    chunks the shape jumps by `jump` pixels.
    """

    fades_at: int = 10**9
    late: int = 0
    jump: int = 0

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
        place = torch.full((len(prompts), 2), world.SIZE // 2)
        kept = {}
        for chunk in range(chunks):
            prompts = (switch or {}).get(chunk - self.late, prompts)
            scenes = world_clips.rows_of([self.faded(SCENES[prompt], chunk) for prompt in prompts])
            film = world_clips.film(scenes, place, FRAMES * LATENTS)
            place = place + FRAMES * LATENTS * world.velocities()[scenes[:, 2]] + self.jump
            if chunk in keep:
                kept[chunk] = film.frames.unflatten(1, (LATENTS, FRAMES)).flatten(2, 3)
        assert set(kept) == keep
        return kept

    def faded(self, scene: world.Scene, chunk: int) -> world.Scene:
        return replace(scene, color="white") if chunk >= self.fades_at else scene

    def subject(self) -> Subject:
        return Subject(self.rollout, lambda latents: latents.unflatten(2, (FRAMES, 3)).flatten(1, 2))


def run(painter: Painter, folder: Path, plan: Plan = PLAN) -> dict[str, object]:
    """The results as the JSON file holds them."""
    out = folder / "quality.json"
    tiny_quality.run(painter.subject(), plan, out, report.header(["quality"], warm_up="none"))
    stored: dict[str, object] = json.loads(out.read_text())["results"]["clean 4"]
    return stored


def test_truth_scores_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(Painter(), tmp_path)
    for mark in ("2", "5"):
        figures = found["steady"]["marks"][mark]
        assert all(figures[name] == 1.0 for name in (*world_clips.ATTRIBUTES, "all"))
        assert figures["displacement_px"] < 0.05 and figures["seam_px"] < 0.05
    assert found["change"]["color_and_background_at_once"] == 1.0
    assert found["met"] and all(found["met"].values())
    assert "| clean   | 4     | chunk 5" in capsys.readouterr().out
    for kind in ("steady", "change"):
        with Image.open(tmp_path / f"quality_clean_4_{kind}.png") as sheet:
            assert sheet.height > world.SIZE * 6


def test_a_color_that_fades_in_the_end_is_drift(tmp_path: Path) -> None:
    found = run(Painter(fades_at=5), tmp_path)
    assert found["steady"]["marks"]["2"]["color"] == 1.0
    assert found["steady"]["drift"]["color"] < -0.5
    assert found["steady"]["drift"]["background"] == 0.0
    assert not found["met"]["drift within 0.02"] and not found["met"]["color >= 0.98"]
    assert found["met"]["shape >= 0.90"]


@pytest.mark.parametrize(("late", "at_once", "within_2"), [(1, 0.0, 1.0), (2, 0.0, 0.0)])
def test_lateness_after_a_prompt_change_is_seen(late: int, at_once: float, within_2: float, tmp_path: Path) -> None:
    found = run(Painter(late=late), tmp_path)
    assert found["change"]["color_and_background_at_once"] == at_once
    assert found["change"]["color_and_background_within_2"] == within_2
    assert found["met"]["change within 2 chunks >= 0.95"] is bool(within_2)


def test_a_jump_between_chunks_shows_in_the_seam_alone(tmp_path: Path) -> None:
    figures = run(Painter(jump=3), tmp_path)["steady"]["marks"]["5"]
    assert figures["seam_px"] == pytest.approx(3 * 2**0.5, abs=0.05)
    assert figures["displacement_px"] < 0.05


def test_a_changed_scene_differs_in_color_and_background() -> None:
    scenes = world.all_scenes()[:60]
    changed = tiny_quality._changed(scenes, torch.Generator().manual_seed(0))
    assert all(a.color != b.color and a.background != b.background for a, b in zip(scenes, changed, strict=True))


def test_an_interrupted_run_goes_on_and_ends_with_the_same_figures(tmp_path: Path) -> None:
    """Interrupted in its second batch: the first is not made again, and the parts go when all is done."""
    whole = run(Painter(), tmp_path)
    parts, calls = tmp_path / "quality.parts", []

    def interrupted(prompts: list[str], **wanted: Any) -> dict[int, Tensor]:
        calls.append(len(prompts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return Painter().rollout(prompts, **wanted)

    subject = replace(Painter().subject(), rollout=interrupted)
    for _ in range(2):
        kept = tiny_quality.Kept(parts, "same")
        try:
            tiny_quality.run(subject, PLAN, tmp_path / "cut.json", report.header(["quality"], warm_up="none"), kept)
        except KeyboardInterrupt:
            assert len(tiny_quality.Kept(parts, "same").parts) == 1
            assert not tiny_quality.Kept(parts, "of other weights").parts
    assert json.loads((tmp_path / "cut.json").read_text())["results"]["clean 4"] == whole
    assert calls == [4, 2, 2, 4, 2]  # steady: 4 and 2 (interrupted), 2; change: 4, 2
    assert not parts.exists()


def test_contexts_without_a_bar_are_reported_without_one() -> None:
    assert tiny_quality.bars_met("matched", {}, {}) == {}


def test_the_estimate_grows_with_the_plan() -> None:
    subject = Painter().subject()
    small = tiny_quality.estimate_s(subject, PLAN)
    assert 0 < small < tiny_quality.estimate_s(subject, replace(PLAN, prompts=600))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--marks", "50", "5"], "rising"),
        (["--contexts", "blurry"], "clean"),
        (["--prompts", "0"], "at least 1"),
        (["--contexts", "clean", "anchored", "--sink", "2"], "anchored goes alone"),
    ],
)
def test_bad_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tiny_quality.parse(words)
    assert message in capsys.readouterr().err


def test_anchors_are_those_that_were_asked_for() -> None:
    _, _, config = tiny_quality.parse(["--contexts", "anchored", "--anchor-every", "3"])
    subject = tiny_quality.load_subject(WEIGHTS, torch.device("cpu"), config=config)
    kept = {0, 1}
    asked = {"chunks": 2, "steps": 2, "kv_context": "anchored", "seed": 0, "keep": kept}
    assert set(subject.rollout(["a red circle"], **asked)) == kept
    with pytest.raises(ConfigError, match="so no chunk would be an anchor"):
        tiny_quality.load_subject(WEIGHTS, torch.device("cpu"), config=ModelConfig(kv_context="anchored"))
