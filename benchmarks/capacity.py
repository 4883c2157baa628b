"""How many fit: live sessions come at a given rate, and how many of them are served well?

Starts `streamdiff serve` once for each variant and climbs a ladder of loads until too few visitors are served as --slo
says; the load before is the tipping point. A visitor opens a session, watches it as an aiortc peer that takes every
packet but decodes nothing, sets other prompts, and ends the session. Nobody waits for anybody else's end.

    python -m benchmarks.capacity --loads 2,4,6 --rows 1,4 --seconds 15
    python -m benchmarks.capacity --rows 1,2,4,8 --adaptive 1,4 --out mine.json
    python -m benchmarks.capacity --rows "" --variant "two=--max-rows 2" --variant "codec=--codec vp8"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml
from aiortc import InvalidStateError, RTCDataChannel, RTCPeerConnection

from benchmarks import peers, report, slo
from benchmarks.browser import SERVE, running_server
from benchmarks.slo import PROMPTS, Slo, spread
from streamdiff import clock

OK, FAILED, USAGE = 0, 1, 2
SLO = "first_frame=2,stalls=0,rate=0.9,control=4"
LIMITS = {
    "first_frame": "seconds from the request to the first frame, at most",
    "stalls": "times that the picture stood, at most",
    "rate": "frames shown of those due, a share, at least",
    "control": "seconds from a prompt to its first frame on show, every prompt, at most",
}
LEAST_S = 3.0
"""The shortest visit, and how long it lasts after a prompt at least: less than that says nothing."""
PROMPT_S = 4.0
"""Seconds between two prompts of a visitor, on average."""
STILL_SHARE = 0.5
"""The picture stood between two looks where less of the frames due were new."""
LIMIT_S = 60.0
"""An answer that takes longer is no answer."""
_ERRORS = (httpx.HTTPError, RuntimeError, ConnectionError, InvalidStateError, ValueError)
"""What a server and a line can do to a visitor; ValueError: an answer that is no JSON."""


# ---- who comes when ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visitor:
    """Opens a session at `at_s`, watches it for `stay_s`, and sets another prompt at each of `prompts_s`, which count
    from the arrival."""

    at_s: float
    stay_s: float
    seed: int
    prompts_s: tuple[float, ...] = ()

    def prompt(self, number: int) -> str:
        """Its first prompt is number 0."""
        return PROMPTS[(self.seed + number) % len(PROMPTS)]


def exponentials(seed: str) -> Iterator[float]:
    """Draws of the unit exponential, of which any eight that begin at a multiple of eight are one from each eighth of
    the distribution: so short runs too have about the load that was asked for."""
    own = Random(seed)
    while True:
        for eighth in own.sample(range(8), 8):
            yield -math.log(1 - (eighth + own.random()) / 8)


def visitors(sessions: float, seconds: float, stay_s: float, seed: int) -> list[Visitor]:
    """In the order in which they come: for `seconds`, so many `sessions` at once on average, each of which stays for
    `stay_s` on average. Before, in `stay_s / 2`, as many come one after the other. The same seed gives the same people
    at every load: only the time between them differs."""
    gaps, stays, people = exponentials(f"visitors {seed}"), exponentials(f"stays {seed}"), round(sessions)
    begin_s, end_s = stay_s / 2, stay_s / 2 + seconds
    times = [begin_s * number / people for number in range(people)]
    # By Little's law so many are there on average as come while one stays.
    at_s = begin_s + next(gaps) * stay_s / sessions
    while at_s < end_s:
        times.append(at_s)
        at_s += next(gaps) * stay_s / sessions
    found = []
    for number, at_s in enumerate(times):
        own = Random(f"visitor {seed} {number}")
        own_s = min(LEAST_S + next(stays) * (stay_s - LEAST_S), end_s + LEAST_S - at_s)
        prompts, prompt_s = [], own.expovariate(1.0) * PROMPT_S
        while prompt_s < own_s - LEAST_S:
            prompts.append(prompt_s)
            prompt_s += own.expovariate(1.0) * PROMPT_S
        found.append(Visitor(at_s, own_s, number, tuple(prompts)))
    return found


# ---- what they get -----------------------------------------------------------------------------------------------


@dataclass
class Visit:
    """What a visitor got. Times in seconds of one clock.

    `looks`: (time, frames shown so far) again and again, from the first frame on. `controls`: of every prompt, how long
    it took to be seen, or until the visitor left in vain. `refused`: why there was no session, a word; `received`:
    frames that came in over the network.
    """

    at_s: float
    leaves_s: float
    first_frame_s: float | None = None
    looks: list[tuple[float, int]] = field(default_factory=list)
    controls: list[float] = field(default_factory=list)
    refused: str = ""
    received: int = 0

    def stalls(self, fps: float) -> int:
        """Times that the picture stood: looks that follow each other are one stall."""
        still = [
            frames - before < STILL_SHARE * fps * (at_s - was_s)
            for (was_s, before), (at_s, frames) in pairwise(self.looks)
        ]
        return sum(now and not before for before, now in pairwise([False, *still]))

    def rate(self, fps: float) -> float | None:
        """Share of the frames due that were shown, 1 at most; None for a visit that was too short to tell."""
        if len(self.looks) < 2 or self.looks[-1][0] <= self.looks[0][0]:
            return None
        (begin_s, first), (end_s, last) = self.looks[0], self.looks[-1]
        return min(1.0, (last - first + 1) / (fps * (end_s - begin_s)))  # the latest may be due just after the look

    def broken(self, limits: Slo, fps: float) -> list[str]:
        """Why this visitor was not served well; empty: was."""
        if self.refused:
            return [self.refused]
        rate = self.rate(fps)
        found = {
            "first_frame": self.first_frame_s,
            "stalls": float(self.stalls(fps)),
            "rate": 1.0 if rate is None and self.first_frame_s is not None else rate,
            "control": max(self.controls, default=0.0),
        }
        return slo.broken(found, limits)


def figures(visits: Sequence[Visit], limits: Slo, fps: float, begin_s: float, end_s: float) -> dict[str, report.Json]:
    """What the visits come to, between two times. `offered` and `goodput` are sessions at once on average: those who
    came, and those of them who were served well."""
    why = [visit.broken(limits, fps) for visit in visits]
    seconds = [max(0.0, min(visit.leaves_s, end_s) - max(visit.at_s, begin_s)) for visit in visits]
    good_s = sum(time_s for time_s, reasons in zip(seconds, why, strict=True) if not reasons)
    well = sum(not reasons for reasons in why)
    seen = [visit for visit in visits if visit.first_frame_s is not None]
    shown = sum(visit.looks[-1][1] for visit in seen if visit.looks)
    return {
        "visits": len(visits),
        "served_well": well,
        "served_share": well / len(visits) if visits else 1.0,
        "offered": round(sum(seconds) / (end_s - begin_s), 3),
        "goodput": round(good_s / (end_s - begin_s), 3),
        "first_frame_s": spread([visit.first_frame_s for visit in seen if visit.first_frame_s is not None]),
        "control_s": spread([lag_s for visit in seen for lag_s in visit.controls]),
        # The slowest are the high percentiles here, as with seconds.
        "short_of_rate": spread([1 - rate for visit in seen if (rate := visit.rate(fps)) is not None]),
        "stalls": sum(visit.stalls(fps) for visit in visits),
        "received_share": round(sum(visit.received for visit in seen if visit.looks) / shown, 3) if shown else None,
        "broken": dict(Counter(reason for reasons in why for reason in reasons)),
    }


# ---- at a running server -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Viewer:
    """The end of one visitor's data channel: what it hears goes into `visit`."""

    visit: Visit
    asked_s: dict[str, float] = field(default_factory=dict)  # prompts that were not seen yet, by id
    channel: asyncio.Future[RTCDataChannel] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def hear(self, text: str) -> None:
        """The server said something. Mutates: self."""
        message, now_s = json.loads(text), clock.monotonic_s()
        if message["type"] == "stats" and message["frame"] >= 0:
            self.visit.looks.append((now_s, message["frame"] + 1))
        seen = message["type"] == "receipt" and message["stage"] in ("shown", "superseded")
        if seen and (asked_s := self.asked_s.pop(message["id"], None)) is not None:
            self.visit.controls.append(now_s - asked_s)

    async def say(self, id: str, prompt: str) -> None:
        """Set another prompt, as soon as there is a channel; it counts from now on. Mutates: self."""
        self.asked_s[id] = clock.monotonic_s()
        channel = await asyncio.shield(self.channel)  # a visit that ends meanwhile must not end it
        channel.send(json.dumps({"type": "prompt", "id": id, "prompt": prompt, "switch": "keep"}))


async def visit_of(http: httpx.AsyncClient, url: str, fps: float, visitor: Visitor, zero_s: float) -> Visit:
    """One visit at the server at `url`, whose times count from `zero_s`; the record's too."""
    await _until(zero_s + visitor.at_s)
    leaves_s = zero_s + visitor.at_s + visitor.stay_s
    visit = Visit(clock.monotonic_s(), leaves_s)
    pc: RTCPeerConnection | None = None
    session, seen, viewer = dict[str, Any](), peers.Seen(), _Viewer(visit)
    try:
        body = {"prompt": visitor.prompt(0), "seed": visitor.seed, "fps": fps}
        answer = await http.post(f"{url}api/sessions", json=body)  # also after its time: else nobody would end it
        reply = answer.json()
        if answer.status_code != 201:
            visit.refused = str(reply.get("code", f"http {answer.status_code}"))
        else:
            session = reply
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + leaves_s - clock.monotonic_s()):
                whep, opened = url.rstrip("/") + session["whep"], viewer.channel.set_result
                pc, seen = await peers.watch(
                    http, whep, False, hear=viewer.hear, opened=opened, token=session["control_token"]
                )
                for number, after_s in enumerate(visitor.prompts_s, start=1):
                    await _until(zero_s + visitor.at_s + after_s)
                    await viewer.say(f"p{number}", visitor.prompt(number))
                await _until(leaves_s)
    except TimeoutError:
        pass  # left: before there was anything to see, or at the end
    except _ERRORS as error:
        visit.refused = f"error: {type(error).__name__}"
    await _until(leaves_s)
    visit.controls += [clock.monotonic_s() - asked_s for asked_s in viewer.asked_s.values()]
    if pc is not None:
        await pc.close()
    if session:
        await _end(http, f"{url}api/sessions/{session['id']}", peers.bearer(session["control_token"]), visit)
    visit.received = seen.frames
    visit.first_frame_s = None if seen.first_s is None else seen.first_s - visit.at_s
    visit.at_s, visit.leaves_s = visit.at_s - zero_s, visit.leaves_s - zero_s
    visit.looks = [(at_s - zero_s, frames) for at_s, frames in visit.looks]
    return visit


async def _end(http: httpx.AsyncClient, url: str, headers: dict[str, str], visit: Visit) -> None:
    """Mutates: visit, where the server does not end the session."""
    try:
        answer = await http.delete(url, headers=headers)
    except httpx.HTTPError:  # it ends by itself when nobody watches
        return
    if answer.status_code != 200:
        visit.refused = visit.refused or f"error: end http {answer.status_code}"


async def _until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - clock.monotonic_s()))


async def play(url: str, fps: float, who: Sequence[Visitor]) -> list[Visit]:
    """Let them come, until the last one has left."""
    zero_s = clock.monotonic_s()
    async with httpx.AsyncClient(timeout=LIMIT_S, limits=httpx.Limits(max_connections=None)) as http:
        return list(await asyncio.gather(*(visit_of(http, url, fps, visitor, zero_s) for visitor in who)))


# ---- variants and loads ------------------------------------------------------------------------------------------


def variant_of(text: str) -> tuple[str, tuple[str, ...]]:
    """`NAME=ARGUMENTS` as a name and further arguments of `serve`. Raises ValueError without a name."""
    name, separator, words = text.partition("=")
    if not name.strip() or not separator:
        raise ValueError(f'--variant is {text!r}, but must be NAME="ARGUMENTS"; they may be empty')
    return name.strip(), tuple(shlex.split(words))


def rows_variant(rows: int, adaptive: bool) -> tuple[str, tuple[str, ...]]:
    words = ("--max-rows", str(rows)) if rows > 1 else ()
    return (f"max_rows {rows}, adaptive", (*words, "--adaptive")) if adaptive else (f"max_rows {rows}", words)


def measure(options: argparse.Namespace, limits: Slo, name: str, words: Sequence[str]) -> dict[str, Any]:
    """All points of one variant, at a server of its own, and its tipping point; one load more is tried beyond it. One
    address is everybody here, and a spare engine would take memory only."""
    serve = {"warm_standby": False, "max_viewers": 1000, "address_share": 1.0, "max_utilization": options.load_limit}
    points: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="streamdiff-") as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump({"serve": serve}))
        with running_server([*SERVE, "--config", str(config), *options.serve, *words]) as server:
            asyncio.run(play(server.url, options.fps, visitors(2, 1.0, 4.0, options.seed)))  # first calls
            for load in options.loads:
                who = visitors(load, options.seconds, options.stay, options.seed)
                visits = asyncio.run(play(server.url, options.fps, who))
                span_s = (options.stay / 2, options.stay / 2 + options.seconds)
                points.append({"load": load, **figures(visits, limits, options.fps, *span_s)})
                share = points[-1]["served_share"]
                print(f"{name}: {load:g} at once, {share:.0%} served well", file=sys.stderr, flush=True)
                if len(points) > 1 and points[-2]["served_share"] < options.share:
                    break
    return tipping(points, options.share) | {"points": points}


def tipping(points: Sequence[dict[str, Any]], share: float) -> dict[str, float | None]:
    """The largest load up to which enough visitors were served well, and the first at which they were not; None where
    not even the least was served, or all were."""
    failed = [number for number, point in enumerate(points) if point["served_share"] < share]
    first = failed[0] if failed else len(points)
    return {
        "tipping_load": points[first - 1]["load"] if first else None,
        "first_load_above": points[first]["load"] if failed else None,
    }


# ---- options and output ------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--loads", type=lambda text: [float(word) for word in text.split(",")], default="2,4,6,8,10", metavar="LIST",
        help="sessions at once (default %(default)s)")  # fmt: skip
    add("--seconds", type=float, default=20.0, help="of each load (default 20)")
    add("--stay", type=float, default=8.0, help="seconds of a visit on average (default 8)")
    add("--fps", type=float, default=10.0, help="frames shown per second to each visitor (default 10)")
    add("--seed", type=int, default=0, help="of who comes when (default 0)")
    add("--slo", default=SLO, metavar="LIMITS", help=f"of {', '.join(LIMITS)} (default {SLO})")
    add("--share", type=float, default=0.95, help="of visitors who must be served well (default 0.95)")
    for name, default in (("rows", "1,2,4,8"), ("adaptive", "")):
        add(f"--{name}", type=lambda text: [int(word) for word in text.split(",")] if text else [], default=default,
            metavar="LIST", help="max_rows of servers" + (", with --adaptive" if name == "adaptive" else "")
            + f" (default {default or 'none'})")  # fmt: skip
    add("--variant", action="append", default=[], metavar='NAME="ARGUMENTS"', help="further arguments of `serve`")
    add("--load-limit", type=float, default=10.0, metavar="SHARE", help="serve.max_utilization, above which sessions "
        "are refused (default 10: so late that service breaks first)")  # fmt: skip
    add("--out", type=Path, metavar="FILE", help="JSON file to write")
    add("serve", nargs="*", help="further arguments of `streamdiff serve` for all, after --")
    return made


def check(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, tuple[str, ...]]]:
    """The limits, and the variants by name. Raises ValueError for options that cannot be."""
    for name, least in (("seconds", 0.0), ("stay", LEAST_S), ("fps", 0.0), ("share", 0.0)):
        if not getattr(options, name) > least:
            raise ValueError(f"--{name} is {getattr(options, name):g}, but must be above {least:g}")
    if options.share > 1:
        raise ValueError(f"--share is {options.share:g}, but must be at most 1")
    if options.loads != sorted(set(options.loads)) or options.loads[0] <= 0:
        raise ValueError(f"--loads are {options.loads}, but must be above 0 and rise")
    rows = [(each, False) for each in options.rows] + [(each, True) for each in options.adaptive]
    variants = [*(rows_variant(*each) for each in rows), *map(variant_of, options.variant)]
    if not variants or len(dict(variants)) < len(variants):
        raise ValueError("give --rows or --variant, each name once")
    if wrong := [each for each, _ in rows if not 1 <= each <= 16]:
        raise ValueError(f"--rows has {wrong[0]}, but must be from 1 to 16")
    return slo.parse(options.slo, LIMITS), dict(variants)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        limits, variants = check(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    head = report.header(
        ["benchmarks.capacity", *argv] if argv is not None else None,
        warm_up="two sessions on every server; before each load half a visit, in which people come one by one",
    )
    try:
        results = {name: measure(options, limits, name, words) for name, words in variants.items()}
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    print(report.table([{"variant": name, "tipping load": each["tipping_load"], "first above": each["first_load_above"],
                         "best goodput": max(point["goodput"] for point in each["points"])}
                        for name, each in results.items()]))  # fmt: skip
    if options.out is not None:
        names = ("seconds", "stay", "fps", "seed", "share", "load_limit")
        settings: dict[str, report.Json] = {name: getattr(options, name) for name in names}
        settings |= {"slo": limits, "serve": list(options.serve)}
        report.write_json(options.out, head, results, benchmark="capacity", settings=settings)
        print(f"written: {report.public_path(str(options.out.resolve()))}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
