"""What a snapshot's file says of its session, read from its header. Imports no torch: the web process reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamdiff.engine.messages import Data
from streamdiff.errors import ConfigError
from streamdiff.pipeline.snapshot.header import FORMAT, read_header


@dataclass(frozen=True)
class SavedSession:
    """A saved session: the prompt as the model was given it, what it was opened with, and how far it was.

    `model`: the facts that must be the same where it goes on, by name (`name`, `width`, `height`, `dtype`, `weights`
    among them). `made_frames` is the number of the next frame, `chunk` the last one that was made, `nbytes` the size of
    the file.
    """

    format: int
    nbytes: int
    model: Mapping[str, Any]
    text: str
    seed: int
    steps: int
    kv_context: str
    epoch: int
    chunk: int
    made_frames: int
    paused: bool


_SESSION_FIELDS = {
    "text": str,
    "seed": int,
    "kv_context": str,
    "epoch": int,
    "chunk": int,
    "_made_frames": int,
    "_paused": bool,
}


def read_saved_session(data: Data, name: str = "the snapshot") -> SavedSession:
    """The session in a snapshot's file, of which `data` is the content; errors call it `name`.

    Raises:
        ConfigError: no snapshot, one of another format, a damaged one, or one that no engine has saved.
    """
    header = read_header(data, name)
    session = header.about.get("session")
    if not isinstance(session, dict) or any(
        type(session.get(key)) is not kind for key, kind in _SESSION_FIELDS.items()
    ):
        raise ConfigError(f"{name} tells nothing usable of the engine's session; it was not saved by one")
    try:
        session["text"].encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name}: the text of its session has half of a surrogate pair") from error
    return SavedSession(
        FORMAT, len(data), header.model, session["text"], session["seed"], header.steps, session["kv_context"],
        session["epoch"], session["chunk"], session["_made_frames"], session["_paused"],
    )  # fmt: skip
