"""Control over a WebSocket, and events to read only: schema, roles, origins, and readers that do not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from streamdiff.server.routes import control
from tests.server.conftest import CONTROL, LIMIT_S, VIEW, bearer, locked, open_site
from tests.server.scripted import CHUNK_FRAMES
from tests.server.socket_client import SocketClient
from tests.server.webrtc.test_viewers import _colour, _is, _until_colour

pytestmark = pytest.mark.slow
PATH = "/api/sessions/default/control"


async def test_receipts_follow_steps_to_the_screen_beside_a_prompt() -> None:
    """Of two numbers of steps the latest holds; a prompt between them does too."""
    async with open_site() as site:
        peer = await site.watch()
        await peer.frame()
        socket = await SocketClient.connect(site.base, PATH)
        socket.send({"type": "steps", "steps": 3, "id": "none such"})
        error = await socket.message({"type": "error", "id": "none such"})
        assert (error["code"], error["field"]) == ("out_of_range", "steps")
        assert error["message"] == "`steps` is 3; the model scripted has 4, 2."
        socket.send({"type": "pause", "id": "hold"})
        await socket.message({"type": "receipt", "id": "hold"})
        for name, message in {
            "first": {"type": "steps", "steps": 2},
            "text": {"type": "prompt", "prompt": "blue"},
            "second": {"type": "steps", "steps": 4},
            "last": {"type": "steps", "steps": 2},
        }.items():
            socket.send({**message, "id": name})
            await socket.message({"type": "receipt", "id": name, "stage": "accepted"})
        socket.send({"type": "resume", "id": "on"})
        ends = {name: await socket.message({"type": "receipt", "id": name}) for name in ("first", "text", "second")}
        assert [ends[name]["stage"] for name in ends] == ["superseded", "applied", "superseded"]
        applied = await socket.message({"type": "receipt", "id": "last"})
        assert (applied["stage"], applied["chunk"]) == ("applied", ends["text"]["chunk"])
        assert applied["chunk"] == applied["frame"] // CHUNK_FRAMES > 0
        for name in ("text", "last"):
            shown = await socket.message({"type": "receipt", "id": name})
            assert (shown["stage"], shown["pts"] > 0) == ("shown", True)
        socket.send({"type": "get", "id": "get"})
        assert (await socket.message({"type": "state", "id": "get"}))["steps"] == 2
        await socket.close()


async def test_bad_messages_are_answered_and_a_long_one_ends_it() -> None:
    async with open_site() as site:
        socket = await SocketClient.connect(site.base, PATH)
        for text, code in [("{", "bad_json"), ("[]", "bad_message"), (b"\0", "binary"), ("x" * 17_000, "too_large")]:
            socket.send(text)
            assert await socket.message({"type": "error", "code": code})
        for number in range(120):
            socket.send({"type": "ping", "id": number})
        assert await socket.message({"type": "error", "code": "rate_limited"})
        socket.send("x" * 1_000_000)
        assert await socket.until_closed() == 1009
        assert (await site.http.get("/readyz")).status_code == 200


async def test_two_controllers_the_last_one_wins_and_a_stale_one_is_told() -> None:
    async with open_site() as site:
        peer = await site.watch()
        one, two = [await SocketClient.connect(site.base, PATH) for _ in range(2)]
        rev = (await two.message({"type": "hello"}))["state"]["rev"]
        one.send({"type": "prompt", "prompt": "green", "id": 1})
        assert (await two.message({"type": "state", "prompt": "green"}))["rev"] > rev, "everybody hears of it"
        two.send({"type": "prompt", "prompt": "yellow", "id": 2, "if_rev": rev})
        assert (await two.message({"type": "error", "id": 2}))["code"] == "conflict"
        two.send({"type": "prompt", "prompt": "purple", "id": 3})
        await two.message({"type": "receipt", "id": 3, "stage": "shown"})
        await _until_colour(peer, "purple")
        await asyncio.gather(one.close(), two.close())


async def test_viewers_read_only(tmp_path: Path) -> None:
    async with open_site(locked(tmp_path)) as site:
        assert (await site.http.get("/")).status_code == 200, "the page holds no secret"
        assert (await site.http.get("/healthz")).status_code == 200
        for path in ("/api/state", "/frame.jpg", "/api/sessions", "/api/sessions/default", "/metrics"):
            for headers in ({}, bearer("wrong-token-of-length"), {"Authorization": "Basic eDp5"}):
                answer = await site.http.get(path, headers=headers)
                assert (answer.status_code, "Bearer" in answer.headers["www-authenticate"]) == (401, True), path
            assert (await site.http.get(path, headers=bearer(VIEW))).status_code == 200
        assert (await site.post(await site.offer())).status_code == 401
        refused = await SocketClient.connect(site.base, PATH)
        assert (refused.status, refused.problem["code"]) == (401, "token")
        await refused.close()

        watches, steers = await site.offer(), await site.offer()
        assert (await site.post(watches, token=VIEW)).status_code == 201
        assert (await site.post(steers, token=CONTROL)).status_code == 201
        assert (await watches.message({"type": "hello"}))["role"] == "viewer"
        watches.channel.send(json.dumps({"type": "prompt", "prompt": "blue", "id": 1}))
        assert (await watches.message({"type": "error", "id": 1}))["code"] == "forbidden"
        watches.channel.send(json.dumps({"type": "ping", "id": 2}))
        assert await watches.message({"type": "pong", "id": 2})
        assert _is(_colour(await watches.frame()), "red")
        await steers.message({"type": "hello", "role": "controller"})
        steers.channel.send(json.dumps({"type": "prompt", "prompt": "green", "id": 3}))
        await _until_colour(watches, "green")

        reads = await SocketClient.connect(site.base, PATH, headers=bearer(VIEW))
        reads.send({"type": "pause", "id": 4})
        assert (await reads.message({"type": "error", "id": 4}))["code"] == "forbidden"
        page = await SocketClient.connect(site.base, PATH, protocols=("streamdiff", f"streamdiff.token.{CONTROL}"))
        assert page.subprotocol == "streamdiff"
        page.send({"type": "pause", "id": 5})
        assert await page.message({"type": "receipt", "id": 5, "stage": "accepted"})
        await asyncio.gather(reads.close(), page.close())


async def test_a_reader_that_does_not_read_is_let_go_and_others_hear_on() -> None:
    async with open_site() as site:
        live = site.live
        reads = await SocketClient.connect(site.base, PATH)
        stuck = await SocketClient.connect(site.base, PATH, receive_bytes=4096)
        assert site.state.sockets.count == 2
        for number in range(2000):
            live.broadcast({"type": "pad", "number": number, "pad": "x" * 50_000})
            await reads.message({"type": "pad", "number": number})
            if site.state.sockets.count == 1:
                break
        assert site.state.sockets.count == 1, "200 messages of 50 KB are more than a kernel takes in"
        assert 'sockets_ended_total{end="slow"} 1.0' in (await site.http.get("/metrics")).text
        reads.send({"type": "ping", "id": 1})
        assert await reads.message({"type": "pong", "id": 1})
        assert control.MAX_BUFFERED_BYTES < 1024 * 1024
        await asyncio.gather(reads.close(), stuck.close())


async def test_whoever_pings_and_reads_no_answer_is_cut_off() -> None:
    pings = (b"\x89\xfd" + bytes(4) + b"x" * 125) * 400
    async with open_site() as site:
        client = await SocketClient.connect(site.base, PATH, receive_bytes=4096)
        with pytest.raises(ConnectionError):
            for _ in range(400):  # times 52 kB: more than kernels hold
                client.writer.write(pings)
                await client.writer.drain()
        await site.until(lambda: site.state.sockets.count == 0)


async def test_the_end_of_a_session_ends_its_sockets() -> None:
    async with open_site() as site:
        opened = (await site.http.post("/api/sessions", json={})).json()
        socket = await SocketClient.connect(site.base, opened["control"])
        assert (await socket.message({"type": "hello"}))["role"] == "viewer"
        await site.http.delete(f"/api/sessions/{opened['id']}", headers=bearer(opened["control_token"]))
        assert (await socket.message({"type": "session_ended"}))["reason"] == "deleted"
        assert await socket.until_closed() == 1000
        gone = await SocketClient.connect(site.base, opened["control"])
        assert gone.status == 410
        unknown = await SocketClient.connect(site.base, "/api/sessions/nobody/control")
        assert unknown.status == 404
        await asyncio.gather(socket.close(), gone.close(), unknown.close())


async def _event(lines: AsyncIterator[str], kind: str) -> dict[str, Any]:
    """The next of that type of a stream of server-sent events."""
    async with asyncio.timeout(LIMIT_S):
        async for line in lines:
            if line.startswith("data: ") and (message := json.loads(line[6:]))["type"] == kind:
                return dict(message)
    raise AssertionError(f"no {kind} before the end")


EVENTS = "/api/sessions/{}/events"


async def test_events_tell_each_state_to_who_may_watch_and_end_with_the_session() -> None:
    async with open_site() as site:
        opened = (await site.http.post("/api/sessions", json={"prompt": "red", "fps": 20})).json()
        token = bearer(opened["control_token"])
        async with site.http.stream("GET", EVENTS.format(opened["id"])) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.aiter_lines()
            hello = await _event(lines, "hello")
            assert (hello["role"], hello["state"]["prompt"]) == ("viewer", "red")
            await site.http.patch(f"/api/sessions/{opened['id']}", json={"prompt": "blue"}, headers=token)
            while (await _event(lines, "state"))["prompt"] != "blue":
                pass
            await site.http.delete(f"/api/sessions/{opened['id']}", headers=token)
            await _event(lines, "session_ended")
            assert [line async for line in lines if line] == []
        assert (await site.http.get(EVENTS.format(opened["id"]))).status_code == 410
        assert (await site.http.get(EVENTS.format("nobody"))).status_code == 404


async def test_of_events_that_nobody_reads_the_newest_is_kept_and_they_hold_up_no_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_site() as site:
        live = site.live
        events = control._events(live)
        await anext(events)
        for number in range(1000):
            live.broadcast({"type": "state", "number": number})
        assert await anext(events) == 'data: {"type": "state", "number": 999}\n\n'
        await events.aclose()
        assert not live.peers
        stream = await site.http.send(site.http.build_request("GET", EVENTS.format("default")), stream=True)
        await _event(stream.aiter_lines(), "hello")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
