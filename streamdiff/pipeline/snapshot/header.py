"""What a snapshot's file says of itself in its header. Imports no torch: who only keeps snapshots reads them here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.safetensors_header import parse_data

KIND, FORMAT = "streamdiff session", 1
_OPENED = {"seed": int, "steps": int, "kv_context": str, "epoch": int}


@dataclass(frozen=True)
class SnapshotHeader:
    """See `file.Snapshot`, of which this is all but the tensors."""

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
        said = json.loads(metadata["header"])
        unlike = [key for key, kind in _OPENED.items() if type(said["session"].get(key)) is not kind]
        if unlike:
            raise ConfigError(f"{name}: the snapshot's header has no usable {', '.join(unlike)}")
        return SnapshotHeader(said["model"], said["session"], said["trees"], said["about"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{name}: the snapshot's header is damaged: {type(error).__name__}: {error}") from None


def read_header(data: bytes | memoryview, name: str = "the snapshot") -> SnapshotHeader:
    """The header of a snapshot's file, of which `data` is the content, all of it: its size is checked, its tensors are
    not read. Raises ConfigError as `read_metadata`, and for what is no safetensors file or cut off."""
    return read_metadata(parse_data(data, name).metadata, name)
