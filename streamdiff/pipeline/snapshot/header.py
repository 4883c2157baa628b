"""What a snapshot's file says of itself in its header. Imports no torch: who only keeps snapshots reads them here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.safetensors_header import LENGTH_BYTES, TensorEntry, parse_data
from streamdiff.pipeline.scheduler.step import KV_CONTEXTS

KIND, FORMAT = "streamdiff session", 1
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
    about: what who saved it wants to know again: prompts, frame numbers; as JSON has it.
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


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is no number that a session has")
