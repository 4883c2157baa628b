"""A text that takes longer to encode than a caller of the REST API waits: the answer says so, and the prompt comes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

import pytest

from streamdiff.server.routes import control
from tests.server.conftest import Site, open_site
from tests.server.scripted import Painter, Text

pytestmark = pytest.mark.slow


@dataclass
class SlowText(Text):
    """Encodes green only when it may, and yellow never."""

    slow: bool = True
    free: ClassVar[threading.Event] = threading.Event()

    def encode(self, text: str) -> tuple[int, int, int]:
        if "green" in text:
            assert self.free.wait(240)
        if "yellow" in text:
            raise RuntimeError("no memory")
        return super().encode(text)


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    SlowText.free.clear()
    monkeypatch.setattr(control, "ANSWER_TIMEOUT_S", 0.5)


@asynccontextmanager
async def served() -> AsyncIterator[Site]:
    async with open_site(painter=Painter(chunk_s=0.02, text=SlowText())) as site:
        try:
            yield site
        finally:
            SlowText.free.set()


async def test_a_prompt_that_takes_long_is_202_and_comes_later() -> None:
    async with served() as site:
        live = site.live
        before = live.prompt
        asked = await site.http.post("/api/control", json={"type": "prompt", "prompt": "all green", "id": 5})
        receipt = asked.json()
        assert (asked.status_code, receipt["stage"], receipt["kind"], receipt["id"]) == (202, "asked", "prompt", 5)
        assert receipt["request"] and receipt["lag_s"] == 0.5
        assert (await site.http.get("/api/sessions/default")).json()["prompt"] == before
        paused = await site.http.post("/api/sessions/default/pause")
        assert (paused.status_code, paused.json()["session"]["paused"]) == (200, True), "what need not wait does not"
        SlowText.free.set()
        await site.until(lambda: live.prompt == "all green")
        assert (await site.http.get("/api/sessions/default")).json()["prompt"] == "all green"


async def test_an_engine_that_takes_no_command_is_another_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request was not handed over, and so nobody can say that it comes."""
    async with served() as site:
        live = site.live
        monkeypatch.setattr(live, "_send", lambda command: asyncio.sleep(60))
        answer = await site.http.post("/api/control", json={"type": "prompt", "prompt": "all blue"})
        assert (answer.status_code, answer.json()["code"]) == (504, "engine")
