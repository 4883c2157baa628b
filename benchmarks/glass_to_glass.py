"""How old a picture is when it is seen, and how long a prompt takes to be seen, in a real headless Chromium.

Two servers, one after the other, each with the browser beside it on this machine:

- an engine that paints the time into its pictures (`benchmarks.time_code`); the page reads it from its video in a
  canvas. `made_to_screen` holds all of it: the playout buffer (`buffer`, by the server's own figures), encoding, the
  network of this machine, the browser's jitter buffer, decoding, and up to one screen refresh.
- `streamdiff serve` with the embedded model; `prompt_to_pixel` counts from the message's sending to the first presented
  picture of the new colour.

    python -m benchmarks.glass_to_glass --out benchmarks/results/glass_to_glass.json

With `--camera` something else is measured: the browser's camera shows numbers (`benchmarks.camera_code`), the page
sends it to `streamdiff serve` with the embedded model, which gives it back at a strength near 0, and `camera_to_screen`
counts from a number's first frame in the camera's preview to its first one in the page's video. A number changes one of
four fields; the frame in which that is seen may be one of the latent frame's four earlier or later.

    python -m benchmarks.glass_to_glass --camera --out benchmarks/results/glass_to_glass_camera.json

With `--keys`, how long a key takes to change the picture (`benchmarks.key_to_pixel`).

    python -m benchmarks.glass_to_glass --keys --out benchmarks/results/glass_to_glass_keys.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks import camera_code, key_to_pixel, live_browser, report, time_code
from benchmarks.browser import SERVE, chromium, running_server
from streamdiff.config import PlaybackConfig

CAMERA_STRENGTH = 0.05
"""The least that the page's slider has: what comes out is nearly what goes in."""
CAMERA_LIMIT_S = 120.0
SETTLE_S = 90.0
"""In which the lead comes down from the most that is allowed to what the machine needs (`server/media/playout.py`)."""
CLOCK = (sys.executable, "-m", "benchmarks.time_code", "serve")


def _spread_ms(values: Sequence[float]) -> dict[str, float | int]:
    return {
        "count": len(values),
        "median_ms": round(statistics.median(values), 1),
        "p95_ms": round(report.percentile(values, 95), 1),
        "min_ms": round(min(values), 1),
        "max_ms": round(max(values), 1),
    }


def picture_age(seconds: float, max_ahead_s: float, fps: float, settle_s: float) -> dict[str, Any]:
    """Ages of pictures when they are seen, over `seconds` of the clock engine's stream, `settle_s` after it is live."""
    command = (*CLOCK, "--max-ahead-s", str(max_ahead_s), "--fps", str(fps))
    with running_server(command) as server, chromium() as browser:
        browser.get(server.url)
        live_browser._until_live(browser)
        time.sleep(settle_s)
        buffered = httpx.get(server.url + "api/state", timeout=20).json()["stats"]["buffered"]
        browser.set_script_timeout(seconds + 30)
        found = browser.execute_async_script(
            time_code.READ, seconds, time_code.COLUMNS, time_code.ROWS, time_code.SIDE, time_code.PERIOD_MS
        )
        version = browser.capabilities["browserVersion"]
    if not found["latencies"]:
        raise SystemExit(f"no time code could be read in the browser: {found}")
    ages = _spread_ms(found["latencies"])
    return {
        "browser": f"Chromium {version}",
        "max_ahead_s": max_ahead_s,
        "fps": fps,
        "made_to_screen": ages,
        "buffer_ms": round(1000 * buffered / fps, 1),
        "received_to_screen": _spread_ms([-each for each in found["network"]]) if found["network"] else None,
        "codes_per_s": round(len(found["latencies"]) / seconds, 1),
        "unreadable": found["unreadable"],
        "latencies_ms": [round(each, 1) for each in found["latencies"]],
    }


def prompt_to_pixel(prompts: int, settle_s: float, command: Sequence[str] = SERVE) -> dict[str, Any]:
    """Times from a prompt to its pixels, with what `command` serves, `settle_s` after it is live."""
    with running_server(command) as server, chromium() as browser:
        browser.get(server.url)
        live_browser._until_live(browser)
        first = live_browser.PROMPTS[1]
        browser.execute_script("streamdiff.client.send({ type: 'prompt', prompt: arguments[0] })", first)
        time.sleep(settle_s)
        lags = live_browser._prompt_lags(browser, prompts)
        state = httpx.get(server.url + "api/state", timeout=20).json()
    spread = _spread_ms([1000 * lag for lag in lags])
    return {"engine": _engine(state), "lead_ms": state["stats"]["lead_ms"], **spread}


def key_to_pixel_of(count: int, settle_s: float, command: Sequence[str] = SERVE) -> dict[str, Any]:
    """Times from `count` keys to their pixels, with what `command` serves, `settle_s` after it is live."""
    with running_server((*command, "--prompt", key_to_pixel.SCENE)) as server, chromium() as browser:
        browser.get(server.url)
        live_browser._until_live(browser)
        time.sleep(settle_s)
        browser.set_script_timeout(2 * live_browser.LIMIT_S)
        found = key_to_pixel.presses(browser, count, live_browser.LIMIT_S)
        state = httpx.get(server.url + "api/state", timeout=20).json()
        version = browser.capabilities["browserVersion"]
    return {
        "browser": f"Chromium {version}",
        "engine": _engine(state),
        "key_to_pixel": _spread_ms([each["pixel"] for each in found]),
        "parts_ms": key_to_pixel.parts(found) | {"work": state["stats"]["chunk_ms"]},
        **{name: state["stats"][name] for name in ("lead_ms", "shown_fps", "made_fps")},
        "presses_ms": [{stage: round(ms, 1) for stage, ms in each.items()} for each in found],
    }


def _engine(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state["engine"][name] for name in ("model", "device", "steps", "kv_context", "chunk_frames")}


def camera_to_screen(
    seconds: float, max_ahead_s: float, settle_s: float, command: Sequence[str] = SERVE
) -> dict[str, Any]:
    """Times from the camera's preview to the page's video, over `seconds` of what `command` serves, `settle_s` after it
    began to follow the camera."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server((*command, "--max-ahead-s", str(max_ahead_s))) as server,
        chromium(camera=camera_code.write_y4m(Path(folder) / "codes.y4m")) as browser,
    ):
        browser.get(server.url)
        live_browser._until_live(browser)
        browser.execute_script(
            "const slider = document.getElementById('strength'); slider.value = arguments[0];"
            "slider.dispatchEvent(new Event('input', { bubbles: true }));", CAMERA_STRENGTH,
        )  # fmt: skip
        browser.find_element("id", "fold").click()
        browser.find_element("id", "camera-camera").click()
        end_s = time.monotonic() + CAMERA_LIMIT_S
        while not (_stats(server.url)["input"] or {}).get("used"):
            if time.monotonic() > end_s:
                raise SystemExit(
                    f"no picture of the camera was used: {browser.find_element('id', 'camera-error').text}"
                )
            time.sleep(0.2)
        time.sleep(settle_s)
        browser.set_script_timeout(seconds + 30)
        found = browser.execute_async_script(camera_code.READ, seconds, camera_code.COLUMNS, camera_code.ROWS)
        stats, state = _stats(server.url), httpx.get(server.url + "api/state", timeout=20).json()
        version = browser.capabilities["browserVersion"]
    times = camera_code.latencies(found["camera"], found["screen"])
    if not times:
        raise SystemExit(f"no number of the camera was seen again: {found}")
    return {
        "browser": f"Chromium {version}",
        "engine": _engine(state),
        "strength": CAMERA_STRENGTH,
        "camera_to_screen": _spread_ms(times),
        "codes": len(found["camera"]),
        "unreadable": found["unreadable"],
        **{name: stats[name] for name in ("lead_ms", "chunk_ms", "shown_fps", "made_fps", "input")},
        "latencies_ms": [round(each, 1) for each in times],
    }


def _stats(url: str) -> dict[str, Any]:
    return dict(httpx.get(url + "api/state", timeout=20).json()["stats"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.glass_to_glass", description="how old pictures are, and prompts, when they are seen"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="how long time codes are read (default 20)")
    parser.add_argument("--prompts", type=int, default=10, help="prompt changes that are timed; 0 leaves them out")
    most_s = PlaybackConfig().max_ahead_s
    parser.add_argument(
        "--max-ahead-s", type=float, default=most_s, help=f"seconds of video made ahead, at most (default {most_s:g})"
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=SETTLE_S,
        help=f"seconds before it is measured, in which the lead shrinks (default {SETTLE_S:g})",
    )
    parser.add_argument("--fps", type=float, default=40.0, help="frames shown per second (default 40)")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="of the embedded model, for prompts; the painting engine computes nothing (default auto)",
    )
    parser.add_argument("--camera", action="store_true", help="measure the way from the browser's camera instead")
    parser.add_argument(
        "--keys", type=int, nargs="?", const=40, help="measure so many presses of a key instead (default 40)"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args(argv)
    if arguments.keys is not None and arguments.keys < 1:
        parser.error("--keys must be at least 1")
    if arguments.seconds <= 0 or arguments.prompts < 0 or arguments.settle < 0:
        parser.error("--seconds must be above 0, --prompts and --settle at least 0")
    header = report.header(
        sys.argv if argv is None else ["benchmarks.glass_to_glass", *argv], warm_up=f"{arguments.settle:g} s"
    )
    command = (*SERVE, "--device", arguments.device)
    if arguments.keys:
        found = key_to_pixel_of(arguments.keys, arguments.settle, command)
        print(report.table([{"what": "key to pixel", **found["key_to_pixel"]}]))
        print(f"medians of its parts, ms: {found['parts_ms']}; lead {found['lead_ms']} ms")
        if arguments.out is not None:
            report.write_json(arguments.out, header, found)
        return 0
    if arguments.camera:
        found = camera_to_screen(arguments.seconds, arguments.max_ahead_s, arguments.settle, command)
        print(report.table([{"what": "camera to screen", **found["camera_to_screen"]}]))
        print(f"lead {found['lead_ms']} ms, a chunk's work {found['chunk_ms']} ms; input {found['input']}")
        if arguments.out is not None:
            report.write_json(arguments.out, header, found)
        return 0
    found = {"picture_age": picture_age(arguments.seconds, arguments.max_ahead_s, arguments.fps, arguments.settle)}
    rows = [{"what": "made to screen", **found["picture_age"]["made_to_screen"]}]
    if found["picture_age"]["received_to_screen"]:
        rows.append({"what": "received to screen", **found["picture_age"]["received_to_screen"]})
    if arguments.prompts:
        found["prompt_to_pixel"] = prompt_to_pixel(arguments.prompts, arguments.settle, command)
        spread = {name: value for name, value in found["prompt_to_pixel"].items() if name not in ("engine", "lead_ms")}
        rows.append({"what": "prompt to pixel", **spread})
    print(report.table(rows))
    print(f"of it in the playout buffer: {found['picture_age']['buffer_ms']} ms")
    if arguments.out is not None:
        report.write_json(arguments.out, header, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
