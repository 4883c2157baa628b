"""Visitors and jobs of the load benchmark at a running web server with a painting engine: what they note is what was
shown."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from benchmarks import load_server, peers
from benchmarks.arrivals import JobArrival, Visitor
from streamdiff.config import Config, ServeConfig
from tests.server.conftest import LIMIT_S, open_site
from tests.server.scripted import Painter

pytestmark = pytest.mark.slow
FPS = 20.0


def test_visitors_note_what_they_were_shown_and_leave_nothing_open(tmp_path: Path) -> None:
    who = [Visitor(0.0, 12.0, 0, (4.0,)), Visitor(0.1, 12.0, 1, ()), Visitor(0.2, 0.0, 2, ())]
    jobs = [JobArrival(0.0, 0.5, 3)]

    async def main() -> None:
        config = Config(serve=ServeConfig(jobs_dir=str(tmp_path), address_share=1.0))
        async with open_site(config, Painter(chunk_s=0.01)) as site:
            visits, videos = await load_server.run(f"{site.base}/", FPS, who, jobs)
            assert [visit.refused for visit in visits] == ["", "", ""]
            for visit in visits[:2]:
                assert visit.first_frame_s is not None and 0 < visit.first_frame_s < 12
                (begin_s, first), (end_s, last) = visit.looks[0], visit.looks[-1]
                assert 0 < begin_s < end_s <= visit.leaves_s and last > first
                assert visit.received is not None and visit.received > 0
                # Counted by the peer, and told by the server: pictures that are sent again may come on top.
                assert visit.received >= 0.5 * (last - first)
            [lag_s] = visits[0].controls
            assert 0 < lag_s < 7.99 and visits[1].controls == []  # seen, and not given up after eight seconds
            # Has left before there was anything.
            assert visits[2].first_frame_s is None and visits[2].looks == []
            [video] = videos
            assert not video.error and video.total_s is not None and video.bytes > 100
            # Visitors decode nothing; who does, in the same process, still gets pictures.
            async with httpx.AsyncClient() as http:
                pc, seen = await peers.watch(http, f"{site.base}/whep", True)
                await site.until(lambda: seen.frames > 0)
                await pc.close()
            await site.until(lambda: [each.id for each in site.state.manager.sessions] == ["default"])
            await site.until(lambda: site.state.viewers.count == 0)

    asyncio.run(asyncio.wait_for(main(), 3 * LIMIT_S))


def test_who_is_refused_and_who_finds_no_server_is_told_apart() -> None:
    who = [Visitor(0.1 * number, 3.0, number, ()) for number in range(4)]

    async def main() -> None:
        async with open_site(Config(serve=ServeConfig(address_share=1.0)), Painter(chunk_s=0.01, fits=3)) as site:
            visits, _ = await load_server.run(f"{site.base}/", FPS, who, [])
            assert sorted(visit.refused for visit in visits) == ["", "", "memory", "memory"]  # one is the default one
            base = site.base
        visits, videos = await load_server.run(f"{base}/", FPS, who[:1], [JobArrival(0.0, 1.0, 0)])
        assert visits[0].refused == f"error: {httpx.ConnectError.__name__}"
        assert videos[0].error == "connection"

    asyncio.run(asyncio.wait_for(main(), 3 * LIMIT_S))
