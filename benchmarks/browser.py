"""A server started as a user would start it, and a headless Chromium that watches it. For benchmarks and tests.

Knows nothing about what is measured. Needs Debian's `chromium` and `chromium-driver`, or their like, on the PATH.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from streamdiff.atomic_write import exit_on_sigterm

ROOT = Path(__file__).resolve().parents[1]
SERVE = (sys.executable, "-m", "streamdiff", "serve", "--port", "0", "--no-browser")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
)

PROBE = """
const done = arguments[arguments.length - 1];
(async () => {
  const video = document.getElementById("video");
  const canvas = globalThis.probeCanvas ??= new OffscreenCanvas(32, 32);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  let mean = null, pixels = null;
  if (video.readyState >= 2) {
    context.drawImage(video, 0, 0, 32, 32);
    const data = context.getImageData(0, 0, 32, 32).data;
    mean = [0, 0, 0];
    pixels = Array.from(data);
    for (let i = 0; i < data.length; i += 4) for (let c = 0; c < 3; c += 1) mean[c] += data[i + c] / 1024;
  }
  const { client, view } = globalThis.streamdiff ?? {};
  let inbound = {};
  if (client?.pc) {
    const reports = [...(await client.pc.getStats()).values()];
    inbound = reports.find((report) => report.type === "inbound-rtp" && report.kind === "video") ?? {};
  }
  const status = document.getElementById("status-text").textContent;
  done({ mean, pixels, inbound, view, now: performance.now(), status });
})().catch((error) => done({ error: String(error) }));
"""
"""Reads decoded pixels (32 x 32, RGBA), getStats of the video, and what the page shows."""


@dataclass(frozen=True)
class Server:
    """A running server process and the address it printed."""

    process: subprocess.Popen[str]
    url: str

    @property
    def engine(self) -> psutil.Process:
        """The engine process, or the launcher of its ranks; a spare that waits beside it is younger."""
        return min(psutil.Process(self.process.pid).children(), key=psutil.Process.create_time)


@contextmanager
def running_server(command: Sequence[str] = SERVE) -> Iterator[Server]:
    """Start `command` in the repository's root and wait for the address on its standard output. However this process is
    asked to end meanwhile, the server ends too. Only for the main thread.

    Raises:
        RuntimeError: it ended before that; with what it wrote.
    """
    with exit_on_sigterm():
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        reader = threading.Thread(target=deque, args=(process.stdout, 0))  # who writes is never held up
        try:
            server = Server(process, _address(process))
            reader.start()
            yield server
        finally:
            end(process)
            if reader.ident is not None:
                reader.join()
            assert process.stdout is not None
            process.stdout.close()


def end(process: subprocess.Popen[str]) -> None:
    """Ask it to end, and make it end when it does not. Mutates: process."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"http://\S+/", line):
            return found.group(0)
    raise RuntimeError(f"the server ended with code {process.wait()} before it printed its address:\n{''.join(lines)}")


@contextmanager
def chromium(width: int = 1280, height: int = 860, camera: Path | None = None) -> Iterator[webdriver.Chrome]:
    """A headless Chromium with an empty profile. Its console is kept for `console_errors`. `camera` is a y4m file that
    its camera shows again and again; None: no camera may be used."""
    options = Options()
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if binary := shutil.which(name):
            options.binary_location = binary
            break
    fake = (
        "use-fake-ui-for-media-stream",
        "use-fake-device-for-media-stream",
        f"use-file-for-fake-video-capture={camera}",
    )
    shown = [f"--{flag}" for flag in fake] if camera is not None else []
    for flag in (*FLAGS, *shown, f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        browser.set_script_timeout(60)
        yield browser
    finally:
        browser.quit()


def cpu_s(processes: Sequence[psutil.Process]) -> list[float]:
    """Seconds that each has computed."""
    return [sum(process.cpu_times()[:2]) for process in processes]


def probe(browser: webdriver.Chrome) -> dict[str, Any]:
    """One look at the page; see `PROBE`."""
    found = browser.execute_async_script(PROBE)
    assert isinstance(found, dict)
    assert "error" not in found, found["error"]
    return found


def console_errors(browser: webdriver.Chrome) -> list[str]:
    """What the page complained about since the last call."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
