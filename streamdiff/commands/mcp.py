"""`streamdiff mcp`: tools by which an assistant opens, steers and looks at streams of a running server, by the Model
Context Protocol (MCP) on standard input and output."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import Field

from streamdiff.client import AsyncClient, AsyncRemoteStream
from streamdiff.commands.jobs import McpJob, RemoteJob
from streamdiff.errors import RequestError, StreamdiffError
from streamdiff.heavy_import import optional
from streamdiff.server.auth import read_setting_file

Seconds = Annotated[float, Field(gt=0, le=60)]
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Tools:
    """What an assistant can do: each public method is a tool, and its docstring what the assistant reads."""

    def __init__(self, client: AsyncClient, folder: Path, image: Callable[..., Any]) -> None:
        self._client, self._folder, self._image = client, folder, image
        self.streams: dict[str, tuple[AsyncRemoteStream, asyncio.Task[None]]] = {}

    def _find(self, stream: str) -> AsyncRemoteStream:
        if stream not in self.streams:
            raise RequestError("stream", f"there is no stream {stream!r} here; open one", "unknown")
        found, watching = self.streams[stream]
        if watching.done():
            watching.result()
        return found

    async def open(self, prompt: str, seed: int = 0) -> dict[str, Any]:
        """Open a live video stream of a prompt, which plays until it is closed. Returns its `stream`, which the other
        tools take, and the controls that its model has."""
        return await self._watch(await self._client.open(prompt, seed=seed))

    async def join(self, session: str = "default") -> dict[str, Any]:
        """Watch and steer a session that is open on the server already, with others."""
        return await self._watch(await self._client.session(session))

    async def _watch(self, stream: AsyncRemoteStream) -> dict[str, Any]:
        async def watch() -> None:  # or it would pause
            async for _ in stream.frames():
                pass

        await self.close(stream.id)
        self.streams[stream.id] = stream, asyncio.create_task(watch())
        state = await stream.ask("get")
        told = ("text", "notice", "fps", "width", "height", "switches", "controls")
        return {"stream": stream.id, **{name: state[name] for name in told}}

    async def prompt(self, stream: str, prompt: str, over: int = 1) -> dict[str, Any]:
        """Change what a stream shows while it plays, over so many chunks. Returns when it is on screen."""
        return await self._find(stream).prompt(prompt, over=over, until="shown")

    async def control(self, stream: str, values: dict[str, float], seconds: Seconds = 1.0) -> dict[str, Any]:
        """Hold controls of the model (axes from -1 to 1, buttons 0 or 1) for some seconds, at most 60, then let go."""
        held = self._find(stream)
        receipt = await held.control("shown", **values)
        await asyncio.sleep(seconds)
        await held.control(**dict.fromkeys(values, 0.0))
        return receipt

    async def look(self, stream: str) -> Any:
        """The frame on show now, as a JPEG."""
        return self._image(data=await self._find(stream).picture(), format="jpeg")

    async def timeline(self, stream: str, changes: list[dict[str, Any]]) -> str:
        """Let changes come by themselves: [{"seconds": 4, "prompt": "...", "over": 6}, {"at": 60, "controls": {"jump":
        1}}, {"seconds": 16, "loop": true}]; `at` counts chunks. Replaces the timeline before; [] ends it."""
        await self._find(stream).request("POST", "/timeline", json=changes)
        return f"{len(changes)} changes are to come."

    async def record(self, stream: str, seconds: float = 10.0) -> str:
        """Save the last seconds that were shown, at most 30, as a video file. Returns its path."""
        video = (await self._find(stream).request("GET", "/clip", params={"seconds": seconds})).content
        path = self._folder / f"{stream}-{secrets.token_hex(4)}.{'mp4' if video[4:8] == b'ftyp' else 'webm'}"
        path.write_bytes(video)
        return str(path.resolve())

    async def close(self, stream: str) -> str:
        """End a stream that `open` opened, or leave one that was joined."""
        if stream not in self.streams:
            return "It is not open here."
        found, watching = self.streams.pop(stream)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await found.close()
        return "closed"


def _as_tool(method: Callable[_P, Awaitable[_R]], error: type[Exception]) -> Callable[_P, Awaitable[_R]]:
    """The method, whose refusals reach the assistant: of other exceptions the SDK sends no text."""

    @wraps(method)
    async def run(*given: _P.args, **named: _P.kwargs) -> _R:
        try:
            return await method(*given, **named)
        except (StreamdiffError, OSError) as refused:
            raise error(str(refused)) from refused

    return run


def read_token(job: RemoteJob) -> str | None:
    """The token to show a server. Raises ConfigError."""
    return None if job.token_file is None else read_setting_file(str(job.token_file), "--token-file").strip()


async def _serve(job: McpJob, sdk: Any, error: type[Exception]) -> None:
    async with AsyncClient(job.url, read_token(job)) as client:
        tools = Tools(client, job.folder, sdk.Image)
        server = sdk.MCPServer("streamdiff", instructions=__doc__, log_level="WARNING")
        for name in ("open", "join", "prompt", "control", "look", "timeline", "record", "close"):
            server.add_tool(_as_tool(getattr(tools, name), error), structured_output=False)
        try:
            await server.run_stdio_async()
        finally:
            for stream in [*tools.streams]:
                await tools.close(stream)


def run(job: McpJob) -> int:
    """Serve tools until standard input ends; the exit status.

    Raises:
        ConfigError: no MCP SDK, or a token's file that cannot be read.
    """
    sdk = optional("mcp.server.mcpserver", "mcp", "streamdiff mcp")
    asyncio.run(_serve(job, sdk, optional("mcp.server.mcpserver.exceptions", "mcp", "streamdiff mcp").ToolError))
    return 0
