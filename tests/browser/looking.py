"""How the browser tests look at the page, and ask it for things."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.keys import Keys

from benchmarks.browser import SERVE, probe
from tests import fork_server

PAINTED = (sys.executable, "-m", "tests.server.scripted", "serve", "--no-browser")
LIMIT_S = 240.0
LOOK_S = 0.05
"""Seconds between two looks, which take time of the cores that play the video."""


def painted_server(*options: str) -> tuple[str, ...]:
    """The same, forked as in `model_server`."""
    return fork_server.interpreter(), *PAINTED[1:], *options


def model_server(*options: str) -> tuple[str, ...]:
    """The command of a server with the embedded model, whose engine is forked from a process that has everything
    imported. For tests that are not about how it starts."""
    return fork_server.interpreter(), *SERVE[1:], *options


def until(browser: WebDriver, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Look at the page again and again until `condition` holds for what is seen."""
    end = time.monotonic() + LIMIT_S
    while not condition(seen := probe(browser)):
        assert time.monotonic() < end, {name: value for name, value in seen.items() if name != "pixels"}
        time.sleep(LOOK_S)
    return seen


def open_controls(browser: WebDriver) -> None:
    """Open the drawer with the controls, where it is closed."""
    if not browser.find_element("id", "settings").is_displayed():
        browser.find_element("id", "fold").click()


def ask(browser: WebDriver, prompt: str) -> None:
    """Type a prompt, press Enter, and wait until the page says that it is on screen."""
    box = browser.find_element("id", "prompt")
    box.clear()
    box.send_keys(prompt + Keys.ENTER)
    until(browser, lambda _: browser.find_element("id", "receipt").get_attribute("data-stage") == "shown")


def coloured(seen: dict[str, Any], over: int, under: int) -> float:
    """How many of the 1,024 pixels have clearly more of one channel than of another; not a number, with which no
    comparison holds, where there is no picture to be read yet."""
    pixels = seen["pixels"]
    if pixels is None:
        return float("nan")
    return sum(pixels[at + over] - pixels[at + under] > 90 for at in range(0, len(pixels), 4))
