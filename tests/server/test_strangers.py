"""What somebody without a token is told where steering takes one: of the default session, and of no other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from streamdiff.config import Config, IceServer, ServeConfig
from streamdiff.engine.messages import Failed
from streamdiff.engine.process.supervisor import Restarting
from streamdiff.server.sessions.control import PLAIN_REASON
from tests.server.conftest import Site, bearer, run_scene
from tests.server.socket_client import SocketClient
from tests.server.webrtc.test_viewers import _colour, _is

pytestmark = pytest.mark.slow
CONTROL, WRONG = "a-token-to-steer-with", "a-token-of-nobody-at-all"
SECRET = "blue, and nobody else's business"
STUN = "stun:stun.example.org:3478"


def _run(tmp_path: Path, scene: Callable[[Site], Awaitable[None]]) -> None:
    """On a server with a control token and nothing else."""
    (tmp_path / "c").write_text(CONTROL)
    serve = ServeConfig(control_token_file=str(tmp_path / "c"), ice_servers=[IceServer(url=STUN)])
    run_scene(scene, Config(serve=serve))


async def _open(site: Site) -> dict[str, Any]:
    response = await site.http.post("/api/sessions", json={"prompt": SECRET}, headers=bearer(CONTROL))
    assert response.status_code == 201, response.text
    opened: dict[str, Any] = response.json()
    return opened


def _addresses(session: str) -> list[str]:
    """Where a session can be read over HTTP."""
    return [f"/api/sessions/{session}", f"/api/state?session={session}", f"/frame.jpg?session={session}"]


def test_a_session_with_tokens_of_its_own_is_read_and_watched_with_one_only(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        opened = await _open(site)
        session = opened["id"]
        live = site.state.manager.get(session)
        assert live is not None
        await site.until(lambda: live.playback.pacer.picture() is not None)
        for token, allowed in ((None, False), (WRONG, False), (opened["view_token"], True), (CONTROL, True)):
            for path in _addresses(session):
                answer = await site.http.get(path, headers=bearer(token))
                assert answer.status_code == (200 if allowed else 401), (path, token)
                assert allowed or SECRET not in answer.text
            clip = await site.http.get(f"/api/sessions/{session}/clip", headers=bearer(token))
            assert clip.status_code in ((200, 409) if allowed else (401,))
            options = await site.http.options(f"/whep/{session}", headers=bearer(token))
            assert (STUN in options.headers.get("link", "")) == allowed
            socket = await SocketClient.connect(site.base, opened["control"], headers=bearer(token))
            assert socket.status == (101 if allowed else 401)
            if allowed:
                hello = await socket.message({"type": "hello"})
                assert (hello["role"], hello["state"]["prompt"]) == (
                    "controller" if token == CONTROL else "viewer",
                    SECRET,
                )
            await socket.close()
            peer = await site.offer()
            assert (await site.post(peer, session=session, token=token)).status_code == (201 if allowed else 401)
            direct = await site.http.post(
                f"/whep/{session}",
                content=(await site.offer()).pc.localDescription.sdp,
                headers={"Content-Type": "application/sdp", **bearer(token)},
            )
            assert direct.status_code == (201 if allowed else 401)
            if allowed:
                assert _is(_colour(await peer.frame()), "blue")

    _run(tmp_path, scene)


def test_lists_and_figures_name_no_session_that_the_caller_may_not_watch(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        session = (await _open(site))["id"]
        made = f'streamdiff_frames_made_total{{session="{session}"}}'
        for token, names in ((None, ["default"]), (CONTROL, ["default", session])):
            listed = await site.http.get("/api/sessions", headers=bearer(token))
            assert [each["id"] for each in listed.json()["sessions"]] == names
            assert (SECRET in listed.text) == (token is not None)
            figures = (await site.http.get("/metrics", headers=bearer(token))).text
            assert (made in figures, session in figures) == ((token is not None),) * 2
            assert 'streamdiff_frames_made_total{session="default"}' in figures
        for path in ("/", "/api/openapi.json", "/api/state", "/readyz"):
            answer = await site.http.get(path)
            assert answer.status_code == 200 and session not in answer.text and SECRET not in answer.text, path

    _run(tmp_path, scene)


def test_the_default_session_is_watched_by_everybody_and_steered_with_the_token(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.until(lambda: site.state.manager.sessions[0].playback.pacer.picture() is not None)
        for path in _addresses("default"):
            assert (await site.http.get(path)).status_code == 200
        peer = await site.watch()
        assert (await peer.message({"type": "hello"}))["role"] == "viewer"
        assert _is(_colour(await peer.frame()), "red")
        for token, status in ((None, 401), (CONTROL, 200)):
            answer = await site.http.patch("/api/sessions/default", json={"seed": 3}, headers=bearer(token))
            assert answer.status_code == status

    _run(tmp_path, scene)


async def _told_over_http(site: Site, token: str | None) -> list[tuple[int, str]]:
    """Everything that says over HTTP how the engine is."""
    offer = (await site.offer()).pc.localDescription.sdp
    answers = [
        await site.http.get("/readyz", headers=bearer(token)),
        await site.http.get("/api/state", headers=bearer(token)),
        await site.http.get("/api/sessions", headers=bearer(token)),
        await site.http.post("/api/control", json={"type": "pause"}, headers=bearer(token)),
        await site.http.post("/api/sessions", json={}, headers=bearer(token)),
        await site.http.post("/whep", content=offer, headers={"Content-Type": "application/sdp", **bearer(token)}),
    ]
    return [(answer.status_code, answer.text) for answer in answers]


def test_what_the_engine_wrote_is_told_to_those_who_may_steer_only(tmp_path: Path) -> None:
    words = "the engine ended with exit code 1; the last it wrote:\n  /home/ann/of-a-secret.safetensors"

    async def scene(site: Site) -> None:
        sockets = {
            token: await SocketClient.connect(site.base, "/api/sessions/default/control", headers=bearer(token))
            for token in (None, CONTROL)
        }
        peers = {None: await site.offer(), CONTROL: await site.offer()}
        for token, peer in peers.items():
            assert (await site.post(peer, token=token)).status_code == 201
            await peer.message({"type": "hello"})
            await sockets[token].message({"type": "hello"})

        await site.client.inject(Restarting(words, 7))
        for token, knows in ((None, False), (CONTROL, True)):
            for told in (peers[token], sockets[token]):
                state = await told.message({"type": "state", "engine": "restarting"})
                assert state["engine_reason"] == (words if knows else PLAIN_REASON)
            said = await _told_over_http(site, token)
            assert (said[0][0], "restarting" in said[0][1]) == (503, True)
            assert any("of-a-secret" in text for _, text in said) == knows
            late = await SocketClient.connect(site.base, "/api/sessions/default/control", headers=bearer(token))
            hello = await late.message({"type": "hello"})
            assert hello["state"]["engine_reason"] == (words if knows else PLAIN_REASON)
            await late.close()

        await site.client.inject(Failed(words))
        await site.client.inject(None)
        for token, knows in ((None, False), (CONTROL, True)):
            for told in (peers[token], sockets[token]):
                ended = await told.message({"type": "engine_ended"})
                assert ended["message"] == f"The engine stopped: {words if knows else PLAIN_REASON}"
            said = await _told_over_http(site, token)
            assert [said[0][0], said[1][0], said[-1][0]] == [503, 200, 503]
            assert any("of-a-secret" in text for _, text in said) == knows
            refused = await SocketClient.connect(site.base, "/api/sessions/default/control", headers=bearer(token))
            assert (refused.status, "of-a-secret" in refused.problem["detail"]) == (503, knows)
            await refused.close()
            await sockets[token].close()
            assert not any("of-a-secret" in str(message) for message in peers[None].messages)

    _run(tmp_path, scene)
