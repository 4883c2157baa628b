"""Sessions on disk, each in a file of its own: what the web process knows of it, and a snapshot of the engine's part.

A file is written beside its name and moved there, so that it is whole or not there, and only its user can read it: it
holds the session's tokens. Blocking: call it on a thread.
"""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from streamdiff.atomic_write import lock_of, open_private, temporary_sibling
from streamdiff.engine.features import NAMES, Features
from streamdiff.engine.messages import DEFAULT_STRENGTH, Data
from streamdiff.errors import ConfigError
from streamdiff.server.logging_setup import log_fields

logger = logging.getLogger(__name__)

_END, _REFUSED, _PART = ".session", ".refused", ".part"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MAX_RECORD_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class SessionRecord:
    """A session as the web process knows it; see `LiveSession` and `StreamSpec`. `age_s`: seconds since its opening.
    `epoch` is the last one, `made_frames` the number of the next frame. `image`: its bytes `[1, H, W, 3]` as base64;
    `features`: those of `Features` by name, likewise, and `strength` as there."""

    id: str
    view_token: str | None
    control_token: str | None
    prompt: str
    text: str
    seed: int
    fps: float
    steps: int
    kv_context: str
    adaptive: bool
    image: str | None
    paused: bool
    rev: int
    epoch: int
    made_frames: int
    age_s: float
    features: dict[str, str] = field(default_factory=dict)
    strength: float = DEFAULT_STRENGTH

    def given(self) -> Features:
        """Its features. Raises ValueError for what is no base64, or another name."""
        if unknown := self.features.keys() - set(NAMES):
            raise ValueError(f"it has features {', '.join(sorted(unknown))[:64]}")
        files = {name: base64.b64decode(text, validate=True) for name, text in self.features.items()}
        return Features(**files, strength=self.strength)

    def picture(self) -> bytes | None:
        """The bytes of `image`. Raises ValueError for what is no base64."""
        return None if self.image is None else base64.b64decode(self.image, validate=True)


_RECORD = TypeAdapter(SessionRecord)


@dataclass(frozen=True)
class FoundSession:
    """A session's file: its record, and the content of its snapshot's file; empty: there is none, as no engine could
    save it."""

    record: SessionRecord
    snapshot: bytes
    folder: SessionFolder


class SessionFolder:
    """The sessions in one folder."""

    def __init__(self, path: Path, setting: str) -> None:
        """Make the folder if it is not there. Raises ConfigError, which calls it by its `setting`."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{setting}: {path} cannot be made: {error.strerror or error}") from error
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"{setting}: {path} cannot be written to; choose another")
        self._setting = setting

    @contextmanager
    def held(self) -> Iterator[SessionFolder]:
        """Context manager: keep other servers out, which would open the same sessions and remove each other's files.
        Raises ConfigError where one has the folder."""
        try:
            lock = lock_of(self.path)
        except OSError as error:  # of file systems that have none, as some that several machines share
            logger.warning("%s: %s cannot be locked, let one server alone use it: %s", self._setting, self.path, error)
            yield self
            return
        if lock is None:
            raise ConfigError(
                f"{self._setting}: {self.path} cannot be used: another server has it, or it is both serve.handover and "
                "serve.state_dir; name another folder"
            )
        try:
            yield self
        finally:
            os.close(lock)

    def write(self, record: SessionRecord, snapshot: Data) -> None:
        """Keep a session, instead of what was kept of it before. Raises OSError."""
        target = self._of(record.id)
        with temporary_sibling(target) as temporary:
            with open_private(temporary) as file:
                file.write(_RECORD.dump_json(record) + b"\n")
                file.write(snapshot)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)

    def snapshot(self, id: str) -> bytes | None:
        """The snapshot that is kept of a session; None: none."""
        found = self._read(self._of(id))
        return None if found is None else found.snapshot

    def find(self) -> Iterator[FoundSession]:
        """All sessions; what cannot be read is set aside. What a process left unfinished is removed."""
        for part in self.path.glob(f".streamdiff-*{_PART}"):
            part.unlink(missing_ok=True)
        for path in sorted(self.path.glob(f"*{_END}")):
            found = self._read(path)
            if found is not None:
                yield found

    def remove(self, id: str) -> None:
        """Keep a session no longer. A file that cannot be removed stays, and the log says so."""
        try:
            self._of(id).unlink(missing_ok=True)
        except OSError as error:
            logger.error("What was kept of session %s cannot be removed: %s", id, error, extra=log_fields(session=id))

    def set_aside(self, id: str, why: str) -> None:
        """Keep the file of a session that cannot be opened under another name, and say so."""
        self._set_aside(self._of(id), why)

    def _set_aside(self, path: Path, why: str) -> None:
        aside = path.with_name(path.name + _REFUSED)
        try:
            path.replace(aside)
        except OSError as error:
            why, aside = f"{why}; it cannot be renamed: {error}", path
        name = path.name.removesuffix(_END)
        logger.error("Session %s is not opened again, %s stays: %s", name, aside, why, extra=log_fields(session=name))

    def _of(self, id: str) -> Path:
        assert _ID.fullmatch(id), f"{id!r} is no name of a file"
        return self.path / f"{id}{_END}"

    def _read(self, path: Path) -> FoundSession | None:
        """None for what is not there, or cannot be read, which is set aside."""
        try:
            with path.open("rb") as file:
                line = file.readline(_MAX_RECORD_BYTES)
                snapshot = file.read()
            record = _RECORD.validate_json(line, strict=True)
            record.picture(), record.given()
            if record.id != path.name.removesuffix(_END) or not _ID.fullmatch(record.id):
                raise ValueError(f"it is the file of session {record.id[:64]!r}")
        except FileNotFoundError:
            return None
        except (OSError, ValidationError, ValueError) as error:
            self._set_aside(path, f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return None
        return FoundSession(record, snapshot, self)


def read_snapshot(path: str) -> bytes:
    """A saved session's file. Raises ConfigError where it cannot be read."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"session.snapshot: {path} cannot be read: {error.strerror or error}") from None
