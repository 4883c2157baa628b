"""What viewers and senders of video have in common: from a checked offer to the end of the connection.

Knows nothing about prompts or the engine; HTTP enters only as statuses of `Problem`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import ClassVar, Generic, TypeVar

from aiortc import RTCPeerConnection

from streamdiff import clock
from streamdiff.server.peers import RETRY_AFTER_S, PerAddressLimiter, SlotPool
from streamdiff.server.problem import Problem
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.webrtc import aiortc_compat, sdp
from streamdiff.server.webrtc.ice import IceServers, ports_are_in_use

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
TOMBSTONE_S = 60.0
"""How long after its end a connection may be deleted: some clients close it first."""
POSTS_PER_S, POST_BURST = 20.0, 40.0
CHANGES_PER_S, CHANGE_BURST = 100.0, 200.0
"""Candidates and ends: a page that trickles sends ten or so, and many may sit behind one address."""
CLOSE_S = 3.0
"""For the good-bye to a peer whose connection is closed; without a bound it may take for ever."""


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
        return self._find(session_id, id)

    def _find(self, session_id: str, id: str) -> PeerT:
        peer = self._peers.get(id)
        if peer is None or peer.session.id != session_id:
            raise Problem(404, self.missing)
        return peer

    async def delete(self, session_id: str, id: str, address: str) -> None:
        """End a session's peer of that id; one that ended lately is fine as well. Raises Problem: 404, 429."""
        self._changes.check(address, "changes", clock.monotonic_s())
        if self._tombstones.get((session_id, id), float("-inf")) < clock.monotonic_s():
            await self._end(self._find(session_id, id), "delete")

    async def trickle(self, session_id: str, id: str, fragment: str, address: str) -> None:
        """Take candidates that a peer found after its offer; those beyond the limit are left out. Mutates: the peer.

        Raises:
            Problem: 404, 400, 422 for an ICE restart, 429.
        """
        peer = self.find(session_id, id, address)
        try:
            trickle = sdp.parse_trickle(fragment)
        except sdp.SdpError as error:
            raise Problem(400, str(error)) from error
        if trickle.username is not None and trickle.username not in peer.offer.usernames:
            raise Problem(422, f"ICE restart is not supported: POST a new offer. This {self.whose} stays as it was.")
        for candidate in trickle.candidates:
            if peer.candidates >= sdp.MAX_CANDIDATES:
                return
            peer.candidates += 1
            candidate.sdpMid = peer.offer.mid_for(candidate.sdpMid)
            await peer.pc.addIceCandidate(candidate)

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

    def _register(self, peer: PeerT) -> None:
        """Keep a peer that has its answer, and end it unless it connects in time. Mutates: self, peer."""
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


def checked_offer(text: str, role: sdp.Role, codecs: Sequence[str]) -> sdp.Offer:
    """The offer of a peer, which has one of `codecs`.

    Raises:
        Problem: 400; where it is well formed, but cannot be met, 422, and 406 for a sender.
    """
    try:
        return sdp.check_offer(text, role, codecs)
    except sdp.SdpError as error:
        status = 400 if not error.unsatisfiable else 422 if role == "viewer" else 406
        raise Problem(status, str(error), code=error.code) from error


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
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        if ports_are_in_use():
            message = f"No UDP port is free for {purpose}: those of serve.udp_ports are in use."
            raise Problem(503, message, headers, code="ports")
        logger.error("No UDP socket could be opened for %s: are there too many open files (ulimit -n)?", purpose)
        raise Problem(503, f"The server could open no UDP socket for {purpose}.", headers, code="network")
    return offer.complete(answer)


def ended(session: LiveSession) -> Problem:
    """The answer where a session has ended meanwhile."""
    return Problem(410, f"The session {session.id!r} has ended.", code="ended")
