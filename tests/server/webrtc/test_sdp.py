"""The offer's pre-check, on offers made by aiortc and then damaged."""

from __future__ import annotations

import asyncio
import re

import pytest
from aiortc import RTCConfiguration, RTCPeerConnection
from aiortc.sdp import SessionDescription

from streamdiff.server.webrtc.sdp import (
    MAX_CANDIDATES,
    UNMET,
    SdpError,
    check_offer,
    parse_trickle,
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
    checked = check_offer(offer).sdp
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
    checked = check_offer(offer.replace("a=mid:0\r\n", "a=mid:0\r\n" + extra)).sdp
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
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("m=video 9", "m=video 99999999"),
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
    assert caught.value.status == 400
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
    assert caught.value.status in UNMET.values()
    assert "recvonly" in str(caught.value)


@pytest.mark.parametrize("kinds", [("audio",), ()])
def test_no_video_is_unsatisfiable(kinds: tuple[str, ...]) -> None:
    with pytest.raises(SdpError) as caught:
        check_offer(asyncio.run(_offer(*kinds)))
    assert caught.value.status in UNMET.values()


def test_audio_beside_video_passes() -> None:
    assert "m=audio" in check_offer(asyncio.run(_offer("audio", "video"))).sdp


def test_a_direction_left_out_means_both(offer: str) -> None:
    assert "a=sendrecv" in check_offer(_without(offer, "^a=recvonly")).sdp


UNUSABLE = (
    "a=candidate:1 1 udp 2122260223 4f1c1c3e-aaaa.local 50000 typ host\r\n"
    "a=candidate:2 1 tcp 1518280447 192.0.2.9 9 typ host tcptype active\r\n"
    "a=end-of-candidates\r\n"
)
"""What a browser finds where no STUN server answers."""


def as_jsep(offer: str) -> str:
    """aiortc's offer as JSEP (RFC 9429) writes one with max-bundle: the transport is in its first section alone."""
    session, first, *others = re.split(r"(?m)^(?=m=)", offer)
    for number, section in enumerate(others):
        section = re.sub(r"a=(ice-|fingerprint|setup|rtcp-mux|candidate|end-of-cand).*\r\n", "", section)
        others[number] = re.sub(r"^(m=\w+) \d+(.*\r\n)", r"\1 0\2a=bundle-only\r\n", section)
    return "".join((session, first, *others))


REJECTED = {
    "by the peer": "m=audio 0 UDP/TLS/RTP/SAVPF 0\r\na=inactive\r\n",
    "text": "m=text 9 UDP/TLS/RTP/SAVPF 98\r\na=mid:t\r\na=rtpmap:98 t140/1000\r\n",
    "image": "m=image 54111/2 udptl t38\r\na=mid:i\r\n",
    "other data": "m=application 9 UDP/BFCP *\r\na=mid:b\r\n",
}


@pytest.mark.parametrize("turned_down", REJECTED.values(), ids=REJECTED)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_section_that_cannot_be_answered_is_turned_down_in_its_place(turned_down: str, place: str) -> None:
    session, *sections = re.split(r"(?m)^(?=m=)", as_jsep(asyncio.run(_offer("audio", "video"))))
    sections.insert(0 if place == "before" else 3, turned_down)
    checked = check_offer("".join((session, *sections)))
    media = SessionDescription.parse(checked.sdp).media
    assert [each.kind for each in media] == ["audio", "video", "application"]
    assert len({(each.ice.usernameFragment, each.ice.password) for each in media}) == 1 and media[2].ice.password
    assert all(each.dtls.fingerprints and each.dtls.role == "client" for each in media)
    answer = checked.complete(
        "v=0\r\na=group:BUNDLE 0 1 2\r\nm=audio 5 X 0\r\nm=video 5 X 97\r\nm=application 5 X x\r\n"
    )
    rejected = turned_down.split()[0]
    lines = [line for line in answer.splitlines() if line.startswith("m=")]
    assert [(line.split()[0], line.split()[1] == "0") for line in lines].count((rejected, True)) == 1
    assert [line.split()[1] == "0" for line in lines].index(True) == (0 if place == "before" else 3)
    assert "a=group:BUNDLE 0 1 2\r\n" in answer


def test_a_bundle_whose_first_section_is_turned_down_keeps_its_transport() -> None:
    offer = as_jsep(asyncio.run(_offer("audio", "video"))).replace("a=mid:0\r\n", f"a=mid:0\r\n{USABLE}")
    checked = check_offer(re.sub(r"a=rtpmap:.*(opus|PCM|G722).*\r\n", "", offer))
    [video, _] = SessionDescription.parse(checked.sdp).media
    assert (video.kind, checked.bundle) == ("video", ("1", "2"))
    assert "192.0.2.9" in [each.ip for each in video.ice_candidates]
    assert {checked.mid_for(mid) for mid in ("0", "1", "2", "x")} == {"1"}


def test_an_offer_without_a_bundle_is_answered_without(offer: str) -> None:
    checked = check_offer(_without(offer, "^a=group:BUNDLE"))
    assert checked.bundle == () and [checked.mid_for(mid) for mid in ("0", "1")] == ["0", "1"]
    assert "BUNDLE" not in checked.complete("v=0\r\na=group:BUNDLE 0 1\r\nm=video 9 X 97\r\nm=application 9 X x\r\n")


def test_an_answer_has_one_fingerprint(offer: str) -> None:
    """libdatachannel takes the last of several, for which it has not always prepared."""
    printed = "".join(f"a=fingerprint:sha-{bits} AB:CD\r\n" for bits in (256, 384, 512))
    answer = check_offer(offer).complete(f"v=0\r\nm=video 9 X 97\r\n{printed}m=application 9 X x\r\n{printed}")
    assert re.findall("a=fingerprint:.*", answer) == ["a=fingerprint:sha-256 AB:CD\r"] * 2


def test_a_bundle_that_names_a_section_twice_has_it_once(offer: str) -> None:
    checked = check_offer(offer.replace("a=group:BUNDLE 0 1", "a=group:BUNDLE 0 0 1"))
    assert checked.bundle == ("0", "1") and "a=group:BUNDLE 0 1\r\n" in checked.sdp


def test_nothing_says_that_no_candidates_will_come(offer: str) -> None:
    assert "end-of-candidates" in offer
    assert "end-of-candidates" not in check_offer(offer).sdp
    assert "end-of-candidates" not in without_unusable(offer[: offer.index("m=")] + UNUSABLE)


USABLE = "a=candidate:1 1 udp 2122260223 192.0.2.9 50000 typ host\r\n"


def _with_h264(offer: str, *fmtp: str) -> str:
    """The offer with H.264 of these parameters and nothing else."""
    offer = re.sub(r"a=(rtpmap|fmtp|rtcp-fb):.*\r\n", "", offer)
    lines = (
        f"a=rtpmap:{96 + n} H264/90000\r\n" + f"a=fmtp:{96 + n} {each}\r\n" * bool(each) for n, each in enumerate(fmtp)
    )
    return offer.replace("a=mid:0\r\n", f"a=mid:0\r\n{''.join(lines)}")


MODE = "packetization-mode=1"


@pytest.mark.parametrize(
    ("fmtp", "viewer", "sender"),
    [
        ([f"{MODE};profile-level-id=64001f"], ["96"], ["96"]),
        ([f"profile-level-id=4D0028; {MODE}"], ["96"], ["96"]),
        ([f"profile-level-id=640c1f;{MODE}", f"profile-level-id=42e01f; {MODE}"], ["97"], ["97"]),
        ([f"{MODE};profile-level-id=42e03e"], ["96"], ["96"]),
        ([MODE], ["96"], ["96"]),
        ([""], [], ["96"]),
        (["profile-level-id=42e01f", "profile-level-id=64001f;packetization-mode=0"], [], ["96", "97"]),
        ([f"{MODE};profile-level-id=f4001f"], [], []),
        ([f"{MODE};profile-level-id=42"], [], []),
    ],
)
def test_h264_is_taken_in_the_profiles_that_can_be_sent_or_read(
    offer: str, fmtp: list[str], viewer: list[str], sender: list[str]
) -> None:
    offer = _with_h264(offer, *fmtp)
    for role, payloads in (("viewer", viewer), ("sender", sender)):
        text = offer if role == "viewer" else offer.replace("a=recvonly", "a=sendonly")
        if not payloads:
            with pytest.raises(SdpError) as caught:
                check_offer(text, role)  # type: ignore[arg-type]
            assert (caught.value.status != 400, caught.value.code) == (True, "codec")
            continue
        checked = check_offer(text, role)  # type: ignore[arg-type]
        assert [*checked.h264] == payloads
        answer = checked.complete(
            f"v=0\r\nm=video 9 X 96\r\na=fmtp:{payloads[0]} {AIORTC};x=1\r\nm=application 9 X x\r\n"
        )
        [given] = re.findall(r"a=fmtp:.. (.*)\r", answer)
        wanted = {word.strip() for word in fmtp[int(payloads[0]) - 96].split(";") if word}
        assert set(given.split(";")) == wanted | {"level-asymmetry-allowed=1", "x=1"}


AIORTC = "level-asymmetry-allowed=1;packetization-mode=1;profile-level-id=42e01f"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("m=application", "m=video"),
        ("m=application 9 UDP/DTLS/SCTP webrtc-datachannel", "m=text 9 UDP/TLS/RTP/SAVPF 98"),
        ("m=video", "m=smell"),
        ("/90000", "/8000"),
    ],
)
def test_what_a_sender_offers_is_taken_as_a_whole_or_not_at_all(offer: str, old: str, new: str) -> None:
    offer = re.sub(r"^(m=\w+) \d+", r"\1 9", offer, flags=re.MULTILINE).replace("a=recvonly", "a=sendonly")
    if new == "m=video":
        video = offer[offer.index("m=video") : offer.index("m=application")]
        offer = offer[: offer.index("m=application")] + video.replace("a=mid:0", "a=mid:1")
    with pytest.raises(SdpError) as caught:
        check_offer(offer.replace(old, new), "sender")
    assert caught.value.status in UNMET.values()


def test_nine_sections_are_too_many(offer: str) -> None:
    video = offer[offer.index("m=video") :]
    with pytest.raises(SdpError, match="8 at most"):
        check_offer(offer + video * 8)


def test_two_sections_of_one_name_are_malformed(offer: str) -> None:
    video = offer[offer.index("m=video") : offer.index("m=application")]
    for damaged in (offer + video, offer.replace("a=mid:0\r\n", "a=mid:0\r\na=mid:1\r\n")):
        with pytest.raises(SdpError, match="twice") as raised:
            check_offer(damaged)
        assert raised.value.status == 400


def test_an_answer_keeps_the_candidates_that_can_be_used_and_all_else() -> None:
    useful = "v=0\r\na=candidate:1 1 udp 2130706431 192.0.2.2 50000 typ host\r\na=end-of-candidates\r\n"
    useless = "a=candidate:2 1 tcp 1015022079 192.0.2.2 9 typ host tcptype active\r\n"
    named = "a=candidate:3 1 udp 2130706431 0a1b.local 50001 typ host\r\n"
    assert without_unusable(useful) == useful
    assert without_unusable(useful + useless + named) == useful
    with pytest.raises(SdpError, match="no ICE candidate"):
        without_unusable(useful + "a=candidate:nonsense\r\n")


def test_trickle_reads_candidates_and_skips_what_is_of_no_use(offer: str) -> None:
    username, candidates = parse_trickle(
        "a=ice-ufrag:abcd\r\na=ice-pwd:0123456789012345678901\r\nm=video 9 UDP/TLS/RTP/SAVPF 0\r\na=mid:1\r\n"
        "a=candidate:1 1 udp 2122260223 192.0.2.9 50000 typ host\r\n"
        "a=candidate:1 1 udp 2122260223 x.local 50000 typ host\r\na=end-of-candidates\r\n"
    )
    assert username == "abcd"
    assert [(each.sdpMid, each.ip, each.port) for each in candidates] == [("1", "192.0.2.9", 50000)]


def test_a_bad_candidate_of_a_fragment_leaves_the_others_in_force() -> None:
    good = [f"1 1 udp 1 192.0.2.{n} 5000 typ host" for n in (1, 2, 3)]
    lines = [
        f"a=candidate:{good[0]}",
        f"a=candidate:{BAD_CANDIDATES[7]}",
        f"candidate:{good[1]}",
        f"a=candidate:{good[2]}",
    ]
    fragment = "\r\n".join(["a=mid:0", *lines, UNUSABLE, "a=candidate:"])
    assert [each.ip for each in parse_trickle(fragment)[1]] == ["192.0.2.1", "192.0.2.2", "192.0.2.3"]
    assert parse_trickle(f"candidate:{good[0]}")[1]
    assert not parse_trickle("a=candidate:\r\n")[1], "which says that no more will come"


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
    with pytest.raises(SdpError) as caught:
        check_offer(offer.replace("a=mid:0\r\n", f"a=mid:0\r\n{line}\r\n"))
    assert caught.value.status == 400
    assert "section 0" in str(caught.value) and repr(line) in str(caught.value), "which line"


@pytest.mark.parametrize("text", ["", "hello", "{}", "a=candidate:broken\r\n"])
def test_what_is_no_fragment(text: str) -> None:
    with pytest.raises(SdpError):
        parse_trickle(text)
