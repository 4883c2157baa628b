"""The engine as seen from a web process that it has started itself (`rank0_server.host`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from streamdiff.engine.messages import Failed, Ready, Shutdown
from streamdiff.engine.process.engine_process import EngineHandle
from streamdiff.engine.process.ipc import EngineClient
from streamdiff.errors import EngineFailure

BYE = b"bye"
"""Written by the engine to this process's standard input when it ends in order."""


class ParentEngine(EngineHandle):
    """The engine that is this process's parent: it waits at the IPC socket, and is gone when standard input ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ipc: EngineClient | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether the engine is there: it has started this process."""
        return self._watching is None or not self._watching.done()

    async def ended(self) -> str:
        """Wait until the engine has ended; after `start`."""
        assert self._watching is not None, "start first"
        await asyncio.shield(self._watching)
        return "without a word"

    async def start(self) -> EngineClient:
        """Wait until the engine is warm, without a time limit; its output goes to the terminal it was started from.

        Raises:
            EngineFailure: it ended.
        """
        ipc = self._ipc = EngineClient(self._folder)
        self._watching = asyncio.create_task(self._watch(ipc))
        async with contextlib.aclosing(ipc.events()) as events:
            event = await anext(events, None)
        if not isinstance(event, Ready):
            raise EngineFailure(event.reason if isinstance(event, Failed) else "the engine ended before it was ready")
        self._ready = event
        return ipc

    async def stop(self) -> None:
        """Send `Shutdown` to the engine unless it has ended, and close the socket."""
        if self._watching is not None:
            self._watching.cancel()
        if self._ipc is not None:
            if self._ready is not None:
                with contextlib.suppress(EngineFailure):  # it has ended
                    await self._ipc.send(Shutdown())
            self._ipc.close()

    async def _watch(self, ipc: EngineClient) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        try:
            data = await reader.read()
        finally:
            transport.close()
        if data == BYE:
            os.kill(os.getpid(), signal.SIGTERM)  # the server then ends in order
        ipc.end(None if data == BYE else Failed("the engine ended without a word"))
