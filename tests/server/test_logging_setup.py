"""What a server writes: plain lines for a person, JSON objects for a collector, calm in both, and no prompt unasked."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from datetime import datetime
from typing import Any

import httpx
import pytest

from streamdiff.config import ServeConfig
from streamdiff.server import logging_setup
from tests.server.conftest import bearer
from tests.server.test_restart import start, watching

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]


def _records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def _play(url: str, frames: int, prompts: list[str]) -> dict[str, Any]:
    """Open a session, watch so many frames of it with new prompts on the way, and leave; returns the session."""
    async with httpx.AsyncClient(base_url=url, timeout=240) as http:
        session: dict[str, Any] = (await http.post("/api/sessions", json={"prompt": "blue secret"})).json()
        path, key = f"/api/sessions/{session['id']}", bearer(session["control_token"])
        async with watching(http, session["id"]) as viewer:
            while len(viewer.frames) < frames:
                await viewer.until_frame(lambda pts, colour: True)
                if prompts:
                    await http.patch(path, json={"prompt": prompts.pop()}, headers=key)
            await http.patch(path, json={"prompt": "red secret", "oops": 1}, headers=key)
            await http.delete(viewer.location)
        await http.delete(path, headers=key)
    return session | {"viewer": viewer.location.rpartition("/")[2]}


async def test_as_json_every_line_is_an_object_and_only_comings_and_goings_are_told() -> None:
    """No prompt is."""
    server = start("--log-format", "json")
    try:
        async with asyncio.timeout(240):
            while not (found := re.search(r'"url": "([^"]+)"', server.complaints)):
                await asyncio.sleep(0.05)
        begin = len(_records(server.complaints))
        session = await _play(found[1], 80, [f"green secret {number}" for number in range(5)])
    finally:
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.process.wait, 30)
        said = server.process.stdout.read()  # type: ignore[union-attr]
        assert server.close() == 0
    assert said == "", "all goes to standard error"
    records = _records(server.complaints)
    for record in records:
        assert datetime.fromisoformat(record["time"]).tzinfo is not None
        assert record["level"] == "info" and record["logger"].startswith("streamdiff") and record["message"]
    ours = [record for record in records if record.get("session") == session["id"]]
    whispered = session["viewer"][:6]
    assert [(each["logger"].rpartition(".")[2], each.get("viewer"), each.get("end")) for each in ours] == [
        ("manager", None, None),
        ("peer_connections", whispered, None),
        ("peer_connections", whispered, "delete"),
        ("manager", None, None),
    ]
    text = json.dumps(records)
    for secret in ("secret", session["viewer"], session["control_token"], session["view_token"]):
        assert secret not in text
    assert len(records) <= begin + len(ours), "80 frames add no line"


def test_as_json_the_engine_s_last_words_and_the_end_are_objects_too() -> None:
    server = start("--log-format", "json", "--name", "dies-2", "--restarts", "0")
    assert server.process.stdout is not None and server.process.stdout.read() == ""
    assert server.process.wait(240) == server.close() == 1
    records = _records(server.complaints)
    assert any(r["logger"] == "streamdiff.engine.output" and "out of paint" in r["message"] for r in records)
    last = records[-1]
    assert (last["logger"], last["level"]) == ("streamdiff.fatal", "error")
    assert "out of paint" in last["message"] and "session 'default'" in last["message"]


def test_a_warning_has_its_facts_and_a_fault_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("streamdiff.server.some")
    with logging_setup.configure(ServeConfig(log_format="json")):
        logger.warning("low %(what)s", {"what": "ink", "left_ml": 3, "path": os})
        try:
            raise ValueError("no\nink")
        except ValueError:
            logger.exception("it broke")
    first, second = _records(capsys.readouterr().err)
    assert (first["level"], first["message"], first["left_ml"]) == ("warning", "low ink", 3)
    assert first["path"] == str(os), "what JSON does not know is told as text"
    assert "ValueError: no\nink" in second["traceback"]
