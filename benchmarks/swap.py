"""Many sessions on memory for few, watched in turn: is anybody refused, is anything lost, and how soon is there a
picture after a switch?

Starts `streamdiff serve` with the embedded model, memory for `--play` sessions, host memory for `--host` more and the
disk for the rest, and opens `--sessions` of them over the API. One viewer (aiortc, decoding) then watches one after the
other: each has been swapped out before its turn, and goes on where it was.

    python -m benchmarks.swap
    python -m benchmarks.swap --sessions 8 --play 2 --host 3 --out swap.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks import peers, report
from benchmarks.browser import SERVE, Server, running_server
from streamdiff import clock

OK, WRONG = 0, 1
SESSION_BYTES = 4_554_752
"""Of a session of the embedded model on one stage; `GET /api/sessions` says whether so many fit."""
LIMIT_S = 120.0
LOOK_S = 0.02
FRAMES = 10
"""So many new ones are watched of each before the next."""


@dataclass(frozen=True)
class Switch:
    """One turn: where the session lay; seconds from the viewer's offer to its first picture, and until a chunk was made
    that had not been made before; and whether frame numbers went on."""

    place: str
    picture_s: float
    made_s: float
    kept: bool


def figures(switches: Sequence[Switch]) -> dict[str, float]:
    """By name in `metrics.METRICS`."""
    found = {}
    for name in ("picture", "made"):
        times = [getattr(each, f"{name}_s") for each in switches]
        found[f"switch_{name}_s"] = median(times)
        found[f"switch_{name}_p95_s"] = quantiles(times, n=20)[-1] if len(times) > 1 else times[0]
    return found


def settings(play: int, host: int, folder: Path) -> dict[str, Any]:
    """The server's configuration."""
    return {
        "model": {"steps": 2, "memory_gb": (play + 0.5) * SESSION_BYTES / 1e9},
        "serve": {
            "host_memory_gb": (host + 0.5) * SESSION_BYTES / 1e9, "state_dir": str(folder / "state"),
            "grace_s": 0.0, "idle_s": None, "lifetime_s": None, "spare": False, "load": 10.0,
        },
    }  # fmt: skip


async def _stats(http: httpx.AsyncClient, session: str) -> tuple[str, int, int]:
    """Where it lies; its latest frame on show; how many were made."""
    said = (await http.get(f"api/sessions/{session}")).json()
    stats = said["stats"]
    return said["place"], stats["frame"], stats["frame"] + stats["buffered"]


async def _watch(http: httpx.AsyncClient, session: str) -> Switch:
    place, frame, made = await _stats(http, session)
    pictures: list[float] = []
    begin_s = clock.monotonic_s()
    pc, _ = await peers.watch(
        http, str(http.base_url.join(f"whep/{session}")), True, look=lambda _: pictures.append(clock.monotonic_s())
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            while (now := await _stats(http, session))[2] <= made or not pictures:
                await asyncio.sleep(LOOK_S)
            made_s = clock.monotonic_s() - begin_s
            while (now := await _stats(http, session))[1] < frame + FRAMES:
                await asyncio.sleep(LOOK_S)
        return Switch(place, pictures[0] - begin_s, made_s, now[1] >= frame)
    finally:
        await pc.close()


async def _measure(server: Server, sessions: int, play: int, fps: float) -> list[Switch]:
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as http:
        fit = (await http.get("api/sessions")).json()["capacity"]["sessions_fit"]
        if fit != play:
            raise RuntimeError(f"{fit} sessions fit, not {play}: SESSION_BYTES is of another model or version")
        await http.delete("api/sessions/default")
        names: list[str] = []
        for _ in tqdm(range(sessions), desc="open", dynamic_ncols=True):
            body = {"prompt": "a red circle moving left", "seed": len(names), "fps": fps}
            answer = await http.post("api/sessions", json=body)
            if answer.status_code != 201:
                raise RuntimeError(f"session {len(names)} was refused: {answer.text}")
            names.append(answer.json()["id"])
        turns = [await _watch(http, name) for name in tqdm([*names, *names[:1]], desc="watch", dynamic_ncols=True)]
        return turns[1:]  # the first has loaded codecs, and comes again at the end


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.swap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--sessions", type=int, default=50, help="sessions that are open (default 50)")
    made.add_argument("--play", type=int, default=4, help="that the memory holds (default 4)")
    made.add_argument("--host", type=int, default=20, help="that host memory holds beside them (default 20)")
    made.add_argument("--fps", type=float, default=20.0, help="frames a second that each shows (default 20)")
    made.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON; the exit code says whether nothing was lost."""
    made = parser()
    options = made.parse_args(argv)
    for name, least in (("sessions", 2), ("play", 1), ("host", 0)):
        if getattr(options, name) < least:
            made.error(f"--{name} is {getattr(options, name)}, but must be {least} or more")
    head = report.header(
        ["benchmarks.swap", *argv] if argv is not None else None, warm_up="the first session's first turn"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "swap.yaml"
        config.write_text(json.dumps(settings(options.play, options.host, folder)))  # JSON is YAML
        with running_server((*SERVE, "--config", str(config))) as server:
            switches = asyncio.run(_measure(server, options.sessions, options.play, options.fps))
    kept, found = sum(each.kept for each in switches), figures(switches)
    places = {place: sum(each.place == place for each in switches) for place in ("device", "host", "disk")}
    label = f"tiny, {options.sessions} sessions on memory for {options.play}"
    print(report.table([{"case": label, **found, "from": str(places), "kept": f"{kept} of {len(switches)}"}]))
    if options.out is not None:
        chosen = {label: {name: getattr(options, name) for name in ("sessions", "play", "host", "fps")}}
        result: dict[str, Any] = {
            "figures": found,
            "kept": kept,
            "from": places,
            "switches": [asdict(each) for each in switches],
        }
        report.write_json(options.out, head, {label: result}, benchmark="swap", settings=chosen)
    return OK if kept == len(switches) else WRONG


if __name__ == "__main__":
    sys.exit(main())
