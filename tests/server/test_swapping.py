"""More sessions than the memory holds: those that nobody watches are swapped out and come back when somebody does."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

from streamdiff.config import ModelConfig
from streamdiff.pipeline.load_plan import plan_load
from tests.server.test_restart import MODEL, Watching, serving, stats, watching

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]
LIMIT_S = 240.0
SESSION_GB = 0.00666
"""Of the embedded model swapped out, a little more than it takes."""
PLAY = 2


@cache
def device_memory_gb(sessions: int) -> float:
    """What the embedded model takes with so many sessions, and a little more."""
    plan = plan_load(ModelConfig(steps=2), torch.device("cpu"))
    demand = plan.demand
    return (demand.totals[0] - demand.memory()[0].sessions) / 1e9 + (sessions + 0.1) * SESSION_GB


def options(tmp_path: Path, play: int = PLAY, **settings: Any) -> tuple[str, ...]:
    """Of a server with memory for `play` sessions."""
    serve = {"pause_after_s": 0.2, "warm_standby": False, "max_utilization": 10.0, **settings}
    model = {"device_memory_gb": device_memory_gb(play), "steps": 2}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": model, "serve": serve}))
    return "--config", str(config)


async def opened(http: httpx.AsyncClient, fps: int = 10) -> httpx.Response:
    return await http.post("/api/sessions", json={"prompt": "a red circle", "fps": fps})


def key(session: httpx.Response) -> dict[str, str]:
    return {"Authorization": f"Bearer {session.json()['control_token']}"}


async def until_places(http: httpx.AsyncClient, **wanted: int) -> dict[str, Any]:
    """Wait until so many sessions lie there, `away`: in host memory or on disk; what the server says of all then."""
    places: dict[str, int] = {}
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                listed: dict[str, Any] = (await http.get("/api/sessions")).json()
                places = listed["capacity"]["places"]
                if wanted.items() <= (places | {"away": places["host"] + places["disk"]}).items():
                    return listed
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"sessions lie {places}, not {wanted}")


async def goes_on(viewer: Watching) -> int:
    """Wait until it was shown a new frame of the stream; its number."""
    before = await stats(viewer, lambda told: True)
    return int((await stats(viewer, lambda told: told["frame"] > before["frame"]))["frame"])


async def test_more_are_open_than_play_and_only_who_is_watched_has_the_device(tmp_path: Path) -> None:
    async with serving(*options(tmp_path, host_memory_gb=2 * SESSION_GB), program=MODEL) as (_, http):
        first, second, third = [(await opened(http)) for _ in range(3)]
        assert [each.status_code for each in (first, second, third)] == [201] * 3, third.text
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


async def until_ready(http: httpx.AsyncClient, waiting: int = 0) -> list[str]:
    """Wait until all sessions are open but so many, which wait for memory; returns these."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            ready = await http.get("/readyz")
            if ready.status_code == 200 and len(waits := ready.json()["waiting"]) == waiting:
                return list(waits)
            await asyncio.sleep(0.05)


async def saved(http: httpx.AsyncClient, session: httpx.Response) -> bytes:
    """The session's file, which is asked for until the session is open."""
    async with asyncio.timeout(LIMIT_S):
        while (got := await http.get(f"/api/sessions/{session.json()['id']}/snapshot", headers=key(session))).is_error:
            assert (got.status_code, got.json()["code"]) in [(503, "opening"), (503, "restarting"), (503, "busy")]
            assert int(got.headers["retry-after"]) >= 1
            await asyncio.sleep(0.05)
    return got.content


@pytest.mark.parametrize("fault", ["engine", "server", "handover"])
async def test_none_of_twelve_sessions_on_memory_for_four_is_lost(fault: str, tmp_path: Path) -> None:
    """With the engine killed, the server killed, and handed over to the next one; two of them are watched."""
    settings: dict[str, Any] = {"host_memory_gb": 3 * SESSION_GB, "state_dir": str(tmp_path / "state")}
    settings |= {"handover": str(tmp_path / "handover")} if fault == "handover" else {"keep_s": 0.5}
    given = options(tmp_path, 4, **settings)

    async def nothing_is_lost(http: httpx.AsyncClient) -> None:
        for each in sessions:
            await saved(http, each)
        assert await until_ready(http) == []
        listed = (await http.get("/api/sessions")).json()["sessions"]
        assert {each["id"] for each in listed} == {"default", *(each.json()["id"] for each in sessions)}
        for each in sessions[::5]:
            async with watching(http, each.json()["id"]) as viewer:
                await goes_on(viewer)

    async with serving(*given, program=MODEL, code=None) as (server, http), AsyncExitStack() as held:
        sessions = [await opened(http, fps=2) for _ in range(11)]
        assert {each.status_code for each in sessions} == {201}, [each.text for each in sessions if each.is_error]
        viewers = [await held.enter_async_context(watching(http, each.json()["id"])) for each in sessions[-2:]]
        for viewer in viewers:
            await goes_on(viewer)
        await until_places(http, device=2, away=10)  # which of them still fit into host memory depends on timing
        if fault == "engine":
            server.engine.send_signal(signal.SIGKILL)
            for viewer in viewers:
                said = await viewer.after(0, {"type": "state", "engine": "restarting"})
                await viewer.after(viewer.messages.index(said), {"type": "state", "engine": "running"})
                await goes_on(viewer)
            await nothing_is_lost(http)
        else:
            if fault == "server":
                async with asyncio.timeout(LIMIT_S):
                    while len(list((tmp_path / "state").glob("*.session"))) < 12:
                        await asyncio.sleep(0.05)
            server.process.send_signal(signal.SIGTERM if fault == "handover" else signal.SIGKILL)
            await asyncio.to_thread(server.process.wait)
    assert server.process.returncode == (-signal.SIGKILL if fault == "server" else 0), server.complaints
    if fault != "engine":
        async with serving(*given, program=MODEL) as (_, http):
            await nothing_is_lost(http)


async def test_where_memory_is_short_sessions_wait_and_each_is_named(tmp_path: Path) -> None:
    """Handed over to a server with memory for half of them and none elsewhere; those that end make room for others."""
    settings = {"handover": str(tmp_path / "handover"), "host_memory_gb": 2 * SESSION_GB}
    async with serving(*options(tmp_path, **settings), program=MODEL) as (server, http):
        named = {each.json()["id"]: each for each in [await opened(http) for _ in range(3)]}
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.process.wait)
    given = options(tmp_path, **settings | {"host_memory_gb": 0})
    async with serving(*given, program=MODEL) as (server, http):
        waiting = await until_ready(http, waiting=2)
        for id in waiting:
            assert f"Session {id} is opened when there is memory" in server.complaints
            there = (await http.get(f"/api/sessions/{id}", headers=key(named[id]))).json()
            assert (there["prompt"], there["place"]) == ("a red circle", "none")
            paused = await http.post(f"/api/sessions/{id}/pause", headers=key(named[id]))
            assert (paused.status_code, paused.json()["code"]) == (503, "memory")
            asked = await http.get(f"/api/sessions/{id}/snapshot", headers=key(named[id]))
            assert (asked.status_code, asked.json()["code"]) == (503, "memory")
        [other] = named.keys() - set(waiting)
        for id, token in (("default", {}), (other, key(named[other]))):
            assert (await http.delete(f"/api/sessions/{id}", headers=token)).status_code == 200
        assert await until_ready(http) == []
        for id in waiting:
            await saved(http, named[id])
