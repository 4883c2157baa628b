"""Checks a peer's SDP offer, prepares it for aiortc, and completes aiortc's answer to it.

aiortc takes some broken offers, raises surprising errors for others, and has no way to turn a section down, so it sees
only what was checked, and only the sections that it can answer. The repairs: `.local` candidates go (resolving one
blocks for a second), TCP candidates and the end of candidates go, sections get the lines that they leave to the first
one of their bundle, H.264 of any profile is called baseline, and the answer becomes DTLS-passive (aiortc as DTLS client
cannot talk to a peer with an RSA certificate). Knows nothing about peer connections; HTTP enters only as statuses
of `Problem`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aiortc import RTCIceCandidate
from aiortc.sdp import MediaDescription, SessionDescription, candidate_from_sdp

from streamdiff.server.problem import Problem
from streamdiff.server.webrtc.aiortc_compat import OFFER_ERRORS, common_codecs

MAX_SDP_BYTES = 64 * 1024
MAX_LINES = 2000
MAX_SECTIONS = 8
MAX_CANDIDATES = 64
MAX_CODECS, MAX_FEEDBACK = 128, 32
"""Of a section: as many codecs as there are payload types, and lines of feedback for all of them."""
MAX_CANDIDATE_CHARACTERS = 512

_MEDIA_LINE = re.compile(r"m=([a-z]+) ([0-9]{1,6})(/[0-9]+)? (\S+) (\S.*)")
_FINGERPRINT = re.compile(r"^a=fingerprint:[A-Za-z0-9-]+ ([0-9A-Fa-f]{2}:)+[0-9A-Fa-f]{2}$")
_CREDENTIAL = re.compile(r"^[A-Za-z0-9+/=_-]{4,256}$")
_SETUP = {"actpass": "active", "active": "active", "passive": "passive"}
_FRAGMENT_LINES = ("m=", "a=mid:", "a=ice-", "a=group:", "a=candidate:", "candidate:", "a=end-of-candidates")
_DIRECTIONS = ("sendrecv", "sendonly", "recvonly", "inactive")
_END = "a=end-of-candidates"
"""Once told so, aioice gives up where it has no pair of addresses to try, although the peer may still call."""
_OF_BUNDLE = ("ice-ufrag", "ice-pwd", "fingerprint", "setup", "rtcp-mux")
"""Attributes that JSEP writes once for a bundle, in its first section."""

Role = Literal["viewer", "sender"]
UNMET: dict[Role, int] = {"viewer": 422, "sender": 406}
_DIRECTION_OF: dict[Role, str] = {"viewer": "recvonly", "sender": "sendonly"}
_NAMES: dict[Role, dict[str, str]] = {
    "viewer": {"h264": "H.264 (baseline, main or high profile, packetization-mode=1)", "vp8": "VP8"},
    "sender": {"h264": "H.264 (baseline, main or high profile)", "vp8": "VP8"},
}
_PROFILE = re.compile(r"(42|4d|64)[0-9a-f]{4}", re.IGNORECASE)
"""`profile-level-id` of the baseline, main and high profiles. The constrained baseline that is sent can be decoded
wherever one of them can; libavcodec decodes all of them."""
_BASELINE = "level-asymmetry-allowed=1;packetization-mode=1;profile-level-id=42e01f"


class SdpError(Problem):
    """SDP that cannot be used: 400; where it is well formed, but asks for what a stream cannot give, UNMET."""

    def __init__(self, message: str, status: int = 400, code: str = "offer") -> None:
        super().__init__(status, message, code=code)


_Section = list[str]
"""Lines of one part of the offer; the first part is the session's."""
_Formats = dict[str, dict[str, str]]
"""By payload type, the parameters of a format."""


@dataclass(frozen=True)
class Offer:
    """A checked offer. `sdp` is what aiortc answers; `mids` names the sections in it, `bundle` those of them that share
    a transport. `usernames`: the ICE user name fragments of the whole offer."""

    sdp: str
    usernames: frozenset[str]
    mids: tuple[str, ...]
    bundle: tuple[str, ...]
    turned_down: tuple[str | None, ...]
    """The answer to each section of the whole offer; None: aiortc's."""
    h264: _Formats
    """H.264 as it was offered."""

    def complete(self, answer: str) -> str:
        """The answer to the whole offer, made of aiortc's to `sdp`."""
        session, *sections = re.split(r"(?m)^(?=m=)", answer)
        bundle = f"a=group:BUNDLE {' '.join(self.bundle)}\r\n" if self.bundle else ""
        answered = iter(sections)
        parts = [next(answered) if section is None else section for section in self.turned_down]
        text = "".join([re.sub(r"a=group:BUNDLE.*\r\n", bundle, session), *parts])
        # Of several libdatachannel (OBS) takes the last; but where its peer's packets come before the answer, as on one
        # machine, it has prepared for SHA-256 and hangs up.
        text = re.sub(r"a=fingerprint:(?!sha-256 ).*\r\n", "", text)
        return re.sub(r"a=fmtp:([0-9]+) (.*)\r\n", self._as_offered, text)

    def mid_for(self, mid: str | None) -> str:
        """The section of `sdp` whose transport takes the candidates of section `mid` of the whole offer."""
        return mid if mid in self.mids and mid not in self.bundle else (self.bundle or self.mids)[0]

    def _as_offered(self, line: re.Match[str]) -> str:
        """An `a=fmtp` line of the answer with the profile and mode of the offer."""
        if (offered := self.h264.get(line[1])) is None:
            return line[0]
        names = ("packetization-mode", "profile-level-id")
        kept = [word for word in line[2].split(";") if not word.startswith(names)]
        return (
            f"a=fmtp:{line[1]} {';'.join(kept + [f'{name}={offered[name]}' for name in names if name in offered])}\r\n"
        )


def check_offer(text: str, role: Role = "viewer", codecs: Sequence[str] = ("h264", "vp8")) -> Offer:
    """The offer of a peer, of which one video section has one of `codecs`.

    Raises:
        SdpError: says what is wrong with which section.
    """
    session, sections = _split(text)
    bundle = _check_names(session, sections)
    if sum(line.startswith("a=candidate:") for part in sections for line in part) > MAX_CANDIDATES:
        raise SdpError(f"The offer has more than {MAX_CANDIDATES} candidates.")
    kinds = [_kind(number, section, bundle) for number, section in enumerate(sections)]
    usernames = frozenset(
        line[12:] for part in (session, *sections) for line in part if line.startswith("a=ice-ufrag:")
    )
    tagged = next((section for section in sections if bundle[:1] == [_value(section, "mid")]), [])
    session = _repair(session)
    h264: _Formats = {}
    media: dict[int, MediaDescription] = {}
    for number, (kind, section) in enumerate(zip(kinds, sections, strict=True)):
        if kind in ("audio", "video", "application"):
            if _value(section, "mid") in bundle:
                section += _lent(section, session, tagged)
            _check_section(number, kind, section, session)
            section[:] = _repair(section)
            if kind == "video":
                section[:] = _as_baseline(section, h264, any_mode=role == "sender")
            media[number] = _parsed(number, session, section)
    taken = _taken_video(role, media, codecs)
    if role == "sender":
        _check_sent(kinds, sections, media)
    # aiortc sends in, or takes, the first video that it sees; what it has no codec for it cannot answer.
    kept = {number for number, each in media.items() if (each.kind == "audio" or number > taken) and _codecs(each)}
    kept |= {taken, *([kinds.index("application")] if "application" in kinds else [])}
    mids = {number: _value(section, "mid") or "" for number, section in enumerate(sections) if number in kept}
    bundle = [mid for mid in bundle if mid in mids.values()]
    session = [line for line in session if not line.startswith("a=group:BUNDLE")]
    session += [f"a=group:BUNDLE {' '.join(bundle)}"] if bundle else []
    lines = [*session, *(line for number in mids for line in sections[number])]
    turned_down = (None if number in kept else _rejection(section) for number, section in enumerate(sections))
    sdp = "".join(f"{line}\r\n" for line in lines)
    return Offer(sdp, usernames, tuple(mids.values()), tuple(bundle), tuple(turned_down), h264)


def without_unusable(answer: str) -> str:
    """A media server's answer without the candidates that cannot be used here; where none is left, without their end.

    Raises:
        SdpError: it has a line that is no candidate.
    """
    lines = _usable(line.rstrip() for line in answer.splitlines())
    if not any(line.startswith("a=candidate:") for line in lines):
        lines = [line for line in lines if line != _END]
    return "".join(f"{line}\r\n" for line in lines)


def parse_trickle(text: str) -> tuple[str | None, list[RTCIceCandidate]]:
    """The user name in an SDP fragment (RFC 8840) from a peer that sends candidates as it finds them, and those that
    can be used here, each with its section's `sdpMid`. Lines that are no candidates are left out where others are.

    Raises:
        SdpError: it is no such fragment.
    """
    lines = [line.strip() for line in text.splitlines()]
    if len(lines) > MAX_LINES:
        raise SdpError(f"The fragment has more than {MAX_LINES} lines.")
    mid, username = "0", None
    found: list[RTCIceCandidate | None] = []
    wrong: SdpError | None = None
    for line in lines:
        if line.startswith("a=mid:"):
            mid = line[6:]
        elif line.startswith("a=ice-ufrag:"):
            username = line[12:]
        elif line.removeprefix("a=").startswith("candidate:") and line.partition(":")[2]:  # nothing: their end
            try:
                candidate = _candidate(line)
            except SdpError as error:
                wrong = wrong or error
                continue
            found.append(candidate)
            if candidate is not None:
                candidate.sdpMid = mid
    if wrong is not None and not found:
        raise wrong
    if not any(line.startswith(_FRAGMENT_LINES) for line in lines):
        raise SdpError("The fragment has no ICE line; send a=ice-ufrag, a=ice-pwd and a=candidate lines (RFC 8840).")
    candidates = [each for each in found if each is not None]
    if len(candidates) > MAX_CANDIDATES:
        raise SdpError(f"The fragment has more than {MAX_CANDIDATES} candidates.")
    return username, candidates


def _value(section: _Section, name: str) -> str | None:
    """What follows `a=<name>:` on its first line; "" for a flag; None when absent."""
    for line in section:
        if line == f"a={name}":
            return ""
        if line.startswith(f"a={name}:"):
            return line[len(name) + 3 :]
    return None


def _split(text: str) -> tuple[_Section, list[_Section]]:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not lines or lines[0] != "v=0":
        raise SdpError("This is no SDP offer: its first line must be v=0.")
    if len(lines) > MAX_LINES:
        raise SdpError(f"The offer has more than {MAX_LINES} lines.")
    session: _Section = []
    sections: list[_Section] = []
    for line in lines:
        if not re.match(r"^[a-z]=", line):
            raise SdpError(f"This is no line of SDP: {line[:60]!r}.")
        if line.startswith("m="):
            sections.append([])
        (sections[-1] if sections else session).append(line)
    if not sections:
        raise SdpError("The offer has no media section (m= line).")
    if len(sections) > MAX_SECTIONS:
        raise SdpError(f"The offer has {len(sections)} media sections; {MAX_SECTIONS} at most.")
    return session, sections


def _check_names(session: _Section, sections: Sequence[_Section]) -> list[str]:
    """The names of the bundled sections, that whose transport they share first."""
    # aiortc takes two of one name for one, and then has no transport for it.
    named = [line for section in sections for line in section if line.startswith("a=mid:")]
    if len(set(named)) < len(named):
        twice = next(line for line in named if named.count(line) > 1)
        raise SdpError(f"The offer has the line {twice[:60]!r} twice; each media section has one of its own.")
    group = next((line.split()[1:] for line in session if line.split()[0] == "a=group:BUNDLE"), [])
    bundle = list(dict.fromkeys(group))  # aiortc has no transport for one that is named twice
    if not {f"a=mid:{mid}" for mid in bundle} <= set(named):
        raise SdpError("The offer's a=group:BUNDLE names a section that is not there.")
    return bundle


def _kind(number: int, section: _Section, bundle: Sequence[str]) -> str:
    """audio, video, application (data channels); "rejected" by the peer itself; else what is turned down."""
    parts = _MEDIA_LINE.fullmatch(section[0])
    if parts is None:
        raise SdpError(f"Media section {number} has an unreadable first line: {section[0][:60]!r}.")
    kind, port, count, protocol, formats = parts.groups()
    if int(port) > 65535:
        raise SdpError(f"Media section {number} has port {port}; 65535 is the highest.")
    if int(port) == 0 and not ("a=bundle-only" in section and _value(section, "mid") in bundle):
        return "rejected"
    if kind == "application":
        sctp = formats.split()[0] if protocol == "DTLS/SCTP" else _value(section, "sctp-port")
        is_known = protocol.endswith("DTLS/SCTP") and re.fullmatch("[1-9][0-9]{0,3}|[1-5][0-9]{4}", sctp or "")
    else:
        is_known = kind in ("audio", "video")
    return kind if is_known and count is None and re.fullmatch("[A-Z/]+", protocol) else "other"


def _lent(section: _Section, session: _Section, tagged: _Section) -> list[str]:
    """Lines that a bundled section leaves to the first one of the bundle."""
    absent = {name for name in _OF_BUNDLE if _value(section, name) is None and _value(session, name) is None}
    if "ice-ufrag" in absent:
        absent.add("candidate")
    return [line for line in tagged if line[2:].partition(":")[0] in absent]


def _check_section(number: int, kind: str, section: _Section, session: _Section) -> None:
    """Raises SdpError unless it is complete."""
    where = f"Media section {number}"
    if not _value(section, "mid"):
        raise SdpError(f"{where} has no a=mid.")
    for name in ("ice-ufrag", "ice-pwd"):
        value = _value(section, name) or _value(session, name)
        if value is None or not _CREDENTIAL.match(value):
            raise SdpError(f"{where} has no usable a={name}.")
    if (_value(section, "setup") or _value(session, "setup")) not in _SETUP:
        raise SdpError(f"{where} has no a=setup:actpass.")
    prints = [line for part in (session, section) for line in part if line.startswith("a=fingerprint:")]
    if not prints or not all(_FINGERPRINT.match(line) for line in prints):
        raise SdpError(f"{where} has no usable a=fingerprint; media is always encrypted.")
    if kind != "application" and _value(section, "rtcp-mux") is None:
        raise SdpError(f"{where} has no a=rtcp-mux.")
    for name, most in (("a=rtpmap:", MAX_CODECS), ("a=rtcp-fb:*", MAX_FEEDBACK)):
        if sum(line.startswith(name) for line in section) > most:
            raise SdpError(f"{where} has more than {most} lines {name}.")


def _usable(lines: Iterable[str]) -> list[str]:
    """The lines without the candidates that cannot be used here."""
    return [line for line in lines if not line.startswith("a=candidate:") or _candidate(line) is not None]


def _candidate(line: str) -> RTCIceCandidate | None:
    """The candidate of a line `a=candidate:` or `candidate:`; None if it cannot be used here: not UDP, or an address to
    look up.

    Raises:
        SdpError: the line is no candidate.
    """
    wrong = SdpError(f"This is no ICE candidate: {line[:80]!r}.")
    # Other alphabets have digits too, which Python reads.
    if not line.isascii() or len(line) > MAX_CANDIDATE_CHARACTERS:
        raise wrong
    try:
        found = candidate_from_sdp(line.partition(":")[2])
    except OFFER_ERRORS as error:
        raise wrong from error
    ports = (found.port, 0 if found.relatedPort is None else found.relatedPort)
    in_range = 1 <= found.component <= 256 and 0 <= found.priority < 2**32 and all(0 <= port < 2**16 for port in ports)
    if not in_range or line.split()[6] != "typ":
        raise wrong
    if found.protocol.lower() != "udp":
        return None
    try:
        ipaddress.ip_address(found.ip)
    except ValueError:
        return None
    return found


def _repair(section: _Section) -> list[str]:
    """A section, or the session's lines, as aiortc is to see them."""
    setup = "a=setup:"
    lines = [
        f"{setup}{_SETUP[line[8:]]}" if line.startswith(setup) and line[8:] in _SETUP else line
        for line in _usable(section)
        if line != _END
    ]
    if lines[0].startswith(("m=audio", "m=video")) and not any(line[2:] in _DIRECTIONS for line in lines):
        lines.append("a=sendrecv")
    return lines


def _as_baseline(section: _Section, h264: _Formats, any_mode: bool) -> list[str]:
    """A video section whose H.264 that can be sent or read is called constrained baseline, packetization-mode=1, as
    aiortc knows no other. `any_mode`: also that without packetization-mode=1. Mutates: h264, adds what was offered."""
    lines = {match[1]: match[2] for line in section if (match := re.fullmatch(r"a=fmtp:([0-9]+) (.*)", line))}
    offered: _Formats = {}
    for line in section:
        if match := re.match(r"a=rtpmap:(9[6-9]|1[0-9]{2}) h264/", line, re.IGNORECASE):
            words = (word.strip().partition("=") for word in lines.get(match[1], "").split(";"))
            offered[match[1]] = {name.lower(): value for name, _, value in words}
    fitting = {
        payload: parameters
        for payload, parameters in offered.items()
        if _PROFILE.fullmatch(parameters.get("profile-level-id", "42000a"))
        and (any_mode or parameters.get("packetization-mode") == "1")
    }
    # Where there is baseline, it is that: what the peer makes of another name for it is less known.
    baseline = {
        payload: parameters
        for payload, parameters in fitting.items()
        if parameters.get("profile-level-id", "").startswith("42") and parameters.get("packetization-mode") == "1"
    }
    chosen = baseline or fitting
    h264.update(chosen)
    replaced = {f"a=fmtp:{payload}" for payload in chosen}
    kept = [line for line in section if line.partition(" ")[0] not in replaced]
    return kept + [f"a=fmtp:{payload} {_BASELINE}" for payload in chosen]


def _parsed(number: int, session: _Section, section: _Section) -> MediaDescription:
    """A section as aiortc reads it. Raises SdpError: names the line that it cannot read."""
    if (media := _media("\r\n".join((*session, *section)))) is None:
        # One by one: a long offer takes no longer than this.
        formats = {line.partition(" ")[0][9:]: line for line in section if line.startswith("a=rtpmap:")}
        for line in (section[0], *session, *section[1:]):
            payload = line.partition(" ")[0][7:] if line.startswith("a=fmtp:") else ""
            if _media("\r\n".join((section[0], formats.get(payload, ""), line))) is None:
                break
        raise SdpError(f"Media section {number} cannot be read: {line[:60]!r}.")
    return media


def _media(text: str) -> MediaDescription | None:
    """The first section of a description; None: aiortc cannot read it."""
    try:
        return SessionDescription.parse(text).media[0]
    except OFFER_ERRORS:
        return None


def _codecs(media: MediaDescription) -> set[str]:
    """The names, in lower case, of the codecs that aiortc can answer a section with."""
    return {codec.name.lower() for codec in common_codecs(media)}


def _taken_video(role: Role, media: Mapping[int, MediaDescription], codecs: Sequence[str]) -> int:
    """The number of the video section that a stream is sent in, or read from."""
    way = _DIRECTION_OF[role]
    videos = [number for number, each in media.items() if each.kind == "video"]
    if not videos:
        message = f"The offer has no video section; offer one with a={way} and another port than 0."
        raise SdpError(message, UNMET[role])
    fitting = [number for number in videos if media[number].direction in (way, "sendrecv")]
    if not fitting:
        message = f"The offer's video is {media[videos[0]].direction}; a {role} offers it with a={way}."
        raise SdpError(message, UNMET[role])
    for number in fitting:
        if _codecs(media[number]) & set(codecs):
            return number
    names = " or ".join(_NAMES[role][codec] for codec in codecs)
    raise SdpError(f"The offer has no video codec that fits; offer {names}.", UNMET[role], "codec")


def _check_sent(kinds: Sequence[str], sections: Sequence[_Section], media: Mapping[int, MediaDescription]) -> None:
    """Raises SdpError where a sender would have to be turned down in part (RFC 9725, 4.4.3). That its sound is not
    taken it reads in the answer, and cameras and OBS always offer some."""
    for kind in ("audio", "video"):
        sent = sum(each.kind == kind and each.direction in ("sendonly", "sendrecv") for each in media.values())
        if sent > 1:
            raise SdpError(f"The offer sends {sent} tracks of {kind}; send one of each kind at most.", UNMET["sender"])
    for kind, section in zip(kinds, sections, strict=True):
        if kind == "other" and "a=inactive" not in section:
            message = f"The offer's section {section[0][:60]!r} cannot be taken; send video, and sound if need be."
            raise SdpError(message, UNMET["sender"])


def _rejection(section: _Section) -> str:
    """The answer to a section that is turned down."""
    kind, _, _, protocol, formats = _MEDIA_LINE.fullmatch(section[0]).groups()  # type: ignore[union-attr]
    mid = _value(section, "mid")
    lines = [f"m={kind} 0 {protocol} {formats}", "c=IN IP4 0.0.0.0", *([f"a=mid:{mid}"] if mid else []), "a=inactive"]
    return "".join(f"{line}\r\n" for line in lines)
