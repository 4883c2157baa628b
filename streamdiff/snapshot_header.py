"""The header of a snapshot's file, and its signature. Imports no torch: the web process reads and signs files here.

A server signs each file that it sends: an HMAC-SHA256 over the safetensors header, in whose metadata the writer has put
the SHA-256 of every tensor. So one pass over the content, made while it is written, covers the whole file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from streamdiff.core import MOST_LORAS, KVContext
from streamdiff.errors import ConfigError
from streamdiff.models.headers import LENGTH_BYTES, TensorEntry, packed_header, parse_data

_SOURCE = "session.save(FILE) and GET /api/sessions/ID/snapshot write one"
KIND, FORMAT = "streamdiff session", 3
MAX_HEADER_BYTES = 1 << 20
"""Of a snapshot's header; real ones have some ten kilobytes, and reading a full one takes a quarter of a second."""
_Number = Annotated[int, Field(strict=True, ge=0, le=2**40)]
"""Chunks, frames and epochs are numbered up to that; at 16 frames per second it lasts two thousand years."""
_Steps = Annotated[int, Field(strict=True, ge=1, le=1000)]


@dataclass(frozen=True)
class OpenedWith:
    """What a saved session is opened with again. `next_steps`: denoise steps that the latest request has asked for,
    where they do not hold yet."""

    seed: _Number
    steps: _Steps
    epoch: _Number
    kv_context: KVContext
    next_steps: _Steps | None = None


@dataclass(frozen=True)
class SnapshotHeader:
    """A session at rest, but for its tensors.

    model: the facts of its model by name, `weights` among them: what must be the same where it continues.
    trees: see `session_state.walk.save`; tensors of each tree have its name in front.
    about: what the engine says of the session, see `SavedStream`; empty where no engine has saved it.
    """

    model: dict[str, Any]
    session: OpenedWith
    trees: dict[str, Any]
    about: dict[str, Any]


@dataclass(frozen=True)
class SavedStream:
    """A saved session: the prompt as the model was given it (more characters than any that is accepted becomes), its
    latest epoch, the number of its next frame and of the next one to be shown, and what it is opened with; whether the
    prompt has not come whole yet; LoRAs by label, with their scale (None: only chunks in flight have it)."""

    text: Annotated[str, Field(max_length=10_000)]
    epoch: _Number
    made_frames: _Number
    shown_frames: _Number
    seed: int
    steps: int
    kv_context: str
    blending: bool = False
    loras: Annotated[dict[str, Annotated[float, Field(ge=0, le=2)] | None], Field(max_length=MOST_LORAS)] = field(
        default_factory=dict
    )


_HEADER, _STREAM = TypeAdapter(SnapshotHeader), TypeAdapter(SavedStream)


def read_header(data: bytes | memoryview, name: str = "the snapshot") -> tuple[SnapshotHeader, dict[str, TensorEntry]]:
    """The header of a snapshot's file, and where its tensors lie; `data` is the content of the file, all of it: its
    size is checked, its tensors are not read. Errors call it `name`.

    Raises:
        ConfigError: no snapshot, one of another format, or one that is damaged or not whole.
    """
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > len(data) - LENGTH_BYTES:
        raise ConfigError(f"{name} is no snapshot of a session: not a safetensors file, or cut off. {_SOURCE}")
    if length > MAX_HEADER_BYTES:
        raise ConfigError(f"{name} has a header of {length:,} bytes; a snapshot's has at most {MAX_HEADER_BYTES:,}")
    found = parse_data(data, name)
    if found.metadata.get("kind") != KIND:
        raise ConfigError(f"{name} is a safetensors file, but no snapshot of a session. {_SOURCE}")
    if found.metadata.get("format") != str(FORMAT):
        raise ConfigError(
            f"{name} has snapshot format {found.metadata.get('format')}, this version of streamdiff reads {FORMAT}; "
            "take it again with this version"
        )
    try:
        header = _HEADER.validate_python(json.loads(found.metadata["header"], parse_constant=_no_constant))
    except (KeyError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: the snapshot's header is damaged: {_described(error)}") from None
    return header, found.entries


def read_saved_session(data: bytes | memoryview, name: str = "the snapshot") -> SavedStream:
    """The session in a snapshot's file, of which `data` is the content; errors call it `name`.

    Raises:
        ConfigError: as `read_header`, or one that no engine has saved.
    """
    return saved_stream(read_header(data, name)[0], name)


def saved_stream(header: SnapshotHeader, name: str = "the snapshot") -> SavedStream:
    """The session of a snapshot. Raises ConfigError for one that no engine has saved."""
    saved, opened = header.about.get("session"), header.session
    if not isinstance(saved, dict):
        raise ConfigError(f"{name} tells nothing of the engine's session; it was not saved by one")
    again = {"seed": opened.seed, "steps": opened.next_steps or opened.steps, "kv_context": opened.kv_context}
    try:
        stream = _STREAM.validate_python({**saved, **again})
    except ValidationError as error:
        raise ConfigError(f"{name}: about.session.{_described(error)}") from None
    return stream


def _described(error: Exception) -> str:
    """The first thing that is wrong, by its name."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "string_unicode":
        first["msg"] = "it has half of a surrogate pair"
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


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
