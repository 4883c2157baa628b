"""Outputs that are asked for while a session plays, each to a target that the operator allows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from streamdiff.errors import ConfigError, RequestError
from streamdiff.server.metrics import Metrics
from streamdiff.server.outputs import target as targets
from streamdiff.server.outputs.output import Output, OutputStatus
from streamdiff.server.outputs.target import Target
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.webrtc.ice_servers import IceServers

MAX_PER_SESSION, MAX_OUTPUTS = 4, 32
"""Each takes a process, or a peer connection."""


class AllowedTargets:
    """`serve.output_targets`: folders, and addresses below which everything is allowed."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """
        Raises:
            ConfigError: a folder that is none, or an address of an unknown kind.
        """
        self._addresses = [text for text in allowed if "://" in text]
        for text in self._addresses:
            targets.parse(text)
        self._folders = [Path(text).expanduser() for text in allowed if "://" not in text]
        for folder in self._folders:
            if not folder.is_dir():
                raise ConfigError(f"serve.output_targets: {folder} is no folder; create it first")

    def allows(self, address: str) -> bool:
        """Whether an address is on the list, or below one that is."""
        return any(_is_below(address, allowed) for allowed in self._addresses)

    def parse(self, text: str) -> Target:
        """An allowed target: an address, or the name of a file, which goes into the first folder.

        Raises:
            RequestError: another one, or one that cannot be written; says what is allowed.
        """
        if "://" in text:
            if not self.allows(text):
                raise RequestError("target", "the address is not among those this server allows (serve.output_targets)")
        elif not self._folders:
            raise RequestError("target", "this server allows no files; give an address that it allows")
        elif PurePath(text).name != text or "\\" in text or not text.isprintable():
            raise RequestError("target", "a file has a name without a folder, as show.mp4; the server chooses where")
        try:
            return targets.parse(text if "://" in text else str(self._folders[0] / text))
        except (ConfigError, ValueError, OSError) as error:  # the last of a name that is too long
            # Of files the error says where on the server they are kept.
            of_file = f"{text[:60]!r} cannot be written: a recording ends in .mp4 or .webm, and has a new name"
            raise RequestError("target", str(error) if "://" in text else of_file) from error


def _is_below(text: str, allowed: str) -> bool:
    """Whether an address lies below another: same scheme, host, port and query, and a path that goes on from its own.
    Who sends may be named in it (`TOKEN@`)."""
    try:
        wanted, base = urlsplit(text), urlsplit(allowed)
        alike = all(getattr(wanted, name) == getattr(base, name) for name in ("scheme", "hostname", "port", "query"))
    except ValueError:
        return False
    # Python and FFmpeg read some odd addresses differently: the host has to be the allowed one to the letter.
    alike = alike and _host_text(wanted.netloc) == _host_text(base.netloc)
    if not alike or wanted.fragment or not text.isprintable() or set(wanted.path) & {" ", "%", "\\"}:
        return False  # FFmpeg takes options after a space
    return ".." not in wanted.path.split("/") and f"{wanted.path}/".startswith(f"{base.path.rstrip('/')}/")


def _host_text(netloc: str) -> str:
    return netloc.rpartition("@")[2].lower()


class SessionOutputs:
    """The outputs of all sessions but those of the configuration. Lives on the event loop."""

    def __init__(self, allowed: AllowedTargets, metrics: Metrics, ice_servers: IceServers) -> None:
        self._allowed, self._metrics, self._ice_servers = allowed, metrics, ice_servers
        self._outputs: dict[tuple[str, str], Output] = {}  # by the session's id and their own

    async def add(self, session: LiveSession, text: str) -> tuple[str, OutputStatus]:
        """Send a session to a target too; returns the output's id and its state.

        Raises:
            RequestError: a target that is not allowed or cannot be written, or too many outputs.
        """
        target = await asyncio.to_thread(self._allowed.parse, text)  # which may try a protocol
        if session.closed:
            raise RequestError("session", "the session has ended")
        if len(self.of(session)) >= MAX_PER_SESSION or len(self._outputs) >= MAX_OUTPUTS:
            limits = f"a session has {MAX_PER_SESSION} outputs at most, and the server {MAX_OUTPUTS}"
            raise RequestError("target", f"{limits}; end one first")
        if target.is_file and any(output.target.url == target.url for output in self._outputs.values()):
            raise RequestError("target", f"{text} is being written; choose another name")
        id = secrets.token_urlsafe(6)
        named = replace(target, name=f"{target.name} {id}")
        output = Output(named, lambda: session, self._metrics, self._allowed.allows, self._ice_servers)
        self._outputs[session.id, id] = output
        return id, output.status

    def of(self, session: LiveSession) -> dict[str, OutputStatus]:
        """The states of a session's outputs, by id."""
        return {id: output.status for (session_id, id), output in self._outputs.items() if session_id == session.id}

    async def remove(self, session: LiveSession, id: str) -> bool:
        """End an output; False if there is none of that id."""
        if (output := self._outputs.get((session.id, id))) is None:
            return False
        await self._end(output)  # until then it counts: it still has its process
        self._outputs.pop((session.id, id), None)
        return True

    async def end_session(self, session: LiveSession) -> None:
        """End the outputs of a session that ends."""
        ending = [self._outputs.pop((session.id, id)) for id in self.of(session)]
        await asyncio.gather(*map(self._end, ending))

    async def stop(self) -> None:
        """End all outputs: what came so far is written."""
        ending = list(self._outputs.values())
        self._outputs.clear()
        await asyncio.gather(*map(self._end, ending))

    async def _end(self, output: Output) -> None:
        await output.stop()
        self._metrics.forget_output(output.status.name)
