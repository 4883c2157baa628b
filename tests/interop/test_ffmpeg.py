"""A third-party WHIP sender: FFmpeg's, as it comes with PyAV. It answers no STUN request, and is not sent away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aioice.ice
import numpy as np
import pytest
import torch

from tests.interop.ffmpeg_sender import GREEN
from tests.server.conftest import Site
from tests.server.routes.test_whip import fed, served, state, used
from tests.server.test_tls import write_pair

pytestmark = pytest.mark.slow
SENDER = Path(__file__).with_name("ffmpeg_sender.py")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@contextlib.asynccontextmanager
async def sending(site: Site, tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The sender, with a certificate of its own: FFmpeg's are of a kind that is not taken."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SENDER), f"{site.base}/whip?strength=0.4", *write_pair(tmp_path / "own"),
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_ffmpeg_feeds_a_session_and_stays_although_it_answers_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FFmpeg asks every few seconds by itself. Without what takes that for an answer six questions are too many.
    monkeypatch.setattr(aioice.ice, "CONSENT_INTERVAL", 1.0)
    async with served() as site:
        await (await site.watch()).frame()
        async with sending(site, tmp_path) as sender:
            figures = await used(site)
            assert figures["size"] == [320, 240]
            assert np.abs(np.median(fed(site)[-1].reshape(-1, 3), axis=0) - GREEN).max() < 30
            [feeder] = site.state.feeders._peers.values()
            connection: Any = next(iter(feeder.pc._RTCPeerConnection__dtlsTransports))  # type: ignore[attr-defined]
            asked = 0
            note = connection.transport._connection.check_incoming

            def count(*request: Any) -> None:
                nonlocal asked
                asked += 1
                note(*request)

            connection.transport._connection.check_incoming = count
            async with asyncio.timeout(240):
                while asked < 3:  # at least ten seconds
                    await asyncio.sleep(0.1)
            assert sender.returncode is None
            assert (await state(site))["input"] == {"kind": "WHIP sender", "strength": 0.4, "fault": ""}
        await site.until(lambda: not site.state.feeders._peers)
        assert (await state(site))["input"] is None, "gone without a word"
