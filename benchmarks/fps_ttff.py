"""One stream through the real path: frames per second, time to first frame, latencies, stalls, parts, memory.

What runs is what `streamdiff serve` runs: the engine, the ring over as many processes as there are stages, the decoder.
Every case has processes of its own, so nothing of one reaches another. `benchmarks/README.md` defines every figure.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report, stream_case, stream_options, stream_plot
from benchmarks.stream_case import Amount, Case
from benchmarks.stream_figures import Raw, figures
from benchmarks.stream_rank import CASE, RAW
from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.config import Config
from streamdiff.device import pick_device
from streamdiff.engine.process import ipc
from streamdiff.errors import ConfigError
from streamdiff.models.catalogue import is_random

OK, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM
_STOP_S = 15.0
EPILOG = """examples:
  python -m benchmarks.fps_ttff                                  the embedded model, at 1, 2 and 4 stages
  python -m benchmarks.fps_ttff --out mine.json --plot mine.png
  python -m benchmarks.fps_ttff --preset wan-1.3b --device cuda  Wan 1.3B, 832x480, 4 steps, both decoders
  python -m benchmarks.fps_ttff --preset wan-1.3b-all --list     what that would measure: every size, steps, context
  python -m benchmarks.fps_ttff --preset wan-14b --stages 1,2,4 --kv-context staircase --decoder tiny
  python -m benchmarks.fps_ttff --preset wan-1.3b --parallel 1x2,1x4,2x2    ranks that share stages
  python -m benchmarks.fps_ttff --preset wan-1.3b --model self-forcing     the published weights, fetched if need be
  python -m benchmarks.fps_ttff --stages 1 --profile costs       and where the time goes: costs/*/trace.json.gz
  python -m benchmarks.compare before.json after.json            two of these files, figure by figure

A list (4,2,1) in place of one value makes a case of each. Without a checkpoint Wan's weights are random and of real
size, made on the device: speed and memory are real, the picture is noise, and nothing is downloaded. There is no text
encoder then, so a prompt's encoding is in no figure; the result says so.
With one session, KV context `clean` keeps one stage busy at a time, so at more stages a preset leaves it out; name it
with --kv-context to see it.
"""


class Failed(Exception):
    """A case's processes ended without a result."""


# ---- what to measure ---------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.fps_ttff",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stream_options.add(made)
    amounts = made.add_argument_group("how much")
    for name, text in _AMOUNTS.items():
        amounts.add_argument(f"--{name}", type=int, metavar="N", help=f"{text} (default {getattr(Amount(), name)})")
    amounts.add_argument(
        "--playback-fps", type=float, metavar="N", help="of the simulated viewer (default: the model's)"
    )
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    made.add_argument("--profile", type=Path, metavar="DIR", help="after measuring, trace some chunks of every case")
    return made


_AMOUNTS = {
    "openings": "streams opened to see their beginning",
    "chunks": "chunks that count as steady",
    "margin": "chunks between the full window and those",
    "prompts": "changes of the prompt on the way",
}


def profiled(cases: list[Case], folder: Path | None) -> list[Case]:
    """The cases, each with a folder of its own for its trace."""
    if folder is None:
        return cases
    return [replace(case, profile=str((folder / slug(case)).resolve())) for case in cases]


def slug(case: Case) -> str:
    """A folder's name for a case."""
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in case.label).replace("__", "_")


# ---- measuring ---------------------------------------------------------------------------------------------------


def measure(case: Case, limit_s: float | None = None) -> Raw:
    """Run the case's ranks, for `limit_s` at most, and read what they wrote down.

    Raises:
        Failed: they ended without a result; they have said why.
    """
    module = "benchmarks.stream_rank"
    program = (
        ["-m", module] if case.config.ranks == 1 else ["-m", "streamdiff.engine.process.launcher", "--module", module]
    )
    with tempfile.TemporaryDirectory(prefix="streamdiff-") as name:
        folder = Path(name)
        (folder / CASE).write_text(json.dumps(case.to_json()))
        ipc.write_config(folder, Config(model=case.config))  # for the launcher; the case says it too
        command = [sys.executable, *program, "--address", name]
        # Rank 0 ends, and its launcher with the other ranks, when nobody holds the other end of its standard input.
        with _ended(subprocess.Popen(command, cwd=report.ROOT, stdin=subprocess.PIPE, start_new_session=True)) as lead:
            try:
                code = lead.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise Failed(f"{case.label}: not done within {limit_s:.0f} s") from None
        if code != 0 or not (folder / RAW).is_file():
            raise Failed(f"{case.label}: its processes ended with exit code {code}")
        raw = json.loads((folder / RAW).read_text())
        others = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(1, case.config.ranks)]
    for other in others:
        raw["peak_bytes"].append(other["peak_bytes"])
        raw["threads"].append(other["threads"])
    return Raw.from_json(raw)


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Leave no process behind: a signal reaches this one only, which then ends the launcher, and that its ranks. Where
    this one is killed, they end by themselves (`stream_rank`)."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdin is not None
        process.stdin.close()


def result_of(raw: Raw) -> dict[str, Any]:
    """What stands in the file for a case."""
    steps = {name: median(values) for name, values in raw.parts.items() if name.startswith("step ")}
    return {"figures": figures(raw), "step_s_by_step": steps, "remarks": raw.remarks, "raw": raw.to_json()}


# ---- telling -----------------------------------------------------------------------------------------------------

_COLUMNS = {
    "fps": "fps", "TTFF s": "ttff_s", "2nd chunk s": "second_chunk_s", "chunk p50 s": "chunk_p50_s",
    "p95": "chunk_p95_s", "p99": "chunk_p99_s", "prompt p50 s": "control_p50_s", "stalls 0 s": "stalls_0",
    "0.5 s": "stalls_0.5", "1 s": "stalls_1", "peak GiB": "peak_gib",
}  # fmt: skip
_PARTS = ("text", "step", "clean", "decode", "copy", "encode")


def tables(results: Mapping[str, Any]) -> str:
    """The figures of all cases, and the parts in milliseconds where they were measured."""
    rows, parts = [], []
    for label, result in results.items():
        found = result["figures"]
        peaks = [f"{count / 2**30:.3g}" for count in result["raw"]["peak_bytes"]]
        cells = {title: found[name] for title, name in _COLUMNS.items()}
        rows.append({"case": label, **cells, "by rank": " ".join(peaks)})
        if found["step_s"] is not None:
            ms = {name: found[f"{name}_s"] for name in _PARTS}
            parts.append(
                {"parts, alone, in ms": label, **{name: None if s is None else 1000 * s for name, s in ms.items()}}
            )
    return "\n\n".join(report.table(table) for table in (rows, parts) if table)


def note(all_cases: Sequence[Case]) -> str:
    """What must not be overlooked about the weights; empty where there is nothing."""
    if any(is_random(case.config.name) and case.config.weights is None for case in all_cases):
        return "weights are random and of real size: speed and memory are real, the picture is noise"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        all_cases = profiled(stream_options.cases_of(options), options.profile)
        if options.plot is not None:
            stream_plot.check(options.plot)
        device = pick_device(all_cases[0].config.device)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    if options.list:
        print("\n".join(case.label for case in all_cases))
        return OK
    warm_up = (
        "a chunk; the window filled; parts: until the window is full, first rounds of text, decode, encode left out"
    )
    head = report.header(["benchmarks.fps_ttff", *argv] if argv is not None else None, warm_up=warm_up)
    if text := note(all_cases):
        print(f"note: {text}", file=sys.stderr)
    results: dict[str, Any] = {}
    failed: list[str] = []
    code: int = OK
    try:
        with exit_on_sigterm():
            for number, case in enumerate(all_cases, start=1):
                print(f"{number} of {len(all_cases)}: {case.label}", file=sys.stderr, flush=True)
                try:
                    results[case.label] = result_of(measure(case))
                except Failed as error:
                    print(f"error: {error}", file=sys.stderr)
                    failed.append(case.label)
                    code = FAILED
    except (KeyboardInterrupt, SystemExit) as asked:
        print(f"\nstopped: {len(results)} of {len(all_cases)} cases are measured", file=sys.stderr)
        code = INTERRUPTED if isinstance(asked, KeyboardInterrupt) else TERMINATED
    if results:
        done = [case for case in all_cases if case.label in results]
        more: dict[str, Any] = {"device": str(device), "weights": note(done), "failed": failed}
        _tell(options, head, stream_case.settings(done, str(device)), results, more)
    return code


def _tell(
    options: argparse.Namespace, head: report.Header, stored: dict[str, Any], results: dict[str, Any], more: Any
) -> None:
    print(tables(results))
    if options.out is not None:
        report.write_json(options.out, head, results, benchmark="fps_ttff", settings=stored, **more)
        print(f"written: {report.public_path(str(options.out.resolve()))}")
    if options.plot is not None:
        stream_plot.draw(options.plot, results)
        print(f"written: {report.public_path(str(options.plot.resolve()))}")
    if options.profile is not None:
        print(f"profiles: {report.public_path(str(options.profile.resolve()))}/*/trace.json.gz")


if __name__ == "__main__":
    raise SystemExit(main())
