"""The offer's pre-check, on offers made by aiortc and then damaged."""

from __future__ import annotations

import asyncio
import re

import pytest
from aiortc import RTCConfiguration, RTCPeerConnection
from aiortc.sdp import SessionDescription

from streamdiff.server.webrtc.sdp import (
    MAX_CANDIDATES,
    SdpError,
    check_offer,
    parse_trickle,
    username_of,
    without_unusable,
)


async def _offer(*kinds: str, direction: str = "recvonly", channel: bool = True) -> str:
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    for kind in kinds:
        pc.addTransceiver(kind, direction=direction)
    if channel:
        pc.createDataChannel("control")
    await pc.setLocalDescription(await pc.createOffer())
    text = str(pc.localDescription.sdp)
    await pc.close()
    return text


@pytest.fixture(scope="module")
def offer() -> str:
    return asyncio.run(_offer("video"))


def _without(offer: str, pattern: str) -> str:
    damaged = "".join(line + "\r\n" for line in offer.splitlines() if not re.search(pattern, line))
    assert damaged != offer
    return damaged


def test_a_good_offer_passes_and_the_answerer_becomes_passive(offer: str) -> None:
    checked = check_offer(offer)
    assert "a=setup:actpass" in offer
    assert "a=setup:actpass" not in checked
    assert checked.count("a=setup:active") == offer.count("a=setup:actpass")
    assert SessionDescription.parse(checked).media[0].kind == "video"


def test_local_and_tcp_candidates_go_and_others_stay(offer: str) -> None:
    extra = (
        "a=candidate:1 1 udp 2122260223 4f1c1c3e-aaaa.local 50000 typ host\r\n"
        "a=candidate:2 1 tcp 1518280447 192.0.2.9 9 typ host tcptype active\r\n"
        "a=candidate:3 1 udp 2122260223 192.0.2.9 50000 typ host generation 0\r\n"
        "a=candidate:4 1 UDP 2122260223 2001:db8::1 50000 typ host\r\n"
    )
    checked = check_offer(offer.replace("a=mid:0\r\n", "a=mid:0\r\n" + extra))
    assert ".local" not in checked
    assert " tcp " not in checked
    assert "192.0.2.9 50000" in checked
    assert "2001:db8::1" in checked


@pytest.mark.parametrize(
    "pattern",
    ["^a=ice-ufrag", "^a=ice-pwd", "^a=fingerprint", "^a=setup", "^a=rtcp-mux", "^a=mid:0", "^m=", "^v="],
)
def test_an_incomplete_offer_is_malformed(offer: str, pattern: str) -> None:
    with pytest.raises(SdpError) as caught:
        check_offer(_without(offer, pattern))
    assert not caught.value.unsatisfiable


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("m=video 9", "m=video 99999999"),
        ("m=video", "m=smell"),
        ("a=mid:0\r\n", "a=mid:0\r\na=candidate:nonsense\r\n"),
        ("a=mid:0\r\n", "a=mid:0\r\na=candidate:1 1 udp 1 192.0.2.9 99999 typ host\r\n"),
        ("a=mid:0\r\n", "a=mid:0\r\n" + "a=candidate:1 1 udp 1 192.0.2.9 99 typ host\r\n" * (MAX_CANDIDATES + 1)),
        ("a=mid:0\r\n", "a=mid:0\r\n" + "a=x-filler:1\r\n" * 100_000),
        ("a=mid:0\r\n", "a=mid:0\r\n" + "a=rtpmap:96 VP8/90000\r\n" * 990),
        ("a=mid:0\r\n", "a=mid:0\r\n" + "a=rtcp-fb:* nack\r\n" * 990),
        ("a=mid:0\r\n", "a=mid:0\r\nthis is no line of SDP\r\n"),
        ("sha-256 ", "sha-256 zz:"),
        ("a=setup:actpass", "a=setup:whatever"),
    ],
)
def test_a_damaged_offer_is_malformed(offer: str, old: str, new: str) -> None:
    damaged = re.sub(r"^m=video \d+", "m=video 9", offer, flags=re.MULTILINE).replace(old, new, 1)
    with pytest.raises(SdpError) as caught:
        check_offer(damaged)
    assert not caught.value.unsatisfiable
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "text", ["", "\n\n", "hello", "<html></html>", '{"sdp": "v=0"}', "v=0", "v=0\r\no=- 0 0 IN IP4 0\r\n"]
)
def test_what_is_no_offer(text: str) -> None:
    with pytest.raises(SdpError):
        check_offer(text)


@pytest.mark.parametrize("cut", [50, 200, 400, 700])
def test_a_truncated_offer(offer: str, cut: int) -> None:
    with pytest.raises(SdpError):
        check_offer(offer[:cut])


@pytest.mark.parametrize("direction", ["sendonly", "inactive"])
def test_video_that_cannot_be_sent_is_unsatisfiable(offer: str, direction: str) -> None:
    with pytest.raises(SdpError) as caught:
        check_offer(offer.replace("a=recvonly", f"a={direction}"))
    assert caught.value.unsatisfiable
    assert "recvonly" in str(caught.value)


@pytest.mark.parametrize("kinds", [("audio",), ()])
def test_no_video_is_unsatisfiable(kinds: tuple[str, ...]) -> None:
    with pytest.raises(SdpError) as caught:
        check_offer(asyncio.run(_offer(*kinds)))
    assert caught.value.unsatisfiable


def test_audio_beside_video_passes() -> None:
    assert "m=audio" in check_offer(asyncio.run(_offer("audio", "video")))


def test_a_direction_left_out_means_both(offer: str) -> None:
    assert "a=sendrecv" in check_offer(_without(offer, "^a=recvonly"))


def test_nine_sections_are_too_many(offer: str) -> None:
    video = offer[offer.index("m=video") :]
    with pytest.raises(SdpError, match="8 at most"):
        check_offer(offer + video * 8)


def test_two_sections_of_one_name_are_malformed(offer: str) -> None:
    video = offer[offer.index("m=video") : offer.index("m=application")]
    for damaged in (offer + video, offer.replace("a=mid:0\r\n", "a=mid:0\r\na=mid:1\r\n")):
        with pytest.raises(SdpError, match="twice") as raised:
            check_offer(damaged)
        assert not raised.value.unsatisfiable


def test_an_answer_keeps_the_candidates_that_can_be_used_and_all_else() -> None:
    useful = "v=0\r\na=candidate:1 1 udp 2130706431 192.0.2.2 50000 typ host\r\na=end-of-candidates\r\n"
    useless = "a=candidate:2 1 tcp 1015022079 192.0.2.2 9 typ host tcptype active\r\n"
    named = "a=candidate:3 1 udp 2130706431 0a1b.local 50001 typ host\r\n"
    assert without_unusable(useful) == useful
    assert without_unusable(useful + useless + named) == useful
    with pytest.raises(SdpError, match="no ICE candidate"):
        without_unusable(useful + "a=candidate:nonsense\r\n")


def test_trickle_reads_candidates_and_skips_what_is_of_no_use(offer: str) -> None:
    trickle = parse_trickle(
        "a=ice-ufrag:abcd\r\na=ice-pwd:0123456789012345678901\r\nm=video 9 UDP/TLS/RTP/SAVPF 0\r\na=mid:1\r\n"
        "a=candidate:1 1 udp 2122260223 192.0.2.9 50000 typ host\r\n"
        "a=candidate:1 1 udp 2122260223 x.local 50000 typ host\r\na=end-of-candidates\r\n"
    )
    assert trickle.username == "abcd"
    assert [(each.sdpMid, each.ip, each.port) for each in trickle.candidates] == [("1", "192.0.2.9", 50000)]
    assert username_of(check_offer(offer))


BAD_CANDIDATES = [
    "1 \u00b2 udp 1 192.0.2.9 5000 typ host",
    "1 1 udp 1 192.0.2.9 \u00b2 typ host",
    "1 1 udp 1 192.0.2.9 \u0663 typ host",
    "1 1 udp \u00b2 192.0.2.9 5000 typ host",
    f"1 1 udp 1 192.0.2.9 {'9' * 400} typ host",
    f"1 1 udp 1 192.0.2.9 {'9' * 5000} typ host",
    "1 1 udp 1 192.0.2.9 -1 typ host",
    "1 1 udp 1 192.0.2.9 65536 typ host",
    "1 1 udp 1 192.0.2.9 5000 typ srflx raddr 192.0.2.9 rport x",
    "1 1 udp 1 192.0.2.9 5000 typ srflx raddr 192.0.2.9 rport 65536",
    "1 1 udp 4294967296 192.0.2.9 5000 typ host",
    "1 0 udp 1 192.0.2.9 5000 typ host",
    "1 1 udp 1 192.0.2.9 5000 kind host",
]


@pytest.mark.parametrize("candidate", BAD_CANDIDATES)
def test_what_is_no_candidate(offer: str, candidate: str) -> None:
    line = f"a=candidate:{candidate}\r\n"
    with pytest.raises(SdpError, match="no ICE candidate"):
        parse_trickle(line)
    with pytest.raises(SdpError, match="no ICE candidate"):
        check_offer(offer.replace("a=mid:0\r\n", "a=mid:0\r\n" + line))


@pytest.mark.parametrize(
    "line", ["a=fmtp:77 apt=1", "a=rtpmap:x H264/90000", "a=ssrc:1", "c=IN IP6", "a=sctp-port:\u00b2"]
)
def test_what_aiortc_cannot_read_is_told_before_it_is_asked(offer: str, line: str) -> None:
    with pytest.raises(SdpError, match="cannot be read"):
        check_offer(offer.replace("a=mid:0\r\n", f"a=mid:0\r\n{line}\r\n"))


@pytest.mark.parametrize("text", ["", "hello", "{}", "a=candidate:broken\r\n"])
def test_what_is_no_fragment(text: str) -> None:
    with pytest.raises(SdpError):
        parse_trickle(text)
