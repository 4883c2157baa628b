"""On a CUDA machine: is everything right there, and if so, how fast is it? One command, within a time.

First contact, where there are several GPUs (`tests/gpu/nccl_ring.py`), part by part: an order of connecting that must
lock and the one that must not, links, whole rings. Then the checks (`gpu_check.py`): the same latents and pictures as
on the CPU, the fast path against the plain one, no micro-step in which the host waits for the device, the tests that
need a GPU. Then the presets, rings first. A check that hangs is wrong. What builds on a wrong check is not measured:
rings after first contact, cases with that KV context, that decoder, or, where a fast path is wrong, with it. A host
that waits is reported and measured all the same: it is slow, not wrong.

Every file is written as its lines come, so an end of any kind loses only what was under way.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
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
code 0: all checks that this machine allows hold and all cases are measured; 1: not all, see what is printed; 2: there
is no CUDA device.
"""
_PART_S, _COMPILES_S, _TESTS_S = 60.0, 300.0, 600.0
"""After which a check hangs: one part of first contact, one that compiles nothing; one that compiles; all tests."""
_COMPILING = ("fast", "graphs", "memory", "sessions", "shared")
_CASE_S, _LEAST_S = 420.0, 60.0
_COMPILED_S = 900.0
"""For a case whose graphs are made first: one for every filled window, of all blocks."""
FAST = ("--compile", "on")
PLAIN = ("--compile", "off")
_CONTACT = ("order", "connect", "links", "steady", "ring")
"""Parts of first contact; each builds on those before it."""
_TESTS, _RING_TESTS = "tests", "ring_tests"
_TESTS_AT_ONCE = 4
_DUMP_S = 5.0  # for every process of a check that hangs to write its stacks
HOLDS, WRONG, NO_MEMORY, UNTRIED, NOT_HERE = "holds", "WRONG", "no memory", "untried", "not here"
"""Of a check. no memory: it crashed for want of it, which says nothing of what it checks; untried: there was no time,
or what it builds on is wrong; not here: this machine does not have what it needs."""
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|MemoryError|out of memory|allocate memory|STATUS_ALLOC_FAILED", re.I)


@dataclass(frozen=True)
class Found:
    """What came of a check: `HOLDS`, `WRONG`, `NO_MEMORY`, `UNTRIED` or `NOT_HERE`, and its last line."""

    name: str
    verdict: str
    finding: str


class Deadline:
    """How much time is left."""

    def __init__(self, minutes: float) -> None:
        self._end_s = clock.monotonic_s() + 60 * minutes

    def left_s(self, most_s: float) -> float:
        return min(most_s, self._end_s - clock.monotonic_s())


def check(name: str, device: str, deadline: Deadline, folder: Path, running: set[subprocess.Popen[bytes]]) -> Found:
    """Carry out one check in a process of its own, which prints into a file in `folder`. Mutates: running."""
    kind, _, part = name.partition(":")
    most_s = _TESTS_S if kind in (_TESTS, _RING_TESTS) else _COMPILES_S if kind in _COMPILING else _PART_S
    if (limit_s := deadline.left_s(most_s)) <= 1:
        return Found(name, UNTRIED, "no time left")
    words = ["-m", "benchmarks.gpu_check", name, "--device", device]
    if kind == "contact":
        words = ["-m", "tests.gpu.nccl_ring", "--stages", str(min(4, torch.cuda.device_count()))]
        words += ["--part", part, "--log", str(folder / "nccl")]
    if kind in (_TESTS, _RING_TESTS):
        words = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu", "-k"]
        words += ["not ring", "-n", str(_TESTS_AT_ONCE)] if kind == _TESTS else ["ring"]
    log = folder / f"{name.replace(':', '_')}.log"
    code = run_whole(words, limit_s, log, running)
    if code is None:
        return Found(name, *((UNTRIED, "no time left") if limit_s < most_s else (WRONG, f"hangs after {most_s:.0f} s")))
    text = log.read_text("utf-8", "replace")
    (*_, said) = [line for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    code_too = "" if code in (gpu_check.HOLDS, gpu_check.WRONG, gpu_check.NOT_HERE) else f" (exit code {code})"
    return Found(name, verdict_of(code, text), said.removeprefix(f"{name}: ") + code_too)


def verdict_of(code: int, text: str) -> str:
    """What an exit code and what was printed say. Of tests one has to have run, and every one that failed has to have
    failed for memory."""
    if code == gpu_check.NOT_HERE or re.search(r"^=+ \d+ skipped", text, re.MULTILINE):
        return NOT_HERE
    if code == gpu_check.HOLDS:
        return HOLDS
    failed = re.findall(r"^(?:FAILED|ERROR) .*", text, re.MULTILINE) or [text]
    short = code == -signal.SIGKILL or all(_OUT_OF_MEMORY.search(each) for each in failed)
    return NO_MEMORY if short else WRONG


def run_whole(words: Sequence[str], limit_s: float, log: Path, running: set[subprocess.Popen[bytes]]) -> int | None:
    """Run python with these words, printing into `log`; its exit code, None where it took too long: then its processes
    write where they are, too. What it has started ends with it, whatever happens: ranks that wait in NCCL for one that
    is gone would keep the devices busy for ever. Mutates: running, which holds the process while it runs."""
    # CI: pytest does not shorten the reasons of what failed
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "CI": "1"}
    with log.open("wb") as out, subprocess.Popen(
        [sys.executable, *words], cwd=report.ROOT, env=environment, start_new_session=True,
        stdout=out, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        running.add(process)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            all_started = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for number in (signal.SIGABRT, signal.SIGKILL):  # those in sessions of their own, too
                for each in all_started:
                    with suppress(psutil.NoSuchProcess):
                        each.send_signal(number)
                psutil.wait_procs(all_started, timeout=_DUMP_S)
            return None
        finally:
            running.discard(process)
            end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def wrong(found: Sequence[Found]) -> set[str]:
    """Names of the checks that are wrong."""
    return {each.name for each in found if each.verdict == WRONG}


def allowed(case: Case, faults: set[str]) -> str:
    """Why a case must not be measured, empty where it may."""
    config = case.config
    decoder = stream_case.decoder_of(config)
    reasons = [f"cpu:{config.kv_context}", f"decoder:{decoder}"]
    if config.shares > 1:
        reasons.append("shared:clean")
    if config.ranks > 1:
        reasons += [f"contact:{part}" for part in _CONTACT]
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
    """Cases in the order of how much they are wanted: rings where there are as many GPUs, every KV context, then the
    published settings on one. Compiled on CUDA; on one GPU also without."""
    contexts, small = ",".join(stream_case.CONTEXTS), ("--decoder", "tiny")
    rings = [
        ["--preset", name, *small, *split]
        for name in ("wan-1.3b", "wan-14b")
        for ranks in (4, 2)
        if gpus >= ranks
        for split in (
            ("--kv-context", contexts, "--stages", str(ranks)),
            ("--parallel", "1x4,2x2" if ranks == 4 else "1x2"),
        )
    ]
    lines = [
        *rings,
        ["--preset", "wan-1.3b"],
        ["--preset", "wan-14b"],
        ["--preset", "tiny", "--stages", "1"],
        ["--preset", "wan-1.3b", *PLAIN],
        ["--preset", "wan-14b", *PLAIN],
        ["--preset", "wan-1.3b", "--kv-context", contexts, *small],
        ["--preset", "wan-1.3b", "--size", "512x512", *small],
        ["--preset", "wan-1.3b", "--steps", "2,1", *small],
        ["--preset", "wan-14b", "--size", "512x512", *small],
        ["--preset", "wan-1.3b-all"],
        ["--preset", "wan-14b-all"],
    ]
    found: dict[str, Case] = {}
    for words in lines:
        if not only or words[1].removesuffix("-all") in only:
            path = () if PLAIN[0] in words else FAST if device == "cuda" else PLAIN
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


def throughput(case: Case, deadline: Deadline, out: Path) -> str:
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
        return "no time left"
    return f"exit code {done.returncode}"


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
    a time, at last the tests of rings."""
    folder = (options.out / "checks").resolve()
    folder.mkdir(exist_ok=True)
    running: set[subprocess.Popen[bytes]] = set()

    def one(name: str) -> Found:
        return check(name, options.device, deadline, folder, running)

    several = options.device == "cuda" and torch.cuda.device_count() > 1
    fault = ""
    for name in (f"contact:{part}" for part in _CONTACT if several):
        found = Found(name, UNTRIED, f"{fault} is wrong") if fault else one(name)
        fault = fault or (name if found.verdict == WRONG else "")
        yield found
    with ThreadPoolExecutor(options.at_once) as pool:
        try:
            # the tests take longest, and are begun first; what ends before them is told before them
            for each in as_completed([pool.submit(one, name) for name in (_TESTS, *gpu_check.NAMES)]):
                yield each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                end_group(process)
    if several:
        yield Found(_RING_TESTS, UNTRIED, f"{fault} is wrong") if fault else one(_RING_TESTS)


def run(options: argparse.Namespace) -> int:
    """Checks, then cases, then the floor of the first one on one GPU; returns the exit code."""
    deadline = Deadline(options.minutes)
    found: list[Found] = []
    for each in () if options.no_checks else checks(options, deadline):
        found.append(each)
        print(f"{each.verdict:9} {each.name}: {each.finding}", flush=True)
        _write_checks(options.out, found)
    holds = all(each.verdict in (HOLDS, NOT_HERE) for each in found)
    if options.checks_only:
        return fps_ttff.OK if holds else fps_ttff.FAILED
    gpus = torch.cuda.device_count() if options.device == "cuda" else 1
    cases = wanted(options.device, gpus, options.only, stream_options.QUICK if options.quick else Amount())
    cases = traced(cases, options.out / "profile")
    results, left_out = measure(cases, wrong(found), deadline, options.out)
    print(fps_ttff.tables(results))
    print("\n".join(["", *(f"left out: {line}" for line in left_out)]))
    there = [case for case in cases if case.label in results and case.config.ranks == 1 and case.config.name != "tiny"]
    if there and deadline.left_s(_CASE_S) > _LEAST_S:
        print(f"throughput: {throughput(there[0], deadline, options.out)}")
    return fps_ttff.OK if holds and not left_out else fps_ttff.FAILED


def traced(cases: Sequence[Case], folder: Path) -> list[Case]:
    """The cases, of which the first of each model, compiled and not, has a profile: of all it would take too long."""
    first = {(case.config.name, case.config.compile): case.label for case in reversed(cases)}.values()
    return [
        replace(case, profile=str((folder / fps_ttff.slug(case)).resolve()) if case.label in first else None)
        for case in cases
    ]


def _write_checks(out: Path, found: Sequence[Found]) -> None:
    rows = [{"check": each.name, "verdict": each.verdict, "finding": each.finding} for each in found]
    (out / "checks.json").write_text(json.dumps({"commit": report.commit(), "checks": rows}, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
