"""Keys of those who steer: over every channel, held while they are held, and let go for who leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from streamdiff.config import Config
from streamdiff.server.sessions.control import CONTROLS_PER_S
from streamdiff.server.sessions.steering import SILENCE_S, ControlHolders
from tests.server.conftest import CONTROL, VIEW, Site, bearer, locked, open_site
from tests.server.scripted import CONTROLS, INFO, Painter
from tests.server.socket_client import SocketClient

pytestmark = pytest.mark.slow


@asynccontextmanager
async def steered(config: Config | None = None) -> AsyncIterator[tuple[Site, Painter]]:
    """A server whose model is steered by `CONTROLS`."""
    painter = Painter(chunk_s=0.001, info=replace(INFO, controls=CONTROLS))
    async with open_site(config, painter) as site:
        yield site, painter


async def socket_of(site: Site) -> SocketClient:
    """A control WebSocket."""
    return await SocketClient.connect(site.base, "/api/sessions/default/control")


def held(painter: Painter) -> dict[str, float]:
    return painter.streams[0].held


def test_what_a_peer_holds_is_let_go_when_it_leaves_or_is_silent_and_not_what_others_hold_by_then() -> None:
    controls = ControlHolders()
    controls.hold("a", {"x": 1.0, "jump": 1.0}, 0.0)
    controls.hold("b", {"x": -1.0}, 0.5)  # the newest counts
    assert controls.next_s() == SILENCE_S and controls.let_go(0.9) == {}
    controls.hold("a", {}, 0.9)  # still there
    assert controls.let_go(1.6) == {"x": 0.0} and controls.next_s() == 0.9 + SILENCE_S
    controls.leave("a")
    controls.leave("nobody")
    assert controls.let_go(1.7) == {"jump": 0.0}
    assert controls.next_s() is None and not controls.heard_s
    controls.hold("a", {"x": 1.0}, 2.0)
    controls.hold("b", {"x": 0.0}, 2.1)  # whoever lets go
    assert controls.next_s() is None and controls.let_go(9.0) == {}


async def test_a_key_over_every_channel_with_receipts_up_to_the_picture() -> None:
    async with steered() as (site, painter):
        peer = await site.watch()
        await peer.message({"type": "hello"})
        state = (await site.http.get("/api/state")).json()
        assert state["state"]["controls"] == state["engine"]["controls"]
        assert state["state"]["controls"][0] == {
            "name": "move_x", "kind": "axis", "keys": ["ArrowLeft", "ArrowRight", "MouseX"], "whole_chunk": False,
            "scale": 1.0, "idle": False,
        }  # fmt: skip
        peer.channel.send(json.dumps({"type": "control", "id": 1, "axes": {"move_x": 0.5}, "t": 12.5}))
        for stage in ("accepted", "applied", "shown"):
            receipt = await peer.message({"type": "receipt", "id": 1, "stage": stage})
            assert receipt["kind"] == "control" and receipt["t"] == 12.5
        assert receipt["chunk"] >= 1 and receipt["frame"] >= 8 and held(painter) == {"move_x": 0.5}
        socket = await socket_of(site)
        socket.send({"type": "control", "id": 2, "buttons": {"jump": True}})
        await socket.message({"type": "receipt", "id": 2, "stage": "shown"})
        await socket.close()
        response = await site.http.post("/api/control", json={"type": "control", "axes": {"move_x": -1}})
        assert response.status_code == 200 and response.json()["stage"] == "accepted"
        assert held(painter)["move_x"] == -1
        assert not [message for message in peer.messages if message["type"] == "error"]
        assert (await site.http.get("/api/state")).json()["state"]["rev"] == state["state"]["rev"], "no change of state"


async def test_keys_are_let_go_when_their_holder_goes_away() -> None:
    async with steered() as (site, painter):
        socket = await socket_of(site)
        socket.send({"type": "control", "id": 1, "axes": {"move_x": 1}})
        await socket.message({"type": "receipt", "stage": "accepted"})
        assert held(painter) == {"move_x": 1}
        await socket.close()
        await site.until(lambda: held(painter) == {"move_x": 0})
        await site.http.post("/api/control", json={"type": "control", "buttons": {"jump": True}})
        await site.until(lambda: held(painter)["jump"] == 0)  # an HTTP request says nothing more


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"axes": {"move_z": 1}}, "control"),
        ({"axes": {"move_x": 1.5}}, "axes"),
        ({"axes": {"jump": 0.5}}, "jump"),
        ({"buttons": {"jump": 1}}, "buttons"),
        ({"axes": {"move_x": 0, "y": 0}}, "control"),
        ({"axes": {f"a{i}": 0 for i in range(65)}}, "axes"),
        ({"axes": {"move_x": "1"}}, "axes"),
        ({"keys": {}}, "keys"),
    ],
)
async def test_what_cannot_be_held_is_refused_whole(message: dict[str, Any], field: str) -> None:
    async with steered() as (site, painter):
        response = await site.http.post("/api/control", json={"type": "control", **message})
        assert response.status_code == 422 and response.json()["field"] == field
        assert not any(call[0] == "set_controls" for call in painter.calls)


async def test_who_may_watch_cannot_steer_and_a_model_without_controls_has_none(tmp_path: Any) -> None:
    async with steered(locked(tmp_path)) as (site, _):
        message = {"type": "control", "axes": {"move_x": 1}}
        for token, status in ((VIEW, 403), (CONTROL, 200)):
            assert (await site.http.post("/api/control", json=message, headers=bearer(token))).status_code == status
    async with open_site() as site:
        refusal = await site.http.post("/api/control", json={"type": "control", "axes": {"move_x": 1}})
        assert (refusal.status_code, refusal.json()["code"]) == (422, "control")


async def test_twenty_clients_with_120_changes_a_second_do_not_hold_up_a_prompt() -> None:
    async with steered() as (site, painter):
        sockets = [await socket_of(site) for _ in range(20)]
        for turn in range(CONTROLS_PER_S):
            for socket in sockets:
                socket.send({"type": "control", "axes": {"move_x": turn / CONTROLS_PER_S}})
        response = await site.http.post("/api/control", json={"type": "prompt", "prompt": "a blue star"})
        assert response.status_code == 200
        await site.until(lambda: painter.streams[0].changes >= 20 * CONTROLS_PER_S)
        for socket in sockets:
            await socket.close()
        await site.until(lambda: held(painter)["move_x"] == 0)
