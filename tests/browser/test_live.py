"""The page in headless Chromium, against a server started as a user starts it.

Once with the embedded model, once with a pipeline that paints (its pixels are known exactly). Where a process is killed
the server is forked.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest
from psutil import Process
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.keys import Keys

from benchmarks.browser import SERVE, Server, console_errors, probe, running_server
from tests.browser.looking import LIMIT_S, PAINTED, ask, coloured, open_controls, painted_server, until
from tests.fork_server import behind

pytestmark = pytest.mark.browser

NOTHING = "\N{EN DASH}"


ITS_OWN = pytest.mark.parametrize(
    "server",
    [pytest.param(PAINTED, id="painted"), pytest.param(SERVE, id="model", marks=pytest.mark.soak)],
    indirect=True,
    scope="module",
)
"""What the page does by itself is the same whatever makes the pictures."""


@pytest.fixture(scope="module", params=[pytest.param(PAINTED, id="painted"), pytest.param(SERVE, id="model")])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running_server(request.param) as server:
        yield server


@pytest.fixture
def page(server: Server, browser: WebDriver) -> Iterator[WebDriver]:
    """The page, live; it must not have complained when the test is over."""
    browser.get(server.url)
    until(browser, lambda seen: seen["status"] == "Live")
    ask(browser, "a red circle moving right at night")
    yield browser
    assert console_errors(browser) == []
    browser.get("about:blank")


def test_frames_are_decoded_and_move(page: WebDriver) -> None:
    first = probe(page)
    assert first["inbound"]["frameWidth"] == first["inbound"]["frameHeight"] >= 128
    pictures = {tuple(first["pixels"])}
    until(page, lambda seen: len(pictures.add(tuple(seen["pixels"])) or pictures) >= 5)  # type: ignore[func-returns-value]
    for _ in range(3):
        before = probe(page)["inbound"]["framesDecoded"]
        until(page, lambda seen, before=before: seen["inbound"]["framesDecoded"] >= before + 20)  # type: ignore[misc]


@ITS_OWN
def test_a_reloaded_tab_calls_itself_the_same(page: WebDriver) -> None:
    """The server then knows which dead connection is its own."""

    def called() -> list[str]:
        asked = "performance.getEntriesByType('resource').map(each => new URL(each.name))"
        names: list[str] = page.execute_script(
            f"return {asked}.filter(url => url.pathname == '/whep').map(url => url.searchParams.get('client'))"
        )
        return sorted(set(names))

    [before] = called()
    assert len(before) == 32
    page.refresh()
    until(page, lambda seen: seen["status"] == "Live")
    assert called() == [before]


def test_the_numbers_are_on_the_page(page: WebDriver) -> None:
    def filled(_: object) -> bool:
        numbers = [page.find_element("id", f"n-{name}").text for name in ("shown", "made", "first", "chunk", "lag")]
        return all(number not in ("", NOTHING, "0") for number in numbers)

    open_controls(page)
    until(page, filled)
    assert page.find_element("id", "n-dropped").text != NOTHING


def test_a_prompt_changes_the_pixels(page: WebDriver) -> None:
    until(page, lambda seen: coloured(seen, 0, 2) > 12)  # red, whatever the sky is
    ask(page, "a blue circle moving right at night")
    until(page, lambda seen: coloured(seen, 2, 0) > 12 and coloured(seen, 0, 2) < 6)
    assert "blue" in page.find_element("id", "playing").text
    assert "On screen after" in page.find_element("id", "receipt").text


def test_an_example_is_one_press_away(page: WebDriver) -> None:
    first = page.find_element("css selector", "#chips .chip").text
    assert page.find_element("id", "prompt").get_attribute("placeholder") == first
    chip = page.find_elements("css selector", "#chips .chip")[1]
    chip.click()
    until(page, lambda _: page.find_element("id", "receipt").get_attribute("data-stage") == "shown")
    assert chip.get_attribute("aria-current") == "true"


def test_unknown_words_get_a_friendly_answer(page: WebDriver) -> None:
    box = page.find_element("id", "prompt")
    box.clear()
    box.send_keys("qwertz uiop" + Keys.ENTER)
    until(page, lambda _: page.find_element("id", "notice").is_displayed())
    assert len(page.find_element("id", "notice-text").text) > 20
    before = probe(page)["inbound"]["framesDecoded"]
    until(page, lambda seen: seen["inbound"]["framesDecoded"] > before + 20)


@ITS_OWN
def test_an_empty_prompt_is_answered_beside_the_box(page: WebDriver) -> None:
    box = page.find_element("id", "prompt")
    box.clear()
    box.send_keys("   " + Keys.ENTER)
    assert page.find_element("id", "prompt-error").text
    assert box.get_attribute("aria-invalid") == "true"


def test_pause_holds_the_stream_and_resume_goes_on(page: WebDriver, server: Server) -> None:
    def frame() -> int:
        return int(httpx.get(server.url + "api/state", timeout=20).json()["stats"]["frame"])

    page.find_element("id", "pause").click()
    until(page, lambda seen: seen["status"] == "Paused")
    held = frame()
    decoded = probe(page)["inbound"]["framesDecoded"]
    still = until(page, lambda seen: seen["inbound"]["framesDecoded"] >= decoded + 3)  # stills: the line is alive
    assert frame() == held
    assert page.find_element("id", "pause").accessible_name == "Resume"
    page.find_element("tag name", "body").send_keys(" ")
    until(page, lambda seen: seen["status"] == "Live" and seen["pixels"] != still["pixels"])
    until(page, lambda _: frame() > held)


def test_reset_with_a_seed(page: WebDriver, server: Server) -> None:
    open_controls(page)
    box = page.find_element("id", "seed")
    box.clear()
    box.send_keys("1234" + Keys.ENTER)
    until(page, lambda _: "Restarted" in page.find_element("id", "receipt").text)
    assert httpx.get(server.url + "api/state", timeout=20).json()["state"]["seed"] == 1234
    box.clear()
    box.send_keys("-5" + Keys.ENTER)
    assert page.find_element("id", "seed-error").text


@ITS_OWN
def test_leaving_the_page_frees_its_place(page: WebDriver, server: Server) -> None:
    def viewers(_: object = None) -> int:
        return int(httpx.get(server.url + "api/state", timeout=20).json()["viewers"])

    assert viewers() == 1
    page.get("about:blank")
    end = time.monotonic() + LIMIT_S
    while viewers():
        assert time.monotonic() < end
    page.get(server.url)
    until(page, lambda seen: seen["status"] == "Live")


def test_the_page_comes_back_when_the_server_does(browser: WebDriver) -> None:
    with running_server(painted_server()) as first:
        port = first.url.rstrip("/").rsplit(":", 1)[1]
        browser.get(first.url)
        until(browser, lambda seen: seen["status"] == "Live")
        first.process.kill()
        first.process.wait()
        until(browser, lambda seen: seen["status"] == "Reconnecting")
        until(browser, lambda _: "The server cannot be reached" in browser.find_element("id", "veil-text").text)
    with running_server(painted_server("--port", port)):
        until(browser, lambda seen: seen["status"] == "Live")
        before = probe(browser)["inbound"].get("framesDecoded", 0)
        until(browser, lambda seen: seen["inbound"].get("framesDecoded", 0) > before + 20)
    browser.get("about:blank")
    console_errors(browser)  # refused connections are in the console while the server is away


SAID = (
    "globalThis.said = [];"
    "streamdiff.client.addEventListener('message', (event) => said.push(JSON.stringify(event.detail)))"
)


def test_an_engine_that_is_killed_comes_back_and_the_page_goes_on_by_itself(browser: WebDriver) -> None:
    with running_server(painted_server()) as server:
        browser.get(server.url)
        until(browser, lambda seen: seen["status"] == "Live")
        ask(browser, "a blue circle moving right")
        before = probe(browser)
        browser.execute_script(SAID)
        min(behind(server.process.pid).children(), key=Process.create_time).kill()  # the other one is a spare

        def again(_: object) -> bool:
            said = [json.loads(text) for text in browser.execute_script("return said")]
            states = [each["engine"] for each in said if each["type"] == "state"]
            return "running" in states[states.index("restarting") :] if "restarting" in states else False

        back = until(browser, again)
        pictures = {tuple(back["pixels"])}
        moves = until(browser, lambda seen: len(pictures.add(tuple(seen["pixels"])) or pictures) >= 5)  # type: ignore[func-returns-value]
        assert coloured(moves, 2, 0) > 12 and coloured(moves, 0, 2) < 6, "the prompt is still in force"
        assert moves["inbound"]["id"] == before["inbound"]["id"], "the connection is the same"
        assert moves["inbound"]["framesDecoded"] > before["inbound"]["framesDecoded"]
        assert moves["status"] == "Live"
        ask(browser, "a red circle moving right")
        until(browser, lambda seen: coloured(seen, 0, 2) > 12)
    browser.get("about:blank")
    console_errors(browser)


@ITS_OWN
def test_nothing_is_wider_than_the_screen_and_all_is_big_enough_for_a_thumb(page: WebDriver) -> None:
    open_controls(page)
    try:
        for width in (320, 390, 768, 1280):
            metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700}
            page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            until(page, lambda _, width=width: page.execute_script("return innerWidth") == width)  # type: ignore[misc]
            assert page.execute_script("return document.documentElement.scrollWidth") <= width
            small = page.execute_script(
                "return [...document.querySelectorAll('button, input, textarea, select')]"
                ".filter(e => e.offsetParent && e.offsetHeight < 36).map(e => e.id || e.textContent)"
            )
            assert small == []
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@ITS_OWN
def test_everything_has_a_name_and_the_keyboard_gets_everywhere(page: WebDriver) -> None:
    open_controls(page)
    nameless = page.execute_script(
        "return [...document.querySelectorAll('button, input, textarea, select, meter, video')]"
        ".filter(e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert nameless == []
    page.find_element("tag name", "body").send_keys("/")
    assert page.switch_to.active_element.get_attribute("id") == "prompt"
    seen = []
    for _ in range(40):
        page.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(page.switch_to.active_element.get_attribute("id"))
    assert {"send", "switch", "seed", "dice", "seed-apply", "fps", "steps"} <= set(seen)
