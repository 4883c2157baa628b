"""The header of a snapshot's file, and its signature. Imports no torch: the web process reads and signs files here.

A server signs each file that it sends: an HMAC-SHA256 over the safetensors header, in whose metadata the writer has put
the SHA-256 of every tensor. So one pass over the content, made while it is written, covers the whole file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamdiff.core import KV_CONTEXTS
from streamdiff.errors import ConfigError
from streamdiff.models.headers import LENGTH_BYTES, TensorEntry, parse_data

KIND, FORMAT = "streamdiff session", 2
MAX_HEADER_BYTES = 1 << 20
"""Of a snapshot's header; real ones have some ten kilobytes, and reading a full one takes a quarter of a second."""
_MOST = 2**40
_OPENED = {
    "seed": (0, _MOST),
    "steps": (1, 1000),
    "next_steps": (1, 1000),
    "epoch": (0, _MOST),
    "next_chunk": (0, _MOST),
}
"""What a session is opened with, and the range of each; and `kv_context`."""
_NEEDED = {"seed", "steps", "epoch", "kv_context"}


@dataclass(frozen=True)
class SnapshotHeader:
    """A session at rest, but for its tensors.

    model: the facts of its model by name, `weights` among them: what must be the same where it goes on.
    session: what it is opened with: seed, steps, kv_context, epoch; and `next_chunk`.
    trees: see `session_state.walk.save`; tensors of each tree have its name in front.
    about: the engine's session, as JSON has it: text, epoch, frame numbers.
    """

    model: Mapping[str, Any]
    session: Mapping[str, Any]
    trees: Mapping[str, Any]
    about: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Denoise steps that the latest request has asked for, whether they hold already or not."""
        return int(self.session.get("next_steps", self.session["steps"]))


def read_metadata(metadata: Mapping[str, str], name: str) -> SnapshotHeader:
    """The header in a safetensors file's metadata; errors call the file `name`.

    Raises:
        ConfigError: no snapshot, one of another format, or a damaged one.
    """
    if metadata.get("kind") != KIND:
        raise ConfigError(f"{name} is a safetensors file, but no snapshot of a session")
    if metadata.get("format") != str(FORMAT):
        raise ConfigError(
            f"{name} has snapshot format {metadata.get('format')}, this version of streamdiff reads {FORMAT}; "
            "take it again with this version"
        )
    try:
        said = json.loads(metadata["header"], parse_constant=_no_constant)
        if odd := [part for part in ("model", "session", "trees", "about") if not isinstance(said[part], dict)]:
            raise ConfigError(f"{name}: the snapshot's header has no usable {', '.join(odd)}")
        _check_opened(said["session"], name)
        return SnapshotHeader(said["model"], said["session"], said["trees"], said["about"])
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{name}: the snapshot's header is damaged: {type(error).__name__}: {error}") from None


def _check_opened(session: Mapping[str, Any], name: str) -> None:
    """Raises ConfigError where the session could not be opened as it says."""
    if not _NEEDED <= set(session) <= _NEEDED | set(_OPENED):
        raise ConfigError(
            f"{name}: its session has {', '.join(session)}; it must have {', '.join(_OPENED)}, kv_context"
        )
    for key, value in session.items():
        low, high = _OPENED.get(key, (0, 0))
        if key in _OPENED and (type(value) is not int or not low <= value <= high):
            raise ConfigError(f"{name}: {key} is {value!r:.60}; it must be a whole number from {low} to {high}")
    if session["kv_context"] not in KV_CONTEXTS:
        raise ConfigError(f"{name}: kv_context is {session['kv_context']!r:.60}; it can be {', '.join(KV_CONTEXTS)}")


def read_header(data: bytes | memoryview, name: str = "the snapshot") -> SnapshotHeader:
    """The header of a snapshot's file, of which `data` is the content, all of it: its size is checked, its tensors are
    not read. Raises ConfigError as `read_metadata`, and for what is no safetensors file or cut off."""
    return read_entries(data, name)[0]


def read_entries(data: bytes | memoryview, name: str) -> tuple[SnapshotHeader, Mapping[str, TensorEntry]]:
    """The same, and where its tensors lie."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if MAX_HEADER_BYTES < length <= len(data) - LENGTH_BYTES:
        raise ConfigError(f"{name} has a header of {length:,} bytes; a snapshot's has at most {MAX_HEADER_BYTES:,}")
    found = parse_data(data, name)
    return read_metadata(found.metadata, name), found.entries


@dataclass(frozen=True)
class SavedStream:
    """A saved session: the prompt as the model was given it, what it was opened with, and the number of its next
    frame."""

    text: str
    seed: int
    steps: int
    kv_context: str
    made_frames: int


_ABOUT = {"text": str, "seed": int, "kv_context": str, "epoch": int, "chunk": int, "_made_frames": int, "_paused": bool}


def read_saved_session(data: bytes | memoryview, name: str = "the snapshot") -> SavedStream:
    """The session in a snapshot's file, of which `data` is the content; errors call it `name`.

    Raises:
        ConfigError: no snapshot, one of another format, a damaged one, or one that no engine has saved.
    """
    header = read_header(data, name)
    session = header.about.get("session")
    if not isinstance(session, dict) or any(type(session.get(key)) is not kind for key, kind in _ABOUT.items()):
        raise ConfigError(f"{name} tells nothing usable of the engine's session; it was not saved by one")
    try:
        session["text"].encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name}: the text of its session has half of a surrogate pair") from error
    return SavedStream(session["text"], session["seed"], header.steps, session["kv_context"], session["_made_frames"])


# ---- signatures -------------------------------------------------------------------------------------------------


def signed(data: bytes | memoryview, key: bytes) -> tuple[bytes, memoryview]:
    """The content of a snapshot's file with a signature, in two pieces; the second one is a view of `data`."""
    tree, rest = _split(data)
    tree["__metadata__"]["signature"] = _signature(tree, key)
    return packed_header(tree), rest


def check_signature(data: bytes | memoryview, key: bytes, name: str = "the snapshot") -> None:
    """Raise ConfigError unless a file that `read_header` takes was signed with `key`, and nothing of it has changed.
    Reads every tensor: call it on a thread."""
    tree, rest = _split(data)
    given = tree["__metadata__"].pop("signature", None)
    if given is None:
        raise ConfigError(f"{name} has no signature: no server has sent it. {_TRUST}", code="unsigned")
    if not hmac.compare_digest(given.encode("ascii", "replace"), _signature(tree, key).encode()):
        raise ConfigError(f"{name} has the signature of another key, or was changed. {_TRUST}", code="signature")
    digests = json.loads(tree.pop("__metadata__")["header"])["digests"]
    for tensor, entry in tree.items():
        begin, end = entry["data_offsets"]
        if digests.get(tensor) != hashlib.sha256(rest[begin:end]).hexdigest():
            raise ConfigError(f"{name}: the content of tensor {tensor!r} was changed. {_TRUST}", code="signature")


_TRUST = (
    "A snapshot is taken from servers with the same serve.snapshot_key_file; --trust-snapshots takes others too, and "
    "streamdiff serve --from FILE and streamdiff.load(FILE) need no signature"
)


def packed_header(tree: Mapping[str, Any]) -> bytes:
    """A safetensors file's beginning: the length of the header, and the header, to a multiple of 8 bytes."""
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _split(data: bytes | memoryview) -> tuple[dict[str, Any], memoryview]:
    """A safetensors file's header, and all that is behind it."""
    view = memoryview(data)
    end = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    return json.loads(bytes(view[LENGTH_BYTES:end])), view[end:]


def _signature(tree: Mapping[str, Any], key: bytes) -> str:
    """Of a header without one."""
    return hmac.new(key, json.dumps(tree, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number that a session has")
