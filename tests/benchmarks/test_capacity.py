"""The load curve: who comes, who was served well, and visits at a running web server with a painting engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import capacity
from benchmarks.capacity import Visit, Visitor, play
from streamdiff.config import Config, ServeConfig
from tests.server.conftest import LIMIT_S, open_site
from tests.server.scripted import Painter

FPS = 10.0
LIMITS = {"first_frame": 0.5, "stalls": 0.0, "rate": 0.9, "control": 0.6}
GOOD = (1, 6, 11, 16, 21, 26)


def visit(
    *counts: int, first_frame_s: float | None = 0.4, controls: tuple[float, ...] = (), refused: str = ""
) -> Visit:
    """Ten seconds, with looks at the frames shown twice a second."""
    looks = [(10.0 + 0.5 * number, count) for number, count in enumerate(counts)]
    return Visit(10.0, 20.0, first_frame_s, looks, list(controls), refused)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (visit(*GOOD, controls=(0.2, 0.6)), []),
        (visit(*GOOD, first_frame_s=0.51), ["first_frame"]),
        (visit(*GOOD, controls=(0.2, 0.61)), ["control"]),
        (visit(1, 6, 8, 13, 18, 23), ["stalls"]),  # 2 of 5 in one look, 22 of 25 in all and one that may be on its way
        (visit(1, 5, 9, 13, 17, 21), ["rate"]),  # slow, but it never stood
        (visit(1, 1, 1, 1, 6, 11), ["stalls", "rate"]),
        (visit(first_frame_s=None), ["first_frame", "rate"]),
        (visit(3), []),  # too short to tell
        (visit(refused="time"), ["time"]),
    ],
)
def test_a_visit_is_served_well_when_every_limit_is_kept(one: Visit, why: list[str]) -> None:
    assert one.broken(LIMITS, FPS) == why


@pytest.mark.slow
def test_visitors_note_what_they_were_shown_and_leave_nothing_open() -> None:
    who = [Visitor(0.0, 5.0, 0, (1.5,)), Visitor(0.1, 5.0, 1), Visitor(0.2, 0.0, 2)]
    crowd = [Visitor(0.1 * number, 3.0, number) for number in range(4)]

    async def main() -> None:
        config = Config(serve=ServeConfig(address_share=1.0))
        async with open_site(config, Painter(chunk_s=0.01, fits=4)) as site:
            visits = await play(f"{site.base}/", 20.0, who)
            assert [each.refused for each in visits] == ["", "", ""]
            for each in visits[:2]:
                assert each.first_frame_s is not None and 0 < each.first_frame_s < 5
                (begin_s, first), (end_s, last) = each.looks[0], each.looks[-1]
                assert 0 < begin_s < end_s and last > first
                assert each.received >= 0.5 * (last - first)  # counted by the peer, and told by the server
            [lag_s] = visits[0].controls
            assert 0 < lag_s < 3.49 and visits[1].controls == []
            assert visits[2].first_frame_s is None and visits[2].looks == []  # left before there was anything
            await site.until(lambda: [each.id for each in site.state.manager.sessions] == ["default"])
            await site.until(lambda: site.state.viewers.count == 0)
            visits = await play(f"{site.base}/", 20.0, crowd)
            assert sorted(each.refused for each in visits) == ["", "", "", "memory"]  # one place is the default one's
            base = site.base
        assert (await play(f"{base}/", 20.0, crowd[:1]))[0].refused == "error: ConnectError"

    asyncio.run(asyncio.wait_for(main(), 3 * LIMIT_S))


@pytest.mark.soak
def test_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "capacity.json"
    words = ["--loads", "1", "--rows", "", "--variant", "two=--max-rows 2", "--seconds", "3"]
    # Whatever a busy machine does, somebody comes, and is counted.
    words += ["--stay", "5", "--slo", "first_frame=60", "--share", "0.01", "--out", str(out)]
    assert capacity.main(words) == capacity.OK
    [point] = json.loads(out.read_text())["results"]["two"]["points"]
    assert point["visits"] > 0 and "error" not in " ".join(point["broken"])
