"""What a snapshot's file says of its session, read from its header. Imports no torch: the web process reads it."""

from __future__ import annotations

from dataclasses import dataclass

from streamdiff.engine.messages import Data
from streamdiff.errors import ConfigError
from streamdiff.pipeline.snapshot.header import read_header


@dataclass(frozen=True)
class SavedSession:
    """A saved session: the prompt as the model was given it, what it was opened with, and the number of its next
    frame."""

    text: str
    seed: int
    steps: int
    kv_context: str
    made_frames: int


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
    return SavedSession(session["text"], session["seed"], header.steps, session["kv_context"], session["_made_frames"])
