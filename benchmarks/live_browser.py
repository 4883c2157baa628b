"""What a viewer gets: frames decoded in headless Chromium, first frame, and from a prompt to its pixels.

Starts `streamdiff serve` as a user would, on this machine, with the browser beside it; both share its cores.
FPS counts frames decoded by the browser between two looks at getStats, after the warm-up. The first frame counts from
the page's offer to the first picture presented. A prompt counts from the message's sending to the first presented
picture of the other colour (seen in a canvas).

    python -m benchmarks.live_browser --seconds 30 --prompts 10 --out benchmarks/results/live_browser.json
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from selenium import webdriver

from benchmarks import report
from benchmarks.browser import SERVE, Server, chromium, cpu_s, probe, running_server
from streamdiff import clock

WARM_UP_S = 5.0
LIMIT_S = 60.0
PROMPTS = ("a blue circle moving right at night", "a red circle moving right at night")

PROMPT_TO_PIXEL = """
const [prompt, over, under, limitMs, done] = arguments;
const video = document.getElementById("video");
const canvas = globalThis.probeCanvas ??= new OffscreenCanvas(32, 32);
const context = canvas.getContext("2d", { willReadFrequently: true });
const sent = performance.now();
streamdiff.client.send({ type: "prompt", prompt });
function look(now) {
  context.drawImage(video, 0, 0, 32, 32);
  const data = context.getImageData(0, 0, 32, 32).data;
  let count = 0;
  for (let i = 0; i < data.length; i += 4) count += data[i + over] - data[i + under] > 90;
  if (count > 12) done(now - sent);
  else if (now - sent > limitMs) done(null);
  else video.requestVideoFrameCallback(look);
}
video.requestVideoFrameCallback(look);
"""


def _until_live(browser: webdriver.Chrome) -> dict[str, Any]:
    end_s = clock.monotonic_s() + LIMIT_S
    while (seen := probe(browser))["status"] != "Live":
        if clock.monotonic_s() > end_s:
            raise SystemExit(f"the page did not go live within {LIMIT_S:g} s; it says {seen['status']!r}")
        time.sleep(0.1)
    return seen


def _first_frames(browser: webdriver.Chrome, url: str, loads: int) -> list[float]:
    """Seconds from offer to first frame, for each of `loads` loads of the page."""
    found = []
    for _ in range(loads):
        browser.get("about:blank")
        browser.get(url)
        found.append(_until_live(browser)["view"]["firstFrameMs"] / 1000)
    return found


def _new_sessions(browser: webdriver.Chrome, url: str, count: int) -> list[float]:
    """Seconds from a session's opening to its first frame on the page, which is loaded in between; one after the
    other, when the default session has been ended, as two cores have no place for both.

    Raises:
        SystemExit: there is no place for one.
    """
    browser.get("about:blank")
    httpx.delete(url + "api/sessions/default", timeout=20).raise_for_status()
    found = []
    for _ in range(count):
        answer = httpx.post(url + "api/sessions", json={"prompt": PROMPTS[0]}, timeout=20)
        if answer.status_code != 201:
            raise SystemExit(f"no session can be opened here (--sessions 0 leaves them out): {answer.text}")
        opened_s, opened = clock.wall_s(), answer.json()
        browser.get(f"{url}?session={opened['id']}")
        found.append(_until_live(browser)["view"]["firstFrameAt"] / 1000 - opened_s)
        browser.get("about:blank")
        token = {"Authorization": f"Bearer {opened['control_token']}"}
        httpx.delete(f"{url}api/sessions/{opened['id']}", headers=token, timeout=20).raise_for_status()
    return found


def _playback(browser: webdriver.Chrome, server: Server, seconds: float) -> dict[str, Any]:
    """Delivery over `seconds`, and what the processes used meanwhile and all cores had left, in percent of one."""
    processes = [psutil.Process(server.process.pid), server.engine]
    before, cpu_before, idle_s = probe(browser), cpu_s(processes), psutil.cpu_times().idle
    time.sleep(seconds)
    after, cpu_after, idle_s = probe(browser), cpu_s(processes), psutil.cpu_times().idle - idle_s
    old, new = before["inbound"], after["inbound"]
    passed_s = (new["timestamp"] - old["timestamp"]) / 1000
    delayed = new["jitterBufferEmittedCount"] - old["jitterBufferEmittedCount"]
    cpu = [round(100 * (end - begin) / passed_s, 1) for begin, end in zip(cpu_before, cpu_after, strict=True)]
    return {
        "seconds": round(passed_s, 2),
        "decoded_fps": round((new["framesDecoded"] - old["framesDecoded"]) / passed_s, 2),
        "frames_dropped": new["framesDropped"] - old["framesDropped"],
        "freezes": new["freezeCount"] - old["freezeCount"],
        "packets_lost": new["packetsLost"] - old["packetsLost"],
        "jitter_buffer_ms": round(1000 * (new["jitterBufferDelay"] - old["jitterBufferDelay"]) / max(delayed, 1), 1),
        "kbit_s": round(8 * (new["bytesReceived"] - old["bytesReceived"]) / passed_s / 1000, 1),
        "width": new["frameWidth"],
        "height": new["frameHeight"],
        "cpu_percent_web": cpu[0],
        "cpu_percent_engine": cpu[1],
        "cpu_percent_idle": round(100 * idle_s / passed_s, 1),
    }


def _prompt_lags(browser: webdriver.Chrome, count: int) -> list[float]:
    """Seconds from a prompt to its pixels; a prompt whose colour never came counts as `LIMIT_S`.

    Prompts are sent at any moment of a chunk: after equal pauses all would be, counted from the pixels of the one
    before, at the same one.
    """
    lags, chance = [], random.Random(0)
    for number in range(count):
        over, under = ((2, 0), (0, 2))[number % 2]
        ms = browser.execute_async_script(PROMPT_TO_PIXEL, PROMPTS[number % 2], over, under, LIMIT_S * 500)
        lags.append(LIMIT_S if ms is None else ms / 1000)
        time.sleep(chance.uniform(1.0, 2.0))
    return lags


CORES = len(os.sched_getaffinity(0))
BUSY = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass"


def _busy_seconds(browser: webdriver.Chrome, server: Server, count: int, cores: int) -> dict[str, Any]:
    """Freezes that the browser counts, and slots without a new frame, over `count` seconds in each of which `cores`
    other processes compute without a pause."""

    def seen() -> tuple[int, int]:
        stats = httpx.get(server.url + "api/state", timeout=20).json()["stats"]
        return probe(browser)["inbound"]["freezeCount"], stats["repeated"]

    freezes, repeated = seen()
    for _ in range(count):
        others = [subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(cores)]
        for other in others:
            other.wait()
        time.sleep(WARM_UP_S)
    after = seen()
    freezes, repeated = after[0] - freezes, after[1] - repeated
    return {"busy_cores": cores, "count": count, "freezes": freezes, "repeated_slots": repeated}


def _spread(values: Sequence[float]) -> dict[str, float | int]:
    return {
        "count": len(values),
        "median_s": round(statistics.median(values), 3),
        "min_s": round(min(values), 3),
        "max_s": round(max(values), 3),
    }


def measure(
    seconds: float, prompts: int, loads: int, sessions: int, busy: int, command: Sequence[str] = SERVE
) -> dict[str, Any]:
    """Everything this benchmark measures, JSON-able."""
    with running_server(command) as server, chromium() as browser:
        load_average = psutil.getloadavg()[0]
        first = _first_frames(browser, server.url, loads)
        browser.execute_script("streamdiff.client.send({ type: 'prompt', prompt: arguments[0] })", PROMPTS[1])
        time.sleep(WARM_UP_S)
        playback = _playback(browser, server, seconds)
        others = [_busy_seconds(browser, server, busy, cores) for cores in range(1, CORES + 1)] if busy else []
        lags = _prompt_lags(browser, prompts)
        state = httpx.get(server.url + "api/state", timeout=20).json()
        new = _new_sessions(browser, server.url, sessions) if sessions else []
        version = browser.capabilities["browserVersion"]
    return {
        "browser": f"Chromium {version}",
        "load_average_before": round(load_average, 2),
        "engine": {name: state["engine"][name] for name in ("model", "device", "steps", "kv_context", "chunk_frames")},
        "playback": playback,
        "busy_seconds": others,
        "first_frame": _spread(first),
        "prompt_to_pixel": _spread(lags) if lags else None,
        "new_session": _spread(new) if new else None,
        "server_stats": {name: state["stats"][name] for name in ("chunk_ms", "repeated", "dropped", "missed")},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.live_browser", description="what a viewer in headless Chromium gets"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="how long playback is measured")
    parser.add_argument("--prompts", type=int, default=10, help="how many prompt changes are timed")
    parser.add_argument("--loads", type=int, default=5, help="how often the page is loaded for the first frame")
    parser.add_argument("--sessions", type=int, default=5, help="new sessions that are timed; 0 leaves them out")
    parser.add_argument(
        "--busy", type=int, default=0, help="so many seconds in which other processes take one core, two, ..."
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("serve", nargs="*", help="further arguments of `streamdiff serve`, after --")
    arguments = parser.parse_args(argv)
    header = report.header(
        sys.argv if argv is None else ["benchmarks.live_browser", *argv], warm_up=f"{WARM_UP_S:g} s of playback"
    )
    found = measure(
        arguments.seconds, arguments.prompts, arguments.loads, arguments.sessions, arguments.busy,
        (*SERVE, *arguments.serve),
    )  # fmt: skip
    print(report.table([found["playback"]]))
    if found["busy_seconds"]:
        print(report.table(found["busy_seconds"]))
    rows = [{"what": name, **found[name]} for name in ("first_frame", "prompt_to_pixel", "new_session") if found[name]]
    print(report.table(rows))
    if arguments.out is not None:
        report.write_json(arguments.out, header, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
