"""What a balancer is told about the room of a server."""

from __future__ import annotations

import asyncio
import socket

import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.errors import ConfigError
from streamdiff.server.load import serve_agent
from streamdiff.server.sessions.control import EngineStatus
from tests.server.conftest import open_site
from tests.server.scripted import Painter


async def test_a_balancer_hears_of_the_room_and_of_none_where_nobody_is_let_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def asked() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return (await reader.read()).decode()
        finally:
            writer.close()

    async with open_site(Config(serve=ServeConfig(max_utilization=3.0))) as site:
        manager = site.state.manager
        async with serve_agent("127.0.0.1", port, manager.free_sessions):
            await (await site.watch()).frame()
            await site.until(lambda: manager.load.free_sessions() is not None)
            first = manager.load.free_sessions()
            assert await asked() == f"up {first}%\n" and first
            manager.load.limit = 0.0
            assert await asked() == "up 0%\n"
            manager.load.limit = 1000.0
            assert await asked() == "up 100%\n", "a weight has a bound"
            manager.draining = True
            assert await asked() == "up 0%\n"
            manager.draining, manager.engine = False, EngineStatus("restarting", "it died", 1)
            assert await asked() == "up 0%\n"
            manager.engine = EngineStatus()
            with pytest.raises(ConfigError):
                async with serve_agent("127.0.0.1", port, manager.free_sessions):
                    pass
        with pytest.raises(OSError):
            await asked()


async def test_a_session_that_nobody_watches_takes_a_place_where_none_can_be_swapped_out() -> None:
    async with open_site(Config(serve=ServeConfig(max_utilization=9.0)), Painter(fits=3)) as site:
        await site.until(lambda: site.live.idle)
        load = site.state.manager.load
        assert (load.free_sessions(), load.sessions_limit()) == (2, 3)


async def test_ids_carry_the_server_s_name_and_those_of_an_earlier_run_have_ended() -> None:
    async with open_site(Config(serve=ServeConfig(name="a7"))) as site:
        opened = (await site.http.post("/api/sessions", json={})).json()
        assert opened["id"].startswith("s-a7-") and opened["whep"] == f"/whep/{opened['id']}"
        old = await site.http.get("/api/sessions/s-a7-before")
        assert (old.status_code, old.json()["reason"]) == (410, "restart")
        assert (await site.http.get("/api/sessions/s-a8-other")).status_code == 404
        token = {"Authorization": f"Bearer {opened['control_token']}"}
        ended = await site.http.delete(f"/api/sessions/{opened['id']}", headers=token)
        assert (ended.status_code, ended.json()["ended"]) == (200, "deleted")
        assert site.state.manager.get(opened["id"]) is None
