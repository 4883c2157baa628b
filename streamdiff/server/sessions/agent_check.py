"""Tells a load balancer how much room there is: HAProxy's agent check, one line for every connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamdiff.errors import ConfigError
from streamdiff.server.sessions.manager import SessionManager

UNMEASURED = 10
"""Taken as the room of a server that has not yet measured what a session costs."""


@asynccontextmanager
async def serve_agent(host: str, port: int | None, manager: SessionManager) -> AsyncIterator[None]:
    """Context manager: answer at `port` (None: nowhere).

    Raises:
        ConfigError: the port cannot be had.
    """
    if port is None:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"up {weight(manager)}%\n".encode())
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise ConfigError(f"serve.agent_port: {port} cannot be had on {host}: {error.strerror}") from error
    async with server:
        yield


def weight(manager: SessionManager) -> int:
    """How many more sessions could play, 0 to 100: the share of its weight that the server should have for new ones.

    It never says `drain`: that would undo, with the `ready` that ends it, what an operator has set at the balancer.
    """
    if manager.draining or not manager.engine.running:
        return 0
    free = manager.load.free_sessions()
    return UNMEASURED if free is None else min(free, 100)
