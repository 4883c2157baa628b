"""A run from end to end, in real processes: figures that the raw times in the file give again, a header, a picture; and
an end by Ctrl-C that leaves nothing behind. No figure is judged here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from benchmarks import fps_ttff, stream_options
from benchmarks.report import ROOT
from benchmarks.stream_case import PRESETS, Case
from benchmarks.stream_figures import Raw, figures

SMALL = ["--openings", "1", "--chunks", "2", "--margin", "1", "--prompts", "1", "--rounds", "1", "--device", "cpu"]


def cases(*words: str) -> list[Case]:
    options = fps_ttff.parser().parse_args(list(words))
    return fps_ttff.profiled(stream_options.cases_of(options), options.profile, options.profile_chunks)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_one_and_two_stages_are_measured_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "result.json", tmp_path / "result.png"
    words = ["--kv-context", "staircase", "--stages", "1,2", *SMALL, "--out", str(out), "--plot", str(plot)]
    assert fps_ttff.main(words) == fps_ttff.OK
    stored = json.loads(out.read_text())
    assert stored["benchmark"] == "fps_ttff" and stored["device"] == "cpu" and stored["failed"] == []
    assert set(stored["header"]) == {"command", "date", "commit", "hardware", "software", "threads", "warm_up"}
    one, two = (f"tiny, 4 steps, staircase, {stages}" for stages in ("1 stage", "2 stages"))
    assert list(stored["results"]) == list(stored["settings"]) == [one, two]
    for result in stored["results"].values():
        raw = Raw.from_json(result["raw"])
        assert figures(raw) == result["figures"]
        assert result["figures"]["fps"] > 0 and result["figures"]["control_p50_s"] > 0
        assert [piece.frames for piece in raw.steady.arrivals] == [4] * len(raw.steady.arrivals)
        times = [piece.at_s for piece in raw.steady.arrivals]
        assert times == sorted(times) and times[0] > raw.steady.asked_s
        assert len({piece.epoch for piece in raw.steady.arrivals}) == 1, "the prompts belong behind the steady part"
    parts = {"text", "step 0", "step 1", "step 2", "step 3", "clean", "decode", "copy", "encode"}
    for result in stored["results"].values():
        assert set(result["raw"]["parts"]) == parts and not result["remarks"]
    assert len(stored["results"][two]["raw"]["peak_bytes"]) == len(stored["results"][two]["raw"]["occupancy"]) == 2
    assert plot.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert printed.count(f"| {one} ") == printed.count(f"| {two}") == 2 and "parts, alone, in ms" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "stages"),
    [
        pytest.param(signal.SIGTERM, fps_ttff.TERMINATED, 2, marks=pytest.mark.soak),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, 2, marks=pytest.mark.soak),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, 1, marks=pytest.mark.soak),
    ],
)
def test_a_signal_ends_the_ranks(tmp_path: Path, number: int, code: int, stages: int) -> None:
    """One that cannot be answered, too: nobody is left to end them."""
    out, files = tmp_path / "result.json", tmp_path / "temporary"
    files.mkdir()
    shared = set(Path("/dev/shm").iterdir())
    words = ["--stages", str(stages), "--kv-context", "same_step", "--device", "cpu", "--chunks", "10000"]
    words += ["--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.fps_ttff", *words]
    # A shell's background job ignores SIGINT, and so would what this starts when it runs in one.
    defaults = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    environment = {**os.environ, "TMPDIR": str(files)}
    started = {"cwd": ROOT, "env": environment, "start_new_session": True, "preexec_fn": defaults}
    with subprocess.Popen(command, stderr=subprocess.PIPE, **started) as program:
        assert program.stderr is not None
        seen = b""
        while b"%d stage%s:" % (stages, b"s" if stages > 1 else b"") not in seen:  # the bar of the rank that measures
            byte = program.stderr.read(1)
            assert byte, seen.decode()
            seen += byte
        ranks = psutil.Process(program.pid).children(recursive=True)
        assert len(ranks) >= (3 if stages > 1 else 1)
        program.send_signal(number)
        assert program.wait(60) == code
        _, alive = psutil.wait_procs(ranks, timeout=30)
        for process in alive:
            process.kill()
        rest = program.stderr.read()
    assert (b"stopped: 0 of 1 cases are measured" in rest) == (number == signal.SIGTERM)
    assert alive == [] and not out.exists()
    assert set(Path("/dev/shm").iterdir()) <= shared and list(files.iterdir()) == []


def test_presets_are_what_was_asked_for() -> None:
    assert [case.config.stages for case in cases()] == [1, 1, 2, 4]
    every = cases("--preset", "wan-14b-all")
    assert len(every) == len({case.label for case in every}) == 2 * 2 * 3 * 3
    assert {case.config.size for case in every} == {"832x480", "512x512"}
    assert {case.config.vae for case in every} == {"random:taew2_1", "random:wan2.1"}
    assert all("random" in fps_ttff.note([case]) for case in every) and fps_ttff.note(cases()) == ""
    assert {preset.model for preset in PRESETS.values()} == {"tiny", "random:wan2.1-1.3b", "random:wan2.1-14b"}


def test_options_stand_in_place_of_the_presets_lists(tmp_path: Path) -> None:
    (case,) = cases(
        "--preset", "wan-1.3b", "--steps", "2", "--decoder", "full", "--stages", "4", "--kv-context", "clean"
    )
    assert (case.config.steps, case.config.stages, case.config.vae) == (2, 4, "random:wan2.1")
    (case,) = cases("--preset", "wan-1.3b", "--model", "self-forcing", "--threads", "3", "--set", "memory_gb=2.5")
    config = case.config
    assert (config.name, config.vae, config.threads, config.memory_gb) == ("self-forcing", None, 3, 2.5)
    one, two = cases("--stages", "2,4", "--profile", str(tmp_path), "--profile-chunks", "7")
    assert one.profile_chunks == two.profile_chunks == 7
    assert one.profile != two.profile and Path(str(one.profile)).parent == tmp_path
    assert Case.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize(
    "words",
    [
        ["--parallel", "1x2", "--stages", "2"], ["--decoder", "big"], ["--kv-context", "clear"], ["--chunks", "0"],
        ["--playback-fps", "0"], ["--set", "steps"], ["--set", "stpes=4"], ["--set", "trace=costs"],
        ["--profile-chunks", "0", "--profile", "costs"], ["--profile-chunks", "8"], ["--plot", "picture.txt"],
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert fps_ttff.main([*words, "--list"]) == fps_ttff.USAGE
    assert words[0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_case_that_fails_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert fps_ttff.main(["--steps", "3", "--stages", "1", "--kv-context", "clean", *SMALL]) == fps_ttff.FAILED
    told = capfd.readouterr().err
    assert "steps is 3; model tiny has" in told
    assert "error: tiny, 3 steps, clean, 1 stage: its processes ended with exit code 2" in told


def test_ranks_that_share_stages_are_cases_too() -> None:
    shared, both, staged = cases("--parallel", "1x2,2x2,4x1", "--kv-context", "clean")
    assert [case.config.ranks for case in (shared, both, staged)] == [2, 4, 4]
    assert [case.config.shares for case in (shared, both, staged)] == [2, 2, 1]
    assert (shared.label, staged.label) == ("tiny, 4 steps, clean, 1x2 ranks", "tiny, 4 steps, clean, 4 stages")


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.soak
def test_ranks_that_share_a_stage_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "shared.json"
    assert fps_ttff.main(["--parallel", "1x2", "--kv-context", "clean", *SMALL, "--out", str(out)]) == fps_ttff.OK
    (result,) = json.loads(out.read_text())["results"].values()
    assert result["figures"]["fps"] > 0 and len(result["raw"]["peak_bytes"]) == 2
    assert "by rank" in capsys.readouterr().out


def test_staircase_at_several_stages_but_clean_at_one() -> None:
    assert [case.label for case in cases("--stages", "1,2")] == [
        "tiny, 4 steps, clean, 1 stage",
        "tiny, 4 steps, staircase, 1 stage",
        "tiny, 4 steps, staircase, 2 stages",
    ]
