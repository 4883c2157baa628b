"""Checks a peer's SDP offer before aiortc parses it: bounds, completeness, and three repairs.

aiortc takes some broken offers and raises surprising errors for others, so nothing unchecked reaches it. The repairs:
`.local` candidates go (resolving one blocks for a second), TCP candidates go, and the answer becomes DTLS-passive
(aiortc as DTLS client cannot talk to a peer with an RSA certificate). Knows nothing about peer connections or HTTP.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Literal, NamedTuple

from aiortc import RTCIceCandidate
from aiortc.sdp import SessionDescription, candidate_from_sdp

from streamdiff.server.webrtc.aiortc_compat import OFFER_ERRORS

MAX_SDP_BYTES = 64 * 1024
MAX_LINES = 2000
MAX_SECTIONS = 8
MAX_CANDIDATES = 64
MAX_CODECS, MAX_FEEDBACK = 128, 32
"""Of a section: as many codecs as there are payload types, and lines of feedback for all of them."""
MAX_CANDIDATE_CHARACTERS = 512

_MEDIA_LINE = re.compile(r"^m=(audio|video|application) ([0-9]{1,6}) ([A-Z/]+) ([^ ].*)$")
_FINGERPRINT = re.compile(r"^a=fingerprint:[A-Za-z0-9-]+ ([0-9A-Fa-f]{2}:)+[0-9A-Fa-f]{2}$")
_CREDENTIAL = re.compile(r"^[A-Za-z0-9+/=_-]{4,256}$")
_SETUP = {"actpass": "active", "active": "active", "passive": "passive"}
_FRAGMENT_LINES = ("m=", "a=mid:", "a=ice-", "a=group:", "a=candidate:", "a=end-of-candidates")
_DIRECTIONS = ("sendrecv", "sendonly", "recvonly", "inactive")


class SdpError(ValueError):
    """An offer that cannot be used. `unsatisfiable`: it is well formed, but asks for what a stream cannot give."""

    def __init__(self, message: str, *, unsatisfiable: bool = False) -> None:
        super().__init__(message)
        self.unsatisfiable = unsatisfiable


class Trickle(NamedTuple):
    """The contents of an SDP fragment. `candidates`: those that can be used here, each with its section's `sdpMid`."""

    username: str | None
    candidates: tuple[RTCIceCandidate, ...]


_Section = list[str]
"""Lines of one part of the offer; the first part is the session's."""


def check_offer(text: str, peer: Literal["viewer", "sender"] = "viewer") -> str:
    """The offer of a `peer`, checked and repaired, ready for aiortc.

    Raises:
        SdpError: says what is wrong with which section.
    """
    session, sections = _split(text)
    kinds = [_check_section(number, section, session) for number, section in enumerate(sections)]
    wanted = [_direction(section) for kind, section in zip(kinds, sections, strict=True) if kind == "video"]
    # aiortc takes two of one name for one, and then has no transport for it.
    named = [line for section in sections for line in section if line.startswith("a=mid:")]
    if len(set(named)) < len(named):
        twice = next(line for line in named if named.count(line) > 1)
        raise SdpError(f"The offer has the line {twice[:60]!r} twice; each media section has one of its own.")
    bundled = set((_value(session, "group") or "").split()[1:])
    if not bundled <= {_value(section, "mid") for section in sections}:
        raise SdpError("The offer's a=group:BUNDLE names a section that is not there.")
    way, does = ("recvonly", "a viewer receives") if peer == "viewer" else ("sendonly", "whoever feeds a session sends")
    if not wanted:
        raise SdpError(f"The offer has no video section; offer one with a={way}.", unsatisfiable=True)
    if not any(direction in (way, "sendrecv") for direction in wanted):
        raise SdpError(f"The offer's video is {wanted[0]}; {does}: offer it with a={way}.", unsatisfiable=True)
    if sum(line.startswith("a=candidate:") for part in sections for line in part) > MAX_CANDIDATES:
        raise SdpError(f"The offer has more than {MAX_CANDIDATES} candidates.")
    lines = [line for part in (session, *sections) for line in _repair(part)]
    checked = "\r\n".join(lines) + "\r\n"
    try:
        SessionDescription.parse(checked)
    except OFFER_ERRORS as error:
        raise SdpError(f"The offer cannot be read: {type(error).__name__}: {str(error)[:120]}") from error
    return checked


def without_unusable(answer: str) -> str:
    """A media server's answer without the candidates that cannot be used here.

    Raises:
        SdpError: it has a line that is no candidate.
    """
    lines = [line.rstrip() for line in answer.splitlines()]
    return "".join(f"{line}\r\n" for line in lines if not line.startswith("a=candidate:") or _candidate(line))


def username_of(offer: str) -> str | None:
    """The first ICE user name fragment in a checked offer."""
    found = re.search(r"^a=ice-ufrag:(\S+)", offer, re.MULTILINE)
    return found.group(1) if found else None


def video_codecs_of(offer: str) -> set[str]:
    """The names of the codecs that a checked offer's first video section lists, in lower case."""
    video = offer[offer.index("m=video") :]
    video = video.split("\r\nm=", 1)[0]
    return {name.lower() for name in re.findall(r"^a=rtpmap:\d+ ([^/\s]+)", video, re.MULTILINE)}


def parse_trickle(text: str) -> Trickle:
    """An SDP fragment (RFC 8840) from a viewer that sends candidates as it finds them.

    Raises:
        SdpError: it is no such fragment.
    """
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise SdpError(f"The fragment has more than {MAX_LINES} lines.")
    mid, username = "0", None
    found: list[RTCIceCandidate] = []
    for line in (raw.strip() for raw in lines):
        if line.startswith("a=mid:"):
            mid = line[6:]
        elif line.startswith("a=ice-ufrag:"):
            username = line[12:]
        elif line.startswith("a=candidate:") and (candidate := _candidate(line)) is not None:
            candidate.sdpMid = mid
            found.append(candidate)
    if not any(line.strip().startswith(_FRAGMENT_LINES) for line in lines):
        raise SdpError("The fragment has no ICE line; send a=ice-ufrag, a=ice-pwd and a=candidate lines (RFC 8840).")
    if len(found) > MAX_CANDIDATES:
        raise SdpError(f"The fragment has more than {MAX_CANDIDATES} candidates.")
    return Trickle(username, tuple(found))


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


def _check_section(number: int, section: _Section, session: _Section) -> str:
    """The kind of a complete section: audio, video or application."""
    where = f"Media section {number}"
    parts = _MEDIA_LINE.match(section[0])
    if parts is None:
        raise SdpError(f"{where} has an unreadable first line: {section[0][:60]!r}.")
    kind, port = parts.group(1), int(parts.group(2))
    if port > 65535:
        raise SdpError(f"{where} has port {port}; 65535 is the highest.")
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
    for line in section:
        if line.startswith("a=candidate:"):
            _candidate(line)
    return kind


def _direction(section: _Section) -> str:
    return next((line[2:] for line in section if line[2:] in _DIRECTIONS), "sendrecv")


def _candidate(line: str) -> RTCIceCandidate | None:
    """The candidate of an `a=candidate:` line; None if it cannot be used here: not UDP, or an address to look up.

    Raises:
        SdpError: the line is no candidate.
    """
    wrong = SdpError(f"This is no ICE candidate: {line[:80]!r}.")
    # Other alphabets have digits too, which Python reads.
    if not line.isascii() or len(line) > MAX_CANDIDATE_CHARACTERS:
        raise wrong
    try:
        found = candidate_from_sdp(line.removeprefix("a=candidate:"))
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
    lines = []
    for line in section:
        if line.startswith("a=candidate:") and _candidate(line) is None:
            continue
        lines.append(f"a=setup:{_SETUP[line[8:]]}" if line.startswith("a=setup:") and line[8:] in _SETUP else line)
    is_media = lines[0].startswith(("m=audio", "m=video")) if lines else False
    if is_media and not any(line[2:] in _DIRECTIONS for line in lines):
        lines.append("a=sendrecv")
    return lines
