"""Viewers over WHEP: from an offer to a running connection, and to its end.

Knows nothing about prompts or the engine; HTTP enters only as statuses of `Problem`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiortc import (
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCSessionDescription,
)

from streamdiff import clock
from streamdiff.config import IceServer
from streamdiff.server.logging_setup import facts
from streamdiff.server.media.codecs import Codec
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.peers import Places
from streamdiff.server.problem import Problem
from streamdiff.server.rate_limit import PerAddressLimiter, TokenBucket
from streamdiff.server.sessions.control import MAX_MESSAGE_BYTES
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.webrtc import aiortc_compat
from streamdiff.server.webrtc.data_channel import ControlChannel
from streamdiff.server.webrtc.sdp import (
    MAX_CANDIDATES,
    SdpError,
    check_offer,
    parse_trickle,
    username_of,
    video_codecs_of,
)
from streamdiff.server.webrtc.track import ViewerTrack

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
TOMBSTONE_S = 60.0
POSTS_PER_S, POST_BURST = 20.0, 40.0
CHANGES_PER_S, CHANGE_BURST = 100.0, 200.0
"""Candidates and ends: a page that trickles sends ten or so, and many may sit behind one address."""
POOR_NETWORK = 0.6
KEY_WISHES_PER_S, KEY_WISH_BURST = 1.0, 5.0
"""A viewer that wishes for key frames more often is not heard each time: every one costs all the others bits."""
CLOSE_S = 3.0
"""For the good-bye to a viewer whose connection is closed. Where nothing gets away it would take for ever."""
LOOK_S = 1.0
STUCK_S = 10.0
"""A viewer whose packets do not get away for so long is given up."""
SILENT_S = 30.0
"""So is one that is sent video and says nothing about it."""
GHOST_S = 3.0
"""One that said nothing for so long makes room, where all places are taken, for the next connection of its own client:
a page that was reloaded without a good-bye. Browsers report once a second."""

_MIME: dict[str, Codec] = {"video/h264": "h264", "video/vp8": "vp8"}


@dataclass(eq=False)
class Viewer:
    """One peer connection that watches a session."""

    id: str
    view: LiveSession
    pc: RTCPeerConnection
    may_control: bool = True
    client: str | None = None
    username: str | None = None
    address: str = ""
    candidates: int = 0
    codec: Codec | None = None
    track: ViewerTrack | None = None
    channel: ControlChannel | None = None
    timeout: asyncio.TimerHandle | None = field(default=None, repr=False)
    drops: CounterDelta = field(default_factory=CounterDelta)
    key_wishes: TokenBucket = field(default_factory=lambda: TokenBucket(KEY_WISHES_PER_S, KEY_WISH_BURST))


class Viewers:
    """Everybody who watches. Lives on the event loop."""

    def __init__(
        self, places: Places, codecs: tuple[Codec, ...], metrics: Metrics, ice_servers: Sequence[IceServer] = ()
    ) -> None:
        self._places = places
        self._codecs = codecs
        self._metrics = metrics
        # Without an explicit (here often empty) list aiortc asks a public STUN server and waits for it.
        self._ice = [RTCIceServer(each.url, each.username, each.credential) for each in ice_servers]
        self._viewers: dict[str, Viewer] = {}
        self._tombstones: dict[tuple[str, str], float] = {}
        self._offers = PerAddressLimiter(POSTS_PER_S, POST_BURST)
        self._changes = PerAddressLimiter(CHANGES_PER_S, CHANGE_BURST)
        self._closing: set[asyncio.Task[None]] = set()
        self._looking: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """Viewers, those still connecting included."""
        return self._places.count

    def measure(self) -> None:
        """Bring what is not counted where it happens into the metrics. Mutates: self."""
        viewers = [(viewer, viewer.track) for viewer in self._viewers.values() if viewer.track is not None]
        self._metrics.viewer_waiting.set(max((track.waiting for _, track in viewers), default=0))
        for viewer, track in viewers:
            self._metrics.viewer_dropped.inc(viewer.drops.more(track.dropped))

    async def create(
        self,
        view: LiveSession,
        offer: str,
        address: str,
        codec: str | None,
        may_control: bool = True,
        client: str | None = None,
    ) -> tuple[str, str]:
        """Connect a viewer; returns its id and the SDP answer.

        `may_control`: whether its data channel may steer. `client`: what the caller calls itself, the same whenever it
        comes back; where all places are taken a connection of that name which is dead makes room.

        Raises:
            Problem: 400 or 422 for the offer, 429 and 503 with Retry-After.
        """
        wanted = self._wanted_codecs(codec)
        try:
            checked = check_offer(offer)
        except SdpError as error:
            raise Problem(422 if error.unsatisfiable else 400, str(error), code="offer") from error
        if not video_codecs_of(checked) & set(wanted):
            names = " or ".join(codec.upper() for codec in wanted)
            raise Problem(422, f"The offer has no video codec that is sent here: offer {names}.", code="codec")
        refusal = self._places.refusal(address)
        ghost = self._ghost_of(client) if refusal is not None else None
        if refusal is not None and ghost is None:
            raise refusal
        self._limit_rate(self._offers, address, "connections")
        # From here to the registration below there are awaits: the place is taken before the first of them.
        self._places.take(address)
        self._count()
        try:
            if ghost is not None:
                await self._end(ghost, "ghost")
            return await self._connect(view, checked, wanted, may_control, client, address)
        except BaseException:
            self._places.leave(address)
            self._count()
            raise

    async def trickle(self, session: str, id: str, fragment: str, address: str) -> None:
        """Take candidates that a viewer found after its offer.

        Raises:
            Problem: 404, 400, 422 for an ICE restart, 429.
        """
        self._limit_rate(self._changes, address, "changes")
        viewer = self._viewers.get(id)
        if viewer is None or viewer.view.session != session:
            raise Problem(404, "There is no such viewer; it may have ended. POST a new offer.")
        try:
            trickle = parse_trickle(fragment)
        except SdpError as error:
            raise Problem(400, str(error)) from error
        if trickle.username is not None and trickle.username != viewer.username:
            raise Problem(422, "ICE restart is not supported: POST a new offer. This viewer goes on as it was.")
        for candidate in trickle.candidates:
            if viewer.candidates >= MAX_CANDIDATES:
                return
            viewer.candidates += 1
            await viewer.pc.addIceCandidate(candidate)

    async def delete(self, session: str, id: str, address: str) -> None:
        """End a viewer; one that ended lately is fine as well.

        Raises:
            Problem: 404, 429.
        """
        self._limit_rate(self._changes, address, "changes")
        viewer = self._viewers.get(id)
        if viewer is not None and viewer.view.session == session:
            await self._end(viewer, "delete")
        elif self._tombstones.get((session, id), float("-inf")) < clock.monotonic_s():
            raise Problem(404, "There is no such viewer.")

    async def end_session(self, view: LiveSession, reason: str) -> None:
        """Close the connections of all who watch a session that ends."""
        theirs = [viewer for viewer in self._viewers.values() if viewer.view is view]
        await asyncio.sleep(0)  # lets the data channels send what they were given
        await asyncio.gather(*(self._end(viewer, "session_ended") for viewer in theirs))

    async def stop(self) -> None:
        """Say good-bye and close every connection."""
        for viewer in list(self._viewers.values()):
            if viewer.channel is not None:
                viewer.channel.send({"type": "bye", "reason": "shutdown", "retry_after_s": 2})
        if self._looking is not None:
            self._looking.cancel()
        await asyncio.sleep(0)  # lets the data channels send what they were given
        await asyncio.gather(*(self._end(viewer, "shutdown") for viewer in list(self._viewers.values())))
        await asyncio.gather(*self._closing, return_exceptions=True)

    # ---- one viewer's life --------------------------------------------------------------------------------------

    async def _connect(
        self,
        view: LiveSession,
        offer: str,
        wanted: tuple[Codec, ...],
        may_control: bool,
        client: str | None,
        address: str,
    ) -> tuple[str, str]:
        pc = RTCPeerConnection(RTCConfiguration(iceServers=self._ice))
        viewer = Viewer(secrets.token_urlsafe(24), view, pc, may_control, client, username_of(offer), address)
        first = self._metrics.viewer_first_s.observe
        viewer.track = ViewerTrack(lambda track: self._started(viewer, track), lambda: self._need_key(viewer), first)
        pc.on("connectionstatechange", lambda: self._state_changed(viewer))
        pc.on("datachannel", lambda channel: self._channel_opened(viewer, channel))
        try:
            answer = await self._negotiate(viewer, offer, wanted)
        except aiortc_compat.OFFER_ERRORS as error:
            await aiortc_compat.close(pc, CLOSE_S)
            logger.debug("An offer was refused: %s: %s", type(error).__name__, error)
            raise Problem(422, f"The offer cannot be answered: {_first_line(error)}", code="offer") from error
        except BaseException:
            await aiortc_compat.close(pc, CLOSE_S)
            raise
        if view.closed:
            await aiortc_compat.close(pc, CLOSE_S)
            raise Problem(410, f"The session {view.session!r} has ended.", code="ended")
        self._viewers[viewer.id] = viewer
        logger.info("A viewer joins session %s.", view.session, extra=_told(viewer))
        viewer.timeout = asyncio.get_running_loop().call_later(CONNECT_TIMEOUT_S, self._timed_out, viewer)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)
        return viewer.id, answer

    async def _negotiate(self, viewer: Viewer, offer: str, wanted: tuple[Codec, ...]) -> str:
        pc = viewer.pc
        assert viewer.track is not None
        transceiver = pc.addTransceiver(viewer.track, direction="sendonly")
        # aiortc takes preferences only before it sees the offer.
        transceiver.setCodecPreferences(preferences(wanted))
        await pc.setRemoteDescription(RTCSessionDescription(offer, "offer"))
        if pc.sctp is not None:
            aiortc_compat.bound_data(pc.sctp, MAX_MESSAGE_BYTES, lambda end: self._end_soon(viewer, end))
        negotiated = aiortc_compat.negotiated_codec(transceiver)
        viewer.codec = _MIME.get(negotiated.mimeType.lower()) if negotiated is not None else None
        if viewer.codec is None:
            raise ValueError(f"no common video codec; offer {' or '.join(codec.upper() for codec in wanted)}")
        track = viewer.track
        aiortc_compat.hook_sender(
            transceiver.sender,
            negotiated,
            lambda: self._wished_key(viewer),
            lambda bps: track.estimated(bps, clock.monotonic_s()),
            lambda loss: track.heard(loss, clock.monotonic_s()),
        )
        await pc.setLocalDescription(await pc.createAnswer())
        return str(pc.localDescription.sdp)

    def _started(self, viewer: Viewer, track: ViewerTrack) -> None:
        if viewer.id in self._viewers and viewer.codec is not None and not viewer.view.closed:
            viewer.view.fanout.attach(viewer.codec, track)

    def _need_key(self, viewer: Viewer) -> None:
        if viewer.codec is not None:
            viewer.view.fanout.request_key(viewer.codec)

    def _wished_key(self, viewer: Viewer) -> None:
        """The viewer lost a picture (PLI, FIR)."""
        if viewer.key_wishes.take(clock.monotonic_s()):
            self._metrics.key_wishes.inc()
            self._need_key(viewer)
        else:
            self._metrics.key_wishes_refused.inc()

    def _look(self) -> None:
        """Give up viewers that take or say nothing any more, as long as there are viewers."""
        now_s = clock.monotonic_s()
        for viewer in list(self._viewers.values()):
            track = viewer.track
            if track is not None and track.stuck_s(now_s) > STUCK_S:
                self._end_soon(viewer, "stuck")
            elif track is not None and track.silent_s(now_s) > SILENT_S:
                self._end_soon(viewer, "silent")
        self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look) if self._viewers else None

    def _channel_opened(self, viewer: Viewer, channel: RTCDataChannel) -> None:
        if channel.label != "control" or (viewer.channel is not None and viewer.channel.open):
            channel.close()
            return
        if viewer.channel is not None:
            viewer.channel.close()  # closed by the viewer; aiortc may tell that after it tells of the new one
        viewer.channel = ControlChannel(
            channel, viewer.id, viewer.view, self._metrics, lambda: _network(viewer), viewer.may_control
        )

    def _state_changed(self, viewer: Viewer) -> None:
        state = viewer.pc.connectionState
        if state == "connected" and viewer.timeout is not None:
            viewer.timeout.cancel()
        elif state in ("failed", "closed"):
            self._end_soon(viewer, state)

    def _timed_out(self, viewer: Viewer) -> None:
        self._end_soon(viewer, "connect_timeout")

    def _end_soon(self, viewer: Viewer, end: str) -> None:
        if viewer.id in self._viewers:
            task = asyncio.create_task(self._end(viewer, end), name=f"end-{end}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _end(self, viewer: Viewer, end: str) -> None:
        if self._viewers.pop(viewer.id, None) is None:
            return
        self._places.leave(viewer.address)
        now_s = clock.monotonic_s()
        self._tombstones = {key: until_s for key, until_s in self._tombstones.items() if until_s > now_s}
        self._tombstones[viewer.view.session, viewer.id] = now_s + TOMBSTONE_S
        if viewer.timeout is not None:
            viewer.timeout.cancel()
        if viewer.channel is not None:
            viewer.channel.close()
        if viewer.track is not None and viewer.codec is not None:
            viewer.view.fanout.detach(viewer.codec, viewer.track)
            self._metrics.viewer_dropped.inc(viewer.drops.more(viewer.track.dropped))
        self._metrics.viewers_ended.labels(end).inc()
        logger.info("A viewer has left: %s.", end, extra=_told(viewer, end=end))
        self._count()
        if not await aiortc_compat.close(viewer.pc, CLOSE_S):
            logger.warning("A viewer's connection was ended by force: no good-bye within %g s (%s).", CLOSE_S, end)

    # ---- small things -------------------------------------------------------------------------------------------

    def _wanted_codecs(self, codec: str | None) -> tuple[Codec, ...]:
        if codec is None:
            return self._codecs
        found = tuple(known for known in self._codecs if known == codec.lower())
        if not found:
            known = ", ".join(self._codecs)
            raise Problem(422, f"The codec {codec[:20]!r} is not offered; this server has {known}.", code="codec")
        return found

    def _ghost_of(self, client: str | None) -> Viewer | None:
        """The oldest connection of `client` that is dead, or never lived. Clients name themselves: one that reports is
        left alone whatever it is called."""
        now_s = clock.monotonic_s()
        theirs = (viewer for viewer in self._viewers.values() if client is not None and viewer.client == client)
        return next((viewer for viewer in theirs if _is_dead(viewer, now_s)), None)

    def _limit_rate(self, allowances: PerAddressLimiter, address: str, what: str) -> None:
        if not allowances.of(address).take(clock.monotonic_s()):
            message = f"Too many {what} in a short time from one address."
            raise Problem(429, message, {"Retry-After": "1"}, code="rate")

    def _count(self) -> None:
        self._metrics.viewers.set(self.count)


def _is_dead(viewer: Viewer, now_s: float) -> bool:
    silent_s = viewer.track.silent_s(now_s) if viewer.track is not None else 0.0
    return viewer.pc.connectionState != "connected" or silent_s > GHOST_S


def preferences(wanted: tuple[Codec, ...]) -> list[Any]:
    """The codecs to offer or take, best first, and retransmission; for aiortc's `setCodecPreferences`."""
    known = RTCRtpSender.getCapabilities("video").codecs
    ordered = [each for codec in wanted for each in known if _MIME.get(each.mimeType.lower()) == codec]
    return ordered + [each for each in known if each.mimeType.lower() == "video/rtx"]


def _told(viewer: Viewer, **more: object) -> dict[str, Any]:
    """For the log. Whoever knows a viewer's id can end it: only its beginning is told."""
    return facts(session=viewer.view.session, viewer=viewer.id[:6], codec=viewer.codec, **more)


def _network(viewer: Viewer) -> str:
    """How the viewer's own estimate of its line compares to what it is sent: unknown, poor or good."""
    line_bps = viewer.track.line_bps(clock.monotonic_s()) if viewer.track is not None else None
    if line_bps is None or viewer.codec is None:
        return "unknown"
    return "poor" if line_bps < POOR_NETWORK * viewer.view.fanout.sent_bps(viewer.codec) else "good"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
