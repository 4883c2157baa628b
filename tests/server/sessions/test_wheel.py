"""One world, many watchers, one wheel: who steers, who waits, and how the wheel goes on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamdiff import clock
from streamdiff.config import Config, ServeConfig
from streamdiff.engine.messages import Reset, SetPaused, SetPrompt
from streamdiff.errors import ConfigError
from streamdiff.server.sessions.control import AskMessage, HoldMessage, WheelMessage
from streamdiff.server.sessions.wheel import MAX_UNCONNECTED, MAX_WAITING, BlockedWords, Watcher, Wheel, WheelQueue
from tests.server.conftest import CONTROL, VIEW, Site, bearer, locked, open_site
from tests.server.socket_client import SocketClient

pytestmark = pytest.mark.slow
WHEEL = "/api/sessions/default/wheel"
PROMPT = {"type": "prompt", "id": "mine", "prompt": "blue"}


@dataclass
class Seat:
    """A control WebSocket: its number, and its token, at the wheel."""

    socket: SocketClient
    id: int
    token: str

    async def says(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message: a receipt, a wheel or an error."""
        asked = {"id": "asked", **message}
        self.socket.send(asked)
        return await self.socket.message({"id": asked["id"]})

    async def take(self, name: str) -> dict[str, Any]:
        return await self.says({"type": "wheel", "do": "take", "name": name})


@asynccontextmanager
async def seats(site: Site, count: int, token: str | None = None) -> AsyncIterator[list[Seat]]:
    """So many watchers."""
    sockets = [
        await SocketClient.connect(site.base, "/api/sessions/default/control", headers=bearer(token))
        for _ in range(count)
    ]
    hellos = [await each.message({"type": "hello"}) for each in sockets]
    yield [Seat(each, hello["watcher"], hello["wheel_token"]) for each, hello in zip(sockets, hellos, strict=True)]
    for each in sockets:
        await each.close()


async def asks(site: Site, do: str, token: str | None = None, wheel: str | None = None, **more: Any) -> httpx.Response:
    """An HTTP request about the wheel."""
    headers = bearer(token) | ({"Wheel-Token": wheel} if wheel else {})
    return await site.http.post(WHEEL, json={"do": do, **more}, headers=headers)


def names(state: dict[str, Any]) -> list[str]:
    """The holder and the queue."""
    holder = [state["holder"]] if state["holder"] else []
    return [each["name"] for each in holder + state["queue"]]


def test_the_wheel_goes_on_in_order_to_who_waits_when_its_holder_leaves_or_is_idle() -> None:
    queue, (a, b, rest) = WheelQueue(10.0), [Watcher(n, "", True, peer) for n, peer in enumerate(("a", "b", ""))]
    for now_s, watcher in enumerate((a, b, rest)):
        assert queue.enter(watcher, float(now_s)) and queue.enter(watcher, float(now_s)), "a second time is the first"
    assert queue.line == [a, b, rest] and queue.end_idle(9.9) == 10.0
    assert queue.end_idle(10.0) == 12.0 and queue.line == [b, rest], "who was not heard has lost it"
    assert queue.end_idle(12.0) == 20.0, "the next has its time"
    assert queue.line == [b], "who has no connection keeps a place by asking"
    queue.enter(a, 13.0)
    queue.put_first(a, 14.0)
    assert queue.line == [a], "who loses it to another does not wait"
    queue.enter(rest, 14.0)
    queue.leave(15.0, b, a)
    assert queue.line == [rest] and queue.end_idle(15.0) == 25.0
    queue.leave(16.0, rest)
    assert queue.holder is None and queue.end_idle(16.0) is None


async def test_who_steers_is_not_idle_and_who_only_asks_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = 0.0, list[dict[str, Any]]()
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s)
    wheel = Wheel("default", 10.0, BlockedWords(ServeConfig()), told.append)
    holder, waiting = wheel.new(True, "a"), wheel.new(True, address="x")
    for watcher in (holder, waiting):
        wheel.carry_out(WheelMessage(do="take"), watcher)
    now_s = 9.0
    wheel.check(HoldMessage(type="pause"), holder)
    now_s = 12.0
    wheel.check(AskMessage(type="get"), holder)
    assert wheel.find(holder.token) is holder and wheel.find(waiting.token) is waiting
    assert (holder.heard_s, waiting.heard_s) == (9.0, 12.0)
    wheel.close()


def test_the_queue_has_a_bound_and_one_address_few_places_without_connections() -> None:
    queue = WheelQueue(10.0)
    assert [queue.enter(Watcher(n, "", True, address="x"), 0.0) for n in range(MAX_UNCONNECTED + 1)][-2:] == [
        True,
        False,
    ]
    assert queue.enter(Watcher(90, "", True, "a connection", "x"), 0.0)
    places = [queue.enter(Watcher(n, "", True, f"p{n}"), 0.0) for n in range(MAX_WAITING + 1)]
    assert len(queue.line) == 1 + MAX_WAITING and not places[-1]


async def test_fifty_watchers_see_who_steers_and_their_places_and_only_the_holder_steers() -> None:
    serve = ServeConfig(address_share=1.0)
    async with open_site(Config(serve=serve)) as site, seats(site, 50) as (ada, bob, *others):
        assert (await ada.says(PROMPT))["stage"] == "accepted", "nobody has it: all steer"
        assert names(await ada.take("Ada")) == ["Ada"]
        assert names(await bob.take("Bob")) == ["Ada", "Bob"]
        for watcher in others:
            seen = await watcher.socket.message({"type": "wheel", "queue": [{"id": bob.id, "name": "Bob"}]})
            assert seen["holder"] == {"id": ada.id, "name": "Ada"}
        live, sent = site.live, len(site.client.sent)
        before = live.rev
        for message in (PROMPT | {"prompt": "green"}, {"type": "pause"}, {"type": "reset"}, {"type": "control"}):
            refused = await others[0].says({**message, "id": 1})
            assert (refused["type"], refused["code"]) == ("error", "wheel") and "Ada" in refused["message"]
        over_http = await site.http.patch("/api/sessions/default", json={"prompt": "green"})
        assert (over_http.status_code, over_http.json()["code"]) == (409, "wheel")
        over_http = await site.http.post("/api/sessions/default/timeline", json=[{"at": 1, "prompt": "green"}])
        assert (over_http.status_code, over_http.json()["code"]) == (409, "wheel")
        assert (live.rev, live.prompt, live.paused) == (before, "blue", False)
        assert not [each for each in site.client.sent[sent:] if isinstance(each, SetPrompt | Reset | SetPaused)]
        assert (await ada.says(PROMPT | {"prompt": "red"}))["stage"] == "accepted"
        header = {"Wheel-Token": ada.token}
        over_http = await site.http.patch("/api/sessions/default", json={"prompt": "green"}, headers=header)
        assert over_http.status_code == 200, "the same holder over HTTP"
        over_http = await site.http.post("/api/sessions/default/timeline", json=[], headers=header)
        assert over_http.status_code == 200
        await ada.socket.close()  # without a word
        await bob.socket.message({"type": "wheel", "holder": {"id": bob.id, "name": "Bob"}})
        assert (await bob.says(PROMPT))["stage"] == "accepted"
        assert names(await bob.says({"type": "wheel", "do": "give_up"})) == []
        assert (await others[1].says(PROMPT))["stage"] == "accepted", "as it was"


async def test_many_changes_are_told_in_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamdiff.server.sessions.wheel.TOLD_S", 1000.0)
    async with open_site() as site, seats(site, 1) as (busy,):
        told = list[dict[str, Any]]()
        site.live.join("probe", told.append)
        for turn in range(20):
            await busy.says({"type": "wheel", "do": "give_up" if turn % 2 else "take"})
        assert [each["type"] for each in told] == ["hello", "wheel"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_viewer_on_a_data_channel_has_it_and_loses_it_when_idle_or_gone(leaves: bool) -> None:
    serve = ServeConfig(wheel_idle_s=60.0 if leaves else 2.0)
    async with open_site(Config(serve=serve)) as site, seats(site, 1) as (other,):
        peer = await site.watch()
        hello = await peer.message({"type": "hello"})
        peer.channel.send(json.dumps({"type": "wheel", "id": 1, "do": "take", "name": "Ada"}))
        await peer.message({"type": "wheel", "id": 1, "holder": {"id": hello["watcher"], "name": "Ada"}})
        await other.socket.message({"type": "wheel", "holder": {"id": hello["watcher"], "name": "Ada"}})
        if leaves:
            await peer.pc.close()
        await other.socket.message({"type": "wheel", "holder": None})  # or its tab is hidden, and says nothing
        assert (await other.says(PROMPT))["stage"] == "accepted"


async def test_a_client_without_a_connection_shows_its_wheel_token() -> None:
    async with open_site() as site:
        first = (await asks(site, "take", name="  one  ")).json()
        second = (await asks(site, "take")).json()
        assert (first["place"], first["holder"]["name"]) == (0, "one")
        assert (second["place"], second["queue"]) == (1, [{"id": second["you"], "name": f"guest {second['you']}"}])
        for token, status in ((first["wheel_token"], 200), (second["wheel_token"], 409), ("wrong", 409), ("", 409)):
            for message in (PROMPT, {"type": "pause"}, {"type": "resume"}):
                answer = await site.http.post("/api/control", json=message, headers={"Wheel-Token": token})
                assert answer.status_code == status, (message, answer.text)
        assert (await site.http.post("/api/control", json={"type": "get"})).status_code == 200, (
            "who asks steers nothing"
        )
        assert (await site.http.delete("/api/sessions/default/input")).json()["code"] == "wheel"
        offer = {"Content-Type": "application/sdp"}
        assert (await site.http.post("/whip", content=b"v=0", headers=offer)).json()["code"] == "wheel"
        await asks(site, "give_up", wheel=first["wheel_token"])
        shown = (await site.http.get(WHEEL, headers={"Wheel-Token": second["wheel_token"]})).json()
        assert (shown["place"], shown["queue"], "watchers" in shown) == (0, [], False)
        async with seats(site, 1) as (connected,):
            name = next(name for name in site.live.peers)  # which is no secret
            assert (await asks(site, "take", wheel=name)).json()["you"] not in (second["you"], connected.id)


async def test_what_is_no_name_is_refused_and_the_wheel_is_free() -> None:
    """Others are in tests/messages.txt."""
    async with open_site() as site:
        answer = await site.http.post(WHEEL, json={"do": "take", "name": "\u0000"})
        assert (answer.status_code, answer.json()["field"]) == (422, "name")
        half = {"content": b'{"do": "take", "name": "\\ud800"}', "headers": {"Content-Type": "application/json"}}
        assert (await site.http.post(WHEEL, **half)).status_code in (400, 422)
        assert names((await site.http.get(WHEEL)).json()) == []
        name = "\U0001f469\u200d\U0001f680 <b>&"  # is escaped where it is shown
        assert names((await asks(site, "take", name=name)).json()) == [name]


async def test_the_owner_takes_it_back_passes_it_and_removes_a_watcher(tmp_path: Path) -> None:
    async with open_site(locked(tmp_path)) as site, seats(site, 2, VIEW) as (guest, other):
        for message in ({"type": "wheel", "do": "take"}, PROMPT, {"type": "wheel", "do": "take_back"}):
            assert (await guest.says(message))["code"] == "forbidden"
        for do in ("open", "pass", "remove", "take"):
            assert (await asks(site, do, VIEW, watcher=1)).status_code == 403
        passed = (await asks(site, "pass", CONTROL, watcher=guest.id)).json()
        assert passed["holder"]["id"] == guest.id and [each["id"] for each in passed["watchers"]] == [
            guest.id,
            other.id,
        ]
        assert (await guest.says(PROMPT))["stage"] == "accepted", "who may only watch steers with the wheel"
        change = {"json": {"prompt": "green"}, "headers": bearer(VIEW) | {"Wheel-Token": guest.token}}
        assert (await site.http.patch("/api/sessions/default", **change)).status_code == 200
        owner = await site.http.patch("/api/sessions/default", json={"prompt": "red"}, headers=bearer(CONTROL))
        assert owner.json()["code"] == "wheel", "the owner too, before taking it back"
        mine = (await asks(site, "take_back", CONTROL, name="owner")).json()
        assert (mine["place"], mine["queue"]) == (0, [])
        assert (await guest.says(PROMPT))["code"] == "forbidden"
        assert (await site.http.patch("/api/sessions/default", **change)).status_code == 403
        await asks(site, "open", CONTROL)
        assert names(await guest.take("Ada")) == ["owner", "Ada"]
        assert (await other.take("OWNER"))["code"] == "name_taken"
        assert names((await asks(site, "remove", CONTROL, watcher=guest.id)).json()) == ["owner"]
        assert (await guest.socket.message({"type": "session_ended"}))["reason"] == "removed"
        assert await guest.socket.until_closed() == 1000
        assert (await asks(site, "remove", CONTROL, watcher=guest.id)).json()["field"] == "watcher"
        assert names(await other.take("Bob")) == ["owner", "Bob"]
        closed = await asks(site, "close", CONTROL)
        assert names(closed.json()) == ["owner"], "who may only watch waits no more"


async def test_a_removed_viewer_gets_no_more_video(tmp_path: Path) -> None:
    (tmp_path / "c").write_text(CONTROL)
    async with open_site(Config(serve=ServeConfig(control_token_file=str(tmp_path / "c")))) as site:
        peer = await site.watch()
        number = (await peer.message({"type": "hello"}))["watcher"]
        assert (await asks(site, "remove", CONTROL, watcher=number)).status_code == 200
        await peer.message({"type": "session_ended", "reason": "removed"})
        await site.until(lambda: site.state.viewers.count == 0)


async def test_words_that_are_blocked_are_in_no_prompt_and_no_name(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("# not here\nrude\nVery  Bad\nbeast*\n", encoding="utf-8")
    serve = ServeConfig(blocked_words=str(tmp_path / "words"), jobs_dir=str(tmp_path / "jobs"))
    async with open_site(Config(serve=serve)) as site, seats(site, 1) as (watcher,):
        for text in ("a RUDE star", "very bad", "\uff52ude", "ru\u200bde", "beastly", "rude."):
            assert (await watcher.says(PROMPT | {"prompt": text}))["code"] == "blocked_word", text
            for method, path in (("PATCH", "/api/sessions/default"), ("POST", "/api/sessions")):
                refused = await site.http.request(method, path, json={"prompt": text})
                assert (refused.status_code, refused.json()["code"]) == (422, "blocked_word"), text
            refused = await site.http.post("/v1/videos", json={"prompt": text})
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "blocked_word"), text
            changes = [{"at": 1, "prompt": "blue"}, {"at": 2, "prompt": text}]
            refused = await site.http.post("/api/sessions/default/timeline", json=changes)
            assert (refused.status_code, refused.json()["field"]) == (422, "1.prompt"), text
            assert (await asks(site, "take", name=text)).json()["field"] == "name", text
        assert len(site.state.manager.sessions) == 1 and names((await site.http.get(WHEEL)).json()) == []
        for text in ("a rudely drawn star", "not here", "very good"):
            assert (await watcher.says(PROMPT | {"prompt": text}))["stage"] == "accepted", text
    with pytest.raises(ConfigError):
        BlockedWords(ServeConfig(blocked_words=str(tmp_path / "none")))


async def test_visitors_open_sessions_of_their_own_while_there_is_room_for_their_address(tmp_path: Path) -> None:
    async with open_site(locked(tmp_path, session_per_visitor=True)) as site:
        assert "data-own-session" in (await site.http.get("/")).text
        assert (await site.http.post("/api/sessions", json={})).status_code == 401, "who may not watch is no visitor"
        opened = await site.http.post("/api/sessions", json={}, headers=bearer(VIEW))
        own = opened.json()
        change = {"json": {"prompt": "blue"}, "headers": bearer(own["control_token"])}
        assert (await site.http.patch(f"/api/sessions/{own['id']}", **change)).status_code == 200
        assert (await site.http.patch("/api/sessions/default", **change)).status_code == 401
        form = await site.http.post("/api/sessions", files={"snapshot": b"x"}, headers=bearer(VIEW))
        assert form.status_code == 415
        answers = [
            (await site.http.post("/api/sessions", json={}, headers=bearer(VIEW))).status_code for _ in range(12)
        ]
        assert 429 in answers and set(answers) <= {201, 503, 429}
        plain = await site.http.post("/api/sessions", json={}, headers=bearer(CONTROL))
        assert plain.status_code in (201, 503), "the operator is no visitor"
    async with open_site(locked(tmp_path)) as site:
        assert "data-own-session" not in (await site.http.get("/")).text
        assert (await site.http.post("/api/sessions", json={}, headers=bearer(VIEW))).status_code == 403
