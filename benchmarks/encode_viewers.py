"""What viewers cost: CPU of the web process and of the engine with 1, 4, 16 and 32 of them, and what each gets.

Starts `streamdiff serve` as a user would. The viewers are real aiortc peers in another process (`benchmarks.peers`):
DTLS, SRTP, packets put together into frames, reports sent back, but no picture decoded, so that one machine can play
many. Their CPU is not counted, but they share the machine's cores.

    python -m benchmarks.encode_viewers --out benchmarks/results/encode_viewers.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import report
from benchmarks.browser import ROOT, SERVE, Server, cpu_s, end, running_server
from streamdiff import clock

PAINTED = (sys.executable, "-m", "benchmarks.time_code", "serve")
LIMIT_S = 90.0
WARM_UP_S = 4.0


@dataclass
class Peers:
    """Viewers in another process; `seen` is what they said last, one entry each."""

    pid: int
    seen: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def watching(url: str, count: int) -> Iterator[Peers]:
    """`count` viewers that have all got frames.

    Raises:
        SystemExit: they did not within `LIMIT_S`.
    """
    words = [sys.executable, "-m", "benchmarks.peers", url, "--count", str(count)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    peers = Peers(process.pid)

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                peers.seen = json.loads(line)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        end_s = clock.monotonic_s() + LIMIT_S
        while not peers.seen or min(each["frames"] for each in peers.seen) == 0:
            if clock.monotonic_s() > end_s or process.poll() is not None:
                raise SystemExit(f"{count} viewers did not all get a frame within {LIMIT_S:g} s: {peers.seen}")
            time.sleep(0.1)
        yield peers
    finally:
        end(process)
        reader.join()


def _stats(server: Server) -> dict[str, Any]:
    answer = httpx.get(server.url + "api/state", timeout=20).json()
    stats: dict[str, Any] = answer["stats"]
    return stats


def _share_lost(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> float:
    """Of all packets sent to the viewers: retransmitted ones count as received."""
    lost, got = (
        sum(end[name] - begin[name] for begin, end in zip(before, after, strict=True)) for name in ("lost", "packets")
    )
    return float(lost / max(1, lost + got))


def _row(server: Server, count: int, seconds: float) -> dict[str, Any]:
    """Figures with `count` viewers, after `WARM_UP_S`."""
    web = psutil.Process(server.process.pid)
    with watching(server.url + "whep", count) as peers:
        processes = [psutil.Process(peers.pid), web, server.engine]
        time.sleep(WARM_UP_S)
        begun_s, cpu, seen, stats = clock.monotonic_s(), cpu_s(processes), peers.seen, _stats(server)
        time.sleep(seconds)
        passed_s = clock.monotonic_s() - begun_s
        used = [100 * (end - begin) / passed_s for begin, end in zip(cpu, cpu_s(processes), strict=True)]
        after, latest = peers.seen, _stats(server)
    frames = [(end["frames"] - begin["frames"]) / passed_s for begin, end in zip(seen, after, strict=True)]
    sent = [(end["bytes"] - begin["bytes"]) / passed_s for begin, end in zip(seen, after, strict=True)]
    return {
        "viewers": count,
        "cpu_percent_web": round(used[1], 1),
        "cpu_percent_engine": round(used[2], 1),
        "cpu_percent_peers": round(used[0], 1),
        "shown_fps": round((latest["frame"] - stats["frame"]) / passed_s, 2),
        "repeated": latest["repeated"] - stats["repeated"],
        "chunk_ms": latest["chunk_ms"],
        "viewer_fps_mean": round(statistics.mean(frames), 2),
        "viewer_fps_min": round(min(frames), 2),
        "kbit_s_per_viewer": round(8 * statistics.mean(sent) / 1000),
        "packets_lost_share": round(_share_lost(seen, after), 4),
        "rss_mb_web": round(web.memory_info().rss / 2**20),
    }


def measure(counts: Sequence[int], seconds: float, command: Sequence[str] = SERVE) -> dict[str, Any]:
    """Everything this benchmark measures, JSON-able."""
    with running_server(command) as server:
        rows = [_row(server, count, seconds) for count in counts]
        state = httpx.get(server.url + "api/state", timeout=20).json()
    first, last = rows[0], rows[-1]
    added = last["viewers"] - first["viewers"]
    percent = (last["cpu_percent_web"] - first["cpu_percent_web"]) / added if added else None
    return {
        "engine": {name: state["engine"][name] for name in ("model", "device", "steps", "kv_context", "chunk_frames")},
        "picture": {name: state["state"][name] for name in ("width", "height", "scale", "fps", "bitrate")},
        "cpu_percent_per_added_viewer": None if percent is None else round(percent, 2),
        "rows": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.encode_viewers", description="what viewers cost, encoded once for all"
    )
    parser.add_argument("--viewers", default="1,4,16,32", help="numbers of viewers (default 1,4,16,32)")
    parser.add_argument("--seconds", type=float, default=12.0, help="how long each number is measured (default 12)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the engine (default auto)"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--painted", action="store_true", help="an engine that paints instead of computing: what the web side costs"
    )
    parser.add_argument("serve", nargs="*", help="further arguments of `streamdiff serve`, after --")
    arguments = parser.parse_args(argv)
    try:
        counts = [int(word) for word in arguments.viewers.split(",")]
    except ValueError:
        parser.error(f"--viewers is {arguments.viewers!r}, but must be numbers such as 1,4,16")
    if min(counts) < 1 or arguments.seconds <= 0:
        parser.error("--viewers and --seconds must be above 0")
    header = report.header(
        sys.argv if argv is None else ["benchmarks.encode_viewers", *argv],
        warm_up=f"{WARM_UP_S:g} s each",
    )
    if arguments.painted and arguments.device != "auto":
        parser.error("--painted computes nothing, so it has no --device; leave one of them out")
    places = ("--max-viewers", str(max(counts)))
    # One address may have half of the places.
    served = (*SERVE, "--device", arguments.device, "--max-viewers", str(2 * max(counts)), *arguments.serve)
    command = (*PAINTED, *places) if arguments.painted else served
    found = measure(counts, arguments.seconds, command)
    print(report.table(found["rows"]))
    print(f"each added viewer: {found['cpu_percent_per_added_viewer']} % of one core in the web process")
    if arguments.out is not None:
        report.write_json(arguments.out, header, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
