"""A start picture given on the page: chosen, dropped, pasted, taken from the screen. In headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from PIL import Image
from selenium.webdriver.chrome.webdriver import WebDriver

from benchmarks.browser import Server, console_errors, running_server
from tests.browser.looking import coloured, open_controls, painted_server, until
from tests.server.scripted import COLOURS

pytestmark = pytest.mark.browser

# In a page nobody may put files onto a clipboard or drag them, so the events carry them.
HAND_OVER = """
const [kind, bytes] = arguments;
const transfer = new DataTransfer();
transfer.items.add(new File([new Uint8Array(bytes)], "picture.png", { type: "image/png" }));
const event = kind === "paste"
  ? new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })
  : new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true });
return document.body.dispatchEvent(event);
"""
PIXELS = 1024


def picture(colour: str) -> bytes:
    file = BytesIO()
    Image.new("RGB", (300, 200), COLOURS[colour]).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(painted_server()) as server:
        yield server


@pytest.fixture
def page(server: Server, browser: WebDriver) -> Iterator[WebDriver]:
    """The page of a red stream without a picture, at a rate at which the picture's chunk takes two seconds."""
    for change in ({"fps": 4}, {"prompt": "a red circle", "switch": "reset"}, {"image": ""}):
        assert httpx.patch(server.url + "api/sessions/default", json=change, timeout=20).status_code == 200
    browser.get(server.url)
    until(browser, lambda seen: seen["status"] == "Live" and coloured(seen, 0, 2) > PIXELS / 2)
    open_controls(browser)
    yield browser
    assert console_errors(browser) == []
    browser.get("about:blank")


def text(page: WebDriver, name: str) -> str:
    return str(page.find_element("id", name).text)


def shows_blue_then_red_again(page: WebDriver) -> None:
    until(page, lambda seen: coloured(seen, 2, 0) > PIXELS / 2)
    assert text(page, "picture-state") == "The stream begins with your picture."
    until(page, lambda seen: coloured(seen, 0, 2) > PIXELS / 2)


@pytest.mark.parametrize("way", ["chosen", "drop", "paste"])
def test_a_picture_is_shown_and_the_stream_goes_on(page: WebDriver, tmp_path: Path, way: str) -> None:
    if way == "chosen":
        file = tmp_path / "blue.png"
        file.write_bytes(picture("blue"))
        page.find_element("id", "picture").send_keys(str(file))
    else:
        assert page.execute_script(HAND_OVER, way, list(picture("blue"))) is False, "the page takes it"
    shows_blue_then_red_again(page)


def test_this_frame_is_what_the_stream_begins_with_and_none_takes_it_away(page: WebDriver, server: Server) -> None:
    none = page.find_element("id", "picture-none")
    assert not none.is_displayed()
    page.find_element("id", "picture-frame").click()
    until(page, lambda _: none.is_displayed())
    state = httpx.get(server.url + "api/state", timeout=20).json()["state"]
    assert state["image"] is True
    none.click()
    until(page, lambda _: not none.is_displayed())


def test_a_file_that_is_no_picture_is_answered_beside_it(page: WebDriver, tmp_path: Path, server: Server) -> None:
    before = httpx.get(server.url + "api/state", timeout=20).json()["state"]["rev"]
    wrong = tmp_path / "song.png"
    wrong.write_bytes(b"not a picture at all")
    page.find_element("id", "picture").send_keys(str(wrong))
    until(page, lambda _: text(page, "picture-error").startswith("The picture is of a format that is not read here"))
    assert [error for error in console_errors(page) if "422" not in error] == []
    large = tmp_path / "large.png"
    large.write_bytes(bytes(11 * 2**20))
    page.find_element("id", "picture").send_keys(str(large))
    until(page, lambda _: text(page, "picture-error") == "That file has 11.0 MiB; at most 10 are read.")
    assert httpx.get(server.url + "api/state", timeout=20).json()["state"]["rev"] == before


def test_a_world_waits_for_a_picture_says_what_keys_do_and_begins_with_it(browser: WebDriver, tmp_path: Path) -> None:
    file, wrong = tmp_path / "blue.png", tmp_path / "song.png"
    file.write_bytes(picture("blue"))
    wrong.write_bytes(b"not a picture at all")
    with running_server(painted_server("--name", "world")) as world:
        browser.get(world.url)
        until(browser, lambda seen: seen["status"] == "Waiting for a picture")
        assert "This world begins with a picture" in text(browser, "veil-text")
        assert text(browser, "veil-keys").splitlines() == [
            "← move x back", "→ move x", "Space jump", "mouse after a click on the picture",
        ]  # fmt: skip
        browser.find_element("id", "picture").send_keys(str(wrong))
        until(browser, lambda _: text(browser, "veil-text").startswith("The picture is of a format that is not read"))
        browser.find_element("id", "prompt").send_keys("a red circle")
        browser.find_element("id", "picture").send_keys(str(file))
        until(browser, lambda seen: "?session=" in browser.current_url and coloured(seen, 2, 0) > PIXELS / 2)
        until(browser, lambda seen: coloured(seen, 0, 2) > PIXELS / 2)
        assert browser.find_element("id", "pad").is_displayed()
        open_controls(browser)
        assert not browser.find_element("id", "picture-none").is_displayed(), "it cannot do without"
        browser.get("about:blank")
