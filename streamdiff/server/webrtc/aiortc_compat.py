"""All uses of private names of aiortc and aioice, whose versions are checked at import.

aiortc sends packets that are encoded already (`recv()` may return an `av.Packet`), but on that path it drops what a
viewer asks for: requests for a key frame and the bandwidth estimate. Two hooks repair it. Others bound what a peer's
data channels may take, what it is sent again, how much of its video waits to be decoded, and how long closing takes;
aiortc bounds none of them. Knows nothing about sessions, sources of frames or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
import logging
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial, partialmethod
from queue import Queue
from types import SimpleNamespace
from typing import Any

import aioice.ice
import aioice.stun
import aiortc
import aiortc.rtcrtpsender
from aiortc import RTCDtlsTransport, RTCPeerConnection, RTCRtpSender, RTCRtpTransceiver, RTCSctpTransport
from aiortc.codecs import CODECS
from aiortc.exceptions import InternalError, InvalidAccessError, InvalidStateError, OperationError
from aiortc.rtcpeerconnection import find_common_codecs
from aiortc.rtcsctptransport import WEBRTC_BINARY, WEBRTC_STRING, RTCSctpCapabilities, SackChunk
from aiortc.rtp import RTCP_PSFB_APP, RTCP_RTPFB_NACK, RtcpPsfbPacket, RtcpRtpfbPacket, unpack_remb_fci
from aiortc.sdp import MediaDescription

from streamdiff import clock
from streamdiff.errors import StreamdiffError
from streamdiff.server.media.encoder import is_key_frame
from streamdiff.server.peers import TokenBucket

logger = logging.getLogger(__name__)

TESTED, TESTED_AIOICE = ((1, 16), (1, 17)), ((0, 10), (0, 14))
"""Oldest aiortc and aioice that work and the first that are untested."""

RETRANSMIT_PACKETS = 1024
"""RTP packets kept per viewer for retransmission: two seconds at 4 Mbit/s. aiortc keeps 128."""

_PARSER_ERRORS = (ValueError, AssertionError, AttributeError, KeyError, IndexError, TypeError, StopIteration)
_STATE_ERRORS = (InternalError, InvalidAccessError, InvalidStateError, OperationError)
OFFER_ERRORS: tuple[type[Exception], ...] = (*_PARSER_ERRORS, *_STATE_ERRORS)
"""What aiortc raises for an offer it cannot digest: it has no error type of its own for that."""

RECEIVE_WINDOW_BYTES = 128 * 1024
"""SCTP receive window (a_rwnd) announced to a peer, for all its data channels together."""
HELD_CHUNKS = 256
"""SCTP data chunks that may wait for missing ones, or the rest of their message: 300 KB. aiortc has no bound, and its
reassembly takes time with the square of their number."""
STREAMS = 64
CHUNKS_PER_S, CHUNK_BURST = 1000.0, 2000.0
"""SCTP chunks that a peer may send. 50 messages of 16 KiB in a second are 700; what it is sent it acknowledges."""
ACKNOWLEDGED_CHUNKS = 4096
"""Chunks that one acknowledgement may list beyond the first gap; aiortc walks through every one."""

GATHER_S = 0.9
"""For STUN and TURN servers to give an address, while the viewer waits for its answer. aioice gives them 5 s."""

HELD_FRAMES = 30
"""A peer's encoded frames that may wait to be decoded: a second of them."""

ASK_S = 1.0
"""Interval of STUN requests to a sender of video, which a living one answers also while nothing on its screen moves."""

CANCEL_ROUNDS = 50
"""Turns of the event loop that the tasks of a closed connection get to end in. Some catch a cancellation to send a
good-bye and want a second one; those that wait for others take a few turns."""

_TRANSPORTS_ATTRIBUTE = "_RTCPeerConnection__dtlsTransports"
_DECODER_QUEUE, _DECODER_THREAD, _DECODER_ERROR = (
    f"_RTCRtpReceiver__decoder_{name}" for name in ("queue", "thread", "error")
)


def common_codecs(media: MediaDescription) -> list[Any]:
    """The codecs of an offered section that aiortc can answer it with."""
    return find_common_codecs(CODECS.get(media.kind, []), media.rtp.codecs)


def negotiated_codec(transceiver: RTCRtpTransceiver) -> Any | None:
    """The codec both sides agreed on, after `setRemoteDescription`; None if there is none."""
    return next(iter(transceiver._codecs), None)


def hook_sender(
    sender: RTCRtpSender,
    on_key_request: Callable[[], None],
    on_estimate: Callable[[int], None],
    on_report: Callable[[], None],
    may_resend: Callable[[], bool],
) -> None:
    """Make `sender` report PLI / FIR, REMB, and every RTCP packet of its peer; `may_resend`, asked for every packet
    that the peer misses (NACK), decides whether that is sent again. Mutates: sender."""
    setattr(sender, "_send_keyframe", on_key_request)  # noqa: B010
    handle = sender._handle_rtcp_packet

    async def listen(packet: Any) -> None:
        on_report()
        if isinstance(packet, RtcpRtpfbPacket) and packet.fmt == RTCP_RTPFB_NACK:
            packet.lost = [number for number in dict.fromkeys(packet.lost) if may_resend()]
        await handle(packet)
        if isinstance(packet, RtcpPsfbPacket) and packet.fmt == RTCP_PSFB_APP:
            bitrate_bps, sources = unpack_remb_fci(packet.fci)  # what it raises is of a packet that cannot be read
            if sender._ssrc in sources:
                on_estimate(bitrate_bps)

    setattr(sender, "_handle_rtcp_packet", listen)  # noqa: B010


class _TooMuchData(Exception):
    """A peer has sent more than its data channels may take."""


DATA_ERRORS: tuple[type[Exception], ...] = (_TooMuchData, *OFFER_ERRORS, struct.error, UnboundLocalError)
"""What is raised for data-channel packets that aiortc cannot digest, or shall not."""


def bound_data(sctp: RTCSctpTransport, max_message_bytes: int, on_misuse: Callable[[str], None]) -> None:
    """Bound what the peer's data channels take in memory and time, and announce the longest message.

    To be called between the offer and the answer. `on_misuse` is called once, with `data_limit` for a peer that sends
    more than the bounds above or `data_malformed` for packets that cannot be read; nothing that the peer sends
    afterwards is looked at. A message longer than `max_message_bytes` that keeps the bounds is delivered; text that is
    not UTF-8 is delivered as bytes. Mutates: sctp.
    """
    handle, receive_chunk, deliver = sctp._handle_data, sctp._receive_chunk, sctp._receive
    chunks = TokenBucket(CHUNKS_PER_S, CHUNK_BURST)
    misused = False

    async def handle_data(data: bytes) -> None:
        nonlocal misused
        if misused:
            return
        try:
            await handle(data)
        except DATA_ERRORS as error:
            misused = True
            end = "data_limit" if isinstance(error, _TooMuchData) else "data_malformed"
            logger.info("A peer misuses its data channels (%s): %s: %s", end, type(error).__name__, error)
            on_misuse(end)

    async def receive_bounded(chunk: Any) -> None:
        if not chunks.take(clock.monotonic_s()):
            raise _TooMuchData(f"more than {CHUNKS_PER_S:g} SCTP chunks in a second")
        if isinstance(chunk, SackChunk) and sum(last - first for first, last in chunk.gaps) > ACKNOWLEDGED_CHUNKS:
            raise _TooMuchData("an acknowledgement of more than was ever sent")
        await receive_chunk(chunk)
        streams = sctp._inbound_streams.values()
        if len(streams) > STREAMS:
            raise _TooMuchData(f"more than {STREAMS} streams")
        if max(sum(len(stream.reassembly) for stream in streams), len(sctp._sack_misordered)) > HELD_CHUNKS:
            raise _TooMuchData(f"more than {HELD_CHUNKS} SCTP chunks of messages that are not complete")

    async def deliver_text(stream_id: int, protocol: int, data: bytes) -> None:
        broken = protocol == WEBRTC_STRING and data.decode(errors="ignore").encode() != data
        await deliver(stream_id, WEBRTC_BINARY if broken else protocol, data)

    capabilities = RTCSctpCapabilities(maxMessageSize=max_message_bytes)
    vars(sctp).update(_handle_data=handle_data, _receive_chunk=receive_bounded, _receive=deliver_text)
    vars(sctp).update(_advertised_rwnd=RECEIVE_WINDOW_BYTES, getCapabilities=lambda: capabilities)


class DecoderQueue(Queue[Any]):
    """A peer's frames on their way to aiortc's decoder thread, in place of its own queue, which has no bound.

    Where HELD_FRAMES wait they are dropped, with all that come before the next key frame, which is asked for. Its end
    drops what waits, and the event loop does not wait for the frame that is being decoded: see `join_decoder`.
    """

    def __init__(self, receiver: aiortc.RTCRtpReceiver, on_dropped: Callable[[int], None]) -> None:
        """To be called between the offer and the answer; `on_dropped` gets how many frames. Mutates: receiver."""
        super().__init__()
        self._receiver, self._on_dropped = receiver, on_dropped
        self._dropped = 0  # since the last frame that was taken
        self._thread: threading.Thread | None = None
        setattr(receiver, _DECODER_QUEUE, self)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Take a frame, or None at the end. Mutates: self."""
        if item is None:
            self._drop_all()
            self._thread = getattr(self._receiver, _DECODER_THREAD)
            # Whom aiortc joins next, on the event loop.
            setattr(self._receiver, _DECODER_THREAD, SimpleNamespace(join=lambda: None))
        elif self._dropped or self.qsize() >= HELD_FRAMES:
            is_key = is_key_frame(item[0].name, item[1].data)
            dropped = self._drop_all() + (not is_key)
            self._on_dropped(dropped)
            if not is_key:
                if self._dropped % HELD_FRAMES == 0:  # a request may get lost
                    getattr(self._receiver, _DECODER_ERROR).set()  # with the next packet aiortc asks for a key frame
                self._dropped += dropped
                return
            self._dropped = 0
        super().put(item, block, timeout)

    async def join_decoder(self, limit_s: float) -> None:
        """Wait up to `limit_s` for the decoder thread to end, without blocking the event loop."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, limit_s)

    def _drop_all(self) -> int:
        with self.mutex:
            count = len(self.queue)
            self.queue.clear()
        return count


def listen(pc: RTCPeerConnection, on_heard: Callable[[], None]) -> None:
    """Call `on_heard` for every authentic STUN, RTP and RTCP packet of the peer, which is asked by STUN every ASK_S.
    A peer that never answers stays as long as its own requests come: FFmpeg's sender, which aioice would close after
    half a minute. To be called before the connection begins. Mutates: pc."""
    for dtls in getattr(pc, _TRANSPORTS_ATTRIBUTE):
        connection, asked = dtls.transport._connection, asyncio.Event()
        connection.check_incoming = partial(_after, (on_heard, asked.set), connection.check_incoming)
        connection.query_consent = partial(_query_consent, connection, asked, on_heard)
        for name in ("_handle_rtp_data", "_handle_rtcp_data"):
            setattr(dtls, name, partial(_after, (on_heard,), getattr(dtls, name)))


def on_media(transceiver: RTCRtpTransceiver, call: Callable[[], None]) -> None:
    """Call `call` for every packet in the negotiated codec that is more than padding. To be called between the offer
    and the answer. Mutates: transceiver."""
    codec, handle = negotiated_codec(transceiver), transceiver.receiver._handle_rtp_packet

    async def listen(packet: Any, **when: Any) -> None:
        if packet.payload and codec is not None and packet.payload_type == codec.payloadType:
            call()
        await handle(packet, **when)

    setattr(transceiver.receiver, "_handle_rtp_packet", listen)  # noqa: B010


def _after(first: Sequence[Callable[[], None]], call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    for each in first:
        each()
    return call(*given, **named)


async def _query_consent(self: Any, asked: asyncio.Event, on_heard: Callable[[], None]) -> None:
    """`aioice.Connection.query_consent`, where a request of the peer, `asked`, is an answer. `_tasks_of` knows it by
    `self`."""
    silent = 0
    while silent < aioice.ice.CONSENT_FAILURES * aioice.ice.CONSENT_INTERVAL / ASK_S:
        await asyncio.sleep(ASK_S)
        answered = asked.is_set()
        asked.clear()
        for pair in self._nominated.values():
            request, key = self.build_request(pair, nominate=False), self.remote_password.encode()
            with contextlib.suppress(aioice.stun.TransactionError):
                await pair.protocol.request(request, pair.remote_addr, integrity_key=key, retransmissions=0)
                answered = True
                on_heard()
        silent = 0 if answered else silent + 1
    self._query_consent_task = None
    await self.close()


async def close(pc: RTCPeerConnection, limit_s: float) -> bool:
    """Close a connection: with a good-bye within `limit_s`, else by force. Nothing of it is left either way.

    `RTCPeerConnection.close` alone waits for the good-bye to get away, whatever that takes; cancelled, or when a
    handshake completes meanwhile, it leaves tasks and sockets behind that nothing ends any more.

    Returns: whether force was not needed.
    """
    closing = asyncio.create_task(pc.close(), name="close-connection")
    closed = False
    try:
        await asyncio.wait({closing}, timeout=limit_s)
        closed = closing.done() and not closing.cancelled() and closing.exception() is None
    finally:
        if not closed:
            _drop_sockets(pc)
        _cancel_tasks(pc)
    for _ in range(CANCEL_ROUNDS):
        if not _cancel_tasks(pc):
            return closed
        await asyncio.sleep(0)
    logger.error("Tasks of a closed connection do not end: %s.", ", ".join(map(repr, _tasks_of(pc))))
    return False


def _drop_sockets(pc: RTCPeerConnection) -> None:
    """Close the connection's sockets without a good-bye; what waits to be sent is lost. Mutates: pc."""
    pc.remove_all_listeners()
    for dtls in getattr(pc, _TRANSPORTS_ATTRIBUTE):
        for protocol in dtls.transport._connection._protocols:
            _under_relay(protocol).transport.abort()


def _under_relay(protocol: Any) -> Any:
    """The protocol that holds the socket: for a candidate at a TURN server the one that speaks to that."""
    return getattr(protocol.transport, "_TurnTransport__inner_protocol", protocol)


def _cancel_tasks(pc: RTCPeerConnection) -> bool:
    """Cancel what the connection still does; whether it does anything. Mutates: pc."""
    tasks = list(_tasks_of(pc))
    for task in tasks:
        task.cancel()
    return bool(tasks)


def _tasks_of(pc: RTCPeerConnection) -> Iterator[asyncio.Task[Any]]:
    """The tasks that run methods of the connection or its parts; aiortc keeps no reference to most of them."""
    parts: list[Any] = [pc, *([] if pc.sctp is None else [pc.sctp])]
    for transceiver in pc.getTransceivers():
        parts += (transceiver.sender, transceiver.receiver)
    for dtls in getattr(pc, _TRANSPORTS_ATTRIBUTE):
        parts += (dtls, dtls.transport, dtls.transport._connection)
        for protocol in dtls.transport._connection._protocols:
            parts += (protocol, protocol.transport, _under_relay(protocol))
    known = {id(part) for part in parts}
    for task in asyncio.all_tasks():
        coroutine = task.get_coro()
        if inspect.iscoroutine(coroutine) and id(inspect.getcoroutinelocals(coroutine).get("self")) in known:
            yield task


_all_host_addresses = aioice.ice.get_host_addresses


def host_addresses(use_ipv4: bool, use_ipv6: bool) -> list[str]:
    """This host's addresses, and loopback where there is nothing else: a laptop without a network still plays."""
    found = list(_all_host_addresses(use_ipv4, use_ipv6))
    return found or (["127.0.0.1"] if use_ipv4 else [])


_handle_rtcp_data: Any = getattr(RTCDtlsTransport, "_handle_rtcp_data", None)


async def _read_rtcp(self: Any, data: bytes) -> None:
    """`RTCDtlsTransport._handle_rtcp_data`, where RTCP that aiortc cannot read does not end the connection."""
    try:
        await _handle_rtcp_data(self, data)
    except (ValueError, IndexError, struct.error) as error:
        logger.debug("RTCP of a peer cannot be read: %s: %s", type(error).__name__, error)


_connect: Any = getattr(RTCPeerConnection, "_RTCPeerConnection__connect", None)


async def _connect_or_end(self: Any) -> None:
    """`RTCPeerConnection.__connect`, for which a connection that is closed meanwhile is no error."""
    try:
        await _connect(self)
    except InvalidStateError:
        if self.signalingState != "closed":
            raise


def check() -> None:
    """Check that the installed aiortc and aioice are of versions whose private names are those used here.

    Raises:
        StreamdiffError: another version; names the tested range.
    """
    for name, (oldest, untested) in {"aiortc": TESTED, "aioice": TESTED_AIOICE}.items():
        installed = importlib.metadata.version(name)
        if not oldest <= tuple(int(part) for part in installed.split(".")[:2]) < untested:
            low, high = (".".join(map(str, version)) for version in (oldest, untested))
            wanted = f"streamdiff works with {name} >= {low}, < {high}: pip install '{name}>={low},<{high}'"
            raise StreamdiffError(f"{name} {installed} is installed. {wanted}")


check()
logging.getLogger("aiortc.rtcrtpreceiver").setLevel(logging.ERROR)  # it warns of every frame that is not decoded
setattr(aiortc.rtcrtpsender, "RTP_HISTORY_SIZE", RETRANSMIT_PACKETS)  # noqa: B010
aioice.ice.get_host_addresses = host_addresses
_gather = partialmethod(aioice.Connection.get_component_candidates, timeout=GATHER_S)
setattr(aioice.Connection, "get_component_candidates", _gather)  # noqa: B010
setattr(RTCPeerConnection, "_RTCPeerConnection__connect", _connect_or_end)  # noqa: B010
setattr(RTCDtlsTransport, "_handle_rtcp_data", _read_rtcp)  # noqa: B010
