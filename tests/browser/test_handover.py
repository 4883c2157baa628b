"""A server is updated under three browsers: their pages reconnect by themselves and the picture goes on."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.chrome.webdriver import WebDriver

from benchmarks.browser import chromium, probe, running_server
from tests.browser.looking import LIMIT_S, coloured, painted_server, until

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def shows(browser: WebDriver, channel: int, other: int) -> None:
    """Wait until the page plays moving pictures that are mostly of one colour: 0 red, 1 green, 2 blue."""
    pictures: set[tuple[int, ...]] = set()

    def seen(page: dict) -> bool:  # type: ignore[type-arg]
        pictures.add(tuple(page["pixels"] or ()))
        return page["status"] == "Live" and len(pictures) >= 3 and coloured(page, channel, other) > 12

    until(browser, seen)


def test_a_rolling_restart_under_three_browsers(browser: WebDriver, tmp_path: Path) -> None:
    """One watches the default session, two have sessions of their own, one of which takes its control token."""
    options = ("--handover", str(tmp_path / "handover"), "--server-name", "a")
    with ExitStack() as stack:
        second, third = stack.enter_context(chromium()), stack.enter_context(chromium())
        with running_server(painted_server(*options)) as first:
            port = first.url.rstrip("/").rsplit(":", 1)[1]
            made = [httpx.post(f"{first.url}api/sessions", json={"prompt": each}).json() for each in ("green", "blue")]
            browser.get(first.url)
            second.get(f"{first.url}?session={made[0]['id']}")
            third.get(f"{first.url}?session={made[1]['id']}#token={made[1]['control_token']}")
            shows(browser, 0, 2)
            shows(second, 1, 0)
            shows(third, 2, 0)
            before = [probe(each)["inbound"]["id"] for each in (browser, second, third)]
            first.process.send_signal(signal.SIGTERM)
            first.process.wait(LIMIT_S)
            assert len(list((tmp_path / "handover").iterdir())) == 3
        with running_server(painted_server("--port", port, *options)) as last:
            shows(browser, 0, 2)
            shows(second, 1, 0)
            shows(third, 2, 0)
            assert before != [probe(each)["inbound"]["id"] for each in (browser, second, third)]
            key = {"Authorization": f"Bearer {made[1]['control_token']}"}
            changed = httpx.patch(f"{last.url}api/sessions/{made[1]['id']}", json={"prompt": "red"}, headers=key)
            assert changed.status_code == 200, changed.text
            shows(third, 0, 2)
            assert not list((tmp_path / "handover").iterdir())
        browser.get("about:blank")
