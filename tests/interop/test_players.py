"""Third-party WHEP players on a page of another origin, with a token, in headless Chromium.

`tools/interop.sh` installs the players. The page is served here; the stream comes from a server of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from selenium.webdriver.chrome.webdriver import WebDriver

from benchmarks.browser import Server, chromium, console_errors, running_server
from tests.browser.looking import coloured, painted_server, until

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.interop, pytest.mark.node]

HERE = Path(__file__).parent
VIEW, CONTROL = "view-token-of-this-test", "control-token-of-this-test"


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing about it."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The origin of a page with the players."""
    folder = tmp_path_factory.mktemp("players")
    shutil.copy(HERE / "players.html", folder)
    bundle = ("--bundle", "--format=esm", f"--outfile={folder}/players.bundle.js", "--log-level=warning")
    subprocess.run((HERE / "node_modules/.bin/esbuild", HERE / "players.js", *bundle), check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Starts a server with a token to watch and one to steer."""
    folder = tmp_path_factory.mktemp("tokens")
    files = [folder / "view", folder / "control"]
    for file, token in zip(files, (VIEW, CONTROL), strict=True):
        file.write_text(token)
    return painted_server("--view-token-file", str(files[0]), "--control-token-file", str(files[1]))


@pytest.fixture(scope="module")
def server(command: tuple[str, ...], page: str) -> Iterator[Server]:
    """A server that pages of the other origin may use."""
    with running_server((*command, "--cors-origins", page)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with chromium() as browser:
        yield browser


def visit(browser: WebDriver, page: str, player: str, server: Server, token: str) -> None:
    """Open the page afresh."""
    browser.get("about:blank")
    console_errors(browser)
    asked = urlencode({"player": player, "whep": f"{server.url}whep/default"})
    browser.get(f"{page}/players.html?{asked}#{token}")


def viewers(server: Server) -> int:
    """How many the server says watch."""
    shown = {"Authorization": f"Bearer {VIEW}"}
    return int(httpx.get(server.url + "api/state", headers=shown, timeout=20).json()["viewers"])


@contextmanager
def playing(browser: WebDriver, page: str, player: str, server: Server) -> Iterator[None]:
    """The page, playing; at the end the player takes its leave."""
    visit(browser, page, player, server, VIEW)
    until(browser, lambda seen: seen["status"] != "loading")
    try:
        assert browser.find_element("id", "status-text").text == "playing"
        yield
    finally:
        browser.execute_async_script("(globalThis.streamdiff?.stop() ?? Promise.resolve()).then(arguments[0])")


@pytest.mark.parametrize("player", ["whip-whep", "eyevinn"])
def test_a_player_of_another_origin_plays_with_a_token(
    browser: WebDriver, page: str, server: Server, player: str
) -> None:
    """Each player's own code may only read the answer where the page's origin is named."""

    def shows(seen: dict[str, Any], over: int, under: int) -> bool:
        return seen["inbound"].get("frameWidth") and seen["pixels"] and coloured(seen, over, under) > 500

    shown = {"Authorization": f"Bearer {CONTROL}"}
    with playing(browser, page, player, server):
        for colour, over, under in (("red", 0, 2), ("blue", 2, 0)):
            message = {"type": "prompt", "id": 1, "prompt": f"a {colour} circle"}
            httpx.post(server.url + "api/control", json=message, headers=shown, timeout=20).raise_for_status()
            seen = until(browser, lambda seen, at=(over, under): shows(seen, *at))  # type: ignore[misc]
            assert (seen["inbound"]["frameWidth"], seen["inbound"]["frameHeight"]) == (128, 128)
            before = seen["inbound"]["framesDecoded"]
            until(browser, lambda seen, before=before: seen["inbound"]["framesDecoded"] >= before + 40)  # type: ignore[misc]
        pictures = {tuple(seen["pixels"])}
        until(browser, lambda seen: len(pictures.add(tuple(seen["pixels"])) or pictures) >= 5)  # type: ignore[func-returns-value]
        assert viewers(server) == 1
    assert viewers(server) == 0
    assert console_errors(browser) == []


def test_a_page_of_an_origin_that_is_not_named_plays_nothing(
    browser: WebDriver, page: str, command: tuple[str, ...]
) -> None:
    with running_server((*command, "--cors-origins", "http://127.0.0.1:1")) as closed:
        for player in ("whip-whep", "eyevinn"):
            visit(browser, page, player, closed, VIEW)
            seen = until(browser, lambda seen: seen["status"].startswith("failed"))
            assert seen["pixels"] is None
            assert "blocked by CORS policy" in " ".join(console_errors(browser))
        assert viewers(closed) == 0
