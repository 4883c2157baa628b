"""Every private name of aiortc and aioice that streamdiff leans on, checked at import.

aiortc sends packets that are encoded already (`recv()` may return an `av.Packet`), but on that path it drops what a
viewer asks for: the wish for a key frame and the bandwidth estimate. Two hooks repair it. Knows nothing about
sessions, sources of frames or HTTP.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import aioice.ice
import aiortc
import aiortc.rtcrtpsender
import av
from aiortc import RTCPeerConnection, RTCRtpSender, RTCRtpTransceiver
from aiortc.codecs import get_encoder
from aiortc.exceptions import InternalError, InvalidAccessError, InvalidStateError, OperationError
from aiortc.sdp import candidate_from_sdp

from streamdiff.errors import StreamdiffError

TESTED = ((1, 16), (1, 17))
"""Oldest aiortc that works and the first that is untested."""

RETRANSMIT_PACKETS = 1024
"""RTP packets kept per viewer for retransmission: two seconds at 4 Mbit/s. aiortc keeps 128."""

OFFER_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    AssertionError,
    AttributeError,
    KeyError,
    IndexError,
    TypeError,
    StopIteration,
    InternalError,
    InvalidAccessError,
    InvalidStateError,
    OperationError,
)
"""What aiortc raises for an offer it cannot digest: it has no error type of its own for that."""

_ENCODER_ATTRIBUTE = "_RTCRtpSender__encoder"

__all__ = [
    "OFFER_ERRORS",
    "Packetizer",
    "candidate_from_sdp",
    "check",
    "extend_history",
    "hook_sender",
    "host_addresses",
    "negotiated_codec",
]


class Packetizer:
    """Splits encoded packets into RTP payloads and passes a viewer's bandwidth estimate on."""

    def __init__(self, codec: Any, on_estimate: Callable[[int], None]) -> None:
        self._packer: Any = get_encoder(codec)
        self._on_estimate = on_estimate
        self._estimate_bps = 0

    def pack(self, packet: av.Packet[Any]) -> tuple[list[bytes], int]:
        """RTP payloads of one encoded frame, and its timestamp on the 90 kHz clock."""
        payloads, timestamp = self._packer.pack(packet)
        return list(payloads), int(timestamp)

    @property
    def target_bitrate(self) -> int:
        """The viewer's latest estimate in bit/s, 0 before the first one."""
        return self._estimate_bps

    @target_bitrate.setter
    def target_bitrate(self, bitrate: int) -> None:
        self._estimate_bps = bitrate
        self._on_estimate(bitrate)


def negotiated_codec(transceiver: RTCRtpTransceiver) -> Any | None:
    """The codec both sides agreed on, after `setRemoteDescription`; None if there is none."""
    codecs = transceiver._codecs
    return codecs[0] if codecs else None


def hook_sender(
    sender: RTCRtpSender,
    codec: Any,
    on_key_request: Callable[[], None],
    on_estimate: Callable[[int], None],
    on_report: Callable[[float | None], None],
) -> None:
    """Make `sender` pack what its track hands out, and report PLI / FIR, REMB, and what its peer received.

    `on_report` is called for everything the peer says about the video: with the share of packets lost since its last
    report (0 to 1), or None where it says nothing on that. Mutates: sender.
    """
    setattr(sender, _ENCODER_ATTRIBUTE, Packetizer(codec, on_estimate))
    setattr(sender, "_send_keyframe", on_key_request)  # noqa: B010
    handle = sender._handle_rtcp_packet

    async def listen(packet: Any) -> None:
        lost = [each.fraction_lost for each in getattr(packet, "reports", ()) if each.ssrc == sender._ssrc]
        on_report(lost[0] / 256 if lost else None)
        await handle(packet)

    setattr(sender, "_handle_rtcp_packet", listen)  # noqa: B010


def extend_history() -> None:
    """Keep more packets for retransmission. Mutates: a constant of aiortc, for the whole process."""
    setattr(aiortc.rtcrtpsender, "RTP_HISTORY_SIZE", RETRANSMIT_PACKETS)  # noqa: B010


_all_host_addresses = aioice.ice.get_host_addresses


def host_addresses(use_ipv4: bool, use_ipv6: bool) -> list[str]:
    """This host's addresses, and loopback where there is nothing else: a laptop without a network still plays."""
    found = list(_all_host_addresses(use_ipv4, use_ipv6))
    return found or (["127.0.0.1"] if use_ipv4 else [])


def check() -> None:
    """Make sure that this aiortc has what we lean on.

    Raises:
        StreamdiffError: another version, or a private name is gone; names the tested range.
    """
    installed = importlib.metadata.version("aiortc")
    oldest, untested = (".".join(map(str, version)) for version in TESTED)
    wanted = f"streamdiff works with aiortc >= {oldest}, < {untested}: pip install 'aiortc>={oldest},<{untested}'"
    major_minor = tuple(int(part) for part in installed.split(".")[:2])
    if not TESTED[0] <= major_minor < TESTED[1]:
        raise StreamdiffError(f"aiortc {installed} is installed. {wanted}")
    probes = (
        hasattr(RTCRtpSender, "_send_keyframe"),
        hasattr(RTCRtpSender, "_next_encoded_frame"),
        inspect.iscoroutinefunction(getattr(RTCRtpSender, "_handle_rtcp_packet", None)),
        "_codecs" in RTCRtpTransceiver.__init__.__code__.co_names,
        "_ssrc" in RTCRtpSender.__init__.__code__.co_names,
        hasattr(aiortc.rtcrtpsender, "RTP_HISTORY_SIZE"),
        hasattr(aioice.ice, "get_host_addresses"),
        "_RTCRtpSender__encoder" in RTCRtpSender._next_encoded_frame.__code__.co_names,
        hasattr(RTCPeerConnection, "addIceCandidate"),
    )
    if not all(probes):
        raise StreamdiffError(f"aiortc {installed} lacks a name that streamdiff uses. {wanted}")


check()
extend_history()
aioice.ice.get_host_addresses = host_addresses
