"""Saved sessions: a snapshot of each that plays, from which it resumes when its engine or its server has failed, and
the files by which sessions are handed over to the next server. Decision 0014.

A file holds what the web process knows of a session, as a line of JSON, and a snapshot of the engine's part. It is
written beside its name and moved there, so that it is whole or not there, and only its user can read it: it holds the
session's tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from streamdiff import clock
from streamdiff.atomic_write import lock_of, open_private, temporary_sibling
from streamdiff.config import ServeConfig
from streamdiff.engine.features import NAMES, Features
from streamdiff.engine.messages import DEFAULT_STRENGTH, Data, Ready, Save
from streamdiff.errors import ConfigError, EngineFailure, RequestError
from streamdiff.server.auth import Tokens
from streamdiff.server.sessions.control import StreamEnded
from streamdiff.server.sessions.live_session import LiveSession, StreamSpec
from streamdiff.snapshot_header import read_saved_session

logger = logging.getLogger(__name__)


def _log(level: int, message: str, id: str, **fields: object) -> None:
    """Log what becomes of session `id`."""
    logger.log(level, message, {"session": id, **fields})


SAVE_LIMIT_S = 60.0
_ENCODING_S = 0.2
"""After which a session whose prompt was being encoded is asked for again."""
_LOOK_S = 1.0
"""How often the keeper looks for sessions that have come or gone."""
_END, _REFUSED, _PART = ".session", ".refused", ".part"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MAX_RECORD_BYTES = 128 * 1024 * 1024


class SavedRecord(BaseModel):
    """A session as the web process knows it; see `LiveSession` and `StreamSpec`. `age_s`: seconds since its opening.
    `epoch` is the last one, `made_frames` the number of the next frame. `image`: the bytes of its picture `[1, H, W,
    3]`. The last four: see `Features`."""

    model_config = ConfigDict(frozen=True, strict=True, ser_json_bytes="base64", val_json_bytes="base64")

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
    image: bytes | None
    paused: bool
    rev: int
    epoch: int
    made_frames: int
    age_s: float
    prompt_embeds: bytes | None = None
    image_latents: bytes | None = None
    video_latents: bytes | None = None
    poses: bytes | None = None
    intrinsics: bytes | None = None
    strength: float = DEFAULT_STRENGTH


@dataclass(frozen=True)
class SavedFile:
    """A session's file: its record, and the content of its snapshot's file; empty: there is none, as no engine could
    save it."""

    record: SavedRecord
    snapshot: bytes
    folder: SavedFolder


class SavedFolder:
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

    @contextlib.contextmanager
    def held(self) -> Iterator[SavedFolder]:
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

    def write(self, record: SavedRecord, snapshot: Data) -> None:
        """Keep a session, instead of what was kept of it before. Raises OSError."""
        target = self._of(record.id)
        with temporary_sibling(target) as temporary:
            with open_private(temporary) as file:
                file.write(record.model_dump_json().encode() + b"\n")
                file.write(snapshot)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)

    def snapshot(self, id: str) -> bytes | None:
        """The snapshot that is kept of a session; None: none."""
        found = self._read(self._of(id))
        return None if found is None else found.snapshot

    def find(self) -> Iterator[SavedFile]:
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
            _log(logging.ERROR, "What was kept of session %(session)s cannot be removed: %(why)s", id, why=error)

    def set_aside(self, id: str, why: str) -> None:
        """Keep the file of a session that cannot be opened under another name, and say so."""
        path = self.path / f"{id}{_END}"
        aside = path.with_name(path.name + _REFUSED)
        try:
            path.replace(aside)
        except OSError as error:
            why, aside = f"{why}; it cannot be renamed: {error}", path
        _log(logging.ERROR, "Session %(session)s is not opened again, %(file)s stays: %(why)s", id, file=aside, why=why)

    def _of(self, id: str) -> Path:
        assert _ID.fullmatch(id), f"{id!r} is no name of a file"
        return self.path / f"{id}{_END}"

    def _read(self, path: Path) -> SavedFile | None:
        """None for what is not there, or cannot be read, which is set aside."""
        try:
            with path.open("rb") as file:
                line = file.readline(_MAX_RECORD_BYTES)
                snapshot = file.read()
            record = SavedRecord.model_validate_json(line)
            if record.id != path.name.removesuffix(_END) or not _ID.fullmatch(record.id):
                raise ValueError(f"it is the file of session {record.id[:64]!r}")
        except FileNotFoundError:
            return None
        except (OSError, ValidationError, ValueError) as error:
            self.set_aside(path.name.removesuffix(_END), f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return None
        return SavedFile(record, snapshot, self)


@dataclass
class _Snapshot:
    """A session's snapshot, of `made_frames` frames and after so many `resets`: a later one begins another stream.
    `data` is None where it lies in the folder."""

    data: Data | None
    made_frames: int
    resets: int


class SnapshotKeeper:
    """The snapshots of one server. `folders` are `serve.handover` and `serve.state_dir`, see `open_folders`; `found`:
    the sessions in them, see `find_sessions`."""

    def __init__(self, serve: ServeConfig, folders: Sequence[SavedFolder | None], found: Sequence[SavedFile]) -> None:
        self.handover, self._folder = folders
        self.found = found
        self._keep_s = serve.keep_s
        self._kept: dict[str, _Snapshot] = {}
        self._next_s: dict[str, float] = {}  # when a session is kept again
        self._found: dict[str, SavedFile] = {}  # not opened yet
        self._unable: set[str] = set()  # said already
        self._keeping = asyncio.Lock()

    # ---- keeping ------------------------------------------------------------------------------------------------

    async def run(self, sessions: Callable[[], Iterable[LiveSession]]) -> None:
        """Keep every session that plays, one after the other, until cancelled; without `serve.keep_s` none."""
        while (keep_s := self._keep_s) is not None:
            now_s = clock.monotonic_s()
            played = [each for each in sessions() if each.opened and self._has_changed(each)]
            for session in played:
                self._next_s.setdefault(session.id, now_s + keep_s)
            due = min(played, key=lambda each: self._next_s[each.id], default=None)
            wait_s = _LOOK_S if due is None else self._next_s[due.id] - now_s
            if due is None or wait_s > 0:
                await asyncio.sleep(min(wait_s, _LOOK_S))
                continue
            # Those that are due together, as after a restart, are spread from now on.
            self._next_s[due.id] = now_s + keep_s
            async with self._keeping:
                await self.keep(due)
            await asyncio.sleep(keep_s / (4 * len(played)))

    async def keep(self, session: LiveSession) -> None:
        """Keep a session as it is now, if it can be. Mutates: self."""
        resets, record = session.resets, None if self._folder is None else record_of(session)
        try:
            data = await session.ask(Save(session.id), SAVE_LIMIT_S) if session.playback.made_frames else b""
            if session.resets != resets:
                return
            if self._folder is not None and record is not None:
                await asyncio.to_thread(self._folder.write, record, data)
        except (RequestError, EngineFailure, StreamEnded, TimeoutError, OSError) as error:
            if session.id not in self._unable and not isinstance(error, EngineFailure | StreamEnded):
                self._unable.add(session.id)
                why = str(error) or "no answer"
                _log(logging.WARNING, "Session %(session)s could not be kept: %(why)s", session.id, why=why)
            return
        if session.closed:  # meanwhile
            if self._folder is not None:
                self._folder.remove(session.id)
            return
        self._unable.discard(session.id)
        made = read_saved_session(data).made_frames if data else 0
        self._kept[session.id] = _Snapshot(data if self._folder is None else None, made, resets)

    def _has_changed(self, session: LiveSession) -> bool:
        """Whether frames were made since it was kept; for the next server its record is kept before the first one."""
        kept = self._kept.get(session.id)
        made = session.playback.made_frames
        if kept is None:
            return made > 0 or self._folder is not None
        return (made, session.resets) != (kept.made_frames, kept.resets)

    # ---- going on -----------------------------------------------------------------------------------------------

    async def snapshot(self, session: LiveSession) -> Data | None:
        """The snapshot that a session resumes from; empty: only its record was found; None: there is neither.
        Mutates: self."""
        if (found := self._found.get(session.id)) is not None:
            return found.snapshot
        kept = self._kept.get(session.id)
        if kept is None or kept.resets != session.resets:
            return None
        if kept.data is None and self._folder is not None:
            return await asyncio.to_thread(self._folder.snapshot, session.id)
        return kept.data

    def opened(self, session: LiveSession, snapshot: Data) -> float:
        """The engine has opened a session from `snapshot`, see there. Returns the seconds of the stream that are lost.
        Mutates: self."""
        found = self._found.pop(session.id, None)
        if found is not None and (found.folder is not self._folder or self._keep_s is None):
            found.folder.remove(session.id)
        if not snapshot:
            if session.playback.made_frames:
                _log(logging.WARNING, "Session %(session)s restarts: nothing of its stream was saved.", session.id)
            return 0.0
        saved = read_saved_session(snapshot)
        lost_s = max(0, session.playback.made_frames - saved.made_frames) / session.fps
        if self._keep_s is not None:
            self._kept.setdefault(session.id, _Snapshot(snapshot, saved.made_frames, session.resets))
        told = "Session %(session)s continues from a snapshot, frame %(frame)d: %(lost_s).2f s of it are lost."
        _log(logging.WARNING, told, session.id, lost_s=round(lost_s, 3), frame=saved.made_frames)
        return lost_s

    def refused(self, session: LiveSession, why: str) -> bool:
        """The engine refused a session's snapshot. Returns whether the session may be reset: not if it was found in a
        folder, where its file is then renamed to `*.refused`. Mutates: self."""
        if (found := self._found.pop(session.id, None)) is not None:
            found.folder.set_aside(session.id, why)
            return False
        self.forget(session.id)
        _log(logging.WARNING, "Session %(session)s restarts instead of resuming: %(why)s", session.id, why=why)
        return True

    def forget(self, id: str) -> None:
        """Remove everything kept of a session. Mutates: self, the folder."""
        self._next_s.pop(id, None)
        if (found := self._found.pop(id, None)) is not None:
            found.folder.remove(id)
        if self._kept.pop(id, None) is not None and self._folder is not None:
            self._folder.remove(id)

    async def end(self) -> None:
        """Remove all kept sessions, as the server was asked to end. Mutates: self, the folder."""
        self._keep_s = None
        async with self._keeping:  # a file that is being written is whole then
            for id in [*self._kept, *(id for id, found in self._found.items() if found.folder is self._folder)]:
                self.forget(id)

    # ---- from one server to the next ----------------------------------------------------------------------------

    def take_up(self, found: SavedFile, session: LiveSession, serve: ServeConfig) -> None:
        """Restore a new session's tokens, age and state from its file's record. Mutates: self, session."""
        record, now_s = found.record, clock.monotonic_s()
        self._found[record.id] = found
        if record.control_token is not None:
            session.tokens = Tokens(record.view_token, record.control_token)
            session.lifetime.opened_s = now_s - record.age_s
            session.lifetime.idle_limit_s = serve.idle_s
        session.text, session.rev, session.epoch = record.text, record.rev, record.epoch
        session.playback.resume_at(record.made_frames)
        if record.paused:
            session.paused = True
            session.playback.pacer.set_paused(True)

    async def hand_over(self, sessions: Sequence[LiveSession]) -> None:
        """Write all sessions for the next server: with a snapshot taken now, or else the last one, or else the record
        alone, from which the stream restarts. Mutates: self, the folder."""
        assert self.handover is not None
        for session in sessions:
            data = await _saved(session) if session.opened else None
            if data is None:
                data = await self.snapshot(session)
            if session.closed:  # meanwhile
                continue
            found = self._found.pop(session.id, None)  # a file it has there stays, also when it is opened now
            try:
                await asyncio.to_thread(self.handover.write, record_of(session), data or b"")
            except OSError as error:
                kept = self._kept.pop(session.id, None) is not None and self._folder is not None
                how = "is only handed over as it was last kept" if kept or found is not None else "is lost"
                _log(logging.ERROR, f"Session %(session)s {how}: %(why)s", session.id, why=error)
                continue
            if found is not None and found.folder is not self.handover:
                found.folder.remove(session.id)
            if data:
                _log(logging.INFO, "Session %(session)s is handed over.", session.id)
            else:
                told = "Session %(session)s is handed over without its stream, which restarts: no engine could save it."
                _log(logging.WARNING, told, session.id)


async def _saved(session: LiveSession) -> Data | None:
    """A session as it is now, asked for again while its prompt is being encoded; None where it cannot be had."""
    with contextlib.suppress(RequestError, EngineFailure, StreamEnded, TimeoutError):
        async with asyncio.timeout(SAVE_LIMIT_S):
            while True:
                try:
                    data: Data = await session.ask(Save(session.id), SAVE_LIMIT_S)
                    return data
                except RequestError as error:
                    if error.code != "encoding":
                        raise
                await asyncio.sleep(_ENCODING_S)
    return None


@contextlib.contextmanager
def open_folders(serve: ServeConfig) -> Iterator[list[SavedFolder | None]]:
    """Context manager: the folders of `serve.handover` and, where sessions are kept, `serve.state_dir`, which no other
    server may use meanwhile. Raises ConfigError."""
    kept = serve.state_dir if serve.keep_s is not None else None
    with contextlib.ExitStack() as held:
        yield [
            None if path is None else held.enter_context(SavedFolder(Path(path).expanduser(), f"serve.{name}").held())
            for name, path in (("handover", serve.handover), ("state_dir", kept))
        ]


def find_sessions(folders: Sequence[SavedFolder | None]) -> list[SavedFile]:
    """The sessions that a server before this one has left, those that it handed over first. Blocking."""
    found: dict[str, SavedFile] = {}
    for folder in folders:
        for each in folder.find() if folder is not None else ():
            found.setdefault(each.record.id, each)
    return list(found.values())


def spec_of(record: SavedRecord, ready: Ready) -> StreamSpec:
    """How a session of a folder is opened."""
    data, picture = record.image, None
    if data is not None and len(data) == ready.height * ready.width * 3:
        picture = np.frombuffer(data, np.uint8).reshape(1, ready.height, ready.width, 3)
    features = Features(**{name: getattr(record, name) for name in (*NAMES, "strength")})
    start = record.prompt, record.seed, record.fps, record.steps, record.kv_context
    return StreamSpec(*start, picture, features, record.adaptive)


def record_of(session: LiveSession) -> SavedRecord:
    """The record of a session, for the next server."""
    tokens, now_s = session.tokens or Tokens(), clock.monotonic_s()
    demand = session.demand(now_s)
    features: dict[str, Any] = {
        name: bytes(value) if isinstance(value, memoryview) else value
        for name, value in session.features.fields().items()
    }
    own = ("id", "prompt", "text", "seed", "kv_context", "paused", "rev", "epoch")
    return SavedRecord(
        **{name: getattr(session, name) for name in own},
        **{name: getattr(demand, name) for name in ("fps", "steps", "adaptive")},
        view_token=tokens.view,
        control_token=tokens.control,
        image=None if session.image is None else session.image.tobytes(),
        made_frames=session.playback.made_frames,
        age_s=now_s - session.lifetime.opened_s,
        **features,
    )


def read_snapshot(path: str) -> bytes:
    """A saved session's file. Raises ConfigError where it cannot be read."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"session.snapshot: {path} cannot be read: {error.strerror or error}") from None
