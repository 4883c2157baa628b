"""A world that is steered by keys, in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from benchmarks.browser import Server, console_errors, running_server
from tests.browser.looking import painted_server, until

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(painted_server("--name", "steered")) as server:
        yield server


@pytest.fixture
def page(server: Server, browser: WebDriver) -> Iterator[WebDriver]:
    browser.get("about:blank")
    browser.get(server.url)
    until(browser, lambda seen: seen["status"] == "Live")
    yield browser
    assert console_errors(browser) == []
    browser.get("about:blank")


def held(seen: dict[str, Any]) -> bool:
    """Whether the middle of the picture is white: a control is held."""
    pixels = seen["pixels"]
    return pixels is not None and min(pixels[4 * (32 * 15 + 15) :][:3]) > 200


def test_keys_are_held_while_they_are_down_and_let_go_when_the_page_loses_them(page: WebDriver) -> None:
    assert page.find_element("id", "pad").is_displayed()
    assert [each.text for each in page.find_elements("class name", "key")] == ["←", "→", "Space"]
    actions = ActionChains(page)
    actions.key_down(Keys.ARROW_RIGHT).perform()
    until(page, held)
    assert page.find_element("css selector", ".key.held").text == "→"
    until(page, lambda _: "on screen after" in page.find_element("id", "pad-lag").text)
    actions.key_up(Keys.ARROW_RIGHT).perform()
    until(page, lambda seen: not held(seen))
    actions.key_down(Keys.SPACE).perform()  # this world's, not pause
    until(page, held)
    page.execute_script("window.dispatchEvent(new Event('blur'))")
    until(page, lambda seen: not held(seen) and seen["status"] == "Live")
    actions.key_up(Keys.SPACE).perform()


def test_a_key_in_the_prompt_is_a_letter_and_buttons_on_the_picture_are_keys(page: WebDriver) -> None:
    prompt = page.find_element("id", "prompt")
    prompt.click()
    ActionChains(page).key_down(Keys.SPACE).key_up(Keys.SPACE).send_keys("x").perform()
    assert prompt.get_attribute("value").endswith(" x")
    assert not held(until(page, lambda seen: seen["pixels"] is not None))
    button = page.find_elements("class name", "key")[0]
    ActionChains(page).click_and_hold(button).perform()
    until(page, held)
    ActionChains(page).release(button).perform()
    until(page, lambda seen: not held(seen))


def test_the_mouse_turns_an_axis_while_the_picture_has_it(page: WebDriver) -> None:
    video = page.find_element("id", "video")
    ActionChains(page).move_to_element(video).click().perform()
    until(page, lambda _: page.execute_script("return document.pointerLockElement !== null"))
    move = "globalThis.mouse = setInterval(() => dispatchEvent(new MouseEvent('mousemove', { movementX: 20 })), 20)"
    page.execute_script(move)  # a locked pointer has no place that a driver could move
    until(page, held)
    page.execute_script("clearInterval(globalThis.mouse)")
    until(page, lambda seen: not held(seen))  # at rest
    page.execute_script("window.dispatchEvent(new Event('blur'))")
    until(page, lambda _: page.execute_script("return document.pointerLockElement === null"))


def test_fingers_have_a_stick_for_the_axes_and_buttons_for_the_rest(page: WebDriver) -> None:
    page.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        page.refresh()
        until(page, lambda seen: seen["status"] == "Live")
        assert [each.text for each in page.find_elements("class name", "key")] == ["jump"]
        stick = page.find_element("class name", "stick")
        box = stick.rect
        middle = box["x"] + box["width"] / 2

        def touch(kind: str, *columns: float) -> None:
            points = [{"x": x, "y": box["y"] + box["height"] / 2} for x in columns]
            page.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", middle + 44)
        until(page, held)
        touch("touchMove", middle)
        until(page, lambda seen: not held(seen))
        touch("touchMove", middle + 44)
        until(page, held)
        touch("touchEnd")
        until(page, lambda seen: not held(seen))
    finally:
        page.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_who_waits_for_the_wheel_sees_who_has_it_and_steers_when_it_is_free(page: WebDriver, server: Server) -> None:
    other = httpx.Client(base_url=server.url)
    address, name = "/api/sessions/default/wheel", "<b>Ada</b>"
    taken = other.post(address, json={"do": "take", "name": name}).json()
    line, go = page.find_element("id", "wheel-text"), page.find_element("id", "wheel-go")
    until(page, lambda _: line.text == f"{name} has the wheel.")
    assert not page.find_element("id", "pad").is_displayed() and not page.find_element("id", "prompt").is_displayed()
    ActionChains(page).key_down(Keys.ARROW_RIGHT).perform()
    go.click()
    until(page, lambda _: "You are number 1 of 1" in line.text)
    other.post(address, json={"do": "give_up"}, headers={"Wheel-Token": taken["wheel_token"]})
    until(page, lambda seen: line.text == "You have the wheel." and not held(seen))
    ActionChains(page).key_up(Keys.ARROW_RIGHT).key_down(Keys.ARROW_RIGHT).perform()
    until(page, held)
    ActionChains(page).key_up(Keys.ARROW_RIGHT).perform()
    assert other.post("/api/control", json={"type": "pause"}).status_code == 409
    go.click()
    until(page, lambda _: not line.is_displayed() and page.find_element("id", "prompt").is_displayed())
    other.close()
