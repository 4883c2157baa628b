"""A session's log over HTTP, a timeline that is posted to it, and how it goes back and branches off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamdiff.engine import resting
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


async def test_who_may_steer_goes_back_and_branches_off_and_all_who_watch_hear_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resting, "KEEP_S", 0.2)  # a chunk
    async with open_site(painter=steered(), keep_bytes=10**8) as site:
        peer = await site.watch()
        first = (await peer.message({"type": "kept"}))["kept"][0]
        await site.http.patch("/api/sessions/default", json={"prompt": "a blue star"})
        await peer.message({"type": "state", "prompt": "a blue star"})
        begun = site.live.playback.made_frames
        await site.until(lambda: site.live.playback.made_frames > begun + 16)
        assert [line.get("prompt") for line in (await log(site))[1:]] == ["a blue star"]
        branch = await site.http.post("/api/sessions/default/branch", json={"chunk": first + 1})
        assert branch.status_code == 201 and branch.json()["control_token"], branch.text
        back = await site.http.post("/api/sessions/default/rewind", json={"chunk": first})
        assert back.status_code == 200 and back.json()["receipts"][0]["stage"] == "accepted", back.text
        assert await peer.message({"type": "rewound"}) == {"type": "rewound", "chunk": first}
        assert back.json()["session"]["prompt"] == site.live.prompt != "a blue star"
        made = site.live.playback.made_frames
        await site.until(lambda: site.live.playback.made_frames > made + 16)
        header, *changes = await log(site)
        assert changes == [] and header["chunks"] > first, (header, first)
        own, token = branch.json()["id"], bearer(branch.json()["control_token"])
        for id, name, shown in ((own, "branch", token), (own, "rewind", token), ("default", "rewind", {})):
            refused = await site.http.post(f"/api/sessions/{id}/{name}", json={"chunk": 10**6}, headers=shown)
            assert (refused.status_code, refused.json().get("field")) == (422, "chunk"), refused.text
        taken = await site.http.post("/api/sessions/default/wheel", json={"do": "take"})
        for name in ("branch", "rewind"):
            refused = await site.http.post(f"/api/sessions/default/{name}", json={"chunk": first})
            assert (refused.status_code, refused.json()["code"]) == (409, "wheel") and taken.status_code == 200


async def test_a_log_is_opened_as_a_session_that_plays_it_and_goes_on() -> None:
    painter = steered()
    async with open_site(painter=painter) as site:
        peer = await site.watch()
        await site.http.post(TIMELINE, json=[{"at": 1, "prompt": "a blue star"}, {"at": 2, "controls": {"jump": 1}}])
        await peer.message({"type": "state", "prompt": "a blue star"})
        await site.until(lambda: any(painter.streams[0].held.values()))
        data = (await site.http.get(LOG)).content
        header, *changes = map(json.loads, data.splitlines())
        opened = await site.http.post("/api/sessions", files={"log": data})
        assert opened.status_code == 201, opened.text
        id, token = opened.json()["id"], bearer(opened.json()["control_token"])
        assert opened.json()["prompt"] == header["prompt"] and opened.json()["seed"] == header["seed"]
        await site.watch(session=id)
        await site.until(lambda: painter.streams[1].chunk > header["chunks"])
        own = (await site.http.get(f"/api/sessions/{id}/log", headers=token)).content
        assert [json.loads(line) for line in own.splitlines()[1:]] == changes
        await site.http.patch(f"/api/sessions/{id}", json={"prompt": "a yellow square"}, headers=token)
        await site.until(lambda: painter.streams[1].paint == painter.text.encode("yellow"))
        fly = json.dumps({"at": 1, "controls": {"fly": 1}}).encode()
        for wrong, field in (
            (data[:-1] + b"x", "log"), (b"", "log"), (data.replace(b'"painted"', b'"other"'), "log"),
            (data.replace(b'"image":""', b'"image":"00"'), "log"),
            (b"\n".join([*data.splitlines()[:-1], fly]), "control"),
        ):  # fmt: skip
            refused = await site.http.post("/api/sessions", files={"log": wrong})
            assert (refused.status_code, refused.json().get("field")) == (422, field), refused.text
        refused = await site.http.post("/api/sessions", files={"log": data}, data={"seed": "7"})
        assert (refused.status_code, refused.json()["field"]) == (422, "seed")
        assert len(painter.streams) == 2
