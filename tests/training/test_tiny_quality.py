"""The quality benchmark finds what is there: perfect scores for truth, and every planted fault in its own figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks import report
from streamdiff.models.tiny.prompts import scene_of
from streamdiff.models.tiny.scene import Scene
from training.judges import tiny_figures, tiny_quality
from training.judges.tiny_quality import Plan, Subject
from training.judges.world_judge import ATTRIBUTES, Verdict, judge
from training.scene_rows import row_of
from training.world.render import render
from training.world.tracks import CHUNK_LATENTS, SIZE, Streams

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
