"""Sessions over HTTP in front of a real engine: opened, watched each by its own viewers, changed, ended."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.engine.messages import Close, Open, SetMaxAhead, Shown
from streamdiff.server.routes import schemas
from streamdiff.server.sessions import manager
from tests.server.conftest import Site, bearer, open_site
from tests.server.scripted import CHUNK_FRAMES, Painter
from tests.server.webrtc.test_viewers import _colour, _is, _until_colour

pytestmark = pytest.mark.slow


def served(painter: Painter | None = None, **serve: Any) -> AbstractAsyncContextManager[Site]:
    return open_site(Config(serve=ServeConfig(**serve)), painter)


async def _open(site: Site, **body: Any) -> dict[str, Any]:
    response = await site.http.post("/api/sessions", json=body)
    assert response.status_code == 201, response.text
    answer: dict[str, Any] = response.json()
    answer["headers"] = bearer(answer["control_token"])
    assert response.headers["location"] == f"/api/sessions/{answer['id']}"
    return answer


async def test_each_frame_reaches_its_own_session_s_viewers_only() -> None:
    async with served() as site:
        blue, green = await _open(site, prompt="blue"), await _open(site, prompt="green", seed=5)
        peers = {
            "blue": await site.watch(session=blue["id"]),
            "green": await site.watch(session=green["id"]),
            "red": await site.watch(),
        }
        for _ in range(3 * CHUNK_FRAMES):
            for name, peer in peers.items():
                assert _is(_colour(await peer.frame()), name)
        changed = await site.http.patch(
            f"/api/sessions/{blue['id']}", json={"prompt": "yellow"}, headers=blue["headers"]
        )
        assert changed.json()["receipts"][0]["stage"] == "accepted"
        await _until_colour(peers["blue"], "yellow")
        assert _is(_colour(await peers["green"].frame()), "green")
        assert _is(_colour(await peers["red"].frame()), "red")


async def test_a_session_is_shown_listed_and_ended() -> None:
    async with served() as site:
        opened = await _open(site, prompt=" a  blue star ", seed=7, size="128x128", steps=4, kv_context="clean", fps=20)
        path = f"/api/sessions/{opened['id']}"
        shown = (await site.http.get(path)).json()
        for name, value in {"prompt": "a blue star", "seed": 7, "steps": 4, "fps": 20.0, "native_fps": 40.0}.items():
            assert shown[name] == value
        [sent] = [each for each in site.client.sent if isinstance(each, Open) and each.session == opened["id"]]
        assert (sent.steps, sent.kv_context, sent.max_ahead_frames) == (4, "clean", 12), "0.6 s at 20 frames per second"
        listed = (await site.http.get("/api/sessions")).json()
        assert [each["id"] for each in listed["sessions"]] == ["default", opened["id"]]
        peer = await site.watch(session=opened["id"])
        await peer.message({"type": "hello"})
        assert (await site.http.delete(path, headers=opened["headers"])).status_code == 200
        assert (await peer.message({"type": "session_ended"}))["reason"] == "deleted"
        await site.until(lambda: site.state.viewers.count == 0)
        assert (await site.http.delete(path)).status_code == 200, "twice is fine"
        for response in (
            await site.http.get(path),
            await site.http.patch(path, json={"prompt": "red"}),
            await site.http.post(f"{path}/pause"),
            await site.post(await site.offer(), session=opened["id"]),
        ):
            assert (response.status_code, response.json()["reason"]) == (410, "deleted")
        assert (await site.http.get("/api/sessions/nobody")).status_code == 404
        assert (await site.http.delete("/api/sessions/nobody")).status_code == 404
        assert 'session="' + opened["id"] not in (await site.http.get("/metrics")).text
        assert Close(opened["id"]) in site.client.sent


async def test_what_a_change_may_hold() -> None:
    painter = Painter(chunk_s=0.02)
    async with served(painter) as site:
        opened = await _open(site, prompt="green")
        session, path = opened["id"], f"/api/sessions/{opened['id']}"

        async def patch(**change: Any) -> httpx.Response:
            return await site.http.patch(path, json=change, headers=opened["headers"])

        answer = await patch(prompt="blue", switch="flush", seed=9, fps=30)
        assert [receipt["kind"] for receipt in answer.json()["receipts"]] == ["fps", "prompt", "reset"]
        after = answer.json()["session"]
        assert (after["prompt"], after["seed"], after["fps"]) == ("blue", 9, 30.0)
        assert SetMaxAhead(session, 18) in site.client.sent
        peer = await site.watch(session=session)
        await _until_colour(peer, "blue")
        [receipt] = (await patch(prompt="yellow", switch="recache")).json()["receipts"]
        assert receipt["switch"] == "recache"
        await _until_colour(peer, "yellow")
        await patch(prompt="purple", switch="reset")
        await _until_colour(peer, "purple")
        assert painter.switches[-1] == "recache", "and a reset is none"
        stale = await patch(prompt="red", if_rev=after["rev"])
        assert (stale.status_code, stale.json()["code"], stale.json()["field"]) == (409, "conflict", "if_rev")
        now = (await site.http.get(path)).json()
        assert now["prompt"] == "purple"
        assert (await patch(prompt="red", if_rev=now["rev"])).status_code == 200


# What the models refuse is compared with the description in `test_control`; more of it is in tests/messages.txt.
BAD_NEW = [
    (b"\xff\xfe", 400, ""),
    (b'{"seed": "7"}', 422, "seed"),
    (b'{"prompt": "' + b"x" * 15_000_000 + b'"}', 413, ""),
]
BAD_CHANGE = [(b'{"steps": 2, "prompt": ""}', 422, "prompt")]


async def test_bad_bodies_name_the_field_and_change_nothing() -> None:
    async with served() as site:
        headers = {"Content-Type": "application/json"}
        before = (await site.http.get("/api/sessions")).json()["sessions"]
        for method, path, table in (
            ("POST", "/api/sessions", BAD_NEW), ("PATCH", "/api/sessions/default", BAD_CHANGE)
        ):  # fmt: skip
            for body, status, field in table:
                response = await site.http.request(method, path, content=body, headers=headers)
                assert response.status_code == status, (body[:60], response.text)
                assert response.headers["content-type"] == "application/problem+json"
                assert response.json().get("field", "") == field, (body[:60], response.text)
        assert (await site.http.post("/api/sessions", content=b"prompt=red")).status_code == 415
        after = (await site.http.get("/api/sessions")).json()["sessions"]
        assert [(each["id"], each["rev"]) for each in after] == [(each["id"], each["rev"]) for each in before]


async def test_of_a_hundred_opens_exactly_the_free_places_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    # A chunk of 8 frames is 0.02 s of work and 0.2 s of video: a tenth of the time. Nine fit into 0.9, one is there.
    monkeypatch.setattr(manager, "RESERVED_S", 3600.0)  # however busy the machine is
    async with served() as site:
        await site.http.get("/healthz")
        tasks, files = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        peer = await site.watch()
        await peer.frame()
        assert (await site.http.get("/api/sessions")).json()["capacity"]["free_sessions"] == 8
        async with httpx.AsyncClient(base_url=site.base, timeout=60, limits=httpx.Limits(max_connections=100)) as http:
            answers = await asyncio.gather(*(http.post("/api/sessions", json={"prompt": "blue"}) for _ in range(100)))
        opened = [answer.json() for answer in answers if answer.status_code == 201]
        refused = [answer for answer in answers if answer.status_code == 503]
        assert (len(opened), len(refused)) == (8, 92)
        for answer in refused:
            assert answer.json()["code"] == "time"
            assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert 'streamdiff_sessions_refused_total{reason="time"} 92.0' in (await site.http.get("/metrics")).text
        for session in opened:
            await site.http.delete(f"/api/sessions/{session['id']}", headers=bearer(session["control_token"]))
        assert (await site.http.get("/api/sessions")).json()["capacity"]["free_sessions"] == 8
        assert _is(_colour(await peer.frame()), "red"), "and the stream goes on"
        await peer.pc.close()
        await site.until(lambda: site.state.viewers.count == 0)
        await site.until(lambda: len(asyncio.all_tasks()) <= tasks + 2)
        await site.until(lambda: len(os.listdir("/proc/self/fd")) <= files + 2)


class Slow(Painter):
    """Opens further sessions when it is let."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.asked, self.let = threading.Event(), threading.Event()

    def open(self, session: int, conditioning: object, **how: Any) -> None:
        if self.streams:
            self.asked.set()
            assert self.let.wait(60)
        super().open(session, conditioning, **how)

    @property
    def count(self) -> int:
        return len(self.streams)


async def test_a_session_that_ends_before_the_engine_has_opened_it_is_closed_there_too() -> None:
    painter = Slow(chunk_s=0.02)
    async with served(painter) as site:
        await (await site.watch()).frame()
        opening = asyncio.create_task(site.http.post("/api/sessions", json={}))
        await asyncio.to_thread(painter.asked.wait, 60)
        [id] = [each.id for each in site.state.manager.sessions if each.id != "default"]
        await site.state.manager.end(id, "deleted")
        refused = await opening
        assert (refused.status_code, refused.json()["code"]) == (503, "engine")
        painter.let.set()
        await site.until(lambda: any(isinstance(each, Close) and each.session == id for each in site.client.sent))
        session = await _open(site)  # what was sent before has been done then
        assert painter.count == 2
        await site.http.delete(f"/api/sessions/{session['id']}", headers=session["headers"])


async def test_more_steps_and_faster_playback_need_room_too() -> None:
    async with served(Painter(chunk_s=0.1)) as site:
        await (await site.watch()).frame()
        few = await _open(site, steps=2, fps=40)
        path = f"/api/sessions/{few['id']}"
        for field, value in {"steps": 4, "fps": 120}.items():
            response = await site.http.patch(path, json={field: value}, headers=few["headers"])
            answer = response.json()
            assert (response.status_code, answer["code"], answer["field"]) == (503, "no_capacity", field)
        both = await site.http.patch(path, json={"fps": 39, "steps": 4}, headers=few["headers"])
        assert (both.status_code, both.json()["field"]) == (503, "steps")
        now = (await site.http.get(path)).json()
        assert (now["steps"], now["fps"], now["rev"]) == (2, 40, few["rev"]), "nor is what could be had of the second"


async def test_a_session_that_fails_ends_with_a_reason_and_the_others_play() -> None:
    """Those who may control it are told what failed, others that it did."""
    async with served() as site:
        session = await _open(site, prompt="blue")
        path = f"/api/sessions/{session['id']}"
        viewer, owner = await site.watch(session=session["id"]), await site.offer()
        await site.post(owner, session=session["id"], token=session["control_token"])
        for peer in (viewer, owner):
            await peer.message({"type": "hello"})
        changed = await site.http.patch(path, json={"prompt": "black"}, headers=session["headers"])
        assert changed.json()["receipts"][0]["stage"] == "accepted"
        told, owner_told = [await peer.message({"type": "session_ended"}) for peer in (viewer, owner)]
        assert told == {"type": "session_ended", "reason": "failed"}
        assert owner_told["reason"] == "failed" and "the painter has no black" in owner_told["message"]
        for response in (await site.http.get(path), await site.http.post(f"{path}/pause", headers=session["headers"])):
            assert (response.status_code, response.json()["reason"]) == (410, "failed")
            assert "painter" not in response.text
        listed = (await site.http.get("/api/sessions")).json()["sessions"]
        assert [each["id"] for each in listed] == ["default"]
        assert _is(_colour(await (await site.watch()).frame()), "red")
        assert not [each for each in site.client.sent if isinstance(each, Close)], "it was closed already"


async def test_a_session_that_nobody_watches_ends_and_the_default_one_stays() -> None:
    async with served(idle_s=0.2) as site:
        session = await _open(site, prompt="blue")
        manager = site.state.manager
        await site.until(lambda: manager.end_reason(session["id"]) == "idle")
        assert [live.id for live in manager.sessions] == ["default"]
        gone = await site.http.get(f"/api/sessions/{session['id']}")
        assert (gone.status_code, gone.json()["reason"]) == (410, "idle")


async def test_a_session_without_viewers_stops_and_goes_on_when_somebody_joins() -> None:
    async with served(pause_after_s=0.3) as site:
        live = site.live
        first = await site.watch()
        await first.frame()
        await first.pc.close()
        await site.until(lambda: not live.watched)
        left = live.stats()["frame"]
        await site.until(lambda: live.idle)
        assert live.stats()["frame"] >= left + 4, "the grace time"
        stopped, reports = live.stats()["frame"], len(_reports(site))
        await site.until(lambda: not site.client.busy)
        assert live.stats()["frame"] == stopped
        assert len(_reports(site)) <= reports + 1
        second = await site.watch()
        await second.frame()
        await site.until(lambda: live.stats()["frame"] > stopped + CHUNK_FRAMES)


def _reports(site: Site) -> list[Shown]:
    return [command for command in site.client.sent if isinstance(command, Shown)]


async def test_a_body_of_very_many_unknown_fields_is_refused_by_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pydantic would make an error of each, which holds everybody up for seconds."""

    def never(*given: Any, **more: Any) -> None:
        raise AssertionError("it is not asked")

    monkeypatch.setattr(schemas.SessionChange, "model_validate", never)
    async with served() as site:
        many = {"prompt": "blue"} | {f"field{number}": number for number in range(20_000)}
        answer = await site.http.patch("/api/sessions/default", json=many)
        assert (answer.status_code, answer.json()["field"]) == (422, "field0")
        assert len(answer.json()["errors"]) == 20
