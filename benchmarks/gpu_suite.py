"""On a CUDA machine: is everything right there, and if so, how fast is it? One command, within a time.

First contact, where there are several GPUs (`tests/gpu/nccl_ring.py`): how they are linked, what NCCL uses, an order
of connecting that must lock and the one that must not, whole rings. Then the checks (`gpu_check.py`): the same latents
and pictures as on the CPU, the fast path against the plain one, no micro-step in which the host waits for the device,
the tests that need a GPU. Then the presets, the most wanted first. What a check has found wrong is not measured: cases
with that KV context, that decoder, or, where a fast path is wrong, with it. A host that waits is told and measured all
the same: it is slow, not wrong.

Everything that is measured is written at once, so an end of any kind loses only what was under way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import fps_ttff, gpu_check, report, stream_case, stream_options, stream_plot
from benchmarks.stream_case import Amount, Case
from streamdiff import clock
from streamdiff.config import ModelConfig

EPILOG = """examples:
  python -m benchmarks.gpu_suite --out results/h200 --minutes 25
  python -m benchmarks.gpu_suite --out results/h200 --minutes 9 --only wan-1.3b --at-once 6     a short loan
  python -m benchmarks.gpu_suite --out results/h200 --checks-only
  python -m benchmarks.gpu_suite --out results/rehearsal --device cpu --only tiny   the suite itself, without a GPU

Writes into --out: checks/ (what each printed), checks.json, fps_ttff.json and .png, throughput.json, profile/. Exit
code 0: all checks hold and all cases are measured; 1: not all, see what is printed; 2: there is no CUDA device.
"""
_CHECK_S, _CASE_S, _LEAST_S = 300.0, 420.0, 60.0
_LONG_S = 600.0
"""For checks that start many processes, or make the graphs of many: first contact, and all tests."""
_COMPILED_S = 900.0
"""For a case whose graphs are made first: one for every filled window, of all blocks."""
FAST = ("--compile", "on", "--clean-pass", "alone")
"""What is on by default."""
FUSED = ("--compile", "on", "--clean-pass", "with-next")
"""A clean pass in the next chunk's first forward."""
PLAIN = ("--compile", "off", "--clean-pass", "alone")
"""Without it."""
_TESTS, _CONTACT = "tests", "contact"


@dataclass(frozen=True)
class Found:
    """What a check has said; `holds` is None where it could not be tried."""

    name: str
    holds: bool | None
    finding: str


class Deadline:
    """How much time is left."""

    def __init__(self, minutes: float) -> None:
        self._end_s = clock.monotonic_s() + 60 * minutes

    def left_s(self, most_s: float) -> float:
        return min(most_s, self._end_s - clock.monotonic_s())


def check(name: str, device: str, limit_s: float, log: Path, running: set[subprocess.Popen[str]]) -> Found:
    """Carry out one check in a process of its own; what it prints is written beside `log`, first contact's folder.
    Mutates: running (`run_whole`)."""
    words = ["-m", "benchmarks.gpu_check", name, "--device", device]
    if name == _CONTACT:
        words = ["-m", "tests.gpu.nccl_ring", "--stages", str(min(4, torch.cuda.device_count()))]
        words += ["--log", str(log)]
    if name == _TESTS:
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    if (done := run_whole(words, limit_s, running)) is None:
        return Found(name, None, f"not done within {limit_s:.0f} s")
    code, stdout, stderr = done
    (log.parent / f"{name.replace(':', '_')}.log").write_text(stdout + stderr)
    lines = [line for line in (stdout.strip() or stderr.strip()).splitlines() if line.strip()]
    said = lines[-1] if lines else f"ended with exit code {code} and said nothing"
    holds = None if code == gpu_check.NOT_HERE else code == gpu_check.HOLDS
    return Found(name, holds, said.removeprefix(f"{name}: "))


def run_whole(
    words: Sequence[str], limit_s: float, running: set[subprocess.Popen[str]] | None = None
) -> tuple[int, str, str] | None:
    """Run python with these words; exit code and what it said, None where it took too long. What it has started ends
    with it, whatever happens: ranks that wait in NCCL for one that is gone would keep the devices busy for ever.
    Mutates: running, which holds the process while it runs."""
    running = set() if running is None else running
    with subprocess.Popen(
        [sys.executable, *words], cwd=report.ROOT, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        running.add(process)
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            running.discard(process)
            end_group(process)
    return process.returncode, stdout, stderr


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill the process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def wrong(found: Sequence[Found]) -> set[str]:
    """Names of the checks that do not hold."""
    return {each.name for each in found if each.holds is False}


def allowed(case: Case, faults: set[str]) -> str:
    """Why a case must not be measured, empty where it may."""
    config = case.config
    decoder = stream_case.decoder_of(config)
    reasons = [f"cpu:{config.kv_context}", f"decoder:{decoder}"]
    if config.shares > 1:
        reasons.append("shared:clean")
    if config.name != "tiny":
        dtype = "bfloat16" if config.dtype == "auto" and config.device == "cuda" else config.dtype
        reasons.append(f"wan:{'float32' if dtype == 'auto' else dtype}")
    return ", ".join(reason for reason in reasons if reason in faults)


def plain(case: Case, faults: set[str]) -> Case:
    """The case without its fast path where that is wrong."""
    own = {f"fast:{case.config.kv_context}", f"graphs:{stream_case.decoder_of(case.config)}"}
    if not own & faults:
        return case
    values = {**case.config.model_dump(), gpu_check.FAST: gpu_check.OFF}
    return replace(case, config=ModelConfig.model_validate(values))


def wanted(device: str, gpus: int, only: Sequence[str], amount: Amount) -> list[Case]:
    """Cases in the order of how much they are wanted: the published setting, plain and `FAST`, 14B, several stages
    where there are as many GPUs, then everything else."""
    lines = [
        ["--preset", "tiny", "--stages", "1"],
        ["--preset", "wan-1.3b"],
        ["--preset", "wan-1.3b", *FAST],
        ["--preset", "wan-1.3b", *FUSED, "--decoder", "tiny"],
        ["--preset", "wan-14b"],
        ["--preset", "wan-14b", *FAST],
        ["--preset", "wan-1.3b", "--kv-context", "staircase,matched", "--decoder", "tiny"],
        ["--preset", "wan-1.3b", "--size", "512x512", "--decoder", "tiny"],
        ["--preset", "wan-1.3b", "--steps", "2,1", "--decoder", "tiny"],
        *(
            ["--preset", name, "--parallel", parallel, "--decoder", "tiny", *FAST[:2]]
            for name in ("wan-1.3b", "wan-14b")
            for parallel, ranks in (("1x2", 2), ("1x4", 4), ("2x2", 4))
            if gpus >= ranks
        ),
        *(
            ["--preset", name, "--kv-context", "staircase,matched", "--decoder", "tiny", "--stages", str(stages)]
            for name in ("wan-1.3b", "wan-14b")
            for stages in (2, 4)
            if gpus >= stages
        ),
        ["--preset", "wan-14b", "--size", "512x512", "--decoder", "tiny"],
        ["--preset", "wan-1.3b-all"],
        ["--preset", "wan-14b-all"],
    ]
    found: dict[str, Case] = {}
    for words in lines:
        if not only or words[1].removesuffix("-all") in only:
            path = () if FAST[0] in words else PLAIN
            options = fps_ttff.parser().parse_args([*words, *path, "--device", device])
            for case in stream_options.cases_of(options):
                found.setdefault(case.label, replace(case, amount=amount))
    return list(found.values())


def measure(cases: Sequence[Case], faults: set[str], deadline: Deadline, out: Path) -> tuple[dict[str, Any], list[str]]:
    """Results by case, and a line for each that there is none of. Writes after every case."""
    head = report.header(warm_up="a chunk; the window filled; two chunks more")
    results: dict[str, Any] = {}
    done: list[Case] = []
    left_out: list[str] = []
    for case in tqdm(cases, unit="case", dynamic_ncols=True):
        if reason := allowed(case, faults):
            left_out.append(f"{case.label}: {reason} does not hold")
        elif (limit_s := deadline.left_s(_COMPILED_S if case.config.compile == "on" else _CASE_S)) < _LEAST_S:
            left_out.append(f"{case.label}: no time left")
        elif (asked := case.label) != (case := plain(case, faults)).label and case.label in results:
            left_out.append(f"{asked}: its fast path is wrong, and the plain one is measured already")
        else:
            try:
                results[case.label] = fps_ttff.result_of(fps_ttff.measure(case, limit_s))
            except fps_ttff.Failed as error:
                left_out.append(str(error))
                continue
            done.append(case)
            stored = stream_case.settings(done, case.config.device)
            more = {"device": case.config.device, "weights": fps_ttff.note(done), "left_out": list(left_out)}
            report.write_json(out / "fps_ttff.json", head, results, benchmark="fps_ttff", settings=stored, **more)
    if results:
        stream_plot.draw(out / "fps_ttff.png", results)
    return results, left_out


def throughput(case: Case, deadline: Deadline, out: Path) -> Found:
    """The floor of the most wanted case, beside what is measured."""
    config = case.config
    words = ["-m", "benchmarks.throughput_model", "--model", config.name, "--device", config.device]
    words += ["--kv-context", config.kv_context, "--out", str(out / "throughput.json")]
    words += ["--steps", str(config.steps)] if config.steps else []
    words += ["--size", config.size] if config.size else []
    words += ["--vae", config.vae] if config.vae else []
    words += ["--compile", config.compile]
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=report.ROOT, timeout=max(1.0, deadline.left_s(_COMPILED_S)), check=False
        )
    except subprocess.TimeoutExpired:
        return Found("throughput", None, "no time left")
    return Found("throughput", done.returncode == 0, f"exit code {done.returncode}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for everything that is written")
    parser.add_argument("--minutes", type=float, default=25.0, metavar="N", help="time for all of it (default 25)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses the suite itself")
    parser.add_argument("--only", type=stream_options.words, default=(), metavar="P,P", help="tiny, wan-1.3b, wan-14b")
    parser.add_argument("--checks-only", action="store_true", help="measure nothing")
    parser.add_argument("--no-checks", action="store_true", help="they were made before, on this machine and commit")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="checks that run at a time (default 1)")
    parser.add_argument("--quick", action="store_true", help="as little of each case as gives every figure")
    options = parser.parse_args(argv)
    if unknown := set(options.only) - {"tiny", "wan-1.3b", "wan-14b"}:
        parser.error(f"--only names {unknown.pop()}, but can name tiny, wan-1.3b, wan-14b")
    if options.at_once < 1:
        parser.error(f"--at-once is {options.at_once}, but must be at least 1")
    if not 0 < options.minutes <= 24 * 60:
        parser.error(f"--minutes is {options.minutes:g}, but must be above 0 and at most a day (1440)")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: torch sees no CUDA device; --device cpu --only tiny rehearses the suite without one",
            file=sys.stderr,
        )
        return fps_ttff.USAGE
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        return run(options)
    except KeyboardInterrupt:
        print("\nstopped: what was measured is written", file=sys.stderr)
        return fps_ttff.INTERRUPTED


def checks(options: argparse.Namespace, deadline: Deadline) -> Generator[Found, None, None]:
    """What every check says, as each ends: first contact alone, where there are several GPUs, then `options.at_once` at
    a time."""
    log = (options.out / "checks" / "nccl").resolve()
    log.parent.mkdir(exist_ok=True)
    running: set[subprocess.Popen[str]] = set()

    def one(name: str) -> Found:
        limit_s = deadline.left_s(_LONG_S if name in (_CONTACT, _TESTS) else _CHECK_S)
        if limit_s <= 1:
            return Found(name, None, "no time left")
        return check(name, options.device, limit_s, log, running)

    if options.device == "cuda" and torch.cuda.device_count() > 1:
        yield one(_CONTACT)
    with ThreadPoolExecutor(options.at_once) as pool:
        try:
            # the tests take longest, and are begun first; what ends before them is told before them
            for each in as_completed([pool.submit(one, name) for name in (_TESTS, *gpu_check.NAMES)]):
                yield each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                end_group(process)


def run(options: argparse.Namespace) -> int:
    """Checks, then cases, then the floor of the first one with a fast path; returns the exit code."""
    deadline = Deadline(options.minutes)
    found: list[Found] = []
    for each in () if options.no_checks else checks(options, deadline):
        found.append(each)
        print(
            f"{ {True: 'holds ', False: 'WRONG ', None: 'untried'}[each.holds]:8} {each.name}: {each.finding}",
            flush=True,
        )
        _write_checks(options.out, found)
    faults = wrong(found)
    if options.checks_only:
        return fps_ttff.FAILED if faults else fps_ttff.OK
    gpus = torch.cuda.device_count() if options.device == "cuda" else 1
    cases = wanted(options.device, gpus, options.only, stream_options.QUICK if options.quick else Amount())
    cases = [replace(case, profile=_profile_folder(options.out, case, number)) for number, case in enumerate(cases)]
    results, left_out = measure(cases, faults, deadline, options.out)
    print(fps_ttff.tables(results))
    print("\n".join(["", *(f"left out: {line}" for line in left_out)]))
    there = [case for case in cases if case.label in results and case.config.name != "tiny"]
    first = next((case for case in there if case.config.compile == "on"), there[0] if there else None)
    if first is not None and deadline.left_s(_CASE_S) > _LEAST_S:
        print(f"throughput: {throughput(first, deadline, options.out).finding}")
    return fps_ttff.FAILED if faults or left_out else fps_ttff.OK


def _profile_folder(out: Path, case: Case, number: int) -> str | None:
    """The first of each model's cases are traced: a trace of every case would cost much of the time."""
    wanted_one = number == 0 or (case.config.steps == 4 and case.config.kv_context == "clean" and number < 9)
    return str((out / "profile" / fps_ttff.slug(case)).resolve()) if wanted_one else None


def _write_checks(out: Path, found: Sequence[Found]) -> None:
    rows = [{"check": each.name, "holds": each.holds, "finding": each.finding} for each in found]
    (out / "checks.json").write_text(json.dumps({"commit": report.commit(), "checks": rows}, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
