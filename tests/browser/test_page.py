"""What the page offers beside the prompt: a link to share, words to try, controls that fold away; in Chromium."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import av
import httpx
import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from benchmarks.browser import Server, console_errors, running_server
from tests.browser.looking import coloured, model_server, open_controls, painted_server, until
from tests.server.scripted import COLOURS

pytestmark = pytest.mark.browser
PLAYED = """
const [data, type, done] = arguments;
const video = document.createElement("video");
video.onloadeddata = () => done(video.videoWidth && video.duration);
video.onerror = () => done(video.error.message);
const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
video.src = URL.createObjectURL(new Blob([bytes], { type })); // the page may play no others
"""
"""How long a video plays, in seconds."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(painted_server()) as server:
        yield server


@pytest.fixture
def page(server: Server, browser: WebDriver) -> Iterator[WebDriver]:
    browser.get(server.url)
    until(browser, lambda seen: seen["status"] == "Live")
    yield browser
    assert console_errors(browser) == []
    browser.get("about:blank")


def opened(server: Server, browser: WebDriver, link: str) -> dict[str, object]:
    """The session to which a link leads."""
    browser.get(link)
    until(browser, lambda seen: "session=" in browser.current_url and seen["status"] == "Live")
    session = parse_qs(urlsplit(browser.current_url).query)["session"][0]
    found: dict[str, object] = httpx.get(f"{server.url}api/sessions/{session}", timeout=20).json()
    return found


def test_a_link_opens_a_session_with_its_prompt_and_seed_and_can_be_shared_on(
    server: Server, browser: WebDriver
) -> None:
    asked = {"prompt": "a green circle & more", "seed": "7", "steps": "2", "kv_context": "staircase"}
    first = opened(server, browser, f"{server.url}?{urlencode(asked | {'fps': '10'})}")
    assert {name: str(first[name]) for name in asked} == asked
    assert first["id"] != "default"
    until(browser, lambda seen: coloured(seen, 1, 0) > 500)
    browser.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    browser.find_element("id", "share").click()
    until(browser, lambda _: browser.find_element("id", "receipt").text.startswith("A link"))
    link = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    second = opened(server, browser, link)
    assert {name: str(second[name]) for name in asked} == asked
    assert second["id"] != first["id"]
    assert first["fps"] == second["fps"] == 10
    assert console_errors(browser) == []


def test_a_page_behind_a_relay_tells_the_server_its_addresses(browser: WebDriver, tmp_path: Path) -> None:
    """A relay lets nobody in whose address it was not told."""
    (tmp_path / "relay.yaml").write_text("serve:\n  ice_servers: [{url: 'stun:127.0.0.1:9'}]\n")
    with running_server(model_server("--config", str(tmp_path / "relay.yaml"))) as server:
        browser.get(server.url)
        until(browser, lambda seen: seen["status"] == "Live")
        told = "performance.getEntriesByType('resource').filter((each) => /whep[/][^/?]+/.test(each.name)).length"
        until(browser, lambda _: browser.execute_script(f"return {told}") > 0)
        assert console_errors(browser) == []
        browser.get("about:blank")


def test_a_suggestion_changes_the_prompt_and_is_then_not_suggested_again(page: WebDriver) -> None:
    def words() -> list[str]:
        return [chip.text for chip in page.find_elements(By.CSS_SELECTOR, "#suggestions .chip")]

    until(page, lambda _: len(words()) == 2)
    colour, shape = words()
    assert colour in COLOURS and shape in ("a yellow circle", "a green square")
    pressed = page.find_element(By.CSS_SELECTOR, "#suggestions .chip")
    pressed.click()
    until(page, lambda _: page.find_element("id", "playing").text == colour)
    assert words()[0] == colour, "nothing moves under the pointer"
    ActionChains(page).move_to_element(page.find_element("id", "screen")).perform()
    until(page, lambda _: words() and words()[0] in set(COLOURS) - {colour})


def test_the_drawer_opens_and_stays_so_on_the_next_visit(page: WebDriver) -> None:
    page.set_window_size(1280, 900)
    settings, button = page.find_element("id", "settings"), page.find_element("id", "fold")
    assert not settings.is_displayed() and button.get_attribute("aria-expanded") == "false"
    closed = page.find_element("id", "screen").rect
    page.find_element("tag name", "body").send_keys("c")
    until(page, lambda _: settings.is_displayed())
    page.refresh()
    until(page, lambda seen: seen["status"] == "Live")
    button = page.find_element("id", "fold")
    assert button.get_attribute("aria-expanded") == "true"
    assert page.find_element("id", "settings").is_displayed()
    assert 500 < page.find_element("id", "screen").rect["height"] < closed["height"], "closing enlarges the picture"
    button.click()
    until(page, lambda _: not page.find_element("id", "settings").is_displayed())


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1920, 1080), (390, 844), (844, 390)])
def test_picture_and_prompt_are_on_the_first_screen(page: WebDriver, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 900}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        until(page, lambda _: page.execute_script("return innerHeight") == height)
        picture, prompt = page.find_element("id", "screen").rect, page.find_element("id", "prompt").rect
        assert picture["y"] >= 0 and picture["y"] + picture["height"] <= height
        assert prompt["y"] >= 0 and prompt["y"] + prompt["height"] <= height
        assert picture["height"] > 0.75 * min(width, height)
        open_controls(page)
        switch = page.find_element("id", "switch")
        until(page, lambda _: switch.is_displayed())
        assert width < height or switch.rect["y"] + switch.rect["height"] <= height, "the drawer is beside the picture"
        page.find_element("id", "prompt").send_keys("a red circle and a blue star " * 5)
        assert width < 900 or page.execute_script("return document.documentElement.scrollHeight") == height
    finally:
        page.find_element("id", "prompt").clear()
        page.find_element("id", "fold").click()
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_next_words_replace_a_prompt_that_was_sent_and_the_arrow_brings_it_back(page: WebDriver) -> None:
    box = page.find_element("id", "prompt")
    box.send_keys("a red circle" + Keys.ENTER)
    box.send_keys("a blue star" + Keys.ENTER)
    until(page, lambda seen: coloured(seen, 2, 0) > 500)
    assert box.get_property("value") == "a blue star"
    box.send_keys(Keys.ARROW_UP, Keys.ARROW_UP)
    assert box.get_property("value") == "a red circle"
    page.find_element("id", "surprise").click()
    until(page, lambda seen: seen["view"]["prompt"] != "a blue star")  # the text, where the painter knows the words


def test_the_last_seconds_are_saved_as_a_video_that_plays(page: WebDriver, tmp_path: Path) -> None:
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    box = page.find_element("id", "prompt")
    box.send_keys("a red circle" + Keys.ENTER)
    decoded = until(page, lambda seen: coloured(seen, 0, 2) > 500)["inbound"]["framesDecoded"]
    until(page, lambda seen: seen["inbound"]["framesDecoded"] > decoded + 450)  # more than 10 s
    box.send_keys("a green circle" + Keys.ENTER)
    until(page, lambda seen: coloured(seen, 1, 0) > 500)
    page.find_element("id", "record").click()
    page.find_element(By.CSS_SELECTOR, "#record-menu [value='10']").click()
    until(page, lambda _: page.find_element("id", "receipt").text.startswith("Saved as "))
    until(page, lambda _: any(file.suffix in (".mp4", ".webm") for file in tmp_path.iterdir()))
    [file] = tmp_path.iterdir()
    assert file.name in page.find_element("id", "receipt").text
    with av.open(str(file)) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) > 300
    green, red = (frames[at].mean((0, 1)) for at in (-1, 0))
    assert green[1] > green[0] + 30 and red[0] > red[1] + 30, "from what was there before to what is shown now"
    played = page.execute_async_script(PLAYED, b64encode(file.read_bytes()).decode(), f"video/{file.suffix[1:]}")
    assert played == pytest.approx(10, abs=0.2)


def test_a_full_screen_has_the_prompt(page: WebDriver) -> None:
    page.find_element("id", "fullscreen").click()
    until(page, lambda _: page.execute_script("return document.fullscreenElement?.id") == "stage")
    page.find_element("id", "prompt").send_keys("a green circle" + Keys.ENTER)
    until(page, lambda seen: coloured(seen, 1, 0) > 500)
    until(page, lambda _: "idle" in str(page.find_element("id", "stage").get_attribute("class")))
    page.find_element("id", "prompt").send_keys("a")
    assert "idle" not in str(page.find_element("id", "stage").get_attribute("class"))
    page.execute_script("document.exitFullscreen()")
