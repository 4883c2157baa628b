"""Peer connections that feed sessions with video over WHIP (RFC 9725), from the offer to the end.

Independent of the engine; of HTTP it uses only the statuses of `Problem`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from streamdiff import clock
from streamdiff.errors import EngineFailure
from streamdiff.server.logging_setup import log_fields
from streamdiff.server.media.video_input import VideoInput
from streamdiff.server.peers import SlotPool
from streamdiff.server.problem import Problem
from streamdiff.server.sessions.control import ControlError, StrengthMessage
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.receipts import SessionEnded
from streamdiff.server.sessions.session_input import ANSWER_S
from streamdiff.server.webrtc.ice_servers import IceServers
from streamdiff.server.webrtc.peer_connections import CLOSE_S, Peer, Peers, answered, checked_offer
from streamdiff.server.webrtc.receiver import READ, VideoReceiver

logger = logging.getLogger(__name__)

SILENT_S = 3.0
"""A sender from which nothing came for so long gives its session to the next one."""
_MISSING = "Nobody of that name feeds the session; it may have ended. POST a new offer."


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
        receiver = VideoReceiver(ice, video_input.push, lambda end: self._end_soon(feeder, end), video_input.leave_out)
        feeder = Feeder(session, receiver.pc, address, checked, video_input, receiver, ends_session)
        feeder.pc.on("connectionstatechange", lambda: self._state_changed(feeder))
        try:
            answer = await answered(checked, receiver.answer(checked.sdp), "one more connection")
            self._ice.take_answer(ice, answer)
            if session.closed:
                raise _ended(session)
            session.input.begin()  # first: whatever comes between, `give_back` tells the engine of the end
            await _tell_engine(feeder, session.input.strength if strength is None else strength)
            if session.closed:
                raise _ended(session)
        except BaseException:
            await receiver.close(CLOSE_S)
            await session.input.give_back(video_input)
            self._slots.release(address)
            raise
        self._register(feeder)
        video_input.on_fault = lambda: self._end_soon(feeder, "encoder")
        logger.info("Video comes in for session %s.", session.id, extra=log_fields(session=session.id))
        return feeder.id, answer

    async def trickle(self, session: str, id: str, fragment: str) -> None:
        """Take candidates that a sender found after its offer.

        Raises:
            Problem: 404, 400, 422 for an ICE restart.
        """
        await self._add_candidates(self._find(session, id, _MISSING), fragment, "one")

    async def delete(self, session: str, id: str) -> None:
        """End a sender; one that ended lately is fine as well. Raises Problem: 404."""
        await self._delete(session, id, _MISSING)

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
        raise _ended(session)
    try:
        return session.input.take("WHIP sender")
    except ControlError as error:
        raise Problem(409, str(error), code=error.code) from error


async def _tell_engine(feeder: Feeder, strength: float) -> None:
    """Have the engine take the input. Raises Problem: 410, 422, 503."""
    message = StrengthMessage(type="strength", strength=strength)
    try:
        receipt = await feeder.session.control_and_wait(message, feeder.id, ANSWER_S)
    except SessionEnded as error:
        raise _ended(feeder.session) from error
    except (ControlError, EngineFailure, TimeoutError) as error:
        raise Problem(503, str(error) or "The engine does not answer.", {"Retry-After": "2"}, code="engine") from error
    if receipt.stage == "refused":
        raise Problem(422, receipt.reason, code="refused", field=receipt.field)


def _ended(session: LiveSession) -> Problem:
    return Problem(410, f"The session {session.id!r} has ended.", code="ended")
