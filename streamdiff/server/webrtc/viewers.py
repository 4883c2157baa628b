"""Viewers over WHEP: from an offer to a running connection, its control messages, and its end.

Knows nothing about prompts or the engine; HTTP enters only as statuses of `Problem`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from aiortc import RTCDataChannel, RTCSessionDescription

from streamdiff import clock
from streamdiff.server.logging_setup import log_fields
from streamdiff.server.media.codecs import Codec
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.peers import SlotPool
from streamdiff.server.problem import Problem
from streamdiff.server.sessions.connection import MAX_BUFFERED_BYTES, ControlConnection
from streamdiff.server.sessions.control import MAX_MESSAGE_BYTES
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.webrtc import aiortc_compat
from streamdiff.server.webrtc.ice import IceServers
from streamdiff.server.webrtc.peer_connections import CLOSE_S, Peer, Peers, answered, checked_offer, ended
from streamdiff.server.webrtc.sender import VideoSender

logger = logging.getLogger(__name__)
POOR_NETWORK = 0.6
CHECK_S = 1.0
STALE_S = 3.0
"""A viewer that reported nothing for so long gives its slot, where all are taken, to the next connection of the same
client: a page that was reloaded without a good-bye. Browsers report once a second."""


class DataChannelConnection(ControlConnection):
    """Control messages over a viewer's data channel. Those to a viewer that does not read are left out."""

    def __init__(self, channel: RTCDataChannel, viewer: Viewer, metrics: Metrics) -> None:
        self._channel = channel
        super().__init__(viewer.id, viewer.session, metrics, viewer.may_control, lambda: _network(viewer))
        channel.on("message", self.on_message)
        channel.on("close", self.close)

    @property
    def open(self) -> bool:
        """Whether the viewer can still use it: neither side has begun to close it."""
        return self._channel.readyState in ("connecting", "open")

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
    drops: CounterDelta = field(default_factory=CounterDelta)


class Viewers(Peers[Viewer]):
    """All WHEP viewers. Lives on the event loop."""

    missing, whose = "There is no such viewer; it may have ended. POST a new offer.", "viewer"

    def __init__(self, slots: SlotPool, codecs: tuple[Codec, ...], metrics: Metrics, ice_servers: IceServers) -> None:
        super().__init__(slots, ice_servers)
        self._codecs, self._metrics = codecs, metrics
        self._check_timer: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """Viewers, those still connecting included."""
        return self._slots.count

    def update_metrics(self) -> None:
        """Copy figures that other objects hold into the metrics. Mutates: self."""
        viewers = self._peers.values()
        self._metrics.viewers.set(self.count)
        self._metrics.viewer_waiting.set(max((viewer.sender.waiting for viewer in viewers), default=0))
        for viewer in viewers:
            self._metrics.viewer_dropped.inc(viewer.drops.increase(viewer.sender.dropped))

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
        wanted = self._wanted_codecs(codec)
        checked = checked_offer(offer, "viewer", wanted)
        refusal = self._slots.refusal(address)
        stale = self._stale_connection_of(client_id, address) if refusal is not None else None
        if refusal is not None and stale is None:
            raise refusal
        self._offers.check(address, "connections", clock.monotonic_s())
        ice, on_first = self._ice.to_ask(), self._metrics.viewer_first_s.observe
        sender = VideoSender(session.playback.fanout, ice, on_first=on_first, on_key_request=self._count_key_request)
        viewer = Viewer(session, sender.pc, address, checked, sender, may_control, client_id)
        viewer.pc.on("connectionstatechange", lambda: self._state_changed(viewer))
        viewer.pc.on("datachannel", lambda channel: self._channel_opened(viewer, channel))
        # From here to the registration below there are awaits: the slot is taken before the first of them.
        self._slots.take(address)
        try:
            if stale is not None:
                await self._end(stale, "ghost")
            answer = await answered(checked, self._negotiate(viewer, wanted), "the video of one more viewer")
            if session.closed:
                raise ended(session)
        except BaseException:
            await sender.close(CLOSE_S)
            self._slots.release(address)
            raise
        self._register(viewer)
        self._ice.take_answer(ice, answer)
        logger.info("A viewer joins session %s.", session.id, extra=_fields_of(viewer))
        if self._check_timer is None:
            self._check_timer = asyncio.get_running_loop().call_later(CHECK_S, self._check_viewers)
        return viewer.id, answer

    async def stop(self) -> None:
        """Close every connection, with a notice to its peer."""
        for viewer in list(self._peers.values()):
            if viewer.channel is not None:
                viewer.channel.send({"type": "bye", "reason": "shutdown", "retry_after_s": 2})
        if self._check_timer is not None:
            self._check_timer.cancel()
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

    def _count_key_request(self, is_met: bool) -> None:
        (self._metrics.keyframe_requests if is_met else self._metrics.keyframe_requests_refused).inc()

    def _check_viewers(self) -> None:
        """Once a second, while there are viewers: end those that are stuck or silent."""
        now_s = clock.monotonic_s()
        for viewer in list(self._peers.values()):
            if (fault := viewer.sender.fault(now_s)) is not None:
                self._end_soon(viewer, fault)
        loop = asyncio.get_running_loop()
        self._check_timer = loop.call_later(CHECK_S, self._check_viewers) if self._peers else None

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
        self._metrics.viewer_dropped.inc(viewer.drops.increase(viewer.sender.dropped))
        self._metrics.viewers_ended.labels(end).inc()
        logger.info("A viewer has left: %s.", end, extra=_fields_of(viewer, end=end))
        if not await viewer.sender.close(CLOSE_S):
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

    def _stale_connection_of(self, client_id: str | None, address: str) -> Viewer | None:
        """The oldest connection of `client_id` that is dead or never connected, and without which `address` may have a
        slot. Clients choose their ids, so one that still reports is left alone."""
        now_s = clock.monotonic_s()
        same = (each for each in self._peers.values() if client_id is not None and each.client_id == client_id)
        dead = (viewer for viewer in same if _is_dead(viewer, now_s))
        return next((viewer for viewer in dead if self._slots.refusal(address, viewer.address) is None), None)


def _is_dead(viewer: Viewer, now_s: float) -> bool:
    return viewer.pc.connectionState != "connected" or viewer.sender.silent_s(now_s) > STALE_S


def _fields_of(viewer: Viewer, **more: object) -> dict[str, Any]:
    """Log fields of a viewer; of its id only the beginning, since the id is all that it takes to end the viewer."""
    return log_fields(session=viewer.session.id, viewer=viewer.id[:6], codec=viewer.sender.codec, **more)


def _network(viewer: Viewer) -> str:
    """The viewer's bandwidth estimate compared to the bit rate it is sent: unknown, poor or good."""
    line_bps, codec = viewer.sender.line_bps(clock.monotonic_s()), viewer.sender.codec
    if line_bps is None or codec is None:
        return "unknown"
    return "poor" if line_bps < POOR_NETWORK * viewer.session.playback.fanout.sent_bps(codec) else "good"
