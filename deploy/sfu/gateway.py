"""WHIP and WHEP in front of Janus (1.1): one publication in, as many viewers as Janus carries out.

    janus --configs-folder=deploy/sfu/janus
    WHIP_TOKEN=... uvicorn --app-dir deploy/sfu gateway:app --host 0.0.0.0 --port 8090

`POST /whip` takes the publication (Authorization: Bearer WHIP_TOKEN), `POST /whep` viewers. A WHIP sender becomes a
publisher of Janus' VideoRoom, which forwards its RTP to mountpoints of the Streaming plugin. Janus offers where WHEP's
viewers do, so the gateway answers both sides, each with the other's addresses and keys; Janus is ICE-lite, and every
viewer the controlling side. There is a mountpoint for each payload type that viewers have offered for H.264.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import os
import re
import secrets
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

JANUS = os.environ.get("JANUS", "http://127.0.0.1:8088/janus")
TOKEN = os.environ.get("WHIP_TOKEN", "")
ORIGINS = os.environ.get("ORIGINS", "*").split(",")
"""Of the pages that may play."""
ROOM, SDP, MAX_SDP = 1, "application/sdp", 64 * 1024
ANSWER_S, POLL_S = 10.0, 40.0
FMTP = "level-asymmetry-allowed=1;packetization-mode=1;profile-level-id=42e01f"


class Janus:
    """One session of Janus' HTTP API. A handle is one peer connection of a plugin."""

    def __init__(self) -> None:
        self._http = httpx.AsyncClient(timeout=POLL_S)
        self._session = ""
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.gone: dict[int, Any] = {}
        """What to call when Janus has closed the connection of a handle."""

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = (await self._http.post(f"{JANUS}{path}", json={"transaction": secrets.token_hex(8), **body})).json()
        failed = answer.get("error") or _error(answer.get("plugindata", {}).get("data", {}))
        if failed:
            raise HTTPException(502, f"Janus: {failed}")
        return dict(answer)

    async def open(self) -> None:
        self._session = f"/{(await self._post('', {'janus': 'create'}))['data']['id']}"

    async def attach(self, plugin: str) -> int:
        return int((await self._post(self._session, {"janus": "attach", "plugin": plugin}))["data"]["id"])

    async def detach(self, handle: int) -> None:
        self.gone.pop(handle, None)
        with contextlib.suppress(HTTPException, httpx.HTTPError):
            await self._post(f"{self._session}/{handle}", {"janus": "detach"})

    async def ask(self, handle: int, **body: Any) -> dict[str, Any]:
        """A request that the plugin answers at once."""
        answer = await self._post(f"{self._session}/{handle}", {"janus": "message", "body": body})
        return dict(answer["plugindata"]["data"])

    async def negotiate(self, handle: int, jsep: dict[str, str] | None, **body: Any) -> dict[str, Any]:
        """A request that the plugin answers with an event."""
        transaction = secrets.token_hex(8)
        self._answers[transaction] = asyncio.get_running_loop().create_future()
        message = {"janus": "message", "transaction": transaction, "body": body} | ({"jsep": jsep} if jsep else {})
        try:
            await self._post(f"{self._session}/{handle}", message)
            async with asyncio.timeout(ANSWER_S):
                event = await self._answers[transaction]
        finally:
            del self._answers[transaction]
        if failed := _error(event.get("plugindata", {}).get("data", {})):
            raise HTTPException(502, f"Janus: {failed}")
        return event

    async def listen(self) -> None:
        """Take Janus' events, until cancelled."""
        while True:
            events = (await self._http.get(f"{JANUS}{self._session}", params={"maxev": 20})).json()
            for event in events if isinstance(events, list) else [events]:
                answer = self._answers.get(event.get("transaction", ""))
                if event["janus"] == "event" and answer is not None and not answer.done():
                    answer.set_result(event)
                if event["janus"] in ("hangup", "detached") and (gone := self.gone.pop(event["sender"], None)):
                    gone()


def _error(data: dict[str, Any]) -> str:
    return str(data.get("error", ""))


class Gateway:
    """The publication and its mountpoints."""

    def __init__(self) -> None:
        self.janus = Janus()
        self._publisher: tuple[int, int, str] | None = None  # handle, its id in the room, the video's mid
        self._mounts: dict[int, dict[str, Any]] = {}  # by payload type: id, port, rtcp port
        self._resources: dict[str, int] = {}
        self._numbers, self._lock = itertools.count(1), asyncio.Lock()

    async def open(self) -> None:
        await self.janus.open()
        self._room, self._streams = [
            await self.janus.attach(f"janus.plugin.{name}") for name in ("videoroom", "streaming")
        ]
        await self.janus.ask(
            self._room, request="create", room=ROOM, publishers=1, videocodec="h264", h264_profile="42e01f", bitrate=0
        )

    async def publish(self, offer: str) -> tuple[str, str]:
        """The answer to a sender, which takes the place of the one before, and its resource."""
        async with self._lock:
            if self._publisher is not None:
                await self.janus.detach(self._publisher[0])
            handle = await self.janus.attach("janus.plugin.videoroom")
            try:
                jsep = {"type": "offer", "sdp": offer}
                body = {"request": "joinandconfigure", "ptype": "publisher", "room": ROOM}
                joined = await self.janus.negotiate(handle, jsep, **body)
                (mid,) = re.findall(r"^a=mid:(\S+)", joined["jsep"]["sdp"], re.MULTILINE)[:1]
                self._publisher = handle, joined["plugindata"]["data"]["id"], mid
                for payload in self._mounts:
                    await self._forward(payload)
            except BaseException:
                self._publisher = None
                await self.janus.detach(handle)
                raise
        return self._resource(handle), joined["jsep"]["sdp"]

    async def _mount(self, payload: int) -> int:
        """The id of the mountpoint for viewers that take this payload type. Mutates: self."""
        async with self._lock:
            if payload not in self._mounts:
                video = {"type": "video", "mid": "v", "pt": payload, "codec": "h264", "fmtp": FMTP}
                media = [{**video, "port": 0, "rtcpport": 0}]
                made = await self.janus.ask(self._streams, request="create", type="rtp", id=payload, media=media)
                (port,) = made["stream"]["ports"]
                self._mounts[payload] = port
                await self._forward(payload)
        return payload

    async def _forward(self, payload: int) -> None:
        """Send the publisher's video to the mountpoint, and its viewers' wishes for key frames back."""
        if self._publisher is None:
            return
        _, publisher, mid = self._publisher
        port = self._mounts[payload]
        stream = {"mid": mid, "port": port["port"], "rtcp_port": port["rtcp_port"], "pt": payload}
        await self.janus.ask(
            self._room, request="rtp_forward", room=ROOM, publisher_id=publisher, host="127.0.0.1", streams=[stream]
        )

    async def watch(self, offer: str) -> tuple[str, str]:
        """The answer to a viewer's offer, and its resource."""
        payload = payload_of(offer)
        if self._publisher is None:
            raise HTTPException(503, "Nothing is published.", {"Retry-After": "2"})
        mount = await self._mount(payload)
        handle = await self.janus.attach("janus.plugin.streaming")
        try:
            given = (await self.janus.negotiate(handle, None, request="watch", id=mount))["jsep"]["sdp"]
            answer = {"type": "answer", "sdp": crossed(offer, given, payload, "active", "recvonly")}
            await self.janus.negotiate(handle, answer, request="start")
        except BaseException:
            await self.janus.detach(handle)
            raise
        return self._resource(handle), crossed(given, offer, payload, "passive", "sendonly")

    def _resource(self, handle: int) -> str:
        name = secrets.token_urlsafe(12)
        self._resources[name] = handle
        self.janus.gone[handle] = lambda: asyncio.ensure_future(self.end(name))
        return name

    async def end(self, name: str) -> None:
        if (handle := self._resources.pop(name, None)) is not None:
            if self._publisher is not None and self._publisher[0] == handle:
                self._publisher = None
            await self.janus.detach(handle)


# ---- SDP -------------------------------------------------------------------------------------------------------------


def payload_of(offer: str) -> int:
    """The payload type of H.264 (constrained baseline, packetization mode 1) in a viewer's offer."""
    for payload in re.findall(r"^a=rtpmap:(\d+) H264/90000", offer, re.MULTILINE):
        fmtp = "".join(re.findall(rf"^a=fmtp:{payload} (.*)", offer, re.MULTILINE)).lower()
        if "packetization-mode=1" in fmtp and "profile-level-id=42" in fmtp:
            return int(payload)
    raise HTTPException(406, "The offer takes no H.264 of the constrained baseline profile.")


def crossed(source: str, offer: str, payload: int, setup: str, direction: str) -> str:
    """An answer to `offer` with the addresses and keys of the other side's description, `source`: video only."""
    source, offer = source.replace("\r\n", "\n"), offer.replace("\r\n", "\n")
    theirs = re.findall(r"^a=(?:ice-ufrag:|ice-pwd:|fingerprint:sha-256|candidate:|end-of-candidates).*$", source, re.M)
    lite = ["a=ice-lite"] if "a=ice-lite" in source else []
    sections = re.split(r"^(?=m=)", offer, flags=re.M)[1:]
    mids = [re.findall(r"^a=mid:(\S+)", section, re.M)[0] for section in sections]
    video = next(number for number, section in enumerate(sections) if section.startswith("m=video"))
    lines = [
        "v=0",
        "o=- 1 1 IN IP4 127.0.0.1",
        "s=-",
        "t=0 0",
        *lite,
        f"a=group:BUNDLE {mids[video]}",
        "a=msid-semantic: WMS *",
    ]
    for number, section in enumerate(sections):
        if number != video:
            kind, _, *rest = section.splitlines()[0].split()
            lines += [" ".join([kind, "0", *rest]), "c=IN IP4 0.0.0.0", f"a=mid:{mids[number]}", "a=inactive"]
            continue
        own = re.findall(rf"^a=(?:rtpmap|fmtp|rtcp-fb):{payload} .*$", section, re.M)
        lines += [
            f"m=video 9 UDP/TLS/RTP/SAVPF {payload}",
            "c=IN IP4 0.0.0.0",
            f"a=mid:{mids[video]}",
            f"a={direction}",
        ]
        lines += ["a=rtcp-mux", f"a=setup:{setup}", *dict.fromkeys(theirs)]
        lines += [line for line in own if "transport-cc" not in line and "goog-remb" not in line]
    return "\r\n".join(lines) + "\r\n"


# ---- HTTP ------------------------------------------------------------------------------------------------------------

gateway = Gateway()


async def _offer(request: Request) -> str:
    if request.headers.get("content-type", "").partition(";")[0] != SDP:
        raise HTTPException(415, f"An offer is {SDP}.", {"Accept-Post": SDP})
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_SDP:
            raise HTTPException(413, "An offer has 64 KiB at most.")
    return bytes(body).decode("utf-8", "replace")


def _may_publish(request: Request) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not TOKEN or not hmac.compare_digest(given.encode(), TOKEN.encode()):
        raise HTTPException(401, "Publishing takes the token.", {"WWW-Authenticate": "Bearer"})


async def whip(request: Request) -> Response:
    _may_publish(request)
    name, answer = await gateway.publish(await _offer(request))
    return Response(answer, 201, {"Location": f"/whip/{name}"}, media_type=SDP)


async def whep(request: Request) -> Response:
    name, answer = await gateway.watch(await _offer(request))
    return Response(answer, 201, {"Location": f"/whep/{name}"}, media_type=SDP)


async def options(request: Request) -> Response:
    return Response(headers={"Accept-Post": SDP})


async def end(request: Request) -> Response:
    await gateway.end(request.path_params["name"])
    return Response()


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    await gateway.open()
    listening = asyncio.create_task(gateway.janus.listen())
    listening.add_done_callback(lambda task: task.cancelled() or os._exit(1))  # Janus is gone: begin with it again
    yield
    listening.cancel()


CORS = Middleware(
    CORSMiddleware,
    allow_origins=ORIGINS,
    allow_methods=["OPTIONS", "POST", "DELETE"],
    allow_headers=["*"],
    expose_headers=["Location"],
)
ROUTES = [
    Route("/whip", whip, methods=["POST"]),
    Route("/whep", whep, methods=["POST"]),
    Route("/whep", options, methods=["OPTIONS"]),
    Route("/whip/{name}", end, methods=["DELETE"]),
    Route("/whep/{name}", end, methods=["DELETE"]),
]
app = Starlette(routes=ROUTES, middleware=[CORS], lifespan=lifespan)
