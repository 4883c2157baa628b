"""`streamdiff osc`: a session of a running server is steered by Open Sound Control (OSC) over UDP, and what the session
tells is sent on as such. docs/remote.md has the addresses."""

from __future__ import annotations

import asyncio
from contextlib import closing, nullcontext
from typing import Any

from streamdiff.client import AsyncClient
from streamdiff.commands.jobs import OscJob
from streamdiff.commands.mcp import read_token
from streamdiff.errors import ConfigError, StreamdiffError
from streamdiff.heavy_import import optional

FIELDS = {"prompt": ("prompt", "over"), "reset": ("seed",), "fps": ("fps",), "steps": ("steps",)}
"""What the values of a message are, by its kind; others have none, or one that is called as they are."""


def _address(text: str, flag: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{flag} is {text!r}; it is HOST:PORT", field=flag)
    return host, int(port)


async def _run(job: OscJob, listen: tuple[str, int], send: tuple[str, int] | None) -> None:
    osc = optional("pythonosc.osc_server", "stage", "streamdiff osc")
    client = optional("pythonosc.udp_client", "stage", "streamdiff osc")
    with nullcontext() if send is None else client.SimpleUDPClient(*send) as out:
        await _carry(job, listen, osc, out)


async def _carry(job: OscJob, listen: tuple[str, int], osc: Any, out: Any) -> None:
    """Carry messages both ways; `out`: where to send what the session tells, or None."""

    def tell(kind: str, name: str, value: object) -> None:
        if out is not None:
            out.send_message(f"/streamdiff/{kind}/{name}", value)

    async with AsyncClient(job.url, read_token(job)) as client, await client.session(job.session) as stream:

        async def carry_out(kind: str, name: str, values: list[Any]) -> None:
            try:
                if kind == "control":
                    await stream.control(**{name: (*values, 0)[0]})
                else:
                    await stream.ask(kind, **dict(zip(FIELDS.get(kind, (kind,)), values, strict=False)))
            except StreamdiffError as error:
                tell("error", kind, str(error))

        def take(address: str, *values: Any) -> None:
            kind, _, name = address.removeprefix("/streamdiff/").partition("/")
            plain = [value for value in values if isinstance(value, str | int | float)]
            whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in plain]
            group.create_task(carry_out(kind, name, whole))

        dispatcher = osc.Dispatcher(strict_timing=False)  # else it sleeps until a bundle's time
        dispatcher.set_default_handler(take)
        server = osc.AsyncIOOSCUDPServer(listen, dispatcher, asyncio.get_running_loop())
        await stream.ask("ping")  # what is wrong with the connection is said before the group makes a group of it
        transport, _ = await server.create_serve_endpoint()
        with closing(transport):
            async with asyncio.TaskGroup() as group:
                async for message in stream.events():
                    for name, value in message.items():
                        if isinstance(value, str | int | float):
                            tell(message["type"], name, value)


def run(job: OscJob) -> int:
    """Carry messages both ways until the session ends; the exit status. Raises ConfigError."""
    asyncio.run(_run(job, _address(job.listen, "--listen"), None if job.send is None else _address(job.send, "--send")))
    return 0
