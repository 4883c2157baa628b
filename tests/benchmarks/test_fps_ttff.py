"""A run from end to end, in real processes: figures that the raw times in the file give again, a header, a picture; and
an end by Ctrl-C that leaves nothing behind. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fps_ttff, stream_options
from benchmarks.stream_case import Case
from benchmarks.stream_figures import Raw, figures

SMALL = ["--openings", "1", "--chunks", "2", "--margin", "1", "--prompts", "1", "--rounds", "1", "--device", "cpu"]


def cases(*words: str) -> list[Case]:
    options = fps_ttff.parser().parse_args(list(words))
    return fps_ttff.profiled(stream_options.cases_of(options), options.profile)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_stages_are_measured_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "result.json", tmp_path / "result.png"
    words = ["--kv-context", "staircase", "--stages", "2", *SMALL, "--out", str(out), "--plot", str(plot)]
    assert fps_ttff.main(words) == fps_ttff.OK
    stored = json.loads(out.read_text())
    assert stored["benchmark"] == "fps_ttff" and stored["device"] == "cpu" and stored["failed"] == []
    assert set(stored["header"]) == {"command", "date", "commit", "hardware", "software", "threads", "warm_up"}
    two = "tiny, 4 steps, staircase, 2 stages"
    assert list(stored["results"]) == list(stored["settings"]) == [two]
    result = stored["results"][two]
    raw = Raw.from_json(result["raw"])
    assert figures(raw) == result["figures"]
    assert result["figures"]["fps"] > 0 and result["figures"]["control_p50_s"] > 0
    assert [piece.frames for piece in raw.steady.arrivals] == [4] * len(raw.steady.arrivals)
    times = [piece.at_s for piece in raw.steady.arrivals]
    assert times == sorted(times) and times[0] > raw.steady.asked_s
    assert len({piece.epoch for piece in raw.steady.arrivals}) == 1, "the prompts belong behind the steady part"
    parts = {"text", "step 0", "step 1", "step 2", "step 3", "clean", "decode", "copy", "encode"}
    assert set(result["raw"]["parts"]) == parts and not result["remarks"]
    assert len(result["raw"]["peak_bytes"]) == len(result["raw"]["occupancy"]) == 2
    assert plot.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert printed.count(f"| {two}") == 2 and "parts, alone, in ms" in printed


def test_options_stand_in_place_of_the_presets_lists(tmp_path: Path) -> None:
    (case,) = cases(
        "--preset", "wan-1.3b", "--steps", "2", "--decoder", "full", "--stages", "4", "--kv-context", "clean"
    )
    assert (case.config.steps, case.config.stages, case.config.vae) == (2, 4, "random:wan2.1")
    (case,) = cases(
        "--preset", "wan-1.3b", "--model", "self-forcing", "--dtype", "float32", "--set", "device_memory_gb=2.5"
    )
    config = case.config
    assert (config.name, config.vae, config.dtype, config.device_memory_gb) == ("self-forcing", None, "float32", 2.5)
    one, two = cases("--stages", "2,4", "--profile", str(tmp_path))
    assert one.profile != two.profile and Path(str(one.profile)).parent == tmp_path
    assert Case.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_case_that_fails_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert fps_ttff.main(["--steps", "3", "--stages", "1", "--kv-context", "clean", *SMALL]) == fps_ttff.FAILED
    told = capfd.readouterr().err
    assert "steps is 3; model tiny has" in told
    assert "error: tiny, 3 steps, clean, 1 stage: its processes ended with exit code 2" in told
