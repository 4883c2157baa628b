"""A live session sent to files and servers: each output takes the encoded packets as a viewer does, and a process
of its own (`muxer`) writes them; to a WHIP server (RFC 9725) a peer connection sends them. What is slow or gone is
skipped and tried again; no viewer waits for it.

WHIP is aiortc's, which takes requests for key frames and sends again what was lost; FFmpeg's own WHIP muxer takes none,
and as PyAV 18.1 has it, its DTLS did not get through to aiortc.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Literal
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import av
import httpx
from aiortc import RTCIceServer, RTCSessionDescription
from pydantic import ConfigDict

from streamdiff import atomic_write, child_process, clock
from streamdiff.atomic_write import check_room
from streamdiff.errors import ConfigError, RequestError
from streamdiff.server.auth import read_setting_file
from streamdiff.server.media.encoder import Codec, EncodedFrame, PacketQueue
from streamdiff.server.media.playback import Playback
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.outputs.muxer import RECORD
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.tasks import wait_at_most
from streamdiff.server.webrtc import aiortc_compat
from streamdiff.server.webrtc.ice import IceServers
from streamdiff.server.webrtc.sdp import SdpError, without_unusable
from streamdiff.server.webrtc.sender import VideoSender

logger = logging.getLogger(__name__)

# Short pieces, written at once: they can be played although the recording was cut off.
_MP4 = {"movflags": "empty_moov+default_base_moof", "frag_duration": "1000000", "flush_packets": "1"}
_WEBM = {"live": "1", "cluster_time_limit": "1000", "flush_packets": "1"}
_FILES: dict[str, tuple[str, Codec, dict[str, str]]] = {".mp4": ("mp4", "h264", _MP4), ".webm": ("webm", "vp8", _WEBM)}
_STREAMS = {
    **{"rtmp": "flv", "rtmps": "flv", "srt": "mpegts", "udp": "mpegts", "tcp": "mpegts"},
    **{"whip+https": "whip", "whip+http": "whip"},
}
_WITH_PORT = ("srt", "udp", "tcp")
"""Schemes without a usual port."""
_HOST = re.compile(r"[^\s\"'<>\\^`{|}]*")
_KNOWN = "a file that ends in .mp4 or .webm, or an address that begins with " + ", ".join(
    f"{scheme}://" for scheme in _STREAMS
)
QUEUE_PACKETS = 80
"""Encoded frames that may wait for one output, 2 s at 40 FPS; beyond that it continues at the next key frame."""
BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
STUCK_S = 15.0
"""A writer that reads nothing for so many seconds is restarted."""
KEY_S = 2.0
"""Interval of key frames sent to an address, as receivers there cannot request one."""
POLL_S = 1.0
ROOM_S = 1.0
"""How often a recording looks whether the disk has room."""
TELL_S = 60.0
"""How often the log says the same of an output."""
EXIT_S = 3.0
MAX_PER_SESSION, MAX_OUTPUTS = 4, 32
"""Each takes a process, or a peer connection."""
WHIP_CONNECT_S = 10.0
"""The media server's answer, and then the connection, may each take so long."""
WHIP_CLOSE_S = 2.0
MAX_ANSWER_BYTES, MAX_REDIRECTS = 256 * 1024, 5
UNUSABLE_ANSWER: tuple[type[Exception], ...] = (SdpError, *aiortc_compat.OFFER_ERRORS)
WHIP_PREFIX = "whip+"


@dataclass(frozen=True)
class Target:
    """One destination. `name` may be shown: of an address it is scheme and host only, as the path may be a secret."""

    url: str
    name: str
    container: str
    codec: Codec
    options: dict[str, str]
    is_file: bool

    def attempt(self, number: int) -> str:
        """Where the attempt `number`, from 0, writes: a recording that broke off is kept, and the next has its own."""
        if not self.is_file or number == 0:
            return self.url
        path, number = Path(self.url), number + 1
        while (other := path.with_stem(f"{path.stem}-{number}")).exists():  # somebody's own
            number += 1
        return str(other)


def parse_target(text: str) -> Target:
    """Parse one target.

    Raises:
        ConfigError: it names nothing that can be written here; says what can.
    """
    if "://" in text:
        parts = _address(text)
        text = f"{parts.scheme}://{text.strip().partition('://')[2]}"  # in small letters, as FFmpeg knows it
        if parts.scheme not in _STREAMS:
            raise ConfigError(f"the output {parts.scheme[:20]}://... is of no known kind; use {_KNOWN}")
        if not parts.hostname:
            raise ConfigError(f"the output {parts.scheme}://... names no host")
        if parts.port is None and parts.scheme in _WITH_PORT:
            raise ConfigError(f"the output at {parts.hostname} names no port; write {parts.scheme}://HOST:PORT")
        if _STREAMS[parts.scheme] == "whip" and parts.password is not None:
            raise ConfigError(
                f"an output at {parts.hostname} has a name and a password; WHIP takes a token: TOKEN@host"
            )
        if not (token := unquote(parts.username or "")).isascii() or not token.isprintable():
            raise ConfigError(f"the token of an output at {parts.hostname} has characters that no HTTP header can have")
        _check_protocol(parts.scheme)
        host = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
        return Target(text, f"{parts.scheme}://{host}", _STREAMS[parts.scheme], "h264", {}, False)
    path = Path(text).absolute()
    if path.suffix.lower() not in _FILES:
        raise ConfigError(f"the output {text[:60]!r} is of no known kind; use {_KNOWN}")
    atomic_write.check_parent(path)
    if path.exists():
        raise ConfigError(f"the output {text[:60]!r} exists, and a recording never replaces one; choose another name")
    container, codec, options = _FILES[path.suffix.lower()]
    return Target(str(path), path.name, container, codec, options, True)


def _address(text: str) -> SplitResult:
    """The parts of an address. Raises ConfigError for a host or port that can never be."""
    try:
        parts = urlsplit(text)
        if parts.port != 0 and _HOST.fullmatch(parts.hostname or ""):  # or its ValueError
            return parts
    except ValueError:
        pass
    shown = text.partition("://")[2].partition("/")[0].rpartition("@")[2]
    raise ConfigError(f"an output names the host and port {shown[:60]!r}, which can never be; write HOST:PORT")


def read_targets(path: str | None) -> list[str]:
    """The targets in `serve.outputs_file`, one a line; none without a file. Raises ConfigError."""
    text = "" if path is None else read_setting_file(path, "serve.outputs_file")
    return [line.strip() for line in text.splitlines() if line.strip()]


def parse_targets(texts: Sequence[str]) -> list[Target]:
    """Parse all targets; each gets a unique name.

    Raises:
        ConfigError: see `parse_target`; or the same file twice.
    """
    found: list[Target] = []
    for text in texts:
        target = parse_target(text)
        if target.is_file and target.url in {each.url for each in found}:
            raise ConfigError(f"the output {text[:60]!r} is named twice")
        alike = sum(each.name.split(" #")[0] == target.name for each in found)
        found.append(replace(target, name=f"{target.name} #{alike + 1}") if alike else target)
    return found


def _check_protocol(scheme: str) -> None:
    """Raise ConfigError for a protocol that FFmpeg was built without. Opening port 0 shows that without connecting."""
    if scheme not in ("srt", "rtmps"):
        return
    try:
        av.open(f"{scheme}://127.0.0.1:0", format=_STREAMS[scheme], timeout=1).close()
    except av.ProtocolNotFoundError:
        raise ConfigError(
            f"{scheme}:// cannot be written: the installed PyAV was built without it. "
            f"Use rtmp:// or udp://, or a PyAV that was built with {scheme.upper()} (pip install --no-binary av av)."
        ) from None
    except (av.FFmpegError, OSError):
        return


@dataclass
class OutputStatus:
    """An output of a session."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    name: str
    """of an address scheme and host only, as the rest may be a secret"""
    state: Literal["waiting", "sending", "retrying", "ended"] = "waiting"
    frames: int = 0
    """handed to it"""
    dropped: int = 0
    """that it did not get"""
    restarts: int = 0
    reason: str = ""
    """why it broke off, or empty"""
    id: str = ""
    """of one that was asked for over the API, or empty"""


class Output:
    """One target of `outputs`. `find_session` returns the session, or None while there is none."""

    def __init__(self, target: Target, find_session: Callable[[], LiveSession | None], outputs: Outputs) -> None:
        self.target, self.status = target, OutputStatus(target.name)
        self._find_session, self._outputs, self._metrics = find_session, outputs, outputs.metrics
        self._queue = PacketQueue(QUEUE_PACKETS)
        self._available = asyncio.Event()
        self._playback: Playback | None = None
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"output-{target.name}")

    def put(self, encoded: EncodedFrame) -> None:
        """Take one packet, or skip to the next key frame; called by the fan-out."""
        dropped = self._queue.dropped
        if self._queue.put(encoded) and self._playback is not None:
            self._playback.request_key(self.target.codec)
        self._count(0, self._queue.dropped - dropped)
        self._available.set()

    async def stop(self) -> None:
        """Write what came so far, and end."""
        self._stopping.set()
        self._available.set()
        if self.target.container == "whip":  # nothing is left to write, and an answer may be long in coming
            self._task.cancel()
        _, late = await asyncio.wait({self._task}, timeout=2 * EXIT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.status.state = "ended"

    async def _run(self) -> None:
        attempt, failures, told = 0, 0, ("", 0.0)
        while not self._stopping.is_set():
            session = self._find_session()
            if session is None or session.closed:
                await wait_at_most(self._stopping, BACK_OFF_S[0])
                continue
            begun_s = clock.monotonic_s()
            reason = await (self._publish(session) if self.target.container == "whip" else self._send(session, attempt))
            self._metrics.output_up.labels(self.status.name).set(0)
            if self._stopping.is_set():
                break
            if reason is None:
                self.status.state, attempt = "waiting", attempt + 1
                continue
            failures = 1 if clock.monotonic_s() - begun_s > BACK_OFF_S[-1] else failures + 1
            attempt += 1
            self.status.state, self.status.reason, self.status.restarts = "retrying", reason, attempt
            wait_s = BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1]
            if reason != told[0] or clock.monotonic_s() - told[1] >= TELL_S:
                told = reason, clock.monotonic_s()
                logger.warning("Output %s broke off: %s. Tried again in %g s.", self.status.name, reason, wait_s)
            await wait_at_most(self._stopping, wait_s)

    async def _poll(self) -> None:
        """Wait for a packet, or `POLL_S`: session and writer may end without one."""
        self._available.clear()
        await wait_at_most(self._available, POLL_S)

    async def _send(self, session: LiveSession, attempt: int) -> str | None:
        """Write the session until something fails; says what. None: the session has ended."""
        try:
            await self._check_room()
            process = await child_process.start("streamdiff.server.outputs.muxer", stderr=asyncio.subprocess.PIPE)
        except OSError as error:  # no more processes, files or memory
            if error.errno == errno.ENOSPC:
                return str(error.strerror)
            return f"its writer cannot be started: {error.strerror}"
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        stderr = asyncio.create_task(process.stderr.read())
        written = asyncio.create_task(self._count_written(process.stdout))
        self._queue = PacketQueue(QUEUE_PACKETS)
        self._playback = session.playback
        reason = ""
        try:
            session.playback.attach(self.target.codec, self.put)  # what its line carries must not lower the picture
            fmt, target = session.playback.format, self.target
            header = {name: getattr(target, name) for name in ("container", "codec", "options")} | {
                "url": target.attempt(attempt), "fps": fmt.fps,
                "width": fmt.width * fmt.scale, "height": fmt.height * fmt.scale,
            }  # fmt: skip
            process.stdin.write(json.dumps(header).encode() + b"\n")
            await self._feed(process, session)
        except av.FFmpegError as error:
            reason = f"its encoder failed: {error}"
        except TimeoutError:
            reason = f"the other side took nothing for {STUCK_S:g} s"
        except OSError as error:  # else the writer has ended, and says why
            reason = str(error.strerror) if error.errno == errno.ENOSPC else ""
        finally:
            session.playback.detach(self.target.codec, self.put)
            self._playback = None
            process.stdin.close()
            await child_process.end(process, EXIT_S)
            await written
        if session.closed:
            return None
        lines = (await stderr).decode(errors="replace").splitlines()
        return reason or (lines[-1] if lines else f"the writer ended with code {process.returncode}")

    async def _feed(self, process: asyncio.subprocess.Process, session: LiveSession) -> None:
        """Hand over packets until the end is asked for, the session ends or the writer does.

        Raises:
            TimeoutError: the writer takes nothing. OSError: it is gone, or the disk has no room.
        """
        assert process.stdin is not None
        key_s = looked_s = clock.monotonic_s()
        while not self._stopping.is_set() and not session.closed and process.returncode is None:
            encoded = self._queue.get()
            if encoded is None:
                await self._poll()
                continue
            now_s = clock.monotonic_s()
            if now_s - looked_s >= ROOM_S:
                looked_s = now_s
                await self._check_room()
            if encoded.key:
                key_s = now_s
            elif not self.target.is_file and now_s - key_s > KEY_S:
                session.playback.request_key(self.target.codec)
            data = bytes(encoded.packet)
            process.stdin.write(RECORD.pack(encoded.pts, encoded.key, len(data)) + data)
            async with asyncio.timeout(STUCK_S):  # `wait_for` would make a task for every packet
                await process.stdin.drain()

    async def _count_written(self, reports: asyncio.StreamReader) -> None:
        """Count what the writer reports: a byte for each packet that its target took. Mutates: self."""
        while written := await reports.read(4096):
            self._count(len(written), 0)

    async def _check_room(self) -> None:
        """Raises OSError (ENOSPC) where this is a recording whose disk has no room for more."""
        if self.target.is_file:
            await asyncio.to_thread(check_room, Path(self.target.url).parent)

    async def _publish(self, session: LiveSession) -> str | None:
        """Publish the session until something fails; says what. None: the session has ended."""
        ice_servers, allows = self._outputs.ice_servers.to_ask(), self._outputs.allowed.allows
        publication = Publication(self.target, session.playback, allows, ice_servers)
        frames, dropped = CounterDelta(), CounterDelta()
        try:
            await publication.open()
            while not self._stopping.is_set() and not session.closed:
                if reason := publication.fault(clock.monotonic_s()):
                    return reason
                await self._poll()
                sender = publication.sender
                self._count(int(frames.increase(sender.sent)), int(dropped.increase(sender.dropped)))
        except WhipError as error:
            return str(error)
        finally:
            await publication.close()
        return None

    def _count(self, frames: int, dropped: int) -> None:
        """What went out and what did not. Mutates: self."""
        if frames:
            self.status.state, self.status.reason = "sending", ""
            self.status.frames += frames
            self._metrics.output_up.labels(self.status.name).set(1)
            self._metrics.output_frames.labels(self.status.name).inc(frames)
        if self.status.frames:  # what came before the first key frame is not missing
            self.status.dropped += dropped
            self._metrics.output_dropped.labels(self.status.name).inc(dropped)


# ---- WHIP ---------------------------------------------------------------------------------------------------------


class WhipError(Exception):
    """A publication that cannot begin; the text says why, without the address: a key is often part of it."""


class Publication:
    """One WHIP publication: `open`, then ask for a `fault` regularly, and `close` in any case."""

    def __init__(
        self, target: Target, playback: Playback, allows: Callable[[str], bool], ice_servers: Sequence[RTCIceServer]
    ) -> None:
        """`target` is `whip+https://[TOKEN@]HOST[:PORT]/PATH`, or `whip+http://...`; the token is sent as a bearer's.
        `allows` says of an address of that form whether the server may speak to it where a media server at another
        one names it."""
        parts = urlsplit(target.url.removeprefix(WHIP_PREFIX))
        self._url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._headers = {"Authorization": f"Bearer {unquote(parts.username)}"} if parts.username else {}
        self._codec, self._allows = target.codec, allows
        # What this line carries must not lower the viewers' picture.
        self.sender = VideoSender(playback, ice_servers)
        self._resource: str | None = None
        self._resource_headers = self._headers
        self._opened_s = 0.0

    async def open(self) -> None:
        """Offer the stream and take the answer; the packets begin when the connection stands. Mutates: self.

        Raises:
            WhipError: no answer, a refusal, or an answer that cannot be used.
        """
        transceiver = self.sender.add_transceiver((self._codec,))
        await self.sender.pc.setLocalDescription(await self.sender.pc.createOffer())
        answer = await self._post(str(self.sender.pc.localDescription.sdp))
        try:
            await self.sender.pc.setRemoteDescription(RTCSessionDescription(without_unusable(answer), "answer"))
        except UNUSABLE_ANSWER as error:
            raise WhipError(f"the media server's answer cannot be used ({type(error).__name__})") from error
        if not self.sender.bind(transceiver) or transceiver.currentDirection != "sendonly":
            raise WhipError(f"the media server does not take {self._codec.upper()} video")
        self._opened_s = clock.monotonic_s()

    def fault(self, now_s: float) -> str | None:
        """What is wrong with the connection; None: nothing."""
        state = self.sender.pc.connectionState
        if state in ("failed", "closed"):
            return f"the connection to the media server has {'failed' if state == 'failed' else 'been closed'}"
        if state != "connected" and now_s - self._opened_s > WHIP_CONNECT_S:
            return f"no connection to the media server within {WHIP_CONNECT_S:g} s"
        if (fault := self.sender.fault(now_s)) is not None:
            if fault == "encoder":
                return f"{self._codec.upper()} cannot be encoded"
            return "the media server takes nothing any more"
        return None

    async def close(self) -> None:
        """Close the connection, and delete the resource at the media server if it answers. Mutates: self."""
        await self.sender.close(WHIP_CLOSE_S)
        if self._resource is not None:
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with (
                    asyncio.timeout(WHIP_CLOSE_S),
                    httpx.AsyncClient() as http,
                    http.stream("DELETE", self._resource, headers=self._resource_headers),
                ):
                    pass

    async def _post(self, offer: str) -> str:
        """The answer to an offer. Mutates: self."""
        headers = {**self._headers, "Content-Type": "application/sdp", "Accept-Encoding": "identity"}
        http = httpx.AsyncClient(
            timeout=WHIP_CONNECT_S, max_redirects=MAX_REDIRECTS, event_hooks={"response": [self._check]}
        )
        try:
            async with (
                asyncio.timeout(WHIP_CONNECT_S),
                http,
                http.stream("POST", self._url, content=offer, headers=headers, follow_redirects=True) as response,
            ):
                return await self._answer(response)
        except TimeoutError as error:
            raise WhipError(f"the media server gave no whole answer within {WHIP_CONNECT_S:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise WhipError(f"the media server cannot be reached ({type(error).__name__})") from error

    async def _check(self, response: httpx.Response) -> None:
        """Look at each response, before a redirect is followed: elsewhere httpx leaves the token out. Raises WhipError
        for a refusal, or an address that is not allowed."""
        if response.status_code not in (201, 307, 308):
            raise WhipError(f"the media server answered {response.status_code} {response.reason_phrase}")
        if response.is_redirect and self._named(response) is None:
            raise WhipError("the media server redirects to an address that is not allowed")

    async def _answer(self, response: httpx.Response) -> str:
        """The SDP of a response that is still to be read. Mutates: self."""
        if "location" in response.headers and (resource := self._named(response)) is not None:
            self._resource = str(resource)
            if not _is_same_origin(resource, response.url) or "authorization" not in response.request.headers:
                self._resource_headers = {}  # the token is for the server that took it
        body = b""
        async for piece in response.aiter_raw():
            if len(body := body + piece) > MAX_ANSWER_BYTES:
                raise WhipError(f"the media server's answer is larger than {MAX_ANSWER_BYTES // 1024} KiB")
        return body.decode(errors="replace")

    def _named(self, response: httpx.Response) -> httpx.URL | None:
        """The address that a response names; None for one at another origin that is not allowed."""
        try:
            named = httpx.URL(urljoin(str(response.url), response.headers.get("location", "")))
        except (ValueError, httpx.InvalidURL) as error:
            raise WhipError("the media server's answer names an address that is none") from error
        return named if _is_same_origin(named, response.url) or self._allows(f"{WHIP_PREFIX}{named}") else None


def _is_same_origin(one: httpx.URL, other: httpx.URL) -> bool:
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


# ---- outputs that are asked for over the API ----------------------------------------------------------------------


class AllowedTargets:
    """`serve.output_targets`: folders, and addresses below which everything is allowed."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """
        Raises:
            ConfigError: a folder that is none, or an address of an unknown kind.
        """
        self._addresses = [text for text in allowed if "://" in text]
        for text in self._addresses:
            parse_target(text)
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
            return parse_target(text if "://" in text else str(self._folders[0] / text))
        except (ConfigError, ValueError, OSError) as error:  # the last of a name that is too long
            # Of files the error says where on the server they are kept.
            of_file = f"{text[:60]!r} cannot be written: a recording ends in .mp4 or .webm, and has a new name"
            raise RequestError("target", str(error) if "://" in text else of_file) from error


def _is_below(text: str, allowed: str) -> bool:
    """Whether an address lies below another: same scheme, host, port and query, and a path that continues its own.
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


class Outputs:
    """All outputs: those of the configuration, which send the default session, and those that were added over the API.
    Lives on the event loop."""

    def __init__(self, allowed: Sequence[str], metrics: Metrics, ice_servers: IceServers) -> None:
        """`allowed`: see `AllowedTargets`, or its ConfigError."""
        self.allowed, self.metrics, self.ice_servers = AllowedTargets(allowed), metrics, ice_servers
        self.configured: list[Output] = []
        self._added: dict[tuple[str, str], Output] = {}  # by the session's id and their own

    async def add(self, session: LiveSession, text: str) -> OutputStatus:
        """Send a session to a target too; returns the state of the output.

        Raises:
            RequestError: a target that is not allowed or cannot be written, or too many outputs.
        """
        target = await asyncio.to_thread(self.allowed.parse, text)  # which may try a protocol
        if session.closed:
            raise RequestError("session", "the session has ended")
        if len(self.of(session)) >= MAX_PER_SESSION or len(self._added) >= MAX_OUTPUTS:
            limits = f"a session has {MAX_PER_SESSION} outputs at most, and the server {MAX_OUTPUTS}"
            raise RequestError("target", f"{limits}; end one first")
        if target.is_file and any(output.target.url == target.url for output in self._added.values()):
            raise RequestError("target", f"{text} is being written; choose another name")
        id = secrets.token_urlsafe(6)
        output = Output(replace(target, name=f"{target.name} {id}"), lambda: session, self)
        output.status.id = id
        self._added[session.id, id] = output
        return output.status

    def of(self, session: LiveSession) -> list[OutputStatus]:
        """The states of the outputs that were added to a session."""
        return [output.status for (session_id, _), output in self._added.items() if session_id == session.id]

    async def remove(self, session: LiveSession, id: str) -> bool:
        """End an added output; False if there is none of that id."""
        if (output := self._added.get((session.id, id))) is None:
            return False
        await output.stop()  # until then it counts: it still has its process
        self.metrics.forget("output", output.status.name)
        self._added.pop((session.id, id), None)
        return True

    async def end_session(self, session: LiveSession) -> None:
        """End the outputs that were added to a session that ends."""
        await asyncio.gather(*(self.remove(session, status.id) for status in self.of(session)))

    async def stop(self) -> None:
        """End all outputs: what came so far is written."""
        await asyncio.gather(*(output.stop() for output in (*self.configured, *self._added.values())))
