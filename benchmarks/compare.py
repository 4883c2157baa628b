"""Two result files, figure by figure: what became better, what worse, and by how much.

Only like is compared: the same benchmark, hardware, threads and settings. Where they differ the answer is what differs,
not a ratio. Software and commit may differ, since that is what one compares; they are shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.metrics import METRICS
from streamdiff.errors import ConfigError

SAME, WORSE, REFUSED = 0, 1, 2
EPILOG = """examples:
  python -m benchmarks.compare before.json after.json
  python -m benchmarks.compare before.json after.json --threshold 0.05      exit code 1 if anything is over 5 % worse
  python -m benchmarks.compare before.json after.json --only fps,ttff_s --threshold 0.05 --out compared.json

A ratio is after / before. Exit code: 0 compared, nothing worse than the threshold; 1 something is; 2 the files cannot
be compared. Noise on a busy machine is easily 10 %: choose the threshold by comparing two runs of the same commit.
"""
_LOAD = "load_average"


@dataclass(frozen=True)
class Row:
    """One figure of one case. `worse` is by how much it is worse, as a share; negative where it is better, None where
    one of the two is not there or no ratio can be made."""

    case: str
    name: str
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """After through before."""
        return self.after / self.before if self.before and self.after is not None else None

    @property
    def worse(self) -> float | None:
        if self.before is None or self.after is None:
            return None
        if not self.before:  # stalls where there were none: worse without measure
            return 0.0 if not self.after else (float("inf") if METRICS[self.name].better == "less" else -float("inf"))
        change = self.after / self.before - 1
        return change if METRICS[self.name].better == "less" else -change

    @property
    def verdict(self) -> str:
        """In words."""
        if self.worse is None:
            return "-"
        if self.worse == 0:
            return "same"
        if abs(self.worse) == float("inf"):
            return "worse: there were none" if self.worse > 0 else "better: there was none"
        return f"{abs(self.worse):.1%} {'worse' if self.worse > 0 else 'better'}"


def read(path: Path) -> dict[str, Any]:
    """A result file.

    Raises:
        ConfigError: it cannot be read, or is no result of a benchmark that names itself.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    missing = [key for key in ("benchmark", "header", "settings", "results") if key not in (tree or {})]
    if not isinstance(tree, dict) or missing:
        raise ConfigError(
            f"{path}: has no {', '.join(missing)}; expected a file that `python -m benchmarks.fps_ttff --out FILE` or "
            "`throughput_model --out FILE` wrote"
        )
    return tree


def differences(before: Mapping[str, Any], after: Mapping[str, Any], cases: Sequence[str]) -> list[str]:
    """What must be alike and is not, a line each."""
    found = list(_unlike("benchmark", before["benchmark"], after["benchmark"]))
    for key in ("hardware", "threads"):
        one, other = (dict(tree["header"][key]) for tree in (before, after))
        one.pop(_LOAD, None), other.pop(_LOAD, None)
        found += _unlike(key, one, other)
    for case in cases:
        found += _unlike(f"settings of {case}", before["settings"][case], after["settings"][case])
    return found


def _unlike(place: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            yield from _unlike(f"{place}: {key}", one.get(key), other.get(key))
    elif one != other:
        yield f"{place} is {json.dumps(one)} before and {json.dumps(other)} after"


def shared_cases(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Cases that both files have, in the order of the first.

    Raises:
        ConfigError: none; says what each has.
    """
    shared = [case for case in before["results"] if case in after["results"]]
    if not shared:
        cases = " and ".join("; ".join(tree["results"]) for tree in (before, after))
        raise ConfigError(f"the files have no case in common: {cases}")
    return shared


def rows(before: Mapping[str, Any], after: Mapping[str, Any], only: Sequence[str] | None = None) -> list[Row]:
    """Every figure that either has of the cases that both have.

    Raises:
        ConfigError: they are not alike, or `only` names what is no figure; every difference is listed.
    """
    if unknown := [name for name in only or () if name not in METRICS]:
        raise ConfigError(f"--only names {unknown[0]!r}, but figures are {', '.join(METRICS)}")
    cases = shared_cases(before, after)
    if found := differences(before, after, cases):
        listed = "\n".join(f"  {line}" for line in found)
        raise ConfigError(f"these results cannot be compared, for they differ in more than the program:\n{listed}")
    made = []
    for case in cases:
        one, other = (tree["results"][case]["figures"] for tree in (before, after))
        names = [name for name in METRICS if (name in one or name in other) and (only is None or name in only)]
        made += [Row(case, name, one.get(name), other.get(name)) for name in names]
    return [row for row in made if row.before is not None or row.after is not None]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, help="result file")
    parser.add_argument("after", type=Path, help="result file of the same benchmark")
    parser.add_argument("--threshold", type=float, metavar="SHARE", help="how much worse is too much, 0.05 for 5 %%")
    parser.add_argument("--only", metavar="FIGURE,FIGURE", help="compare these figures only")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the comparison as JSON")
    options = parser.parse_args(argv)
    if options.threshold is not None and not 0 <= options.threshold < 1000:
        parser.error(f"--threshold is {options.threshold:g}, but must be 0 or more: 0.05 stands for 5 %")
    try:
        before, after = read(options.before), read(options.after)
        found = rows(before, after, options.only.split(",") if options.only else None)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    _tell(before, after, found)
    if options.out is not None:
        stored = [
            {"case": r.case, "figure": r.name, "before": r.before, "after": r.after, "ratio": r.ratio} for r in found
        ]
        head = report.header(["benchmarks.compare", *argv] if argv is not None else None, warm_up="none: two files")
        sides = {"before": before["header"], "after": after["header"]}
        report.write_json(options.out, head, {"rows": stored}, threshold=options.threshold, **sides)
    if options.threshold is None:
        return SAME
    bad = [row for row in found if row.worse is not None and row.worse > options.threshold]
    for row in bad:
        print(f"WORSE  {row.case}: {row.name} {row.verdict}, {options.threshold:.1%} is allowed")
    return WORSE if bad else SAME


def _tell(before: Mapping[str, Any], after: Mapping[str, Any], found: Sequence[Row]) -> None:
    for name, tree in (("before", before), ("after", after)):
        head = tree["header"]
        load = head["hardware"].get(_LOAD)
        print(f"{name:6}  commit {head['commit']}, {head['date']}, torch {head['software'].get('torch')}, load {load}")
    print(
        report.table(
            [
                {
                    "case": row.case,
                    "figure": row.name,
                    "unit": METRICS[row.name].unit,
                    "better": METRICS[row.name].better,
                    "before": row.before,
                    "after": row.after,
                    "after / before": row.ratio,
                    "verdict": row.verdict,
                }
                for row in found
            ]
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
