"""HAProxy's agent check: reports how many more sessions could play, one line for every connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from streamdiff.errors import ConfigError

UNMEASURED = 10
"""Taken for a server that has not yet measured what a session costs."""


@asynccontextmanager
async def serve_agent(host: str, port: int | None, free_sessions: Callable[[], int | None]) -> AsyncIterator[None]:
    """Context manager: answer at `port` (None: nowhere). `free_sessions` says how many more sessions could play;
    None: it is not known.

    Raises:
        ConfigError: the port cannot be had.
    """
    if port is None:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"up {weight(free_sessions())}%\n".encode())
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise ConfigError(f"serve.agent_port: {port} cannot be had on {host}: {error.strerror}") from error
    async with server:
        yield


def weight(free_sessions: int | None) -> int:
    """The share of its weight that the server should have for new sessions, 0 to 100.

    It never says `drain`: that would undo, with the `ready` that ends it, what an operator has set at the balancer.
    """
    return UNMEASURED if free_sessions is None else min(free_sessions, 100)
