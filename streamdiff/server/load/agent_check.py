"""Tells a load balancer how much room there is: HAProxy's agent check, one line for every connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from streamdiff.errors import ConfigError

UNMEASURED = 10
"""Taken as the room of a server that has not yet measured what a session costs."""


@asynccontextmanager
async def serve_agent(host: str, port: int | None, room: Callable[[], int | None]) -> AsyncIterator[None]:
    """Context manager: answer at `port` (None: nowhere). `room` says how many more sessions could play; None: it is not
    known.

    Raises:
        ConfigError: the port cannot be had.
    """
    if port is None:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"up {weight(room())}%\n".encode())
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise ConfigError(f"serve.agent_port: {port} cannot be had on {host}: {error.strerror}") from error
    async with server:
        yield


def weight(room: int | None) -> int:
    """The share of its weight that the server should have for new sessions, 0 to 100.

    It never says `drain`: that would undo, with the `ready` that ends it, what an operator has set at the balancer.
    """
    return UNMEASURED if room is None else min(room, 100)
