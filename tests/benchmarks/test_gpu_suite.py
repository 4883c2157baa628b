"""What the suite makes of its checks; the checks themselves, on the CPU, where they hold and where they must not."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import fps_ttff, gpu_check, gpu_suite
from benchmarks.gpu_suite import HOLDS, NO_MEMORY, NOT_HERE, UNTRIED, WRONG, Deadline, Found, allowed, plain, wanted
from benchmarks.stream_case import CONTEXTS, Amount, Case
from streamdiff.config import ModelConfig
from tests.gpu import nccl_ring

CPU = torch.device("cpu")
WAN = ModelConfig(name="random:wan2.1-1.3b", vae="random:taew2_1", device="cuda", kv_context="clean")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cpu:clean", "cpu:clean"),
        ("cpu:same_step", ""),
        ("decoder:tiny", "decoder:tiny"),
        ("wan:bfloat16", "wan:bfloat16"),
        ("contact:ring", ""),
    ],
)
def test_what_is_wrong_is_not_measured(fault: str, reason: str) -> None:
    assert allowed(Case(WAN, Amount()), {fault}) == reason


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
        ("kill -KILL $$", NO_MEMORY),  # as the kernel does
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


def executable(folder: Path, script: str) -> str:
    """A program that takes the place of the interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_the_checks_hold_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["decoder:tiny", "--device", "cpu"]) == gpu_check.HOLDS
    assert gpu_check.main(["sync:clean", "--device", "cpu"]) == gpu_check.NOT_HERE
    assert gpu_check.main(["graphs:tiny", "--device", "cpu"]) == gpu_check.NOT_HERE
    assert gpu_check.main(["memory:clean", "--device", "cpu"]) == gpu_check.NOT_HERE
    told = capsys.readouterr().out
    assert "decoder:tiny: off by 0 levels" in told and "nothing waits" in told


@pytest.mark.soak
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
