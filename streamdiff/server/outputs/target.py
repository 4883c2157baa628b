"""Parses `serve.outputs`: files and addresses that a session is recorded or sent to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

import av
from av.error import FFmpegError, ProtocolNotFoundError

from streamdiff import atomic_write
from streamdiff.errors import ConfigError
from streamdiff.server.media.codecs import Codec

# Short pieces, written at once: they can be played although the recording was cut off.
_MP4 = {"movflags": "empty_moov+default_base_moof", "frag_duration": "1000000", "flush_packets": "1"}
_WEBM = {"live": "1", "cluster_time_limit": "1000", "flush_packets": "1"}
_FILES: dict[str, tuple[str, Codec, dict[str, str]]] = {".mp4": ("mp4", "h264", _MP4), ".webm": ("webm", "vp8", _WEBM)}
_STREAMS = {
    **{"rtmp": "flv", "rtmps": "flv", "srt": "mpegts", "udp": "mpegts", "tcp": "mpegts"},
    **{"whip+https": "whip", "whip+http": "whip"},
}
_WITH_PORT = ("srt", "udp", "tcp")
"""Schemes without a usual port."""
_HOST = re.compile(r"[^\s\"'<>\\^`{|}]*")
_KNOWN = "a file that ends in .mp4 or .webm, or an address that begins with " + ", ".join(
    f"{scheme}://" for scheme in _STREAMS
)


@dataclass(frozen=True)
class Target:
    """One destination. `name` may be shown: of an address it is scheme and host only, as the path may be a secret."""

    url: str
    name: str
    container: str
    codec: Codec
    options: dict[str, str]
    is_file: bool

    def attempt(self, number: int) -> str:
        """Where the attempt `number`, from 0, writes: a recording that broke off is kept, and the next has its own."""
        if not self.is_file or number == 0:
            return self.url
        path, number = Path(self.url), number + 1
        while (other := path.with_stem(f"{path.stem}-{number}")).exists():  # somebody's own
            number += 1
        return str(other)


def parse(text: str) -> Target:
    """Parse one target.

    Raises:
        ConfigError: it names nothing that can be written here; says what can.
    """
    if "://" in text:
        parts = _address(text)
        text = f"{parts.scheme}://{text.strip().partition('://')[2]}"  # in small letters, as FFmpeg knows it
        if parts.scheme not in _STREAMS:
            raise ConfigError(f"the output {parts.scheme[:20]}://... is of no known kind; use {_KNOWN}")
        if not parts.hostname:
            raise ConfigError(f"the output {parts.scheme}://... names no host")
        if parts.port is None and parts.scheme in _WITH_PORT:
            raise ConfigError(f"the output at {parts.hostname} names no port; write {parts.scheme}://HOST:PORT")
        if _STREAMS[parts.scheme] == "whip" and parts.password is not None:
            raise ConfigError(
                f"an output at {parts.hostname} has a name and a password; WHIP takes a token: TOKEN@host"
            )
        if not (token := unquote(parts.username or "")).isascii() or not token.isprintable():
            raise ConfigError(f"the token of an output at {parts.hostname} has characters that no HTTP header can have")
        _check_protocol(parts.scheme)
        host = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
        return Target(text, f"{parts.scheme}://{host}", _STREAMS[parts.scheme], "h264", {}, False)
    path = Path(text).absolute()
    if path.suffix.lower() not in _FILES:
        raise ConfigError(f"the output {text[:60]!r} is of no known kind; use {_KNOWN}")
    atomic_write.check_parent(path)
    if path.exists():
        raise ConfigError(f"the output {text[:60]!r} exists, and a recording never replaces one; choose another name")
    container, codec, options = _FILES[path.suffix.lower()]
    return Target(str(path), path.name, container, codec, options, True)


def _address(text: str) -> SplitResult:
    """The parts of an address. Raises ConfigError for a host or port that can never be."""
    try:
        parts = urlsplit(text)
        if parts.port != 0 and _HOST.fullmatch(parts.hostname or ""):  # or its ValueError
            return parts
    except ValueError:
        pass
    shown = text.partition("://")[2].partition("/")[0].rpartition("@")[2]
    raise ConfigError(f"an output names the host and port {shown[:60]!r}, which can never be; write HOST:PORT")


def read_file(path: str | None) -> list[str]:
    """The targets in `serve.outputs_file`, one a line; none without a file. Raises ConfigError."""
    if path is None:
        return []
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"serve.outputs_file: {path} cannot be read: {why}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def parse_all(texts: Sequence[str]) -> list[Target]:
    """Parse all targets; each gets a unique name.

    Raises:
        ConfigError: see `parse`; or the same file twice.
    """
    found: list[Target] = []
    for text in texts:
        target = parse(text)
        if target.is_file and target.url in {each.url for each in found}:
            raise ConfigError(f"the output {text[:60]!r} is named twice")
        alike = sum(each.name.split(" #")[0] == target.name for each in found)
        found.append(replace(target, name=f"{target.name} #{alike + 1}") if alike else target)
    return found


def _check_protocol(scheme: str) -> None:
    """Raise ConfigError for a protocol that FFmpeg was built without. Opening port 0 shows that without connecting."""
    if scheme not in ("srt", "rtmps"):
        return
    try:
        av.open(f"{scheme}://127.0.0.1:0", format=_STREAMS[scheme], timeout=1).close()
    except ProtocolNotFoundError:
        raise ConfigError(
            f"{scheme}:// cannot be written: the installed PyAV was built without it. "
            f"Use rtmp:// or udp://, or a PyAV that was built with {scheme.upper()} (pip install --no-binary av av)."
        ) from None
    except (FFmpegError, OSError):
        return
