"""The figures at `/metrics` move as they should, with real viewers and a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamdiff.config import Config, ServeConfig
from tests.server.conftest import Site, open_site
from tests.server.scripted import CHUNK_FRAMES
from tests.server.socket_client import SocketClient

pytestmark = pytest.mark.slow

Figures = dict[str, float]


def figures_in(text: str) -> Figures:
    """Every value by its name with labels, as they are written."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


async def _figures(site: Site) -> Figures:
    return figures_in((await site.http.get("/metrics")).text)


async def _told(site: Site, condition: Callable[[Figures], Any]) -> Figures:
    """The figures as soon as `condition` holds for them."""
    async with asyncio.timeout(240):
        while not condition(found := await _figures(site)):
            await asyncio.sleep(0.01)
    return found


async def test_what_a_viewer_and_a_prompt_move() -> None:
    async with open_site() as site:
        before = await _told(site, lambda found: found["streamdiff_session_first_frame_seconds_count"])
        assert before["streamdiff_session_first_frame_seconds_count"] == 1
        assert before["streamdiff_viewers"] == before["streamdiff_viewer_first_frame_seconds_count"] == 0
        assert (before["streamdiff_sessions"], before["streamdiff_engine_up"]) == (1, 1)
        assert (before["streamdiff_ready"], before["streamdiff_sessions_watched"]) == (1, 0)
        assert (before["streamdiff_viewers_limit"], before["streamdiff_jobs_limit"]) == (32, 0)
        assert not any("request_lag_seconds_count" in name for name in before)

        peer = await site.watch()
        for _ in range(20):
            await peer.frame()
        peer.channel.send(json.dumps({"type": "prompt", "prompt": "a green star", "id": "g"}))
        shown = await peer.message({"type": "receipt", "id": "g", "stage": "shown"})
        lag = 'streamdiff_request_lag_seconds_{}{{kind="prompt",stage="{}"}}'
        after = await _told(site, lambda found: lag.format("count", "shown") in found)
        assert (after["streamdiff_viewers"], after["streamdiff_viewer_first_frame_seconds_count"]) == (1, 1)
        assert [after[lag.format("count", stage)] for stage in ("accepted", "applied", "shown")] == [1, 1, 1]
        lags = [after[lag.format("sum", stage)] for stage in ("accepted", "applied", "shown")]
        assert lags == sorted(lags)
        assert lags[2] == pytest.approx(shown["lag_s"], abs=0.001)
        assert after['streamdiff_control_total{result="accepted",type="prompt"}'] == 1

        for name in ("frames_made_total", "frames_shown_total"):
            assert after[f'streamdiff_{name}{{session="default"}}'] >= 20
        assert after['streamdiff_encode_seconds_count{codec="h264"}'] >= 20
        assert after['streamdiff_key_frames_total{codec="h264"}'] >= 1
        made = after['streamdiff_frames_made_total{session="default"}']
        assert after['streamdiff_chunk_seconds_count{session="default"}'] == made / CHUNK_FRAMES
        # The painter is at work for 0.02 s in each chunk.
        busy_s = after['streamdiff_stage_busy_seconds_total{stage="0"}']
        assert busy_s == pytest.approx(0.02 * made / CHUNK_FRAMES, rel=0.5)
        alone = after['streamdiff_rows_total{rows="1"}']
        assert alone >= 20 / CHUNK_FRAMES - 1
        assert after['streamdiff_rows_total{rows="2"}'] == 2 * alone
        assert after['streamdiff_alone_total{reason="ring"}'] == alone
        told = (await site.http.get("/api/state")).json()["batching"]
        assert told["rows"]["2"] == 2 * told["alone"]["ring"] >= 2 * alone
        assert after["streamdiff_sessions_room"] == site.state.manager.load.free_sessions()
        assert after["streamdiff_sessions_watched"] == 1 <= after["streamdiff_sessions_limit"]
        opened = await site.http.post("/api/sessions", json={})
        assert opened.status_code == 201
        unwatched = await _figures(site)
        assert (unwatched["streamdiff_sessions"], unwatched["streamdiff_sessions_watched"]) == (2, 1)

        await site.http.delete(peer.location)
        left = await _figures(site)
        assert (left["streamdiff_viewers"], left['streamdiff_viewers_ended_total{end="delete"}']) == (0, 1)
        assert left["streamdiff_viewer_first_frame_seconds_count"] == 1


async def test_a_prompt_that_waits_for_a_viewer_is_no_latency() -> None:
    async with open_site() as site:
        await _told(site, lambda found: found["streamdiff_session_first_frame_seconds_count"])
        (session,) = site.state.manager.sessions
        await site.until(lambda: session.idle)
        told = await site.http.post("/api/control", json={"type": "prompt", "prompt": "a green star"})
        assert told.status_code == 200
        peer = await site.watch()
        for _ in range(20):
            await peer.frame()
        peer.channel.send(json.dumps({"type": "prompt", "prompt": "a blue star", "id": "b"}))
        await peer.message({"type": "receipt", "id": "b", "stage": "shown"})
        lag = 'streamdiff_request_lag_seconds_count{{kind="prompt",stage="{}"}}'
        found = await _told(site, lambda found: lag.format("shown") in found)
        assert [found[lag.format(stage)] for stage in ("accepted", "applied", "shown")] == [2, 1, 1]


async def test_refusals_are_counted_by_their_reason() -> None:
    async with open_site(Config(serve=ServeConfig(max_viewers=1))) as site:
        peer = await site.offer()
        offer = peer.pc.localDescription.sdp
        sdp = {"Content-Type": "application/sdp"}
        await site.http.post("/whep", content="v=0", headers=sdp)
        await site.http.post("/whep", content=offer)
        await site.http.post("/whep?codec=av1", content=offer, headers=sdp)
        await site.http.post("/whep/nobody", content=offer, headers=sdp)
        await site.watch()
        assert (await site.http.post("/whep", content=offer, headers=sdp)).status_code == 503
        await site.http.post("/api/sessions", json={"fps": 1000})
        await site.http.post("/api/sessions", content=b"{", headers={"Content-Type": "application/json"})
        site.state.manager.draining = True
        await site.http.post("/api/sessions", json={})
        await site.http.post("/api/control", json={"type": "prompt", "prompt": ""})
        await site.http.patch("/api/sessions/nobody", json={"prompt": "blue"})
        stranger = {"Origin": "https://stranger.example"}
        refused = await SocketClient.connect(site.base, "/api/sessions/default/control", headers=stranger)
        assert refused.status == 403
        await refused.close()
        found = await _figures(site)
        for what, reasons in {
            "viewers_refused": ["offer", "415", "codec", "unknown", "viewers"],
            "sessions_refused": ["invalid", "bad_json", "draining"],
            "control_sockets_refused": ["origin"],
        }.items():
            counted = {name: value for name, value in found.items() if name.startswith(f"streamdiff_{what}_total")}
            assert counted == {f'streamdiff_{what}_total{{reason="{reason}"}}': 1 for reason in reasons}
        assert found['streamdiff_control_total{result="bad_prompt",type="any"}'] == 1
        assert found['streamdiff_control_total{result="unknown",type="any"}'] == 1


async def test_what_a_server_can_hold_and_its_disks_have_free(tmp_path: Path) -> None:
    """A session more takes of the room, not of the limit."""
    own = {name: str(tmp_path / name) for name in ("jobs_dir", "state_dir", "handover")}
    async with open_site(Config(serve=ServeConfig(**own, keep_s=30.0, max_viewers=5))) as site:
        first = await _figures(site)
        await site.watch(session=(await site.http.post("/api/sessions", json={"fps": 20})).json()["id"])
        then = await _figures(site)
        assert then["streamdiff_sessions_limit"] == first["streamdiff_sessions_limit"] > 1
        assert then["streamdiff_sessions_room"] < first["streamdiff_sessions_room"]
        assert (then["streamdiff_jobs_limit"], then["streamdiff_viewers_limit"]) == (64, 5)
        folders = ("jobs_dir", "state_dir", "handover")
        assert all(0 <= then[f'streamdiff_disk_free_ratio{{folder="{folder}"}}'] <= 1 for folder in folders)


async def test_an_ended_session_leaves_no_figures() -> None:
    """Also not by frames that were on their way when it ended, or a page that still asks."""
    async with open_site() as site:
        for _ in range(3):
            session = (await site.http.post("/api/sessions", json={"fps": 20})).json()
            peer = await site.watch(session=session["id"])
            for _ in range(5):
                await peer.frame()
            assert f'session="{session["id"]}"' in (await site.http.get("/metrics")).text
            live = site.state.manager.get(session["id"])
            assert live is not None
            headers = {"Authorization": f"Bearer {session['control_token']}"}
            await site.http.delete(f"/api/sessions/{session['id']}", headers=headers)
            live._on_shown(99, 0, 0)
            live.update_metrics()
            assert f'session="{session["id"]}"' not in (await site.http.get("/metrics")).text
