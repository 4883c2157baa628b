"""How many fit: live sessions and jobs come at given rates, and how many of them are served well?

Starts `streamdiff serve` once for each variant and climbs a ladder of loads until too few visitors are served as --slo
says; the load before is the tipping point. The same visitors then come to the simulator: the real scheduler, playout
buffer and admission in virtual time, with the times of forwards and decoding that were measured on this machine first.

    python -m benchmarks.capacity --loads 2,4,6 --rows 1,4 --seconds 15
    python -m benchmarks.capacity --rows 1,2,4,8 --out mine.json --plot mine.png
    python -m benchmarks.capacity --side simulator --stages 4 --rows 1,4 --seconds 120
    python -m benchmarks.capacity --rows 4 --variant "wait 20 ms=--batching dynamic --batching-wait-ms 20"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import arrivals, load_plot, load_server, report, slo
from benchmarks.arrivals import Load
from benchmarks.browser import SERVE, running_server
from benchmarks.load_simulation import EngineTimes, LoadSimulation, ServerSettings
from benchmarks.slo import Video, Visit
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.trace import check_plot

OK, FAILED, USAGE = 0, 1, 2
SLO = "first_frame=2,stalls=0,rate=0.9,control=4"
SIDES = ("server", "simulator")
LIMITS = slo.LIVE_LIMITS | slo.JOB_LIMITS
WARM_UP = Load(2.0, 1.0, stay_s=4.0)
"""Comes to every server first and is not counted: first calls, first connections."""


@dataclass(frozen=True)
class Variant:
    """A server to compare: further arguments of `streamdiff serve`. `max_rows` for the simulator; None where it cannot
    play these arguments."""

    name: str
    words: tuple[str, ...]
    max_rows: int | None
    adaptive: bool = False


def variant_of(text: str) -> Variant:
    """`NAME=ARGUMENTS`. Raises ValueError without a name."""
    name, separator, words = text.partition("=")
    if not name.strip() or not separator:
        raise ValueError(f'--variant is {text!r}, but must be NAME="ARGUMENTS"; they may be empty')
    given = tuple(shlex.split(words))
    return Variant(name.strip(), given, *_simulated(given))


def _simulated(words: Sequence[str]) -> tuple[int | None, bool]:
    """`--max-rows` of arguments of which the simulator knows every one, and whether `--adaptive` is among them."""
    others = [word for word in words if word != "--adaptive"]
    found, adaptive = dict(zip(others[::2], others[1::2], strict=False)), "--adaptive" in words
    if len(others) % 2 or set(found) - {"--batching", "--max-rows"}:
        return None, adaptive
    return int(found.get("--max-rows", "4")) if found.get("--batching") == "dynamic" else 1, adaptive


def rows_variant(rows: int, adaptive: bool = False) -> Variant:
    words = ("--batching", "dynamic", "--max-rows", str(rows)) if rows > 1 else ()
    more, name = (("--adaptive",), ", adaptive") if adaptive else ((), "")
    return Variant(f"max_rows {rows}{name}", (*words, *more), rows, adaptive)


@dataclass(frozen=True)
class Point:
    """What was found at one load."""

    sessions: float
    live: dict[str, report.Json]
    jobs: dict[str, report.Json]

    def to_json(self) -> dict[str, report.Json]:
        return {"load": self.sessions, **self.live, "jobs": self.jobs}


Play = Callable[[Load], tuple[list[Visit], list[Video]]]


def climb(options: argparse.Namespace, limits: slo.Slo, label: str, play: Play) -> dict[str, report.Json]:
    """All points of one variant on one side, and its tipping point."""
    points: list[Point] = []

    def served(sessions: float) -> bool:
        load = load_of(options, sessions)
        visits, videos = play(load)
        live = slo.live_figures(visits, limits, options.fps, load.begin_s, load.end_s)
        job_limits = {"total": limits["job"]} if "job" in limits else {}
        points.append(Point(sessions, live, slo.video_figures(videos, job_limits, options.seconds)))
        share = live["served_share"]
        assert isinstance(share, float)
        print(f"{label}: {sessions:g} sessions at once, {share:.0%} served well", file=sys.stderr, flush=True)
        return bool(share >= options.share)

    tipping = slo.find_tipping(served, options.loads, halvings=options.halvings, beyond=options.beyond)
    points.sort(key=lambda point: point.sessions)
    return {
        "tipping_load": tipping.load,
        "first_load_above": tipping.above,
        "points": [point.to_json() for point in points],
    }


def load_of(options: argparse.Namespace, sessions: float) -> Load:
    return Load(sessions, options.seconds, options.stay, options.jobs, options.job_seconds)


# ---- the two sides -----------------------------------------------------------------------------------------------


def on_server(options: argparse.Namespace, limits: slo.Slo, variant: Variant, folder: Path) -> dict[str, report.Json]:
    """A server of its own, all loads one after the other."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(server_config(options, folder)))
    command = [*SERVE, "--config", str(config), *model_words(options, folder), *options.serve, *variant.words]
    with running_server(command) as server:

        def play(load: Load) -> tuple[list[Visit], list[Video]]:
            who, what = arrivals.visitors(load, options.seed), arrivals.jobs(load, options.seed)
            return asyncio.run(load_server.run(server.url, options.fps, who, what))

        play(WARM_UP)
        return climb(options, limits, f"{variant.name}, server", play)


def server_config(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What has no option of its own: one address is everybody here, and a spare engine would take memory only."""
    serve: dict[str, Any] = {"spare": False, "max_viewers": 1000, "address_share": 1.0, "load": options.load_limit}
    if options.jobs:
        serve |= {"jobs_dir": str(folder / "jobs"), "jobs_queue": 10_000}
    return {"serve": serve}


def model_words(options: argparse.Namespace, folder: Path) -> list[str]:
    model = str(folder.parent / "wide") if options.tokens > 1 else options.model
    words = ["--model", model] if model else []
    # What is enlarged is alike, whatever the folder is called.
    words += ["--scale", "2"] if options.tokens > 1 else []
    return words + (["--stages", str(options.stages)] if options.stages > 1 else [])


def on_simulator(
    options: argparse.Namespace, limits: slo.Slo, variant: Variant, times: EngineTimes
) -> dict[str, report.Json]:
    assert variant.max_rows is not None
    settings = ServerSettings(
        options.fps, options.stages, variant.max_rows, load_limit=options.load_limit, adaptive=variant.adaptive
    )

    def play(load: Load) -> tuple[list[Visit], list[Video]]:
        who, what = arrivals.visitors(load, options.seed), arrivals.jobs(load, options.seed)
        return LoadSimulation(times, settings).run(who, what)

    return climb(options, limits, f"{variant.name}, simulator", play)


def times_of(options: argparse.Namespace, max_rows: int, folder: Path) -> EngineTimes:
    """Measured here and now, on a machine that does nothing else; or read again from a result."""
    if options.times is not None:
        stored = json.loads(options.times.read_text())["times"]
        lists = {name: tuple(stored.get(name, ())) for name in ("forward_s", "steps_known")}
        return EngineTimes(**stored | lists)
    from benchmarks import load_times
    from streamdiff.config import ModelConfig

    name = str(folder / "wide") if options.tokens > 1 else options.model
    print("forwards and decoding are measured", file=sys.stderr, flush=True)
    return load_times.measure(ModelConfig(name=name) if name else ModelConfig(), max_rows)


def measure(
    options: argparse.Namespace, limits: slo.Slo, variants: Sequence[Variant]
) -> tuple[dict[str, Any], EngineTimes | None]:
    """Results by variant and side, and the times that the simulator was given."""
    results: dict[str, Any] = {variant.name: {} for variant in variants}
    times = None
    with tempfile.TemporaryDirectory(prefix="streamdiff-") as name:
        folder = Path(name)
        if options.tokens > 1:
            from benchmarks.load_times import widened

            widened(folder / "wide", options.tokens)
        if "simulator" in options.sides:
            simulated = [variant for variant in variants if variant.max_rows is not None]
            times = times_of(options, max((each.max_rows or 1 for each in simulated), default=1), folder)
            for variant in simulated:
                results[variant.name]["simulator"] = on_simulator(options, limits, variant, times)
        for number, variant in enumerate(variants if "server" in options.sides else ()):
            own = folder / f"server-{number}"
            own.mkdir()
            results[variant.name]["server"] = on_server(options, limits, variant, own)
    return results, times


# ---- options and output ------------------------------------------------------------------------------------------


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def _rows(text: str) -> list[int]:
    return [int(word) for word in text.split(",")] if text else []


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load = made.add_argument_group("load").add_argument
    load("--loads", type=_numbers, default="2,4,6,8,10", metavar="LIST", help="sessions at once (default %(default)s)")
    load("--halvings", type=int, default=0, help="of the step below the first load that fails (default 0)")
    load("--beyond", type=int, default=1, help="loads tried after that one (default 1)")
    load("--seconds", type=float, default=20.0, help="of each load (default 20)")
    load("--stay", type=float, default=8.0, help="seconds of a visit on average (default 8)")
    load("--fps", type=float, default=10.0, help="frames shown per second to each visitor (default 10)")
    load("--jobs", type=float, default=0.0, help="per minute beside them (default 0)")
    load("--job-seconds", type=float, default=1.0, help="of video in a job (default 1)")
    load("--seed", type=int, default=0, help="of who comes when (default 0)")
    well = made.add_argument_group("served well").add_argument
    well("--slo", default=SLO, metavar="LIMITS", help=f"of {', '.join(LIMITS)} (default {SLO})")
    well("--share", type=float, default=0.95, help="of visitors who must be served well (default 0.95)")
    server = made.add_argument_group("servers").add_argument
    server("--rows", type=_rows, default="1,2,4,8", metavar="LIST", help="max_rows (default %(default)s; empty: none)")
    server("--adaptive", type=_rows, default=[], metavar="LIST", help="max_rows of servers with --adaptive beside them")
    server("--variant", action="append", default=[], metavar='NAME="ARGUMENTS"', help="further arguments of `serve`")
    server("--side", choices=(*SIDES, "both"), default="both", help="default: both")
    server("--model", help="of server and simulator (default: the embedded one)")
    server("--tokens", type=int, default=1, metavar="N", help="the embedded model with pictures N times as wide")
    server("--stages", type=int, default=1, help="of server and simulator (default 1)")
    server("--load-limit", type=float, default=10.0, metavar="SHARE", help="serve.load, above which sessions are "
           "refused (default 10: so late that service breaks first)")  # fmt: skip
    server("--times", type=Path, metavar="FILE", help="a result whose times the simulator takes, not measured again")
    made.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    made.add_argument("--add", action="store_true", help="keep other variants that --out has, of the same settings")
    made.add_argument("--plot", type=Path, metavar="FILE", help="picture to write: .png or .svg")
    made.add_argument("serve", nargs="*", help="further arguments of `streamdiff serve` for all, after --")
    return made


def check(options: argparse.Namespace) -> tuple[dict[str, float], list[Variant]]:
    """The limits and the variants. Raises ValueError or ConfigError for options that cannot be."""
    for name, least in (("halvings", 0), ("beyond", 0), ("tokens", 1), ("stages", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} is {getattr(options, name)}, but must be {least} or more")
    if not 0 < options.share <= 1:
        raise ValueError(f"--share is {options.share:g}, but must be above 0 and at most 1")
    if options.tokens > 1 and options.model is not None:
        raise ValueError("--tokens is for the embedded model; leave --model out")
    if options.add and options.out is None:
        raise ValueError("--add needs --out")
    slo.find_tipping(lambda load: load_of(options, load).sessions > 0, options.loads)
    adaptive = [rows_variant(rows, True) for rows in options.adaptive]
    variants = [*map(rows_variant, options.rows), *adaptive, *map(variant_of, options.variant)]
    if options.serve:
        found = [_simulated([*options.serve, *each.words]) for each in variants]
        variants = [
            replace(each, max_rows=rows, adaptive=lower) for each, (rows, lower) in zip(variants, found, strict=True)
        ]
    if not variants or len({variant.name for variant in variants}) < len(variants):
        raise ValueError("give --rows or --variant, each name once")
    for variant in variants:
        if variant.max_rows is not None and not 1 <= variant.max_rows <= 16:
            raise ValueError(f"--rows has {variant.max_rows}, but must be from 1 to 16")
    if options.plot is not None:
        check_plot(options.plot)
    options.sides = SIDES if options.side == "both" else (options.side,)
    return slo.parse(options.slo, LIMITS), variants


def settings_of(options: argparse.Namespace, limits: slo.Slo) -> dict[str, report.Json]:
    """What results have to share to be compared."""
    names = ("seconds", "stay", "fps", "jobs", "job_seconds", "seed", "share", "model", "tokens", "stages")
    return {
        **{name: getattr(options, name) for name in names},
        "load_limit": options.load_limit,
        "slo": dict(limits),
        "serve": list(options.serve),
    }


def earlier(options: argparse.Namespace, settings: Mapping[str, report.Json]) -> dict[str, Any]:
    """The result that --add goes on from, or nothing. Raises ValueError for one of other settings."""
    if not options.add or not options.out.exists():
        return {"results": {}, "times": None}
    stored: dict[str, Any] = json.loads(options.out.read_text())
    if stored.get("settings") != json.loads(json.dumps(settings)):
        raise ValueError(f"--out {options.out.name} has other settings: {json.dumps(stored.get('settings'))}")
    return stored


def rows_of(results: Mapping[str, Any]) -> list[dict[str, report.Value]]:
    """The tipping points, for people."""
    found: list[dict[str, report.Value]] = []
    for name, sides in results.items():
        for side, result in sides.items():
            best = max(result["points"], key=lambda point: point["goodput"])
            found.append(
                {"variant": name, "on": side, "tipping load": result["tipping_load"],
                 "first above": result["first_load_above"], "best goodput": best["goodput"], "at": best["load"]}
            )  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        limits, variants = check(options)
        settings = settings_of(options, limits)
        before = earlier(options, settings)
    except (ValueError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    head = report.header(
        ["benchmarks.capacity", *argv] if argv is not None else None,
        warm_up="two sessions on every server; before each load half a visit, in which people come one by one",
    )
    try:
        made, times = measure(options, limits, variants)
    except (RuntimeError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    for sides in made.values():
        for result in sides.values():
            result |= {"date": head.date, "command": head.command, "load_average": head.hardware["load_average"]}
    joined = before["results"] | {name: before["results"].get(name, {}) | sides for name, sides in made.items()}
    results = dict(sorted(joined.items()))
    print(report.table(rows_of(results)))
    if options.out is not None:
        known = before["times"] if times is None else asdict(times)
        report.write_json(options.out, head, results, benchmark="capacity", settings=settings, times=known)
        print(f"written: {report.public_path(str(options.out.resolve()))}")
    if options.plot is not None:
        load_plot.draw(options.plot, results)
        print(f"written: {report.public_path(str(options.plot.resolve()))}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
