"""What the suite makes of its checks; the checks themselves, on the CPU, where they hold and where they must not."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from benchmarks import fps_ttff, gpu_check, gpu_suite
from benchmarks.gpu_suite import Deadline, Found, allowed, plain, wanted, wrong
from benchmarks.stream_case import Amount, Case
from streamdiff.config import ModelConfig
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.runner import compiled_stage
from streamdiff.pipeline.runner.cuda_graphs import GraphCache
from tests.pipeline.runner.test_cuda_graphs import record

CPU = torch.device("cpu")
WAN = ModelConfig(name="random:wan2.1-1.3b", vae="random:taew2_1", device="cuda", kv_context="clean")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cpu:clean", "cpu:clean"),
        ("cpu:matched", ""),
        ("decoder:tiny", "decoder:tiny"),
        ("decoder:full", ""),
        ("wan:bfloat16", "wan:bfloat16"),
        ("wan:float32", ""),
        ("sync:clean", ""),
        ("shared:clean", ""),
        ("tests", ""),
    ],
)
def test_what_is_wrong_is_not_measured(fault: str, reason: str) -> None:
    assert allowed(Case(WAN, Amount()), {fault}) == reason


def test_the_embedded_model_needs_no_wan() -> None:
    tiny = Case(ModelConfig(device="cuda"), Amount())
    assert allowed(tiny, {"wan:bfloat16", "decoder:tiny"}) == "" and allowed(tiny, {"cpu:clean"}) == "cpu:clean"


def test_ranks_that_share_a_stage_are_measured_where_they_are_right() -> None:
    assert {case.config.parallel for case in wanted("cuda", 4, (), Amount())} == {None, "1x2", "1x4", "2x2"}
    (shared, *_) = [case for case in wanted("cuda", 2, (), Amount()) if case.config.shares > 1]
    assert (shared.config.parallel, shared.config.kv_context, shared.config.compile) == ("1x2", "clean", "on")
    assert allowed(shared, {"shared:clean"}) == "shared:clean" and allowed(shared, {"sync:clean"}) == ""


@pytest.mark.soak
@pytest.mark.usefixtures("forked")
def test_ranks_that_share_a_stage_are_checked() -> None:
    assert gpu_check.shared_as_alone("clean", CPU).startswith("off by ")


def test_only_what_does_not_hold_is_wrong() -> None:
    assert wrong([Found("a", True, ""), Found("b", False, ""), Found("c", None, "")]) == {"b"}


def test_without_a_fault_the_fast_path_stays() -> None:
    case = Case(WAN, Amount())
    assert plain(case, {"fast:matched", "graphs:full"}) is case


@pytest.mark.parametrize("fault", ["fast:clean", "graphs:tiny"])
def test_with_a_fault_the_plain_path_is_measured(fault: str) -> None:
    case = Case(WAN.model_copy(update={"compile": "on"}), Amount())
    assert plain(case, {fault}).config.compile == "off"


def test_the_most_wanted_case_comes_first_and_none_twice() -> None:
    cases = wanted("cpu", 4, ("wan-1.3b",), Amount())
    labels = [case.label for case in cases]
    assert labels[0] == "random:wan2.1-1.3b 832x480, 4 steps, clean, tiny decoder, 1 stage"
    assert len(labels) == len(set(labels)) and any(case.config.stages == 4 for case in cases)
    assert {case.config.device for case in cases} == {"cpu"}
    assert not any(case.config.stages > 1 for case in wanted("cpu", 1, (), Amount()))


def test_the_fast_paths_are_measured_beside_the_plain_one_before_anything_else() -> None:
    found = wanted("cuda", 1, ("wan-1.3b",), Amount())[:5]
    assert [case.config.compile for case in found] == ["off", "off", "on", "on", "on"]
    assert [case.config.clean_pass for case in found] == [*["alone"] * 4, "with-next"]
    assert found[2].label == found[0].label + ", compiled" and found[4].label == found[2].label + ", with-next"
    assert {case.config.vae for case in found[2:4]} == {"random:taew2_1", "random:wan2.1"}


@pytest.mark.slow
def test_two_sessions_at_once_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CUDA's graphs, nothing compiled; a CPU's pool is for one session."""
    monkeypatch.setattr(compiled_stage, "graph_cache_on", lambda device: GraphCache(record))
    monkeypatch.setattr(gpu_check, "_BEYOND", 1)
    with torch.compiler.set_stance("force_eager"):
        told = gpu_check.two_sessions("clean", CPU)
    assert told.startswith("1 of 2 sessions captured, off by ")


@pytest.mark.slow
def test_only_replayed_forwards_are_asked_for_the_memory_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the window of 3 chunks fills there are no graphs; of the 2 chunks after that the last has no clean pass."""
    monkeypatch.setattr(compiled_stage, "graph_cache_on", lambda device: GraphCache(record))
    monkeypatch.setattr(gpu_check, "_CHUNKS", 4)
    config = {"device": "cpu", "compile": "on", "clean_pass": "alone"}
    with torch.compiler.set_stance("force_eager"):
        runtime = build_pipeline(ModelConfig.model_validate(config))
        try:
            counts = iter(range(1000))
            taken = gpu_check.taken_in_replays(runtime, lambda: next(counts))
        finally:
            runtime.close()
    assert taken == [1] * (2 * 4 - 1)


def test_checks_run_beside_each_other_and_are_told_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests, begun first, end after the other check is told: a suite that is killed then has lost only them."""
    told = threading.Event()

    def check(name: str, *rest: object) -> Found:
        return Found(name, name != "tests" or told.wait(60), "")

    monkeypatch.setattr(gpu_suite, "check", check)
    monkeypatch.setattr(gpu_check, "NAMES", ("one",))
    found = gpu_suite.checks(argparse.Namespace(out=tmp_path, device="cpu", at_once=2), Deadline(60))
    assert next(found) == Found("one", True, "")
    told.set()
    assert list(found) == [Found("tests", True, "")]


def test_checks_under_way_end_where_the_suite_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first check is done once the second's process runs; then nobody wants more."""
    begun, ended = threading.Event(), list[object]()

    class Running(set[subprocess.Popen[str]]):
        def add(self, process: subprocess.Popen[str]) -> None:
            super().add(process)
            begun.set()

    def check(name: str, device: str, limit_s: float, log: Path, running: set[subprocess.Popen[str]]) -> Found:
        if name == "tests":
            assert begun.wait(60)
        else:
            ended.append(gpu_suite.run_whole(["-c", "import time; time.sleep(1000)"], 1000.0, running))
        return Found(name, True, "")

    monkeypatch.setattr(gpu_suite, "check", check)
    monkeypatch.setattr(gpu_suite, "set", Running, raising=False)
    monkeypatch.setattr(gpu_check, "NAMES", ("one",))
    told = gpu_suite.checks(argparse.Namespace(out=tmp_path, device="cpu", at_once=2), Deadline(60))
    assert next(told).name == "tests"
    told.close()  # returns when the second check has
    assert ended == [(-signal.SIGKILL, "", "")]


def test_a_wrong_fast_path_does_not_have_the_plain_one_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = WAN.model_copy(update={"compile": "on"})
    asked = [Case(WAN, Amount()), Case(fast, Amount()), Case(fast.model_copy(update={"size": "512x512"}), Amount())]
    ran: list[str] = []
    monkeypatch.setattr(fps_ttff, "measure", lambda case, limit_s: ran.append(case.config.compile))
    monkeypatch.setattr(fps_ttff, "result_of", lambda raw: {})
    monkeypatch.setattr(gpu_suite.stream_plot, "draw", lambda path, results: None)
    results, left_out = gpu_suite.measure(asked, {"fast:clean"}, Deadline(60), tmp_path)
    assert ran == ["off", "off"] and list(results) == [asked[0].label, asked[2].label.removesuffix(", compiled")]
    assert left_out == [f"{asked[1].label}: its fast path is wrong, and the plain one is measured already"]


def test_both_fast_paths_are_checked_where_there_are_both(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[object, object]] = []

    def stream(**values: object) -> torch.Tensor:
        played.append((values["compile"], values.get("clean_pass")))
        return torch.full((3,), 2.0 if values.get("clean_pass") == "with-next" else 1.0)

    monkeypatch.setattr(gpu_check, "played", stream)
    assert "on, alone off by 0" in gpu_check.fast_as_plain("matched", CPU)
    assert played == [("off", None), ("on", "alone")]
    with pytest.raises(AssertionError, match="off by 1"):
        gpu_check.fast_as_plain("clean", CPU)
    assert played[2:] == [("off", None), ("on", "alone"), ("on", "with-next")]


def test_time_runs_out() -> None:
    assert Deadline(10).left_s(60) == 60 and Deadline(0).left_s(60) <= 0


@pytest.mark.slow
def test_the_checks_hold_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["decoder:tiny", "--device", "cpu"]) == gpu_check.HOLDS
    assert gpu_check.main(["sync:clean", "--device", "cpu"]) == gpu_check.NOT_HERE
    assert gpu_check.main(["graphs:tiny", "--device", "cpu"]) == gpu_check.NOT_HERE
    assert gpu_check.main(["memory:clean", "--device", "cpu"]) == gpu_check.NOT_HERE
    told = capsys.readouterr().out
    assert "decoder:tiny: off by 0 levels" in told and "nothing waits" in told


@pytest.mark.slow
def test_a_wrong_decoder_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    moved = gpu_check._moved

    def spoiled(decoder: object, device: torch.device) -> object:
        model = moved(decoder, device)
        model.autoencoder.decoder[1].weight.data.mul_(0.5)
        return model

    monkeypatch.setattr(gpu_check, "_moved", spoiled)
    assert gpu_check.main(["decoder:tiny", "--device", "cpu"]) == gpu_check.WRONG
    assert "2 is allowed" in capsys.readouterr().out


PARENT = """
import os, subprocess, sys, time
end = os.open(sys.argv[1], os.O_WRONLY)
subprocess.Popen(["sleep", "1000"], pass_fds=[end], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
os.write(end, b"started")
time.sleep(float(sys.argv[2]))
sys.exit(3)
"""


@pytest.mark.parametrize("late", [True, False])
def test_what_a_check_has_started_ends_with_it(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it takes too long or has ended itself: nobody is left who could write into the pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def out_of_time(process: object, timeout: float) -> None:
        select.select([read], [], [])
        raise subprocess.TimeoutExpired("", timeout)

    if late:
        monkeypatch.setattr(subprocess.Popen, "communicate", out_of_time)
    done = gpu_suite.run_whole(["-c", PARENT, str(pipe), "1000" if late else "0"], 100.0)
    assert done == (None if late else (3, "", ""))
    os.set_blocking(read, True)
    with os.fdopen(read, "rb") as told:
        assert told.read() == b"started"


def test_off_by_sees_what_is_not_finite() -> None:
    one = torch.ones(3)
    assert gpu_check.off_by(one, one) == 0 and gpu_check.off_by(1.1 * one, one) == pytest.approx(0.1)
    assert gpu_check.off_by(torch.tensor([1.0, float("nan"), 1.0]), one) == float("inf")


def test_without_cuda_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert gpu_suite.main(["--out", str(tmp_path / "new")]) == fps_ttff.USAGE
    assert "no CUDA device" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_rehearsal_writes_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One context is said to be wrong: it is left out, and the other is measured."""
    monkeypatch.setattr(gpu_check, "NAMES", ("decoder:tiny", "sync:clean"))
    monkeypatch.setattr(gpu_suite, "_TESTS", "cpu:staircase")
    least = Amount(openings=1, chunks=2, margin=1, prompts=1, rounds=1)
    monkeypatch.setattr(gpu_suite.stream_options, "QUICK", least)
    real = gpu_suite.check
    monkeypatch.setattr(
        gpu_suite, "check", lambda name, *rest: Found(name, False, "made up") if ":s" in name else real(name, *rest)
    )
    code = gpu_suite.main(["--out", str(tmp_path), "--device", "cpu", "--only", "tiny", "--quick", "--minutes", "9"])
    assert code == fps_ttff.FAILED
    checks = {row["check"]: row["holds"] for row in json.loads((tmp_path / "checks.json").read_text())["checks"]}
    assert checks == {"decoder:tiny": True, "sync:clean": None, "cpu:staircase": False}
    stored = json.loads((tmp_path / "fps_ttff.json").read_text())
    assert list(stored["results"]) == ["tiny, 4 steps, clean, 1 stage"]
    assert (tmp_path / "fps_ttff.png").exists() and (tmp_path / "profile").is_dir()
    assert "left out: tiny, 4 steps, staircase, 1 stage: cpu:staircase does not hold" in capsys.readouterr().out
