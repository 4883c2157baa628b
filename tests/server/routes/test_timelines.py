"""A session's log over HTTP, and a timeline that is posted to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import CONTROL, VIEW, Site, bearer, locked, open_site
from tests.server.scripted import CONTROLS, INFO, Painter

pytestmark = pytest.mark.slow
TIMELINE, LOG = "/api/sessions/default/timeline", "/api/sessions/default/log"


def steered() -> Painter:
    return Painter(chunk_s=0.001, info=replace(INFO, controls=CONTROLS))


async def log(site: Site) -> list[dict[str, Any]]:
    response = await site.http.get(LOG)
    assert response.status_code == 200 and response.headers["content-type"] == "application/jsonl", response.text
    return [json.loads(line) for line in response.text.splitlines()]


async def test_a_timeline_steers_a_watched_session_and_the_log_says_what_it_did() -> None:
    painter = steered()
    async with open_site(painter=painter) as site:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        changes = [
            {"at": 1, "prompt": "a blue star", "over": 2},
            {"seconds": 0.8, "controls": {"move_x": 0.5}},  # four chunks of 8 frames, 40 a second
            {"at": 4, "prompt": "a yellow square"},
        ]
        response = await site.http.post(TIMELINE, json=changes)
        assert (response.status_code, response.json()) == (200, {"changes": 3})
        state = await peer.message({"type": "state", "prompt": "a yellow square", "text": "a yellow square"})
        assert state["rev"] == 0
        applied = painter.streams[0].chunk
        await site.until(lambda: painter.streams[0].chunk > applied)
        header, first, second, third = await log(site)
        assert header["kind"] == "streamdiff log" and header["fault"] == ""
        begin = first.pop("at") - 1
        assert first == {"prompt": "a blue star", "switch": "keep", "over": 2, "along": "line"}
        assert {second.pop("at"), third.pop("at")} == {begin + 4}
        assert [second, third] == [{"prompt": "a yellow square", "switch": "keep"}, {"controls": {"move_x": 0.5}}]
        assert header["chunks"] > begin + 4 and header["cut"] == ""
        assert (await site.http.post(TIMELINE, json=[])).json() == {"changes": 0}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ([{"at": 1, "controls": {"fly": 1}}], "control"), ([{"at": 1, "prompt": "blue"}] * 10_001, ""),
        ([{"at": 1, "prompt": "blue", "switch": "flush", "over": 2}], "over"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_and_the_timeline_before_stays(changes: Any, field: str) -> None:
    painter = steered()
    async with open_site(painter=painter) as site:
        assert (await site.http.post(TIMELINE, json=[{"at": 10**9, "prompt": "blue"}])).status_code == 200
        response = await site.http.post(TIMELINE, json=changes)
        assert (response.status_code, response.json()["field"]) == (422, field), response.text
        assert painter.streams[0].wait_at is not None and painter.streams[0].wait_at >= 10**9
        assert (await site.http.post(TIMELINE, content=b"[" * 9000)).status_code == 415
        response = await site.http.post(TIMELINE, content=b"[" * 9000, headers={"content-type": "application/json"})
        assert response.status_code == 400


async def test_both_take_the_right_to_steer(tmp_path: Path) -> None:
    async with open_site(locked(tmp_path)) as site:
        for token, status in ((None, 401), (VIEW, 403), (CONTROL, 200)):
            assert (await site.http.get(LOG, headers=bearer(token))).status_code == status
            assert (await site.http.post(TIMELINE, json=[], headers=bearer(token))).status_code == status
