"""Peer connections of viewers (WHEP) and of senders that feed sessions with video (WHIP, RFC 9725): from a checked
offer to the end.

Knows nothing about prompts or the engine; HTTP enters only as statuses of `Problem`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import av
from aiortc import MediaStreamTrack, RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError

from streamdiff import clock
from streamdiff.server.media.encoder import Codec
from streamdiff.server.metrics import Metrics
from streamdiff.server.peers import RETRY_AFTER_S, PerAddressLimiter, SlotPool
from streamdiff.server.problem import Problem, Unavailable
from streamdiff.server.sessions.connection import MAX_BUFFERED_BYTES, ControlConnection
from streamdiff.server.sessions.control import MAX_MESSAGE_BYTES, StreamEnded, StrengthMessage
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.manager import INPUT_ANSWER_S
from streamdiff.server.sessions.video_input import VideoInput
from streamdiff.server.tasks import end_tasks
from streamdiff.server.webrtc import aiortc_compat, sdp
from streamdiff.server.webrtc.ice import IceServers, ports_are_in_use
from streamdiff.server.webrtc.sender import VideoSender

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
TOMBSTONE_S = 60.0
"""How long after its end a connection may be deleted: some clients close it first."""
POSTS_PER_S, POST_BURST = 20.0, 40.0
CHANGES_PER_S, CHANGE_BURST = 100.0, 200.0
"""Candidates and ends: a page that trickles sends ten or so, and many may sit behind one address."""
CLOSE_S = 3.0
"""For the good-bye to a peer whose connection is closed; without a bound it may take for ever."""
POOR_NETWORK = 0.6
CHECK_S = 1.0
STALE_S = 3.0
"""A viewer that reported nothing for so long gives its slot, where all are taken, to the next connection of the same
client: a page that was reloaded without a good-bye. Browsers report once a second."""
UNDECODABLE_S = 10.0
_START_KBPS = 2500
"""Chromium begins at 300 kbit/s, which is a small and coarse picture for many seconds, unless the answer says more."""
SILENT_S = 3.0
"""A sender from which nothing came for so long gives its session to the next one."""


@dataclass(eq=False)
class Peer:
    """One peer connection of a session. Who has its `id` may end it; `address` holds a slot for it; `candidates`: how
    many it has sent since its offer."""

    session: LiveSession
    pc: RTCPeerConnection
    address: str
    offer: sdp.Offer
    _: KW_ONLY
    id: str = field(default_factory=partial(secrets.token_urlsafe, 24))
    candidates: int = 0
    timeout: asyncio.TimerHandle | None = field(default=None, repr=False)

    async def close(self) -> bool:
        """Close the connection, by force after CLOSE_S; whether that was not needed. Mutates: self."""
        return await aiortc_compat.close(self.pc, CLOSE_S)


PeerT = TypeVar("PeerT", bound=Peer)


class Peers(ABC, Generic[PeerT]):
    """All peer connections of one kind. Lives on the event loop.

    `missing` is said of an id that is unknown, `whose` is what a peer is called.
    """

    missing: ClassVar[str]
    whose: ClassVar[str]

    def __init__(self, slots: SlotPool, ice_servers: IceServers) -> None:
        self._slots, self._ice = slots, ice_servers
        self._peers: dict[str, PeerT] = {}
        self._tombstones: dict[tuple[str, str], float] = {}
        self._offers = PerAddressLimiter(POSTS_PER_S, POST_BURST)
        self._changes = PerAddressLimiter(CHANGES_PER_S, CHANGE_BURST)
        self._closing: set[asyncio.Task[None]] = set()

    def find(self, session_id: str, id: str, address: str) -> PeerT:
        """A session's peer of that id, for a caller at `address`. Raises Problem: 404 where there is none, or no more;
        429."""
        self._changes.check(address, "changes", clock.monotonic_s())
        peer = self._peers.get(id)
        if peer is None or peer.session.id != session_id:
            raise Problem(404, self.missing)
        return peer

    async def delete(self, session_id: str, id: str, address: str) -> None:
        """End a session's peer of that id; one that ended lately is fine as well. Raises Problem: 404, 429."""
        if self._tombstones.get((session_id, id), float("-inf")) >= clock.monotonic_s():
            self._changes.check(address, "changes", clock.monotonic_s())
        else:
            await self._end(self.find(session_id, id, address), "delete")

    async def trickle(self, session_id: str, id: str, fragment: str, address: str) -> None:
        """Take candidates that a peer found after its offer; those beyond the limit are left out. Mutates: the peer.

        Raises:
            Problem: 404, 400, 422 for an ICE restart, 429.
        """
        peer = self.find(session_id, id, address)
        username, candidates = sdp.parse_trickle(fragment)
        if username is not None and username not in peer.offer.usernames:
            raise Problem(422, f"ICE restart is not supported: POST a new offer. This {self.whose} stays as it was.")
        for candidate in candidates:
            if peer.candidates >= sdp.MAX_CANDIDATES:
                return
            peer.candidates += 1
            candidate.sdpMid = peer.offer.mid_for(candidate.sdpMid)
            await peer.pc.addIceCandidate(candidate)

    def end_soon(self, id: str, end: str) -> None:
        """End a peer for a reason, if there is one of that id."""
        if (peer := self._peers.get(id)) is not None:
            self._end_soon(peer, end)

    async def end_session(self, session: LiveSession) -> None:
        """Close all connections of a session that ends."""
        theirs = [peer for peer in self._peers.values() if peer.session is session]
        await asyncio.sleep(0)  # lets the data channels send what they were given
        await asyncio.gather(*(self._end(peer, "session_ended") for peer in theirs))

    async def stop(self) -> None:
        """Close every connection."""
        await asyncio.sleep(0)  # lets the data channels send what they were given
        await asyncio.gather(*(self._end(peer, "shutdown") for peer in list(self._peers.values())))
        await asyncio.gather(*self._closing, return_exceptions=True)

    @abstractmethod
    async def _end(self, peer: PeerT, end: str) -> None:
        """End a connection for a reason, if it is registered still. Mutates: self."""

    @asynccontextmanager
    async def _admitted(self, peer: PeerT) -> AsyncIterator[None]:
        """Context manager: a new peer is answered inside. It holds a slot from the first, and is registered at the end;
        where that fails, nothing is left of it. Raises Problem: 410, its session has ended meanwhile. Mutates: self."""
        self._slots.take(peer.address)
        peer.pc.on("connectionstatechange", lambda: self._state_changed(peer))
        try:
            yield
            if peer.session.closed:
                raise StreamEnded(peer.session.id)
        except BaseException:
            await peer.close()
            self._slots.release(peer.address)
            raise
        self._peers[peer.id] = peer
        loop = asyncio.get_running_loop()
        peer.timeout = loop.call_later(CONNECT_TIMEOUT_S, self._end_soon, peer, "connect_timeout")
        self._state_changed(peer)  # which may have come before

    def _unregister(self, peer: PeerT) -> bool:
        """Forget a peer and free its slot; False if that was done before. Mutates: self."""
        if self._peers.pop(peer.id, None) is None:
            return False
        now_s = clock.monotonic_s()
        self._tombstones = {key: until_s for key, until_s in self._tombstones.items() if until_s > now_s}
        self._tombstones[peer.session.id, peer.id] = now_s + TOMBSTONE_S
        self._slots.release(peer.address)
        if peer.timeout is not None:
            peer.timeout.cancel()
        return True

    def _state_changed(self, peer: PeerT) -> None:
        state = peer.pc.connectionState
        if state == "connected" and peer.timeout is not None:
            peer.timeout.cancel()
        elif state in ("failed", "closed"):
            self._end_soon(peer, state)

    def _end_soon(self, peer: PeerT, end: str) -> None:
        if peer.id in self._peers:
            task = asyncio.create_task(self._end(peer, end), name=f"end-{end}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def answered(offer: sdp.Offer, answering: Awaitable[str], purpose: str) -> str:
    """The SDP answer to an offer; `answering` gives aiortc's.

    Raises:
        Problem: 422, the offer cannot be answered; 503, no UDP socket could be opened for its `purpose`.
    """
    try:
        answer = await answering
    except aiortc_compat.OFFER_ERRORS as error:
        logger.debug("An offer was refused: %s: %s", type(error).__name__, error)
        message = "The offer cannot be answered. Offer one video section, as browsers write it (JSEP, RFC 9429)."
        raise Problem(422, message, code="offer") from error
    if "\na=candidate:" not in answer:
        if ports_are_in_use():
            message = f"No UDP port is free for {purpose}: those of serve.udp_ports are in use."
            raise Unavailable("ports", message, RETRY_AFTER_S)
        logger.error("No UDP socket could be opened for %s: are there too many open files (ulimit -n)?", purpose)
        raise Unavailable("network", f"The server could open no UDP socket for {purpose}.", RETRY_AFTER_S)
    return offer.complete(answer)


class DataChannelConnection(ControlConnection):
    """Control messages over a viewer's data channel. Those to a viewer that does not read are left out."""

    def __init__(self, channel: RTCDataChannel, viewer: Viewer, metrics: Metrics) -> None:
        self._channel, self._sender, self._playback = channel, viewer.sender, viewer.session.playback
        super().__init__(viewer.id, viewer.session, metrics, viewer.may_control)
        channel.on("message", self.on_message)
        channel.on("close", self.close)

    @property
    def open(self) -> bool:
        """Whether the viewer can still use it: neither side has begun to close it."""
        return self._channel.readyState in ("connecting", "open")

    def network(self) -> str:
        line_bps, codec = self._sender.line_bps(clock.monotonic_s()), self._sender.codec
        if line_bps is None or codec is None:
            return "unknown"
        return "poor" if line_bps < POOR_NETWORK * self._playback.sent_bps(codec) else "good"

    def send_text(self, text: str) -> None:
        if self._channel.readyState == "open" and self._channel.bufferedAmount < MAX_BUFFERED_BYTES:
            self._channel.send(text)


@dataclass(eq=False)
class Viewer(Peer):
    """One peer connection that watches a session."""

    sender: VideoSender
    may_control: bool
    client_id: str | None
    channel: DataChannelConnection | None = None

    async def close(self) -> bool:
        return await self.sender.close(CLOSE_S)


class Viewers(Peers[Viewer]):
    """All WHEP viewers. Lives on the event loop."""

    missing, whose = "There is no such viewer; it may have ended. POST a new offer.", "viewer"

    def __init__(self, slots: SlotPool, codecs: tuple[Codec, ...], metrics: Metrics, ice_servers: IceServers) -> None:
        super().__init__(slots, ice_servers)
        self._codecs, self._metrics = codecs, metrics
        self._checking = asyncio.create_task(self._check_viewers(), name="viewers")

    @property
    def count(self) -> int:
        """Viewers, those still connecting included."""
        return self._slots.count

    def update_metrics(self) -> None:
        """Copy figures that other objects hold into the metrics. Mutates: self."""
        viewers = self._peers.values()
        self._metrics.viewers.set(self.count)
        self._metrics.viewer_waiting.set(max((viewer.sender.waiting for viewer in viewers), default=0))

    async def create(
        self,
        session: LiveSession,
        offer: str,
        address: str,
        codec: str | None,
        may_control: bool = True,
        client_id: str | None = None,
    ) -> tuple[str, str]:
        """Connect a viewer; returns its id and the SDP answer.

        `may_control`: whether its data channel may steer. `client_id`: chosen by the client, the same at every
        connection; where all slots are taken, a dead connection of the same id is ended for it.

        Raises:
            Problem: 400 or 422 for the offer, 429 and 503 with Retry-After.
        """
        wanted = self._codecs if codec is None else tuple(each for each in self._codecs if each == codec.lower())
        if codec is not None and not wanted:
            known = ", ".join(self._codecs)
            raise Problem(422, f"The codec {codec[:20]!r} is not offered; this server has {known}.", code="codec")
        checked = sdp.check_offer(offer, "viewer", wanted)
        refusal = self._slots.refusal(address)
        stale = self._stale_connection_of(client_id, address) if refusal is not None else None
        if refusal is not None and stale is None:
            raise refusal
        self._offers.check(address, "connections", clock.monotonic_s())
        ice = self._ice.to_ask()
        sender = VideoSender(session.playback, ice, self._metrics)
        viewer = Viewer(session, sender.pc, address, checked, sender, may_control, client_id)
        viewer.pc.on("datachannel", lambda channel: self._channel_opened(viewer, channel))
        async with self._admitted(viewer):
            if stale is not None:
                await self._end(stale, "ghost")
            answer = await answered(checked, self._negotiate(viewer, wanted), "the video of one more viewer")
        self._ice.take_answer(ice, answer)
        logger.info("A viewer joins session %(session)s.", _fields_of(viewer))
        return viewer.id, answer

    async def stop(self) -> None:
        """Close every connection, with a notice to its peer."""
        for viewer in list(self._peers.values()):
            if viewer.channel is not None:
                viewer.channel.send({"type": "bye", "reason": "shutdown", "retry_after_s": 2})
        self._checking.cancel()
        await super().stop()

    # ---- one viewer's life --------------------------------------------------------------------------------------

    async def _negotiate(self, viewer: Viewer, codecs: tuple[Codec, ...]) -> str:
        """aiortc's answer to the viewer's offer. Mutates: viewer.

        Raises:
            ValueError, or another of `aiortc_compat.OFFER_ERRORS`: it cannot be answered.
        """
        pc = viewer.pc
        transceiver = viewer.sender.add_transceiver(codecs)
        await pc.setRemoteDescription(RTCSessionDescription(viewer.offer.sdp, "offer"))
        if pc.sctp is not None:
            aiortc_compat.bound_data(pc.sctp, MAX_MESSAGE_BYTES, lambda end: self._end_soon(viewer, end))
        if not viewer.sender.bind(transceiver):
            raise ValueError("no common video codec")
        for other in pc.getTransceivers():
            if other is not transceiver:
                other.direction = "inactive"  # what a viewer would send is not taken
        await pc.setLocalDescription(await pc.createAnswer())
        return str(pc.localDescription.sdp)

    async def _check_viewers(self) -> None:
        """Once a second end those that are stuck or silent."""
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = clock.monotonic_s()
            for viewer in list(self._peers.values()):
                if (fault := viewer.sender.fault(now_s)) is not None:
                    self._end_soon(viewer, fault)

    def _channel_opened(self, viewer: Viewer, channel: RTCDataChannel) -> None:
        if channel.label != "control" or (viewer.channel is not None and viewer.channel.open):
            channel.close()
            return
        if viewer.channel is not None:
            viewer.channel.close()  # closed by the viewer; aiortc may report that after the new one
        viewer.channel = DataChannelConnection(channel, viewer, self._metrics)

    async def _end(self, viewer: Viewer, end: str) -> None:
        if not self._unregister(viewer):
            return
        if viewer.channel is not None:
            viewer.channel.close()
        self._metrics.viewers_ended.labels(end).inc()
        logger.info("A viewer has left: %(end)s.", _fields_of(viewer) | {"end": end})
        if not await viewer.close():
            logger.warning("A viewer's connection was ended by force: no good-bye within %g s (%s).", CLOSE_S, end)

    # ---- small things -------------------------------------------------------------------------------------------

    def _stale_connection_of(self, client_id: str | None, address: str) -> Viewer | None:
        """The oldest connection of `client_id` that is dead or never connected, and without which `address` may have a
        slot. Clients choose their ids, so one that still reports is left alone."""
        now_s = clock.monotonic_s()
        for viewer in self._peers.values():
            is_dead = viewer.pc.connectionState != "connected" or viewer.sender.silent_s(now_s) > STALE_S
            same = client_id is not None and viewer.client_id == client_id
            if same and is_dead and self._slots.refusal(address, viewer.address) is None:
                return viewer
        return None


def _fields_of(viewer: Viewer) -> dict[str, Any]:
    """Log fields of a viewer; of its id only the beginning, since the id is all that it takes to end the viewer."""
    return {"session": viewer.session.id, "viewer": viewer.id[:6], "codec": viewer.sender.codec}


@dataclass(eq=False)
class Feeder(Peer):
    """A peer connection that feeds a session with the first video of its offer; sound is turned down.

    `video_input` gets every frame, decoded, of whatever size it has by then, and counts those that are left out.
    """

    video_input: VideoInput
    ends_session: bool
    queue: aiortc_compat.DecoderQueue | None = None
    receiving: asyncio.Task[None] | None = None
    heard_s: float = field(default_factory=clock.monotonic_s)
    """When something came from the peer last, be it STUN or RTCP."""
    undecoded_s: float | None = None
    """Since when video comes of which nothing could be decoded."""

    async def answer(self, on_misuse: Callable[[str], None]) -> str:
        """aiortc's answer to the offer. `on_misuse`: see `aiortc_compat.bound_data`; also called with `fault` where
        video comes of which nothing can be decoded for UNDECODABLE_S. Mutates: self.

        Raises:
            ValueError, or another of `aiortc_compat.OFFER_ERRORS`: it cannot be answered.
        """
        await self.pc.setRemoteDescription(RTCSessionDescription(self.offer.sdp, "offer"))
        if self.pc.sctp is not None:
            aiortc_compat.bound_data(self.pc.sctp, MAX_MESSAGE_BYTES, on_misuse)
        taken: MediaStreamTrack | None = None
        for transceiver in self.pc.getTransceivers():
            video = transceiver.kind == "video" and taken is None
            transceiver.direction = "recvonly" if video else "inactive"
            if video:
                taken = transceiver.receiver.track
                self.queue = aiortc_compat.DecoderQueue(transceiver.receiver, self.video_input.leave_out)
                aiortc_compat.on_media(transceiver, lambda: self._check_decodable(on_misuse))
                if aiortc_compat.negotiated_codec(transceiver) is None:
                    raise ValueError("no common video codec")
        assert taken is not None, "a checked offer has video"
        aiortc_compat.listen(self.pc, self._note_heard)
        await self.pc.setLocalDescription(await self.pc.createAnswer())
        self.receiving = asyncio.create_task(self._receive(taken), name="receive-video")
        return with_start_bitrate(str(self.pc.localDescription.sdp))

    async def close(self) -> bool:
        await self.session.end_input(self.video_input)
        if self.receiving is not None:
            await end_tasks(self.receiving)
        closed = await super().close()
        if self.queue is not None:
            await self.queue.join_decoder(CLOSE_S)
        return closed

    def _note_heard(self) -> None:
        self.heard_s = clock.monotonic_s()

    def _check_decodable(self, on_misuse: Callable[[str], None]) -> None:
        """A packet with video has come."""
        now_s = clock.monotonic_s()
        if self.undecoded_s is None or (self.queue is not None and self.queue.qsize()):  # it is decoded slowly
            self.undecoded_s = now_s
        elif now_s - self.undecoded_s > UNDECODABLE_S:
            on_misuse("fault")

    async def _receive(self, track: MediaStreamTrack) -> None:
        """Take frames at once, as aiortc's queue of them has no bound."""
        while True:
            try:
                frame = await track.recv()
            except MediaStreamError:
                return  # the connection has ended, which its state says
            if isinstance(frame, av.VideoFrame):
                self.undecoded_s = None
                self.video_input.push(frame)


class Feeders(Peers[Feeder]):
    """All that feed sessions, at most one each. Lives on the event loop.

    One from which nothing came for SILENT_S gives way to the next. A screen on which nothing moves still sends RTCP and
    STUN.
    """

    missing, whose = "Nobody of that name feeds the session; it may have ended. POST a new offer.", "one"

    def __init__(
        self, slots: SlotPool, ice_servers: IceServers, end_session: Callable[[str, str], Awaitable[None]]
    ) -> None:
        """`slots` are those of viewers: a connection is a connection. `end_session` ends one by its id, for a
        reason."""
        super().__init__(slots, ice_servers)
        self._end_its_session = end_session

    async def create(
        self, session: LiveSession, offer: str, address: str, strength: float | None, ends_session: bool = False
    ) -> tuple[str, str]:
        """Connect a video sender to a session, which continues with its prompt only when that ends, or ends too if
        `ends_session`; returns its id and the SDP answer. It replaces a sender that is silent.

        Raises:
            Problem: 400 or 406 for the offer; 422 where the model takes no video; 409, another feeds it; 410; 429 and
                503 with Retry-After; 504.
        """
        checked = sdp.check_offer(offer, "sender")  # all codecs that aiortc decodes
        self._offers.check(address, "connections", clock.monotonic_s())
        heard_s = clock.monotonic_s() - SILENT_S
        own = (each for each in self._peers.values() if each.session is session)
        silent = next((each for each in own if each.heard_s < heard_s), None)
        if (refusal := self._slots.refusal(address, silent.address if silent else None)) is not None:
            raise refusal
        if silent is not None:
            await self._end(silent, "replaced")
        if session.closed:
            raise StreamEnded(session.id)
        video_input = session.take_input("WHIP sender")
        ice = self._ice.to_ask()
        pc = RTCPeerConnection(RTCConfiguration(iceServers=ice))
        feeder = Feeder(session, pc, address, checked, video_input, ends_session)
        async with self._admitted(feeder):
            answering = feeder.answer(lambda end: self._end_soon(feeder, end))
            answer = await answered(checked, answering, "one more connection")
            self._ice.take_answer(ice, answer)
            if session.closed:
                raise StreamEnded(session.id)
            video_input.begin()  # first: whatever comes between, `end_input` tells the engine of the end
            message = StrengthMessage(type="strength", strength=session.strength if strength is None else strength)
            await session.control_and_wait(message, feeder.id, INPUT_ANSWER_S)
        video_input.end = lambda end: self._end(feeder, end)
        logger.info("Video comes in for session %(session)s.", {"session": session.id})
        return feeder.id, answer

    async def _end(self, feeder: Feeder, end: str) -> None:
        if not self._unregister(feeder):
            return
        end = "gone" if end in ("failed", "closed") else end
        level, fields = (
            logging.WARNING if end == "fault" else logging.INFO,
            {"session": feeder.session.id, "reason": end},
        )
        logger.log(level, "Video for session %(session)s has ended: %(reason)s.", fields)
        await feeder.close()
        if feeder.ends_session and end not in ("session_ended", "shutdown", "connect_timeout", "replaced"):
            await self._end_its_session(feeder.session.id, "input_ended")


def with_start_bitrate(answer: str) -> str:
    """An answer that lets Chromium begin at _START_KBPS; others do not look at it."""
    rate, sections = f"x-google-start-bitrate={_START_KBPS}", re.split("(?m)^(?=m=)", answer)
    for place, section in enumerate(sections):
        if section.startswith("m=video"):
            formats = re.sub(r"a=fmtp:[0-9]+ (?!apt=)[^\r]*", rf"\g<0>;{rate}", section)
            sections[place] = re.sub(r"a=rtpmap:([0-9]+) VP8/.*\n", rf"\g<0>a=fmtp:\1 {rate}\r\n", formats)
    return "".join(sections)
