"""A hundred viewers knock at once where few places are left: how soon does each have its answer, and does who watches
already notice?

Starts `streamdiff serve` as a user would, with one real viewer (aiortc, decoding). Then many offers are sent at the
same moment, each over a connection of its own: as many as there are free places must get 201, the rest 503. Who got a
place never connects, and loses it; so the next round finds the same places.

    python -m benchmarks.rush
    python -m benchmarks.rush --count 300 --places 20 --out rush.json
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from aiortc import RTCConfiguration, RTCPeerConnection
from tqdm import tqdm

from benchmarks import peers, report
from benchmarks.browser import SERVE, Server, running_server
from streamdiff import clock

OK, WRONG = 0, 1
WARM_FRAMES = 80
LIMIT_S = 60.0


@dataclass(frozen=True)
class Rush:
    """One round: what each offer was answered, and when, in seconds since the first was sent; and the longest time that
    the one who watched got no frame meanwhile."""

    statuses: list[int]
    answered_s: list[float]
    gap_s: float

    def last_s(self, status: int) -> float:
        """When the last offer was answered so."""
        return max(
            (at_s for each, at_s in zip(self.statuses, self.answered_s, strict=True) if each == status), default=0
        )


@dataclass
class Watching:
    """When the one who watches got its frames."""

    frames_s: list[float] = field(default_factory=list)

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """The longest time without a frame that touches the interval."""
        gaps = (after - before for before, after in pairwise(self.frames_s) if after > begin_s and before < end_s)
        return max(gaps, default=0.0)


def is_right(rush: Rush, free: int) -> bool:
    """Whether exactly the free places were given, and everybody else was told that there is none."""
    return rush.statuses.count(201) == free and rush.statuses.count(503) == len(rush.statuses) - free


def figures(rounds: Sequence[Rush]) -> dict[str, float]:
    """By name in `metrics.METRICS`."""
    return {
        "refused_s": median(each.last_s(503) for each in rounds),
        "refused_worst_s": max(each.last_s(503) for each in rounds),
        "placed_s": median(each.last_s(201) for each in rounds),
        "gap_worst_s": max(each.gap_s for each in rounds),
    }


async def _offer() -> str:
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    pc.addTransceiver("video", direction="recvonly")
    await pc.setLocalDescription(await pc.createOffer())
    text = str(pc.localDescription.sdp)
    await pc.close()
    return text


async def _round(http: httpx.AsyncClient, url: str, count: int, watching: Watching) -> Rush:
    offer = await _offer()
    begin_s = clock.monotonic_s()
    locations = []

    async def knock() -> tuple[int, float]:
        response = await http.post(url, content=offer, headers=peers.SDP | {"Connection": "close"})
        if response.status_code == 201:
            locations.append(response.headers["location"])
        return response.status_code, clock.monotonic_s() - begin_s

    answers = await asyncio.gather(*(knock() for _ in range(count)))
    end_s = clock.monotonic_s()
    for location in locations:  # leaves at once, so that the next round need not wait for it to be given up
        await http.delete(httpx.URL(url).join(location))
    while not watching.frames_s or watching.frames_s[-1] < end_s:
        await asyncio.sleep(0.01)
    return Rush(
        [status for status, _ in answers], [at_s for _, at_s in answers], watching.longest_gap_s(begin_s, end_s)
    )


async def _measure(server: Server, count: int, repeats: int) -> list[Rush]:
    url, watching = server.url + "whep", Watching()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=LIMIT_S, limits=limits) as http:
        pc, _ = await peers.watch(http, url, True, look=lambda _: watching.frames_s.append(clock.monotonic_s()))
        try:
            rounds = []
            for _ in tqdm(range(repeats), desc="rounds", dynamic_ncols=True):
                before = len(watching.frames_s)
                while len(watching.frames_s) < before + WARM_FRAMES:
                    await asyncio.sleep(0.01)
                rounds.append(await _round(http, url, count, watching))
            return rounds
        finally:
            await pc.close()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.rush", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--count", type=int, default=100, help="offers at once (default 100)")
    made.add_argument("--places", type=int, default=9, help="places, one of them taken (default 9)")
    made.add_argument("--repeats", type=int, default=5, help="rounds (default 5)")
    made.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    made.add_argument("serve", nargs="*", help="further arguments of `streamdiff serve`, after --")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON; the exit code says whether every answer was the right one."""
    made = parser()
    options = made.parse_args(argv)
    for name, least in (("count", 1), ("places", 2), ("repeats", 1)):
        if getattr(options, name) < least:
            made.error(f"--{name} is {getattr(options, name)}, but must be {least} or more")
    head = report.header(
        ["benchmarks.rush", *argv] if argv is not None else None,
        warm_up=f"{WARM_FRAMES} frames at the one who watches before each round",
    )
    command = (*SERVE, "--max-viewers", str(options.places), "--address-share", "1", *options.serve)
    with running_server(command) as server:
        rounds = asyncio.run(_measure(server, options.count, options.repeats))
    right = sum(is_right(each, options.places - 1) for each in rounds)
    label = f"tiny, {options.count} at once, {options.places - 1} places free"
    found = figures(rounds)
    print(report.table([{"case": label, **found, "right": f"{right} of {len(rounds)}"}]))
    if options.out is not None:
        settings = {label: {name: getattr(options, name) for name in ("count", "places", "repeats", "serve")}}
        result: dict[str, Any] = {"figures": found, "right": right, "rounds": [vars(each) for each in rounds]}
        report.write_json(options.out, head, {label: result}, benchmark="rush", settings=settings)
    return OK if right == len(rounds) else WRONG


if __name__ == "__main__":
    sys.exit(main())
