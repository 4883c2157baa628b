"""`streamdiff plan`: what comes out for people and programs, and what cannot be planned is refused before any work.
`serve --gpus N` takes what is best."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from streamdiff.cli import main
from streamdiff.commands import plan as plan_command
from streamdiff.commands.jobs import PlanJob, ServeJob
from streamdiff.commands.plan import as_tree, devices_here, make, with_best
from streamdiff.config import Config, ModelConfig
from streamdiff.core import KV_CONTEXTS
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner import simulator
from tests.rules.source import ROOT

SAME_STEP = ModelConfig(kv_context="same_step")
TIMES = (0.25,) * 4
H100S = "plan --gpus 4 --gpu h100 --model self-forcing --vae taew2_1 --sessions 4"


def test_blocks_are_split_by_a_profile(tmp_path: Path) -> None:
    profile = {"block_s": [0.1, 0.1, 0.1, 0.2, 0.3, 0.4], "embed_s": 0.05, "head_s": 0.01, "decode_s": 0.2, "link_s": 0}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    layout = make(SAME_STEP, PlanJob(stages=2, profile=tmp_path / "p.json", decode_rank="own-stream")).layout
    assert layout.blocks == ((0, 4), (4, 6))
    assert [times[0] for times in layout.stage_s] == pytest.approx([0.55, 0.71])


def test_a_shorter_window_is_planned_with() -> None:
    def caches(**asked: int) -> int:
        return make(ModelConfig(name="self-forcing", **asked), PlanJob(stages=1)).memory[0].caches  # type: ignore[arg-type]

    chunk = caches(window=9) - caches(window=6)
    assert chunk > 0 and caches() - caches(window=6) == 5 * chunk
    kept = chunk // 2  # the sink's keys, un-rotated
    assert caches(window=7, sink=1) == caches(window=9) + kept, "the sink's chunk is kept whole"
    with pytest.raises(ConfigError):
        caches(window=6, sink=4)


def test_a_step_that_may_be_left_out_is_planned_with_and_without() -> None:
    """Krea's fifth, of the first chunk too."""

    def first_chunk_s(steps: int | None) -> float:
        model = ModelConfig(name="krea-realtime-14b", steps=steps)
        return make(model, PlanJob(stages=1, stage_times=(1.0,), decode_time=0.0)).run.figures.first_chunk_s

    assert (first_chunk_s(None), first_chunk_s(4)) == (5, 4)


def test_json_holds_the_whole_plan_and_is_json() -> None:
    outcome = make(SAME_STEP, PlanJob(stage_times=TIMES, decode_rank="dedicated", decode_time=0.5))
    tree = json.loads(json.dumps(as_tree(outcome), allow_nan=False))
    assert [rank["blocks"] for rank in tree["ranks"]] == [[0, 2], [2, 4], [4, 5], [5, 6], []]
    assert tree["ranks"][4]["role"] == ["decode"]
    assert tree["ranks"][4]["occupancy"] == pytest.approx(0.5, abs=0.03)
    for rank in tree["ranks"]:
        parts = rank["bytes"]
        assert parts.pop("total") == sum(parts.values())
    assert tree["figures"]["chunks_per_s"] == pytest.approx(1, rel=0.03)
    assert tree["figures"]["frames_per_s"] == pytest.approx(12, rel=0.03)
    assert tree["figures"]["latency_s"] == pytest.approx(4.5, rel=0.1)


def test_the_forecast_is_in_the_json() -> None:
    found = json.loads(json.dumps(as_tree(make(ModelConfig(), PlanJob(gpu="h200", sessions=2, chunks=8)))))["forecast"]
    assert found["estimate"] is True and found["gpu"]["source"] and found["published_figures_within_factor"] == 1.5
    assert {(each["kv_context"], each["sessions"]) for each in found["expected"]} == {
        (kv_context, count) for kv_context in KV_CONTEXTS for count in (1, 2)
    }
    assert set(found["reaching"]) == {"1", "2"}


def test_a_forecast_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --gpu 5090 --model self-forcing --vae taew2_1 --size 640x384 --sessions 2 --fps 12 --chunks 8"
    assert main.main(words.split()) == 0
    assert "2 sessions reach it in: " in capsys.readouterr().out


def test_the_pages_example_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(H100S.split()) == 0
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    printed = capsys.readouterr().out.splitlines()
    shown = [line for line in printed if line[:4] in ("PxC ", "4x1 ", "2x2 ", "1x4 ", "one ", "best")]
    assert len(shown) == 8 and all(line in page for line in shown)


@pytest.mark.slow
def test_a_gpu_that_would_idle_is_told_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Typed as for `serve`, with weights that are not here."""
    words = "plan --gpu H100 --gpus 8 --model krea-realtime-14b --weights krea.pt --rope absolute"
    assert main.main(words.split()) == 0
    alone, crowd = [line for line in capsys.readouterr().out.splitlines() if line.startswith("best for ")]
    assert "idle" not in alone and "3x2" in crowd and "no way to use all 8 is faster (1, 2, 4, 5, 8 can" in crowd
    assert main.main(["plan", "--weights", "nowhere.pt"]) == 2
    assert "nowhere.pt: no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*H100S.split(), "--link", "pcie", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["link"] == "pcie" and tree["best"]["one"] == ["1x4", "head"]
    assert {len(case["rank_bytes"]) for case in tree["cases"] if case["decode"] == "head"} == {4}


@pytest.mark.slow
def test_a_trace_and_a_plot_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = PlanJob(stage_times=TIMES, trace=tmp_path / "plan.json", plot=tmp_path / "plan.png", chunks=8)
    assert plan_command.run(SAME_STEP, job) == 0
    assert "throughput" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("--stages 7", "model.stages"),
        ("--trace .", "trace"),
        ("--trace plan.svg --plot ./plan.svg", "trace"),
        ("--gpus 0 --gpu h100", "gpus"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, line: str, field: str
) -> None:
    def never(setup: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr(simulator, "simulate", never)
    with pytest.raises(ConfigError) as error:
        main._carry_out(["plan", *line.split()])
    assert error.value.field == field


def test_a_plot_needs_matplotlib_and_a_trace_a_folder_that_can_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError):
        make(SAME_STEP, PlanJob(plot=tmp_path / "plan.png"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError):
        make(SAME_STEP, PlanJob(trace=tmp_path / "t.json"))


H100 = "NVIDIA H100 80GB HBM3"


def config(**model: Any) -> Config:
    return Config.model_validate({"model": {"name": "self-forcing", "vae": "taew2_1", **model}})


def chosen(count: int, goal: Any = None, titles: tuple[str, ...] = (H100,) * 4, **model: Any) -> Config:
    return with_best(config(**model), ServeJob(gpus=count, goal=goal), lambda: titles)


@pytest.mark.slow
def test_one_stream_gets_ranks_that_share_and_many_get_stages(capsys: pytest.CaptureFixture[str]) -> None:
    one = chosen(4).model
    assert (one.parallel, one.stages, one.shares, one.decode_rank) == ("1x4", 1, 4, "head")
    told = capsys.readouterr().err
    assert told.startswith("streamdiff: --parallel 1x4 --decode-rank head: 1x4, decoding on the first rank: ")
    assert "of 6 ways to use 4 x NVIDIA H100 SXM, linked by nvlink, estimated" in told
    assert chosen(4, "many").model.parallel == "4x1"
    assert chosen(2).model.parallel == "1x2"
    large = chosen(4, vae=None).model
    assert (large.parallel, large.decode_rank, large.ranks) == ("1x3", "dedicated", 4)  # three compute, one decodes
    assert "--decode-rank dedicated: 1x3, decoding on one more GPU" in capsys.readouterr().err
    assert (one.name, one.vae) == ("self-forcing", "taew2_1")


def test_what_is_said_by_the_user_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(4, decode_rank="head", vae=None).model.decode_rank == "head"
    assert "--decode-rank" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "goal", "titles", "model", "field"),
    [
        (None, "many", (), {}, "goal"),
        (4, None, (), {"stages": 2}, "model.stages"),
        (4, None, (), {"parallel": "2x2"}, "model.parallel"),
        (4, None, (), {"device": "cpu"}, "model.device"),
        (4, None, (), {}, "gpus"),
        (4, None, (H100,), {}, "gpus"),
        (2, None, (H100, "NVIDIA H200"), {}, "gpus"),
        (2, None, ("Tesla T4",) * 2, {}, "gpus"),
        (1, None, ("NVIDIA GeForce RTX 4090",), {"name": "random:wan2.1-14b"}, "gpus"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    count: int | None, goal: Any, titles: tuple[str, ...], model: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as error:
        with_best(config(**model), ServeJob(gpus=count, goal=goal), lambda: titles)
    assert error.value.field == field


@pytest.mark.slow
def test_a_machine_without_gpus_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices_here() == []
    assert main.main(["serve", "--gpus", "4"]) == 2
    assert "sees 0 CUDA devices here (none). Give fewer, or --stages or --parallel" in capsys.readouterr().err
