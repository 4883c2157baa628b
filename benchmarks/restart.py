"""How long viewers wait when a rank of the engine is killed: until they are told, and until they see new pictures.

Starts `streamdiff serve` as a user would, with real aiortc viewers that decode what they get and listen on a data
channel, as the page does. Then `kill -9` to one process of the engine, again and again, and each time the clock runs
from the kill until every viewer has decoded a new picture, over the connection it had. Restarts come at once here; a
server makes the second one within five minutes wait half a second, and later ones longer.
With --keep-s streams go on from what was kept of them; `kept_past` is the most seconds of a stream that a kill lost.
Each kill comes after so many seconds of video that the spare engine is ready (`serve.warm_standby`); `--rest 0` does
not wait.

    python -m benchmarks.restart
    python -m benchmarks.restart --no-spare --rest 0
    python -m benchmarks.restart --keep-s 5
    python -m benchmarks.restart --stages 2 --rank 1 --out restart.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import psutil
import yaml
from aiortc import RTCPeerConnection
from av import VideoFrame
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks import peers, report
from benchmarks.browser import SERVE, Server, running_server
from streamdiff import clock

_PATCH = "from streamdiff.engine.process import supervisor; supervisor.FIRST_WAIT_S = 0.0; import streamdiff.__main__"
AT_ONCE = (*SERVE[:1], "-c", _PATCH, *SERVE[3:])
"""`streamdiff serve` that starts every engine at once."""
OK, LOST, STOPPED = 0, 1, 128 + signal.SIGTERM
LIMIT_S = 300.0
STEADY_FRAMES = 40
"""Pictures that differ from the one before, at every viewer, before a kill."""
_LOST = "streamdiff_lost_seconds_total "
_LEVELS, _SHARE = 32, 0.002
"""A picture is another one where so large a share of its pixels differs by so many of 256 levels: a shape that moves by
two pixels has four times that, while a picture that is sent again differs by what the codec does to it."""


@dataclass(eq=False)
class Viewer:
    """What one viewer has seen and heard: when each picture came that was another than the one before, when the server
    told which state of the engine, and what became of the connection."""

    changes_s: list[float] = field(default_factory=list)
    engine: list[tuple[float, str]] = field(default_factory=list)
    pc: RTCPeerConnection | None = None
    states: list[str] = field(default_factory=list)
    _last: NDArray[np.uint8] | None = None

    def look(self, frame: VideoFrame) -> None:
        """A picture was decoded. Mutates: self."""
        picture: NDArray[np.uint8] = np.asarray(frame.to_ndarray(format="gray"), np.uint8)
        if self._last is not None and is_other(self._last, picture):
            self.changes_s.append(clock.monotonic_s())
        self._last = picture

    def hear(self, text: str) -> None:
        """The server said something on the data channel. Mutates: self."""
        message = json.loads(text)
        if message["type"] == "state":
            self.engine.append((clock.monotonic_s(), message["engine"]))

    def heard(self, state: str, after_s: float) -> float | None:
        """When it heard of this state first, after `after_s`."""
        return next((at_s for at_s, told in self.engine if at_s > after_s and told == state), None)

    def changed(self, after_s: float) -> float | None:
        """When the first new picture came after `after_s`."""
        return next((at_s for at_s in self.changes_s if at_s > after_s), None)


@dataclass(frozen=True)
class Restart:
    """Seconds from the kill: until the server told that it restarts, until it told that the engine runs, and by viewer
    until the first new picture. `still_s` is by viewer how long the picture stood."""

    told_s: float
    running_s: float
    resumed_s: list[float]
    still_s: list[float]
    kept: int
    kept_past: float | None = None
    """Seconds of the stream that are lost; None: it began afresh."""


def is_other(before: NDArray[np.uint8], picture: NDArray[np.uint8]) -> bool:
    """Whether a decoded picture `[H, W]` shows something else than the one before."""
    difference = np.abs(picture.astype(np.int16) - before)
    return float((difference > _LEVELS).mean()) > _SHARE


def of_viewers(viewers: Sequence[Viewer], killed_s: float) -> Restart | None:
    """What a kill at `killed_s` did, or None while not all viewers see new pictures.

    Pictures that were made before the kill are shown after it; new ones come after the engine has opened the stream,
    which the server tells.
    """
    told = [viewer.heard("restarting", killed_s) for viewer in viewers]
    running = [viewer.heard("running", at_s) for viewer, at_s in zip(viewers, told, strict=True) if at_s is not None]
    if None in told or None in running:
        return None
    resumed = [viewer.changed(at_s or 0.0) for viewer, at_s in zip(viewers, running, strict=True)]
    if None in resumed:
        return None
    seen = [at_s for at_s in resumed if at_s is not None]
    last = [max(at_s for at_s in viewer.changes_s if at_s < end) for viewer, end in zip(viewers, seen, strict=True)]
    return Restart(
        told_s=max(at_s for at_s in told if at_s is not None) - killed_s,
        running_s=max(at_s for at_s in running if at_s is not None) - killed_s,
        resumed_s=[at_s - killed_s for at_s in seen],
        still_s=[end - begin for begin, end in zip(last, seen, strict=True)],
        kept=sum(viewer.states == ["connected"] for viewer in viewers),
    )


def figures(restarts: Sequence[Restart]) -> dict[str, float]:
    """By name in `metrics.METRICS`."""
    worst = [max(restart.resumed_s) for restart in restarts]
    lost = [restart.kept_past for restart in restarts if restart.kept_past is not None]
    return {
        **({"kept_past": max(lost)} if lost else {}),
        "told_s": median(restart.told_s for restart in restarts),
        "running_s": median(restart.running_s for restart in restarts),
        "resumed_s": median(worst),
        "resumed_worst_s": max(worst),
        "still_s": median(max(restart.still_s) for restart in restarts),
    }


# ---- measuring ---------------------------------------------------------------------------------------------------


def engine_process(server: Server, rank: int, stages: int) -> psutil.Process:
    """The engine's process of this rank: a child of the web process, or of the launcher of ranks that is one.

    Raises:
        RuntimeError: there is none.
    """
    if stages == 1:
        return server.engine
    ranks = [child for child in server.engine.children() if child.environ().get("RANK") == str(rank)]
    if not ranks:
        raise RuntimeError(f"rank {rank} of the engine is not there")
    return ranks[0]


async def _until(what: str, done: Callable[[], bool]) -> None:
    """Wait. Raises RuntimeError after `LIMIT_S`."""
    end_s = clock.monotonic_s() + LIMIT_S
    while not done():
        if clock.monotonic_s() > end_s:
            raise RuntimeError(f"{what}: not within {LIMIT_S:g} s")
        await asyncio.sleep(0.01)


async def _join(http: httpx.AsyncClient, url: str) -> Viewer:
    viewer = Viewer()
    pc, _ = await peers.watch(http, url, True, look=viewer.look, hear=viewer.hear)
    viewer.states.append(pc.connectionState)
    pc.on("connectionstatechange", lambda: viewer.states.append(pc.connectionState))
    viewer.pc = pc
    return viewer


async def _lost_s(http: httpx.AsyncClient, server: Server) -> float:
    """Seconds of streams that the server has lost so far where they went on from what it had kept."""
    text = (await http.get(server.url + "metrics")).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(_LOST))


async def _restart(server: Server, viewers: Sequence[Viewer], options: argparse.Namespace) -> Restart:
    """One kill after `--rest` seconds, and what follows."""
    await asyncio.sleep(options.rest)
    before = [len(viewer.changes_s) for viewer in viewers]
    await _until(
        "viewers see the stream",
        lambda: all(len(v.changes_s) > seen + STEADY_FRAMES for v, seen in zip(viewers, before, strict=True)),
    )
    process = engine_process(server, options.rank, options.stages)
    killed_s = clock.monotonic_s()
    process.kill()
    await _until("viewers see new pictures after the kill", lambda: of_viewers(viewers, killed_s) is not None)
    found = of_viewers(viewers, killed_s)
    assert found is not None
    return found


async def _measure(server: Server, options: argparse.Namespace) -> list[Restart]:
    task = asyncio.current_task()
    assert task is not None
    # As asyncio does for Ctrl-C: viewers have threads, which end with their connections and not with an exception.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=20))
        viewers = []
        for _ in range(options.viewers):
            viewers.append(await _join(http, server.url + "whep"))
            assert viewers[-1].pc is not None
            stack.push_async_callback(viewers[-1].pc.close)
        found = []
        for _ in tqdm(range(options.repeats), desc="restarts", dynamic_ncols=True):
            before_s = await _lost_s(http, server)
            one = await _restart(server, viewers, options)
            lost_s = await _lost_s(http, server) - before_s
            found.append(one if options.keep_s is None else replace(one, kept_past=lost_s))
        return found


def measure(options: argparse.Namespace) -> list[Restart]:
    """All restarts of a server of its own; see `parser`."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="streamdiff-") as limits:
        # One more than wanted: an engine that cannot start again ends the benchmark with the server's own reason.
        serve = {"max_restarts": options.repeats + 1}
        serve |= {"warm_standby": not options.no_spare, "keep_s": options.keep_s}
        yaml.safe_dump({"serve": serve}, limits)
        limits.flush()
        with running_server(
            (*AT_ONCE, "--config", limits.name, "--stages", str(options.stages), *options.serve)
        ) as server:
            return asyncio.run(_measure(server, options))


# ---- telling -----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.restart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--stages", type=int, default=1, help="ranks of the engine (default 1)")
    made.add_argument("--rank", type=int, default=0, help="which of them is killed (default 0, the head)")
    made.add_argument("--repeats", type=int, default=3, help="kills (default 3)")
    made.add_argument("--rest", type=float, default=25.0, help="seconds of video before each kill (default 25)")
    made.add_argument("--no-spare", action="store_true", help="without a spare engine (serve.warm_standby: false)")
    made.add_argument("--keep-s", type=float, metavar="N", help="keep what plays every N seconds (serve.keep_s)")
    made.add_argument("--viewers", type=int, default=3, help="viewers who watch (default 3)")
    made.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    made.add_argument("serve", nargs="*", help="further arguments of `streamdiff serve`, after --")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    made = parser()
    options = made.parse_args(argv)
    for name in ("stages", "repeats", "viewers"):
        if getattr(options, name) < 1:
            made.error(f"--{name} is {getattr(options, name)}, but must be 1 or more")
    if not 0 <= options.rank < options.stages:
        made.error(f"--rank is {options.rank}, but with --stages {options.stages} it must be 0 to {options.stages - 1}")
    head = report.header(
        ["benchmarks.restart", *argv] if argv is not None else None,
        warm_up=f"{options.rest:g} s and {STEADY_FRAMES} moving pictures at every viewer before each kill",
    )
    try:
        restarts = measure(options)
    except asyncio.CancelledError:
        print("stopped: nothing is measured", file=sys.stderr)
        return STOPPED
    label = f"tiny, {options.stages} stage{'s' if options.stages > 1 else ''}, rank {options.rank} killed"
    found = figures(restarts)
    kept = min(restart.kept for restart in restarts)
    print(report.table([{"case": label, **found, "connections kept": f"{kept} of {options.viewers}"}]))
    if options.out is not None:
        names = ("stages", "rank", "repeats", "viewers", "rest", "no_spare", "keep_s", "serve")
        settings = {label: {name: getattr(options, name) for name in names}}
        result: dict[str, Any] = {"figures": found, "kept": kept, "restarts": [vars(each) for each in restarts]}
        report.write_json(options.out, head, {label: result}, benchmark="restart", settings=settings)
    return OK if kept == options.viewers else LOST


if __name__ == "__main__":
    sys.exit(main())
