"""Adaptive sessions on a real server: what viewers see and are told while there is too much to do, and afterwards. A
new prompt's first frames are shown at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from streamdiff import clock
from streamdiff.config import Config, PlaybackConfig
from streamdiff.engine.messages import FrameBatch, Open, SetMaxAhead, SetPrompt
from streamdiff.engine.process.supervisor import Restarting
from streamdiff.server import load
from streamdiff.server.media.playback import SKIP_EVERY_S
from streamdiff.server.sessions.live_session import LiveSession
from tests.server.conftest import Peer, Site, bearer, open_site
from tests.server.routes.test_sessions import served
from tests.server.scripted import CHUNK_FRAMES, Painter

pytestmark = pytest.mark.slow


@pytest.fixture
def measured_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what chunks cost counts, however busy this machine is; what was given up comes back at once."""
    monkeypatch.setattr(load, "LATE", float("-inf"))
    monkeypatch.setattr(load, "HOLD_S", 0.2)


async def _open(site: Site, **body: Any) -> httpx.Response:
    response = await site.http.post("/api/sessions", json=body)
    if response.status_code == 201:
        await (await site.watch(session=response.json()["id"])).frame()
    return response


async def _until_corner(peer: Peer, *, white: bool) -> None:
    """Wait until pictures are of chunks in fewer steps than usual, or are not."""
    for _ in range(2000):
        corner = (await peer.frame()).to_ndarray(format="rgb24")[4:20, 4:20]
        if (corner.min() > 200) == white:
            return
    raise AssertionError(f"the corner never became {'white' if white else 'coloured'}")


def _state_of(site: Site, session: str) -> dict[str, Any]:
    live = site.state.manager.get(session)
    assert live is not None
    return live.state(may_control=False)


def _now(state: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(state[name] for name in ("steps", "asked_steps", "fps", "asked_fps", "reason"))


@pytest.mark.usefixtures("measured_only")
async def test_steps_go_down_when_another_comes_and_come_back_when_it_has_gone() -> None:
    async with served(Painter(chunk_s=0.12), adaptive=True) as site:  # each takes 0.6 of the time, in fewer steps 0.36
        peer = await site.watch()
        await _until_corner(peer, white=False)
        other = await _open(site, prompt="blue")
        assert other.status_code == 201, "there is time, as both can give up steps"
        told = await peer.message({"type": "receipt", "kind": "steps", "stage": "shown"})
        assert (told["steps"], told["reason"], told["id"]) == (2, "load", None)
        await _until_corner(peer, white=True)
        state = (await site.http.get("/api/state")).json()["state"]
        assert _now(state) == (2, 4, 40.0, 40.0, "load") and state["adaptive"]
        figures = (await site.http.get("/metrics")).text
        assert 'streamdiff_session_steps{session="default"} 2.0' in figures
        assert 'streamdiff_session_asked_steps{session="default"} 4.0' in figures
        assert 'streamdiff_load_changes_total{direction="down"} 2.0' in figures
        asked = await site.http.post("/api/control", json={"type": "steps", "steps": 4})
        assert [asked.json()[name] for name in ("stage", "steps", "reason")] == ["accepted", 2, "load"]
        path, headers = f"/api/sessions/{other.json()['id']}", bearer(other.json()["control_token"])
        rigid = await site.http.patch(path, json={"adaptive": False}, headers=headers)
        assert rigid.status_code == 200
        await peer.message({"type": "state", "fps": 30.0})
        await site.until(lambda: _now(_state_of(site, other.json()["id"])) == (4, 4, 40.0, 40.0, ""))
        assert (await site.http.delete(path, headers=headers)).status_code == 200
        await _until_corner(peer, white=False)
        state = (await site.http.get("/api/state")).json()["state"]
        assert _now(state) == (4, 4, 40.0, 40.0, "")
        figures = (await site.http.get("/metrics")).text
        assert 'streamdiff_load_changes_total{direction="down"} 3.0' in figures
        assert other.json()["id"] not in figures


@pytest.mark.usefixtures("measured_only")
async def test_then_frame_rate_is_lost_and_only_then_is_somebody_refused() -> None:
    async with served(Painter(chunk_s=0.2), adaptive=True, max_utilization=0.95) as site:
        peer = await site.watch()
        await _until_corner(peer, white=True)  # alone, it takes all of the time
        rigid = await _open(site, adaptive=False)
        assert (rigid.status_code, rigid.json()["code"]) == (503, "time"), "0.3 and 1.0"
        for _ in range(2):
            assert (await _open(site)).status_code == 201
        await site.until(lambda: {(each.steps, each.fps) for each in site.state.manager.sessions} == {(2, 20.0)})
        refused = await _open(site)
        assert (refused.status_code, refused.json()["code"]) == (503, "time")
        state = await peer.message({"type": "state", "fps": 20.0})
        assert _now(state) == (2, 4, 20.0, 40.0, "load")
        asked = await site.http.post("/api/control", json={"type": "fps", "fps": 10})
        assert [asked.json()[name] for name in ("stage", "fps", "reason")] == ["accepted", 5.0, "load"]
        pacer = site.state.manager.sessions[0].playback.pacer
        shown = pacer.progress().shown
        await site.until(lambda: pacer.progress().shown > shown + 5)  # it plays on


async def test_chunks_that_come_late_are_noticed_whatever_was_measured() -> None:
    class TooCheap(Painter):
        def chunk_compute_s(self) -> float:
            return 0.001

    async with served(TooCheap(chunk_s=0.3), adaptive=True) as site:  # and a chunk is shown for 0.2
        peer = await site.watch()
        await _until_corner(peer, white=False)
        await _until_corner(peer, white=True)
        assert (await peer.message({"type": "state", "steps": 2}))["reason"] == "load"


@pytest.mark.usefixtures("measured_only")
async def test_an_engine_that_comes_back_goes_on_with_what_load_leaves() -> None:
    async with served(Painter(chunk_s=0.2), adaptive=True) as site:
        peer = await site.watch()
        await peer.message({"type": "state", "steps": 2, "asked_steps": 4})
        await site.client.inject(Restarting("it was lost", 1))
        await site.client.inject(site.client.ready)
        await site.until(lambda: len([each for each in site.client.sent if isinstance(each, Open)]) > 1)
        assert [each.steps for each in site.client.sent if isinstance(each, Open)] == [4, 2]


async def test_an_engine_that_stalls_may_make_more_ahead_and_only_without_a_frame_left_it_is_late() -> None:
    """As long as the lead can grow, how few frames wait says nothing about the load."""
    async with open_site(Config(playback=PlaybackConfig(max_ahead_s=2.0))) as site:
        await (await site.watch()).frame()
        playback, sent = site.live.playback, site.client.sent
        pacer = playback.pacer
        await site.until(lambda: pacer.progress().shown > 3 * CHUNK_FRAMES)
        [most] = [each.max_ahead_frames for each in sent if isinstance(each, Open)]
        with site.client.held():
            batch = FrameBatch("default", 0, 999, 0, None, np.zeros((1, 2, 2, 3), np.uint8))
            await site.until(lambda: 0 < pacer.progress().buffered <= 2 * CHUNK_FRAMES)
            spare_s = playback.lead.spare_s
            slack_s = playback.slack_s(batch)
            assert slack_s is not None and slack_s > spare_s
            dry = pacer.progress().dry
            await site.until(lambda: pacer.progress().dry > dry)
            slack_s = playback.slack_s(replace(batch, chunk=1000))
            assert slack_s is not None and slack_s < 0
        await site.until(lambda: any(isinstance(each, SetMaxAhead) and each.frames > most for each in sent))


LEAD_S = 4.0


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Site, LiveSession]]:
    """A server whose engine is fast, and its default session."""
    config = Config(playback=PlaybackConfig(max_ahead_s=LEAD_S))
    async with open_site(config, Painter(chunk_s=0.001)) as site:
        yield site, site.live


async def prompt(site: Site, text: str) -> SetPrompt:
    """Ask for a prompt; returns what the engine was told."""
    response = await site.http.post("/api/control", json={"type": "prompt", "prompt": text})
    assert response.status_code == 200, response.text
    return next(command for command in reversed(site.client.sent) if isinstance(command, SetPrompt))


async def test_what_waits_is_skipped_for_a_new_prompt() -> None:
    async with opened() as (site, session):
        peer = await site.watch()
        await peer.frame()
        await site.until(lambda: session.playback.pacer.progress().buffered > 40)
        shown = session.playback.pacer.progress().frame
        assert (await prompt(site, "blue")).skip
        await site.until(lambda: session._latest_shown_epoch == session.epoch)
        progress = session.playback.pacer.progress()
        assert progress.frame > shown
        assert progress.dropped > 0
        assert progress.passed == progress.shown + progress.dropped, "each was either shown or skipped"


async def test_prompts_without_end_skip_now_and_then_only() -> None:
    async with opened() as (site, session):
        await (await site.watch()).frame()
        now_s = clock.monotonic_s()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "monotonic_s", lambda: now_s)
            assert [session.playback.may_skip() for _ in range(3)] == [True, False, False]
            patch.setattr(clock, "monotonic_s", lambda: now_s + SKIP_EVERY_S)
            assert session.playback.may_skip()


async def test_nothing_is_skipped_that_nobody_sees_nor_of_video_that_comes_in() -> None:
    async with opened() as (site, session):
        await site.until(lambda: session.playback.pacer.held)
        assert not (await prompt(site, "blue")).skip
        await (await site.watch()).frame()
        session.take_input("camera")
        assert not (await prompt(site, "blue")).skip
