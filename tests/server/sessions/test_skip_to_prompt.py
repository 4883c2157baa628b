"""A new prompt's first frames are shown at once: what waits before them is skipped, unless that is switched off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from streamdiff import clock
from streamdiff.config import Config, PlaybackConfig
from streamdiff.engine.messages import SetPrompt
from streamdiff.server.media.playback import SKIP_EVERY_S
from streamdiff.server.sessions.live_session import LiveSession
from tests.server.conftest import Site, open_site
from tests.server.scripted import Painter

pytestmark = pytest.mark.slow
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
