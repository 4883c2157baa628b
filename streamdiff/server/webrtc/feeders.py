"""Peer connections that feed sessions with video over WHIP (RFC 9725), from the offer to the end.

Independent of the engine; of HTTP it uses only the statuses of `Problem`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import av
from aiortc import MediaStreamTrack, RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError

from streamdiff import clock
from streamdiff.errors import EngineFailure
from streamdiff.server.logging_setup import log_fields
from streamdiff.server.media.video_input import VideoInput
from streamdiff.server.peers import SlotPool
from streamdiff.server.problem import Problem
from streamdiff.server.sessions.control import MAX_MESSAGE_BYTES, ControlError, StrengthMessage
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.receipts import StreamEnded
from streamdiff.server.sessions.video_source import ANSWER_S
from streamdiff.server.webrtc import aiortc_compat
from streamdiff.server.webrtc.ice import IceServers
from streamdiff.server.webrtc.peer_connections import CLOSE_S, Peer, Peers, answered, checked_offer, ended

logger = logging.getLogger(__name__)

READ = ("h264", "vp8")
"""Codecs that aiortc decodes."""
UNDECODABLE_S = 10.0
_START_KBPS = 2500
"""Chromium begins at 300 kbit/s, which is a small and coarse picture for many seconds, unless the answer says more."""
SILENT_S = 3.0
"""A sender from which nothing came for so long gives its session to the next one."""


class VideoReceiver:
    """A peer connection that takes the first video of an offer; sound is turned down. On the event loop.

    `video_input` gets every frame, decoded, of whatever size it has by then, and counts those that are left out.
    """

    def __init__(
        self, ice_servers: Sequence[RTCIceServer], video_input: VideoInput, on_misuse: Callable[[str], None]
    ) -> None:
        """`on_misuse`: see `aiortc_compat.bound_data`; also called with `fault` where video comes of which nothing can
        be decoded for UNDECODABLE_S."""
        self._video_input, self._on_misuse = video_input, on_misuse
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=list(ice_servers)))
        self._task: asyncio.Task[None] | None = None
        self._queue: aiortc_compat.DecoderQueue | None = None
        self._heard_s = clock.monotonic_s()
        self._undecoded_s: float | None = None
        """Since when video comes of which nothing could be decoded."""

    def silent_s(self, now_s: float) -> float:
        """Seconds for which nothing has come from the peer, not even STUN or RTCP."""
        return now_s - self._heard_s

    async def answer(self, offer: str) -> str:
        """aiortc's answer to the `sdp` of a checked offer. Mutates: self.

        Raises:
            ValueError, or another of `aiortc_compat.OFFER_ERRORS`: it cannot be answered.
        """
        await self.pc.setRemoteDescription(RTCSessionDescription(offer, "offer"))
        if self.pc.sctp is not None:
            aiortc_compat.bound_data(self.pc.sctp, MAX_MESSAGE_BYTES, self._on_misuse)
        taken: MediaStreamTrack | None = None
        for transceiver in self.pc.getTransceivers():
            video = transceiver.kind == "video" and taken is None
            transceiver.direction = "recvonly" if video else "inactive"
            if video:
                taken = transceiver.receiver.track
                self._queue = aiortc_compat.DecoderQueue(transceiver.receiver, self._video_input.leave_out)
                if aiortc_compat.negotiated_codec(transceiver) is None:
                    raise ValueError("no common video codec")
        assert taken is not None, "a checked offer has video"
        aiortc_compat.listen(self.pc, self._note_heard)
        aiortc_compat.on_media(self.pc, self._check_decodable)
        await self.pc.setLocalDescription(await self.pc.createAnswer())
        self._task = asyncio.create_task(self._receive(taken), name="receive-video")
        return with_start_bitrate(str(self.pc.localDescription.sdp))

    async def close(self, limit_s: float) -> None:
        """Close the connection, by force after `limit_s`. Mutates: self."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await aiortc_compat.close(self.pc, limit_s)
        if self._queue is not None:
            await self._queue.join_decoder(limit_s)

    def _note_heard(self) -> None:
        self._heard_s = clock.monotonic_s()

    def _check_decodable(self) -> None:
        """A packet with video has come."""
        now_s = clock.monotonic_s()
        if self._undecoded_s is None or (self._queue is not None and self._queue.qsize()):  # it is decoded slowly
            self._undecoded_s = now_s
        elif now_s - self._undecoded_s > UNDECODABLE_S:
            self._on_misuse("fault")

    async def _receive(self, track: MediaStreamTrack) -> None:
        """Take frames at once, as aiortc's queue of them has no bound."""
        while True:
            try:
                frame = await track.recv()
            except MediaStreamError:
                return  # the connection has ended, which its state says
            if isinstance(frame, av.VideoFrame):
                self._undecoded_s = None
                self._video_input.push(frame)


def with_start_bitrate(answer: str) -> str:
    """An answer that lets Chromium begin at _START_KBPS; others do not look at it."""
    lines, out = answer.splitlines(), []
    payloads: set[str] = set()
    for line in lines:
        if line.startswith("m="):
            payloads = set(line.split()[3:]) if line.startswith("m=video") else set()
        name, _, rest = line.partition(":")
        payload = rest.partition(" ")[0]
        is_format = name == "a=fmtp" and payload in payloads and "apt=" not in rest
        out.append(f"{line};x-google-start-bitrate={_START_KBPS}" if is_format else line)
        if name == "a=rtpmap" and payload in payloads and " VP8/" in line:
            out.append(f"a=fmtp:{payload} x-google-start-bitrate={_START_KBPS}")
    return "".join(f"{line}\r\n" for line in out)


@dataclass(eq=False)
class Feeder(Peer):
    """One peer connection that feeds a session."""

    video_input: VideoInput
    receiver: VideoReceiver
    ends_session: bool


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
                503 with Retry-After.
        """
        checked = checked_offer(offer, "sender", READ)
        self._offers.check(address, "connections", clock.monotonic_s())
        silent = self._silent_of(session)
        if (refusal := self._slots.refusal(address, silent.address if silent else None)) is not None:
            raise refusal
        if silent is not None:
            await self._end(silent, "replaced")
        video_input = _taken(session)
        self._slots.take(address)
        ice = self._ice.to_ask()
        receiver = VideoReceiver(ice, video_input, lambda end: self._end_soon(feeder, end))
        feeder = Feeder(session, receiver.pc, address, checked, video_input, receiver, ends_session)
        feeder.pc.on("connectionstatechange", lambda: self._state_changed(feeder))
        try:
            answer = await answered(checked, receiver.answer(checked.sdp), "one more connection")
            self._ice.take_answer(ice, answer)
            if session.closed:
                raise ended(session)
            session.input.begin()  # first: whatever comes between, `give_back` tells the engine of the end
            await _tell_engine(feeder, session.input.strength if strength is None else strength)
            if session.closed:
                raise ended(session)
        except BaseException:
            await receiver.close(CLOSE_S)
            await session.input.give_back(video_input)
            self._slots.release(address)
            raise
        self._register(feeder)
        video_input.on_fault = lambda: self._end_soon(feeder, "encoder")
        logger.info("Video comes in for session %s.", session.id, extra=log_fields(session=session.id))
        return feeder.id, answer

    async def end_input(self, session: LiveSession) -> bool:
        """End the sender of a session; False if it has none."""
        if (feeder := self._of(session)) is None:
            return False
        await self._end(feeder, "delete")
        return True

    def _of(self, session: LiveSession) -> Feeder | None:
        return next((feeder for feeder in self._peers.values() if feeder.session is session), None)

    def _silent_of(self, session: LiveSession) -> Feeder | None:
        feeder = self._of(session)
        return feeder if feeder is not None and feeder.receiver.silent_s(clock.monotonic_s()) > SILENT_S else None

    async def _end(self, feeder: Feeder, end: str) -> None:
        if not self._unregister(feeder):
            return
        end = "gone" if end in ("failed", "closed") else end
        fields = log_fields(session=feeder.session.id, reason=end)
        level = logging.WARNING if end == "fault" else logging.INFO
        logger.log(level, "Video for session %s has ended: %s.", feeder.session.id, end, extra=fields)
        await feeder.session.input.give_back(feeder.video_input)
        await feeder.receiver.close(CLOSE_S)
        if feeder.ends_session and end not in ("session_ended", "shutdown", "connect_timeout", "replaced"):
            await self._end_its_session(feeder.session.id, "input_ended")


def _taken(session: LiveSession) -> VideoInput:
    """The session's input. Raises Problem: 409, another feeds it; 410, it has ended."""
    if session.closed:
        raise ended(session)
    try:
        return session.input.take("WHIP sender")
    except ControlError as error:
        raise Problem(409, str(error), code=error.code) from error


async def _tell_engine(feeder: Feeder, strength: float) -> None:
    """Have the engine take the input. Raises Problem: 410, 422, 503."""
    message = StrengthMessage(type="strength", strength=strength)
    try:
        receipt = await feeder.session.control_and_wait(message, feeder.id, ANSWER_S)
    except StreamEnded as error:
        raise ended(feeder.session) from error
    except (ControlError, EngineFailure, TimeoutError) as error:
        raise Problem(503, str(error) or "The engine does not answer.", {"Retry-After": "2"}, code="engine") from error
    if receipt.stage == "refused":
        raise Problem(422, receipt.reason, code="refused", field=receipt.field)
