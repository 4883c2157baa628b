"""How connections are accepted and how long they may take, on a running server."""

from __future__ import annotations

import socket

import pytest

from tests.serve.conftest import Site, run_scene

pytestmark = pytest.mark.slow


def test_small_answers_do_not_wait_for_an_acknowledgement() -> None:
    async def scene(site: Site) -> None:
        await site.http.get("/healthz")  # the connection stays open
        accepted = [
            connection.transport.get_extra_info("socket") for connection in site.server.server_state.connections
        ]
        options = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in accepted]
        assert options and all(options)

    run_scene(scene)
