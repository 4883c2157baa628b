"""Peer connections that feed sessions with video over WHIP (RFC 9725), from the offer to the end.

Independent of the engine; of HTTP it uses only the statuses of `Problem`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiortc import RTCIceServer

from streamdiff import clock
from streamdiff.errors import EngineFailure
from streamdiff.server.logging_setup import log_fields
from streamdiff.server.media.video_input import VideoInput
from streamdiff.server.peers import RETRY_AFTER_S, PerAddressLimiter, SlotPool
from streamdiff.server.problem import Problem
from streamdiff.server.sessions.control import ControlError, StrengthMessage
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.receipts import SessionEnded
from streamdiff.server.webrtc import aiortc_compat, sdp
from streamdiff.server.webrtc.ice_servers import IceServers
from streamdiff.server.webrtc.receiver import READ, VideoReceiver
from streamdiff.server.webrtc.viewers import CLOSE_S, CONNECT_TIMEOUT_S, POST_BURST, POSTS_PER_S

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long an offer waits for the engine to take the input; a large encoder may be loaded later than that."""
CHECK_S = 1.0


@dataclass(eq=False)
class Feeder:
    """One peer connection that feeds a session."""

    id: str
    session: LiveSession
    video_input: VideoInput
    receiver: VideoReceiver
    address: str
    username: str | None
    ends_session: bool
    candidates: int = 0
    begun_s: float = field(default_factory=clock.monotonic_s)
    watching: asyncio.Task[None] | None = None


class Feeders:
    """All that feed sessions, at most one each. Lives on the event loop."""

    def __init__(
        self, slots: SlotPool, ice_servers: IceServers, end_session: Callable[[str, str], Awaitable[None]]
    ) -> None:
        """`slots` are those of viewers: a connection is a connection. `end_session` ends one by its id, for a
        reason."""
        self._slots, self._ice, self._end_its_session = slots, ice_servers, end_session
        self._feeders: dict[str, Feeder] = {}
        self._offers = PerAddressLimiter(POSTS_PER_S, POST_BURST)
        self._closing: set[asyncio.Task[None]] = set()

    async def create(
        self, session: LiveSession, offer: str, address: str, strength: float | None, ends_session: bool = False
    ) -> tuple[str, str]:
        """Connect a video sender to a session, which continues with its prompt only when that ends, or ends too if
        `ends_session`; returns its id and the SDP answer.

        Raises:
            Problem: 400 or 422 for the offer, or where the model takes no video; 409, another feeds it; 410; 429 and
                503 with Retry-After.
        """
        try:
            checked = sdp.check_offer(offer, "sender")
        except sdp.SdpError as error:
            raise Problem(422 if error.unsatisfiable else 400, str(error), code="offer") from error
        if not sdp.video_codecs_of(checked) & set(READ):
            raise Problem(422, "The offer has no video codec that is read here: send H.264 or VP8.", code="codec")
        self._offers.check(address, "connections", clock.monotonic_s())
        if (refusal := self._slots.refusal(address)) is not None:
            raise refusal
        video_input = _taken(session)
        self._slots.take(address)
        ice = [RTCIceServer(each.url, each.username, each.credential) for each in self._ice.issue()]
        receiver = VideoReceiver(ice, video_input.push, lambda end: self._end_soon(feeder, end), video_input.leave_out)
        name = sdp.username_of(checked)
        feeder = Feeder(secrets.token_urlsafe(24), session, video_input, receiver, address, name, ends_session)
        try:
            answer = await self._answer(feeder, checked)
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
        self._feeders[feeder.id] = feeder
        video_input.on_fault = lambda: self._end_soon(feeder, "encoder")
        feeder.watching = asyncio.create_task(self._watch(feeder), name="watch-feeder")
        logger.info("Video comes in for session %s.", session.id, extra=log_fields(session=session.id))
        return feeder.id, answer

    async def trickle(self, session: str, id: str, fragment: str) -> None:
        """Take candidates that a sender found after its offer.

        Raises:
            Problem: 404, 400, 422 for an ICE restart.
        """
        feeder = self._find(session, id)
        try:
            trickle = sdp.parse_trickle(fragment)
        except sdp.SdpError as error:
            raise Problem(400, str(error)) from error
        if trickle.username is not None and trickle.username != feeder.username:
            raise Problem(422, "ICE restart is not supported: POST a new offer. This one goes on as it was.")
        for candidate in trickle.candidates[: sdp.MAX_CANDIDATES - feeder.candidates]:
            feeder.candidates += 1
            await feeder.receiver.pc.addIceCandidate(candidate)

    async def delete(self, session: str, id: str) -> None:
        """End a sender. Raises Problem: 404."""
        await self._end(self._find(session, id), "delete")

    async def end_session(self, session: LiveSession) -> None:
        """Close the connection that feeds a session that ends."""
        for feeder in [each for each in self._feeders.values() if each.session is session]:
            await self._end(feeder, "session_ended")

    async def stop(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(self._end(feeder, "shutdown") for feeder in list(self._feeders.values())))
        await asyncio.gather(*self._closing)

    def _find(self, session: str, id: str) -> Feeder:
        feeder = self._feeders.get(id)
        if feeder is None or feeder.session.id != session:
            raise Problem(404, "Nobody of that name feeds the session; it may have ended. POST a new offer.")
        return feeder

    async def _answer(self, feeder: Feeder, offer: str) -> str:
        """The SDP answer. Raises Problem: 422, it cannot be answered; 503, no UDP port is free."""
        try:
            answer = await feeder.receiver.answer(offer)
        except aiortc_compat.OFFER_ERRORS as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise Problem(422, f"The offer cannot be answered: {first_line}", code="offer") from error
        if "\na=candidate:" not in answer:
            message = "No UDP port is free for one more connection: those of serve.udp_ports are in use."
            raise Problem(503, message, {"Retry-After": str(RETRY_AFTER_S)}, code="ports")
        return answer

    async def _watch(self, feeder: Feeder) -> None:
        """Once a second: end a sender that did not connect, or has gone."""
        while True:
            await asyncio.sleep(CHECK_S)
            now_s, state = clock.monotonic_s(), feeder.receiver.pc.connectionState
            late = state != "connected" and now_s - feeder.begun_s > CONNECT_TIMEOUT_S
            if late or state in ("failed", "closed"):  # who is only silent may be a screen on which nothing moves
                self._end_soon(feeder, "connect_timeout" if late else "gone")
                return

    def _end_soon(self, feeder: Feeder, end: str) -> None:
        task = asyncio.create_task(self._end(feeder, end), name=f"end-feeder-{end}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, feeder: Feeder, end: str) -> None:
        if self._feeders.pop(feeder.id, None) is None:
            return
        if feeder.watching is not None:
            feeder.watching.cancel()
        self._slots.release(feeder.address)
        fields = log_fields(session=feeder.session.id, reason=end)
        logger.info("Video for session %s has ended: %s.", feeder.session.id, end, extra=fields)
        await feeder.session.input.give_back(feeder.video_input)
        await feeder.receiver.close(CLOSE_S)
        if feeder.ends_session and end not in ("session_ended", "shutdown", "connect_timeout"):
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
