"""Runs what takes too long for `make test`: the tests marked `soak`, and writes down which held and how long each took.

Other options go to pytest:

    python -m benchmarks.soak
    python -m benchmarks.soak --out soak.json -k growth
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import report

OUT = report.RESULTS / "soak.json"
_NOTHING = 5
"""pytest's exit code where no test was chosen."""


def outcomes(xml: str) -> dict[str, dict[str, report.Value]]:
    """By test, of a report in JUnit's format: whether it `holds`, and the `seconds` it took, set-up included."""
    found: dict[str, dict[str, report.Value]] = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        holds = all(case.find(kind) is None for kind in ("failure", "error", "skipped"))
        seconds = round(float(case.get("time", "0")), 1)
        if name in found:  # once for the test and once for what failed after it
            holds, seconds = holds and bool(found[name]["holds"]), max(seconds, float(found[name]["seconds"] or 0))
        found[name] = {"holds": holds, "seconds": seconds}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=OUT, help=f"JSON file to write (default {report.public_path(str(OUT))})"
    )
    options, chosen = parser.parse_known_args(argv)
    head = report.header(warm_up="none")
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "soak.xml"
        endless = ("-o", "timeout=0", "-o", "faulthandler_timeout=0")  # they take as long as they take
        command = [sys.executable, "-m", "pytest", "--soak", "--no-skips", "-q", f"--junit-xml={junit}"]
        command += [*endless, *chosen]
        code = subprocess.run(command, cwd=report.ROOT, check=False).returncode
        results = outcomes(junit.read_text()) if junit.exists() else {}
    if not results:
        print("no soak test was run, and nothing is written", file=sys.stderr)
        return code or _NOTHING
    report.write_json(options.out, head, dict(sorted(results.items())))
    failed = [name for name, each in results.items() if not each["holds"]]
    held = len(results) - len(failed)
    print(f"{held} of {len(results)} hold; written: {report.public_path(str(options.out.resolve()))}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
