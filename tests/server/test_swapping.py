"""More sessions than the memory holds: those that nobody watches are swapped out and come back when somebody does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.server.test_restart import MODEL, Watching, start, watching

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]
LIMIT_S = 60.0
SESSION_GB = 0.00666
"""Of the embedded model, a little more than it takes."""
PLAY = 2


def serve(tmp_path: Path, **settings: Any) -> Any:
    """A server with memory for PLAY sessions."""
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model": {"memory_gb": PLAY * SESSION_GB, "steps": 2},
                "serve": {"grace_s": 0.2, "spare": False, "load": 10.0, **settings},
            }
        )
    )
    return start("--config", str(config), program=MODEL)


async def opened(http: httpx.AsyncClient) -> httpx.Response:
    return await http.post("/api/sessions", json={"prompt": "a red circle", "fps": 10})


def key(session: httpx.Response) -> dict[str, str]:
    return {"Authorization": f"Bearer {session.json()['control_token']}"}


async def until_places(http: httpx.AsyncClient, **wanted: int) -> dict[str, Any]:
    """Wait until so many sessions lie there; what the server says of all then."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            listed: dict[str, Any] = (await http.get("/api/sessions")).json()
            if wanted.items() <= listed["capacity"]["places"].items():
                return listed
            await asyncio.sleep(0.05)


async def goes_on(viewer: Watching) -> int:
    """Wait until it was shown a new frame of the stream; its number."""
    stats = await viewer.after(len(viewer.messages), {"type": "stats"})
    async with asyncio.timeout(LIMIT_S):
        while (now := await viewer.after(len(viewer.messages), {"type": "stats"}))["frame"] <= stats["frame"]:
            pass
    return int(now["frame"])


def test_more_are_open_than_play_and_only_who_is_watched_has_the_device(tmp_path: Path) -> None:
    server = serve(tmp_path, host_memory_gb=2 * SESSION_GB)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=await asyncio.to_thread(server.address), timeout=60) as http:
            first, second, third = [(await opened(http)) for _ in range(3)]
            assert [each.status_code for each in (first, second, third)] == [201] * 3
            full = await opened(http)
            assert (full.status_code, full.json()["code"]) == (503, "memory"), "host memory holds two, the device two"
            await until_places(http, host=2)
            a, b = (each.json()["id"] for each in (first, second))
            async with watching(http, a) as viewer:
                at = await goes_on(viewer)
                async with watching(http, b) as other:
                    await goes_on(other)
                    listed = await until_places(http, device=2, host=2, disk=0)
                    places = {each["id"]: each["place"] for each in listed["sessions"]}
                    assert (places[a], places[b]) == ("device", "device")
                    refused = await http.post("/whep", content="v=0", headers={"Content-Type": "application/sdp"})
                    assert (refused.status_code, refused.json()["code"]) == (503, "memory"), refused.text
                    assert await goes_on(viewer) > at, "who is watched is not swapped out"
                    text = (await http.get("/metrics")).text
                    assert 'streamdiff_sessions_at{place="host"} 2.0' in text
                assert await goes_on(viewer) > at
            shown = (await http.get(f"/api/sessions/{a}")).json()["stats"]["frame"]
            async with watching(http) as viewer:  # the default one, which was out, takes their place
                await goes_on(viewer)
            async with watching(http, a) as viewer:
                await viewer.after(0, {"type": "hello"})
                assert await goes_on(viewer) > shown, "it goes on where it was"
                for each in (second, third):  # so that host memory has room, for the default session too
                    closed = await http.delete(f"/api/sessions/{each.json()['id']}", headers=key(each))
                    assert closed.status_code == 200, closed.text
                paused = await http.post(f"/api/sessions/{a}/pause", headers=key(first))
                assert paused.status_code == 200, paused.text
                async with asyncio.timeout(LIMIT_S):
                    while (await http.get(f"/api/sessions/{a}")).json()["place"] == "device":
                        await asyncio.sleep(0.05)
                reset = await http.post(f"/api/sessions/{a}/reset", headers=key(first))
                assert reset.status_code == 200, reset.text  # a request that needs its caches brings it back
                await goes_on(viewer)

    try:
        asyncio.run(main())
    finally:
        code = server.close()
    assert code == 0, server.complaints
