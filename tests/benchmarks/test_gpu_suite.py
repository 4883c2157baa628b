"""What the suite makes of its checks; the checks themselves, on the CPU, where they hold and where they must not."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import fps_ttff, gpu_check, gpu_suite
from benchmarks.gpu_suite import HOLDS, NO_MEMORY, NOT_HERE, UNTRIED, WRONG, Deadline, Found, allowed, plain, wanted
from benchmarks.stream_case import CONTEXTS, Amount, Case
from streamdiff.config import ModelConfig
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.runner import compiled_stage
from streamdiff.pipeline.runner.graphs import GraphCache
from tests.gpu import nccl_ring
from tests.pipeline.runner.test_cuda_graphs import record

CPU = torch.device("cpu")
WAN = ModelConfig(name="random:wan2.1-1.3b", vae="random:taew2_1", device="cuda", kv_context="clean")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cpu:clean", "cpu:clean"),
        ("cpu:same_step", ""),
        ("decoder:tiny", "decoder:tiny"),
        ("decoder:full", ""),
        ("wan:bfloat16", "wan:bfloat16"),
        ("wan:float32", ""),
        ("sync:clean", ""),
        ("shared:clean", ""),
        ("contact:ring", ""),
        ("tests", ""),
    ],
)
def test_what_is_wrong_is_not_measured(fault: str, reason: str) -> None:
    assert allowed(Case(WAN, Amount()), {fault}) == reason


@pytest.mark.parametrize("split", [{"stages": 4}, {"parallel": "1x2"}])
@pytest.mark.parametrize("part", nccl_ring.PARTS)
def test_first_contact_bars_every_ring(split: dict[str, object], part: str) -> None:
    ring = Case(ModelConfig.model_validate({**WAN.model_dump(), **split}), Amount())
    assert allowed(ring, {f"contact:{part}"}) == f"contact:{part}" and not allowed(ring, {"cpu:same_step"})


def test_without_a_fault_the_fast_path_stays() -> None:
    case = Case(WAN, Amount())
    assert plain(case, {"fast:same_step", "graphs:full"}) is case


@pytest.mark.parametrize("fault", ["fast:clean", "graphs:tiny"])
def test_with_a_fault_the_plain_path_is_measured(fault: str) -> None:
    case = Case(WAN.model_copy(update={"compile": "on"}), Amount())
    assert plain(case, {fault}).config.compile == "off"


@pytest.mark.parametrize("gpus", [2, 4])
def test_rings_come_first_compiled_and_in_every_context(gpus: int) -> None:
    cases = wanted("cuda", gpus, ("wan-1.3b",), Amount())
    labels = [case.label for case in cases]
    assert len(labels) == len(set(labels))
    ranks = [case.config.ranks for case in cases]
    rings = [case.config for case in cases if case.config.ranks > 1]
    assert set(ranks) == {1, 2, gpus} and ranks == sorted(ranks, reverse=True)
    assert {config.compile for config in rings} == {"on"}
    for stages in {2, gpus}:
        assert [each.kv_context for each in rings if each.stages == stages and not each.parallel] == list(CONTEXTS)
    assert {config.parallel for config in rings} - {None} == ({"1x2"} if gpus == 2 else {"1x2", "1x4", "2x2"})


def test_on_one_gpu_the_compiled_stream_comes_first_and_the_plain_one_beside_it() -> None:
    cases = [case for case in wanted("cuda", 1, ("wan-1.3b",), Amount()) if case.config.steps == 4]
    first = [(case.config.compile, case.config.kv_context) for case in cases[:4]]
    assert first == [("on", "clean")] * 2 + [("off", "clean")] * 2
    assert [case.config.vae for case in cases[:2]] == ["random:taew2_1", "random:wan2.1"]
    assert {case.config.ranks for case in cases} == {1}
    assert {case.config.device for case in wanted("cpu", 4, (), Amount())} == {"cpu"}


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
    config = {"device": "cpu", "compile": "on"}
    with torch.compiler.set_stance("force_eager"):
        runtime = build_pipeline(ModelConfig.model_validate(config))
        try:
            counts = iter(range(1000))
            taken = gpu_check.taken_in_replays(runtime, lambda: next(counts))
        finally:
            runtime.close()
    assert taken == [1] * (2 * 4 - 1)


@pytest.mark.parametrize(
    ("fault", "done"), [("contact:links", [HOLDS, HOLDS, WRONG, UNTRIED, UNTRIED]), ("", [HOLDS] * 5)]
)
def test_first_contact_comes_first_and_what_builds_on_a_wrong_part_is_not_tried(
    fault: str, done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(gpu_suite, "check", lambda name, *rest: Found(name, WRONG if name == fault else HOLDS, ""))
    monkeypatch.setattr(gpu_check, "NAMES", ("one",))
    found = list(gpu_suite.checks(argparse.Namespace(out=tmp_path, device="cuda", at_once=1), Deadline(60)))
    assert [(each.name, each.verdict) for each in found[:5]] == [
        (f"contact:{part}", verdict) for part, verdict in zip(nccl_ring.PARTS, done, strict=True)
    ]
    assert [each.name for each in found[5:-1]] == ["tests", "one"]
    assert (found[-1].name, found[-1].verdict) == ("ring_tests", UNTRIED if fault else HOLDS)


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ("exit 0", HOLDS),
        ("exit 77", NOT_HERE),
        ("echo '=== 5 skipped, 2 deselected in 1.00s ==='", NOT_HERE),
        ("exit 1", WRONG),
        ("exit 3", WRONG),  # of pytest: an internal error
        ("kill -ABRT $$", WRONG),
        ("kill -KILL $$", NO_MEMORY),  # as the kernel does
        ("echo 'torch.OutOfMemoryError: CUDA out of memory.'; exit 1", NO_MEMORY),
        ("echo 'FAILED a::b - torch.OutOfMemoryError: CUDA'; echo '1 failed, 2 passed'; exit 1", NO_MEMORY),
        ("echo 'FAILED a::b - torch.OutOfMemoryError: CUDA'; echo 'FAILED a::c - assert 1 == 2'; exit 1", WRONG),
    ],
)
def test_how_a_check_ends_says_what_it_found(
    script: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable(tmp_path, f"echo begun\n{script}"))
    assert gpu_suite.check("cpu:clean", "cpu", Deadline(60), tmp_path, set()).verdict == verdict
    assert (tmp_path / "cpu_clean.log").read_text().startswith("begun\n")


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [60.0, 0.5])
def test_a_check_that_hangs_is_wrong_unless_the_suite_had_no_more_time(
    minutes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it printed is kept, and where it hung."""
    log, wait = tmp_path / "cpu_clean.log", subprocess.Popen.wait

    def out_of_time(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        while "half" not in log.read_text():
            with pytest.raises(subprocess.TimeoutExpired):
                wait(process, 0.05)
        raise subprocess.TimeoutExpired("", timeout or 0)

    program = tmp_path / "hangs.py"
    program.write_text("import time\nprint('half')\ntime.sleep(1000)\n")
    monkeypatch.setattr(sys, "executable", executable(tmp_path, f"exec {sys.executable} {program}"))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", out_of_time)
        patch.setattr(subprocess.Popen, "__exit__", lambda process, *error: wait(process))
        found = gpu_suite.check("cpu:clean", "cpu", Deadline(minutes), tmp_path, set())
    assert found.verdict == (WRONG if minutes == 60 else UNTRIED)
    assert log.read_text().startswith("half\n") and "hangs.py" in log.read_text()


def executable(folder: Path, script: str) -> str:
    """A program that takes the place of the interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("verdict", [HOLDS, NOT_HERE, WRONG, NO_MEMORY, UNTRIED])
def test_only_what_holds_and_what_is_not_here_is_success(
    verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "NAMES", ("decoder:tiny",))
    monkeypatch.setattr(gpu_suite, "check", lambda name, *_: Found(name, HOLDS if name == "tests" else verdict, ""))
    code = gpu_suite.main(["--out", str(tmp_path), "--device", "cpu", "--checks-only"])
    assert code == (fps_ttff.OK if verdict in (HOLDS, NOT_HERE) else fps_ttff.FAILED)
    rows = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert {row["check"]: row["verdict"] for row in rows} == {"tests": HOLDS, "decoder:tiny": verdict}


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


def test_the_fast_path_is_compared_with_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[object] = []

    def stream(**values: object) -> torch.Tensor:
        played.append(values["compile"])
        return torch.full((3,), 2.0 if values["kv_context"] == "clean" and values["compile"] == "on" else 1.0)

    monkeypatch.setattr(gpu_check, "played", stream)
    assert "on off by 0" in gpu_check.fast_as_plain("same_step", CPU)
    assert played == ["off", "on"]
    with pytest.raises(AssertionError, match="off by 1"):
        gpu_check.fast_as_plain("clean", CPU)


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
        gpu_suite, "check", lambda name, *rest: Found(name, WRONG, "made up") if ":s" in name else real(name, *rest)
    )
    code = gpu_suite.main(["--out", str(tmp_path), "--device", "cpu", "--only", "tiny", "--quick", "--minutes", "9"])
    assert code == fps_ttff.FAILED
    checks = {row["check"]: row["verdict"] for row in json.loads((tmp_path / "checks.json").read_text())["checks"]}
    assert checks == {"decoder:tiny": HOLDS, "sync:clean": NOT_HERE, "cpu:staircase": WRONG}
    stored = json.loads((tmp_path / "fps_ttff.json").read_text())
    assert list(stored["results"]) == ["tiny, 4 steps, clean, 1 stage"]
    assert (tmp_path / "fps_ttff.png").exists() and (tmp_path / "profile").is_dir()
    assert "left out: tiny, 4 steps, staircase, 1 stage: cpu:staircase does not hold" in capsys.readouterr().out
