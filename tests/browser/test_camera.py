"""A camera on the page: what it shows goes in, and the stream of the embedded model follows it. In headless Chromium
with a camera that shows a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from selenium.webdriver.chrome.webdriver import WebDriver

from benchmarks.browser import Server, chromium, console_errors, running_server
from tests.browser.looking import coloured, model_server, open_controls, until

pytestmark = pytest.mark.browser
PIXELS = 1024


def blue_file(path: Path, width: int = 640, height: int = 480) -> Path:
    """A y4m file of a few frames, all blue."""
    planes = ((41, (height, width)), (240, (height // 2, width // 2)), (110, (height // 2, width // 2)))
    frame = b"FRAME\n" + b"".join(np.full(shape, value, np.uint8).tobytes() for value, shape in planes)
    path.write_bytes(f"YUV4MPEG2 W{width} H{height} F30:1 Ip A1:1 C420jpeg\n".encode() + frame * 30)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with chromium(camera=blue_file(tmp_path_factory.mktemp("camera") / "blue.y4m")) as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(model_server("--prompt", "a red circle over a meadow")) as server:
        yield server


def told(server: Server) -> dict[str, Any]:
    return dict(httpx.get(server.url + "api/state", timeout=20).json())


def set_strength(browser: WebDriver, strength: float) -> None:
    """As a hand on the slider does."""
    browser.execute_script(
        "const slider = document.getElementById('strength'); slider.value = arguments[0];"
        "for (const type of ['input', 'change']) slider.dispatchEvent(new Event(type, { bubbles: true }));",
        strength,
    )


def test_the_stream_follows_the_camera_at_the_strength_that_is_set_and_goes_on_without(
    browser: WebDriver, server: Server
) -> None:
    browser.get(server.url)
    until(browser, lambda seen: seen["status"] == "Live" and coloured(seen, 2, 0) < PIXELS / 2)
    open_controls(browser)
    set_strength(browser, 0.05)
    until(browser, lambda _: browser.find_element("id", "camera-embedded").is_displayed())
    camera, stop = (browser.find_element("id", name) for name in ("camera-camera", "camera-stop"))
    assert not stop.is_displayed()
    camera.click()
    until(browser, lambda seen: coloured(seen, 2, 0) > PIXELS / 2)
    preview = browser.find_element("id", "camera-preview")
    assert preview.is_displayed() and "mirrored" in str(preview.get_attribute("class"))
    size = browser.execute_script("return [arguments[0].videoWidth, arguments[0].videoHeight]", preview)
    assert size == [320, 256], "no more is sent than a picture of 256 x 256 can show"
    state = told(server)["state"]["input"]
    assert state == {"kind": "WHIP sender", "strength": 0.05, "fault": ""}
    set_strength(browser, 1.0)
    until(browser, lambda _: str(browser.find_element("id", "receipt").text).startswith("The strength is on screen"))
    until(browser, lambda seen: coloured(seen, 2, 0) < PIXELS / 2)
    assert told(server)["state"]["input"]["strength"] == 1.0
    stop.click()
    until(browser, lambda _: told(server)["state"]["input"] is None)
    assert not preview.is_displayed() and not stop.is_displayed()
    frame = told(server)["stats"]["frame"]
    until(browser, lambda _: told(server)["stats"]["frame"] > frame + 40)
    assert browser.find_element("id", "camera-error").text == ""
    assert console_errors(browser) == []


def test_a_second_one_is_told_who_feeds_and_the_first_goes_on(browser: WebDriver, server: Server) -> None:
    browser.get(server.url)
    until(browser, lambda seen: seen["status"] == "Live")
    open_controls(browser)
    browser.find_element("id", "camera-camera").click()
    until(browser, lambda _: told(server)["state"]["input"] is not None)
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    browser.get(server.url)
    until(browser, lambda seen: seen["status"] == "Live")
    browser.find_element("id", "camera-camera").click()
    says = browser.find_element("id", "camera-error")
    until(browser, lambda _: "is fed already" in str(says.text))
    assert told(server)["state"]["input"] is not None
    browser.close()
    browser.switch_to.window(first)
    browser.get(server.url)  # the page that sent it is gone
    until(browser, lambda _: told(server)["state"]["input"] is None)
