"""What the page lets whom do: ways to change the prompt, the rate, other sessions, tokens. In headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from benchmarks.browser import Server, console_errors, running_server
from tests.browser.looking import ask, coloured, model_server, open_controls, painted_server, until
from tests.server.scripted import MARKS

pytestmark = pytest.mark.browser

VIEW, CONTROL = "view-token-of-this-test", "control+token*of-this~test"
"""The second one with signs that a careless reader of addresses takes for something else."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(painted_server()) as server:
        yield server


def visit(browser: WebDriver, address: str, status: str = "Live") -> None:
    """The page at an address, afresh, even where it differs in its fragment only."""
    browser.get("about:blank")
    browser.get(address)
    until(browser, lambda seen: seen["status"] == status)
    open_controls(browser)


@pytest.fixture
def page(server: Server, browser: WebDriver) -> Iterator[WebDriver]:
    visit(browser, server.url)
    yield browser
    assert console_errors(browser) == []
    browser.get("about:blank")


def text(page: WebDriver, name: str) -> str:
    return str(page.find_element("id", name).text)


def state(server: Server, **asked: Any) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(server.url + "api/state", params=asked, timeout=20).json()["state"]
    return answer


def marked(seen: dict[str, Any], colour: tuple[int, int, int]) -> bool:
    """Whether the picture's upper right corner has that colour."""
    at = 4 * (2 * 32 + 29)
    return max(abs(a - b) for a, b in zip(seen["pixels"][at : at + 3], colour, strict=True)) < 40


@pytest.mark.parametrize(
    ("switch", "said"), [("recache", "past recached"), ("flush", "past flushed"), ("reset", "restarted")]
)
def test_what_a_new_prompt_does_to_the_past_is_chosen_on_the_page(page: WebDriver, switch: str, said: str) -> None:
    Select(page.find_element("id", "switch")).select_by_value(switch)
    box = page.find_element("id", "switch")
    assert len(text(page, "switch-help")) > 20
    assert box.get_attribute("title") == text(page, "switch-help")
    ask(page, "a blue circle")
    assert text(page, "receipt").endswith(f"{said}.")
    until(page, lambda seen: coloured(seen, 2, 0) > 500 and marked(seen, MARKS[switch]))
    Select(box).select_by_value("keep")
    ask(page, "a red circle")
    assert text(page, "receipt").endswith(" s."), "keeping the past is nothing to tell"
    until(page, lambda seen: coloured(seen, 0, 2) > 500 and not marked(seen, MARKS[switch]))


def test_the_rate_is_changed_on_the_page_and_shows(page: WebDriver, server: Server) -> None:
    box = page.find_element("id", "fps")
    assert box.get_property("value") == "40"
    assert text(page, "fps-native") == "The model's own rate: 40"
    box.clear()
    box.send_keys("500" + Keys.ENTER)
    assert "1 to 120" in text(page, "fps-error")
    assert state(server)["fps"] == 40
    box.clear()
    box.send_keys("10" + Keys.ENTER)
    until(page, lambda _: text(page, "receipt") == "Plays at 10 frames per second.")
    assert text(page, "fps-error") == ""
    assert state(server)["fps"] == 10
    until(page, lambda _: text(page, "n-shown") in ("9", "10", "11"))
    httpx.post(server.url + "api/control", json={"type": "fps", "fps": 40}, timeout=20)
    until(page, lambda _: box.get_property("value") == "40")


def test_the_steps_are_chosen_on_the_page_where_there_is_a_choice(page: WebDriver, server: Server) -> None:
    """From the keyboard: the painter's upper left corner is white while chunks have fewer steps than usual."""
    box = page.find_element("id", "steps")
    assert [option.text for option in Select(box).options] == ["4", "2"]
    assert box.get_property("value") == "4" and box.is_displayed()
    assert box.accessible_name == "Steps per chunk"
    box.send_keys(Keys.ARROW_DOWN)
    until(page, lambda seen: min(seen["pixels"][:3]) > 200)
    until(page, lambda _: text(page, "receipt").startswith("Chunks have 2 steps now, after "))
    assert state(server)["steps"] == 2
    refused = httpx.patch(server.url + "api/sessions/default", json={"steps": 3}, timeout=20)
    assert refused.status_code == 422
    httpx.post(server.url + "api/control", json={"type": "steps", "steps": 4}, timeout=20)
    until(page, lambda seen: box.get_property("value") == "4" and min(seen["pixels"][:3]) < 100)
    one = "streamdiff.client.dispatchEvent(new CustomEvent('message', { detail: arguments[0] }))"
    page.execute_script(one, state(server) | {"steps_known": [4]})
    assert not box.is_displayed(), "with one number of steps there is nothing to choose"


def test_another_session_is_watched_and_steered_by_its_address(server: Server, browser: WebDriver) -> None:
    body = {"prompt": "a green circle", "kv_context": "same_step"}
    opened = httpx.post(server.url + "api/sessions", json=body, timeout=20).json()
    visit(browser, f"{server.url}?session={opened['id']}#token={opened['control_token']}")
    assert text(browser, "playing-label") == f"Now playing in session {opened['id']}"
    assert text(browser, "playing") == "a green circle"
    usable = "return [...document.getElementById('switch').options].filter((o) => !o.disabled).map((o) => o.value)"
    assert browser.execute_script(usable) == ["keep", "reset", "flush"]
    ask(browser, "a blue circle")
    until(browser, lambda seen: coloured(seen, 2, 0) > 500)
    assert state(server)["prompt"] != "a blue circle", "the default session plays its own"

    # The page does not offer it; who asks all the same is told in words.
    browser.execute_script("for (const o of document.querySelectorAll('#switch option')) o.disabled = false")
    Select(browser.find_element("id", "switch")).select_by_value("recache")
    browser.find_element("id", "prompt").send_keys(Keys.ENTER)
    until(browser, lambda _: "recache" in text(browser, "switch-error"))
    assert browser.find_element("id", "switch").get_attribute("aria-invalid") == "true"

    headers = {"Authorization": f"Bearer {opened['control_token']}"}
    httpx.delete(server.url + f"api/sessions/{opened['id']}", headers=headers, timeout=20).raise_for_status()
    until(browser, lambda seen: seen["status"] == "Stopped")
    assert "has ended (deleted)" in text(browser, "veil-text")
    browser.find_element("id", "veil-button").click()
    until(browser, lambda seen: seen["status"] == "Stopped" and "has ended" in text(browser, "veil-text"))
    console_errors(browser)  # a 410 is in the console


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files with the two tokens."""
    tokens = {"view": VIEW, "control": CONTROL}
    for name, token in tokens.items():
        (tmp_path / name).write_text(token + "\n", encoding="ascii")
    return {name: str(tmp_path / name) for name in tokens}


def steerable(page: WebDriver) -> set[bool]:
    """Whether the controls can be used: of all that there are, once the examples are."""
    until(page, lambda _: len(page.find_elements("css selector", "#chips .chip")) == 3)
    found = page.execute_script("return [...document.querySelectorAll('[data-steers]')].map((each) => !each.disabled)")
    assert len(found) >= 11, "all controls, examples included"
    return set(found)


def test_who_has_the_control_token_steers_and_all_others_watch(files: dict[str, str], browser: WebDriver) -> None:
    with running_server(painted_server("--control-token-file", files["control"])) as server:
        visit(browser, server.url)
        assert steerable(browser) == {False}
        assert browser.find_element("id", "readonly").is_displayed()
        assert "Steering takes the control token" in text(browser, "readonly-text")
        assert browser.find_element("id", "prompt").get_attribute("title") == text(browser, "readonly-text")
        browser.find_element("tag name", "body").send_keys("r k ")
        refused = "streamdiff.client.send({ type: 'reset' });"
        heard = "streamdiff.client.addEventListener('message', ({ detail }) => detail.code && heard.push(detail.code));"
        browser.execute_script(f"globalThis.heard = []; {heard} {refused}")
        until(browser, lambda _: browser.execute_script("return heard") == ["forbidden"])  # in order: `r` sent nothing
        assert state(server)["rev"] == 0

        browser.get(f"{server.url}#token={CONTROL}")  # the same page, now with a token in its address
        until(browser, lambda seen: seen["status"] == "Live" and browser.find_element("id", "send").is_enabled())
        assert steerable(browser) == {True}
        assert not browser.find_element("id", "readonly").is_displayed()
        ask(browser, "a blue circle")
        until(browser, lambda seen: coloured(seen, 2, 0) > 500)
        browser.execute_script("document.querySelector('.skip').click()")
        assert browser.switch_to.active_element.get_attribute("id") == "prompt"
        assert browser.current_url.endswith(f"#token={CONTROL}")
        assert console_errors(browser) == []

        visit(browser, f"{server.url}#token=a-token-of-somebody-else", "Stopped")
        assert "not one of this stream's" in text(browser, "veil-text")
    browser.get("about:blank")
    console_errors(browser)  # a 401 is in the console


def test_a_ring_of_two_ranks_shows_how_busy_each_is(browser: WebDriver) -> None:
    with running_server(model_server("--stages", "2", "--kv-context", "same_step")) as server:
        visit(browser, server.url)
        shares = "return [...document.querySelectorAll('#rank-bars meter')].map((each) => each.value)"
        until(browser, lambda _: [0 < share <= 1 for share in browser.execute_script(shares)] == [True, True])
        assert browser.find_element("id", "ranks").is_displayed()
        assert browser.find_element("css selector", "option[value=recache]").get_property("disabled")
        assert console_errors(browser) == []
        browser.get("about:blank")


def test_the_page_says_what_comes_goes_back_and_branches_off(page: WebDriver, server: Server) -> None:
    ask(page, "a red circle")
    kept = int(page.find_element("id", "rewind").get_attribute("max") or 0)
    until(page, lambda _: int(page.find_element("id", "rewind").get_attribute("max") or 0) > max(kept, 1))
    chunk = page.find_element("id", "rewind").get_attribute("max")
    httpx.post(server.url + "api/sessions/default/timeline", json=[{"seconds": 2, "prompt": "a blue star"}])
    until(page, lambda _: text(page, "coming-text").startswith("a blue star in "))
    until(page, lambda seen: coloured(seen, 2, 0) > 500 and not page.find_element("id", "coming").is_displayed())
    until(page, lambda _: int(page.find_element("id", "rewind").get_attribute("max") or 0) > int(chunk or 0))
    page.execute_script("const r = document.getElementById('rewind'); r.value = arguments[0];", chunk)
    page.find_element("id", "rewind").send_keys(Keys.LEFT + Keys.RIGHT)
    assert text(page, "rewind-value").endswith(" s")
    page.find_element("id", "rewind-go").click()
    until(page, lambda seen: coloured(seen, 0, 2) > 500 and text(page, "receipt").startswith("Gone back"))
    assert text(page, "playing") == "a red circle"
    page.find_element("id", "branch").click()
    until(page, lambda _: len(page.window_handles) == 2)
    page.switch_to.window(page.window_handles[1])
    until(page, lambda seen: seen["status"] == "Live" and "session=s-" in page.current_url)
    page.close()
    page.switch_to.window(page.window_handles[0])
