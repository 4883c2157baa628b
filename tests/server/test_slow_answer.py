"""A text that takes longer to encode than a caller of the REST API waits: the answer says so, and the prompt comes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from streamdiff.server.routes import control
from tests.server.conftest import Site, run_scene
from tests.server.scripted import Painter, Text

pytestmark = pytest.mark.slow


@dataclass
class SlowText(Text):
    """Encodes green only when it may, and yellow never."""

    slow: bool = True
    free: ClassVar[threading.Event] = threading.Event()

    def encode(self, text: str) -> tuple[int, int, int]:
        if "green" in text:
            assert self.free.wait(60)
        if "yellow" in text:
            raise RuntimeError("no memory")
        return super().encode(text)


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    SlowText.free.clear()
    monkeypatch.setattr(control, "ANSWER_TIMEOUT_S", 0.5)


def _run(scene: Callable[[Site], Awaitable[None]]) -> None:
    async def freed(site: Site) -> None:
        try:
            await scene(site)
        finally:
            SlowText.free.set()

    run_scene(freed, painter=Painter(chunk_s=0.02, text=SlowText()))


def test_a_prompt_that_takes_long_is_202_and_comes_later() -> None:
    async def scene(site: Site) -> None:
        live = site.state.manager.get("default")
        assert live is not None
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

    _run(scene)


def test_a_change_of_several_things_says_of_each_how_far_it_is() -> None:
    async def scene(site: Site) -> None:
        change = {"fps": 20, "prompt": "all green", "seed": 7}
        answer = await site.http.patch("/api/sessions/default", json=change)
        assert answer.status_code == 202
        stages = {receipt["kind"]: receipt["stage"] for receipt in answer.json()["receipts"]}
        assert stages == {"fps": "accepted", "prompt": "asked", "reset": "asked"}
        assert answer.json()["session"]["fps"] == 20
        SlowText.free.set()
        live = site.state.manager.get("default")
        assert live is not None
        await site.until(lambda: (live.prompt, live.seed) == ("all green", 7))
        quick = await site.http.patch("/api/sessions/default", json={"prompt": "all blue"})
        assert (quick.status_code, quick.json()["receipts"][0]["stage"]) == (200, "accepted")

    _run(scene)


def test_what_fails_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(site: Site) -> None:
        monkeypatch.setattr(control, "ANSWER_TIMEOUT_S", 20)
        answer = await site.http.post("/api/control", json={"type": "prompt", "prompt": "all yellow"})
        assert answer.status_code == 422
        assert "no memory" in answer.json()["detail"]

    _run(scene)


def test_an_engine_that_takes_no_command_is_another_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request was not handed over, and so nobody can say that it comes."""

    async def scene(site: Site) -> None:
        live = site.state.manager.get("default")
        assert live is not None
        monkeypatch.setattr(live, "_send", lambda command: asyncio.sleep(60))
        answer = await site.http.post("/api/control", json={"type": "prompt", "prompt": "all blue"})
        assert (answer.status_code, answer.json()["code"]) == (504, "engine")

    _run(scene)
