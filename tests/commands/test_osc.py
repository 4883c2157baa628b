"""`streamdiff osc` between a desk, here python-osc's own client and server, and a running server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
from pythonosc.dispatcher import Dispatcher
from pythonosc.osc_server import AsyncIOOSCUDPServer
from pythonosc.udp_client import SimpleUDPClient

from streamdiff.commands import osc
from streamdiff.commands.jobs import OscJob
from tests.free_ports import free_port
from tests.server.conftest import Site, run_scene
from tests.server.scripted import CONTROLS, INFO, Painter


@pytest.mark.slow
def test_a_desk_steers_and_hears_what_came_of_it() -> None:
    async def scene(site: Site) -> None:
        listen, heard = ("127.0.0.1", free_port()), dict[str, object]()
        dispatcher = Dispatcher()
        dispatcher.set_default_handler(lambda address, *values: heard.update({address: values[0]}))
        desk = AsyncIOOSCUDPServer(("127.0.0.1", 0), dispatcher, asyncio.get_running_loop())  # type: ignore[arg-type]
        transport, _ = await desk.create_serve_endpoint()
        job = OscJob(url=site.base)
        bridge = asyncio.create_task(osc._run(job, listen, transport.get_extra_info("sockname")))
        await site.until(lambda: "/streamdiff/stats/shown_fps" in heard or bridge.done())
        with SimpleUDPClient(*listen) as faders:
            for address, value, told, expected in (
                ("prompt", ["a blue star", 2.0], "state/prompt", "a blue star"),
                ("fps", 20.0, "state/fps", 20.0),
                ("control/move_x", 0.5, "receipt/kind", "control"),
                ("pause", [], "state/paused", True),
                ("prompt", " ", "error/prompt", None),
                ("control/fly", 1.0, "error/control", None),
                ("kind", b"blob", "error/kind", None),
            ):
                heard.pop(f"/streamdiff/{told}", None)
                faders.send_message(f"/streamdiff/{address}", value)
                is_told = partial(lambda at, wanted: at in heard and wanted in (None, heard[at]), f"/streamdiff/{told}")
                await site.until(partial(is_told, expected))
            assert site.live.steering._held.holders.keys() == {"move_x"}
            faders.send_message("/streamdiff/control/move_x", 0.0)
            await site.until(lambda: not site.live.steering._held.holders)
        bridge.cancel()
        with suppress(asyncio.CancelledError):
            await bridge
        transport.close()

    run_scene(scene, painter=Painter(chunk_s=0.001, info=replace(INFO, controls=CONTROLS)))
