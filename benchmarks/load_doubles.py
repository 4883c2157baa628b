"""The load of a server doubles for a while and falls back: do viewers see pictures stand, with and without
`--adaptive`?

Starts `streamdiff serve` as a user would, opens sessions, and has the first half of them watched (aiortc, decoding).
Then viewers come to the other half, which asks nobody for room, and leave again. The frame rate is chosen so that the
first half takes `--load` of the engine's time, as it measured itself.

    python -m benchmarks.load_doubles
    python -m benchmarks.load_doubles --sessions 2 --load 0.6 --seconds 30 --out load_doubles.json

`benchmarks.simulated_load` shows the same under virtual time.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from benchmarks import peers, report
from benchmarks.browser import SERVE, running_server
from streamdiff import clock

OK = 0
WARM_S = 10.0
RESERVED_S = 32.0
"""A session that nobody watches keeps its share for 30 s after it was opened."""
REPEATED = re.compile(r'^streamdiff_slots_repeated_total\{session="([^"]+)"\} (\S+)$', re.MULTILINE)
CHANGES = re.compile(r'^streamdiff_load_changes_total\{direction="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass
class Watched:
    """A session, and when its viewer got frames."""

    id: str
    frames_s: list[float] = field(default_factory=list)
    pc: Any = None

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """The longest time without a frame that ends within the interval."""
        gaps = (after - before for before, after in pairwise(self.frames_s) if begin_s < after <= end_s)
        return max(gaps, default=0.0)


async def _open(http: httpx.AsyncClient, count: int, fps: float) -> list[Watched]:
    """Open sessions, each when those before have given up their reserved shares."""
    opened = []
    for _ in range(count):
        response = await http.post("api/sessions", json={"fps": fps})
        while response.status_code == 503:
            await asyncio.sleep(1)
            response = await http.post("api/sessions", json={"fps": fps})
        opened.append(Watched(response.raise_for_status().json()["id"]))
    return opened


async def _watch(http: httpx.AsyncClient, session: Watched) -> None:
    def look(_: Any) -> None:
        session.frames_s.append(clock.monotonic_s())

    session.pc, _ = await peers.watch(http, f"whep/{session.id}", True, look=look)


async def _repeated(http: httpx.AsyncClient) -> dict[str, float]:
    return {name: float(count) for name, count in REPEATED.findall((await http.get("metrics")).text)}


async def _holds(http: httpx.AsyncClient, sessions: Sequence[Watched]) -> list[list[float]]:
    """Steps and frame rate of each."""
    found = {each["id"]: each for each in (await http.get("api/sessions")).json()["sessions"]}
    return [[found[each.id]["steps"], found[each.id]["fps"]] for each in sessions]


async def _measure(url: str, sessions: int, load: float, seconds: float) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        await http.delete("api/sessions/default")
        capacity = (await http.get("api/sessions")).json()["capacity"]
        fps = min(60.0, max(1.0, round(load / sessions * capacity["chunk_frames"] / capacity["work_s"], 1)))
        stay, come = await _open(http, sessions, fps), await _open(http, sessions, fps)
        await asyncio.sleep(RESERVED_S)
        for session in stay:
            await _watch(http, session)
        await asyncio.sleep(WARM_S)
        begin_s, before, at_first = clock.monotonic_s(), await _repeated(http), await _holds(http, stay)
        for session in come:
            await _watch(http, session)
        await asyncio.sleep(seconds)
        doubled_s, after, doubled = clock.monotonic_s(), await _repeated(http), await _holds(http, stay)
        for session in come:
            await session.pc.close()
        await asyncio.sleep(seconds)
        last = await _holds(http, stay)
        for session in stay:
            await session.pc.close()
        changes = {way: float(count) for way, count in CHANGES.findall((await http.get("metrics")).text)}
    repeated = sum(after.get(each.id, 0) - before.get(each.id, 0) for each in stay)
    return {
        "fps": fps,
        "work_s": capacity["work_s"],
        "waited_s": repeated / fps / sessions,
        "gap_worst_s": max(each.longest_gap_s(begin_s, doubled_s) for each in stay),
        "changes": sum(changes.values()),
        "holds": {"before": at_first, "doubled": doubled, "after": last},
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.load_doubles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--sessions", type=int, default=2, help="before the load doubles (default 2)")
    made.add_argument("--load", type=float, default=0.6, help="their share of the engine's time (default 0.6)")
    made.add_argument("--seconds", type=float, default=30.0, help="of double load, and after it (default 30)")
    made.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    made.add_argument("serve", nargs="*", help="further arguments of `streamdiff serve`, after --")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure with and without, print, and write JSON."""
    made = parser()
    options = made.parse_args(argv)
    for name in ("sessions", "load", "seconds"):
        if getattr(options, name) <= 0:
            made.error(f"--{name} is {getattr(options, name)}, but must be above 0")
    head = report.header(
        ["benchmarks.load_doubles", *argv] if argv is not None else None,
        warm_up=f"{WARM_S:g} s of video at those who watch before the load doubles",
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text("serve:\n  idle_s: null\n  grace_s: 0.5\n", encoding="utf-8")
        for case, flags in (("adaptive", ["--adaptive"]), ("as ever", [])):
            command = (*SERVE, "--config", str(config), "--address-share", "1", *flags, *options.serve)
            with running_server(command) as server:
                measured = _measure(server.url, options.sessions, options.load, options.seconds)
                results[f"tiny, {options.sessions} sessions doubled, {case}"] = asyncio.run(measured)
    shown = ("fps", "waited_s", "gap_worst_s", "changes")
    print(report.table([{"case": case, **{name: found[name] for name in shown}} for case, found in results.items()]))
    for case, found in results.items():
        print(f"{case}: {found['holds']}")
    if options.out is not None:
        settings = {name: getattr(options, name) for name in ("sessions", "load", "seconds", "serve")}
        report.write_json(
            options.out, head, results, benchmark="load_doubles", settings={case: settings for case in results}
        )
    return OK


if __name__ == "__main__":
    sys.exit(main())
