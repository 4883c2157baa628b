"""Keeps a snapshot of each session that plays, from which it goes on when its engine or its server has failed; and
hands sessions over to the next server. Decision 0014."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamdiff import clock
from streamdiff.config import ServeConfig
from streamdiff.engine.messages import Data, Pictures, Ready
from streamdiff.errors import EngineFailure, RequestError
from streamdiff.server.auth import Tokens
from streamdiff.server.logging_setup import log_fields
from streamdiff.server.sessions.live_session import LiveSession
from streamdiff.server.sessions.receipts import SessionEnded
from streamdiff.server.sessions.session_files import FoundSession, SessionFolder, SessionRecord
from streamdiff.server.sessions.session_spec import SessionSpec
from streamdiff.snapshot_header import read_saved_session

logger = logging.getLogger(__name__)

SAVE_LIMIT_S = 60.0
_ENCODING_S = 0.2
"""After which a session whose prompt was being encoded is asked for again."""
_LOOK_S = 1.0
"""How often the keeper looks for sessions that have come or gone."""


@dataclass
class _Kept:
    """A session's snapshot, of `made_frames` frames and after so many `resets`: a later one begins another stream.
    `data` is None where it lies in the folder."""

    data: Data | None
    made_frames: int
    resets: int


class SessionKeeper:
    """The snapshots of one server. `folders` are `serve.handover` and `serve.state_dir`, see `open_folders`."""

    def __init__(self, serve: ServeConfig, folders: Sequence[SessionFolder | None]) -> None:
        self.handover, self._folder = folders
        self._keep_s = serve.keep_s
        self._kept: dict[str, _Kept] = {}
        self._next_s: dict[str, float] = {}  # when a session is kept again
        self._found: dict[str, FoundSession] = {}  # not opened yet
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
            data = await session.snapshots.save(SAVE_LIMIT_S) if session.playback.made_frames else b""
            if session.resets != resets:
                return
            if self._folder is not None and record is not None:
                await asyncio.to_thread(self._folder.write, record, data)
        except (RequestError, EngineFailure, SessionEnded, TimeoutError, OSError) as error:
            if session.id not in self._unable and not isinstance(error, EngineFailure | SessionEnded):
                self._unable.add(session.id)
                fields = log_fields(session=session.id)
                logger.warning("Session %s could not be kept: %s", session.id, error or "no answer", extra=fields)
            return
        if session.closed:  # meanwhile
            if self._folder is not None:
                self._folder.remove(session.id)
            return
        self._unable.discard(session.id)
        made = read_saved_session(data).made_frames if data else 0
        self._kept[session.id] = _Kept(data if self._folder is None else None, made, resets)

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
                fields = log_fields(session=session.id)
                logger.warning("Session %s begins afresh: of its stream nothing was saved.", session.id, extra=fields)
            return 0.0
        saved = read_saved_session(snapshot)
        lost_s = max(0, session.playback.made_frames - saved.made_frames) / session.fps
        if self._keep_s is not None:
            self._kept.setdefault(session.id, _Kept(snapshot, saved.made_frames, session.resets))
        fields = log_fields(session=session.id, lost_s=round(lost_s, 3), frame=saved.made_frames)
        logger.warning(
            "Session %s goes on from a snapshot, frame %d: %.2f s of it are lost.", session.id, saved.made_frames,
            lost_s, extra=fields,
        )  # fmt: skip
        return lost_s

    def refused(self, session: LiveSession, why: str) -> bool:
        """The engine refused a session's snapshot. Returns whether the session may be reset: not if it was found in a
        folder, where its file is then renamed to `*.refused`. Mutates: self."""
        if (found := self._found.pop(session.id, None)) is not None:
            found.folder.set_aside(session.id, why)
            return False
        self.forget(session.id)
        fields = log_fields(session=session.id)
        logger.warning("Session %s does not go on, it begins afresh: %s", session.id, why, extra=fields)
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

    def take_up(self, found: FoundSession, session: LiveSession, serve: ServeConfig) -> None:
        """Restore a new session's tokens, age and state from its file's record. Mutates: self, session."""
        record, now_s = found.record, clock.monotonic_s()
        self._found[record.id] = found
        if record.control_token is not None:
            session.tokens = Tokens(record.view_token, record.control_token)
            session.lifetime.opened_s = now_s - record.age_s
            session.lifetime.idle_limit_s, session.lifetime.limit_s = serve.idle_s, serve.lifetime_s
        session.text, session.rev, session.epoch = record.text, record.rev, record.epoch
        session.playback.go_on(record.made_frames)
        if record.paused:
            session.paused = True
            session.playback.pacer.set_paused(True)

    async def hand_over(self, sessions: Sequence[LiveSession]) -> None:
        """Write all sessions for the next server: with a snapshot taken now, or else the last one, or else the record
        alone, from which the stream begins afresh. Mutates: self, the folder."""
        assert self.handover is not None
        for session in sessions:
            data = await _saved(session) if session.opened else None
            if data is None:
                data = await self.snapshot(session)
            if session.closed:  # meanwhile
                continue
            fields = log_fields(session=session.id)
            found = self._found.pop(session.id, None)  # a file it has there stays, also when it is opened now
            try:
                await asyncio.to_thread(self.handover.write, record_of(session), data or b"")
            except OSError as error:
                kept = self._kept.pop(session.id, None) is not None and self._folder is not None
                how = "is only handed over as it was last kept" if kept or found is not None else "is lost"
                logger.error("Session %s %s: %s", session.id, how, error, extra=fields)
                continue
            if found is not None and found.folder is not self.handover:
                found.folder.remove(session.id)
            if data:
                logger.info("Session %s is handed over.", session.id, extra=fields)
            else:
                logger.warning(
                    "Session %s is handed over without its stream, which begins afresh: the engine could not save it.",
                    session.id, extra=fields,
                )  # fmt: skip


async def _saved(session: LiveSession) -> Data | None:
    """A session as it is now, asked for again while its prompt is being encoded; None where it cannot be had."""
    with contextlib.suppress(RequestError, EngineFailure, SessionEnded, TimeoutError):
        async with asyncio.timeout(SAVE_LIMIT_S):
            while True:
                try:
                    return await session.snapshots.save(SAVE_LIMIT_S)
                except RequestError as error:
                    if error.code != "encoding":
                        raise
                await asyncio.sleep(_ENCODING_S)
    return None


@contextlib.contextmanager
def open_folders(serve: ServeConfig) -> Iterator[list[SessionFolder | None]]:
    """Context manager: the folders of `serve.handover` and, where sessions are kept, `serve.state_dir`, which no other
    server may use meanwhile. Raises ConfigError."""
    kept = serve.state_dir if serve.keep_s is not None else None
    with contextlib.ExitStack() as held:
        yield [
            None if path is None else held.enter_context(SessionFolder(Path(path).expanduser(), f"serve.{name}").held())
            for name, path in (("handover", serve.handover), ("state_dir", kept))
        ]


def find_sessions(folders: Sequence[SessionFolder | None]) -> list[FoundSession]:
    """The sessions that a server before this one has left, those that it handed over first. Blocking."""
    found: dict[str, FoundSession] = {}
    for folder in folders:
        for each in folder.find() if folder is not None else ():
            found.setdefault(each.record.id, each)
    return list(found.values())


def spec_of(record: SessionRecord, ready: Ready) -> SessionSpec:
    """How a session of a folder is opened."""
    data = record.picture()
    picture: Pictures | None = None
    if data is not None and len(data) == ready.height * ready.width * 3:
        picture = np.frombuffer(data, np.uint8).reshape(1, ready.height, ready.width, 3)
    start = record.prompt, record.seed, record.fps, record.steps, record.kv_context
    return SessionSpec(*start, picture, record.given(), record.adaptive)


def record_of(session: LiveSession) -> SessionRecord:
    """The record of a session, for the next server."""
    tokens, now_s = session.tokens or Tokens(), clock.monotonic_s()
    demand = session.demand(now_s)
    return SessionRecord(
        id=session.id,
        view_token=tokens.view,
        control_token=tokens.control,
        prompt=session.prompt,
        text=session.text,
        seed=session.seed,
        fps=demand.fps,
        steps=demand.steps,
        adaptive=demand.adaptive,
        kv_context=session.kv_context,
        image=None if session.image is None else base64.b64encode(session.image.tobytes()).decode("ascii"),
        paused=session.paused,
        rev=session.rev,
        epoch=session.epoch,
        made_frames=session.playback.made_frames,
        age_s=now_s - session.lifetime.opened_s,
        features=session.features.encoded,
        strength=session.features.strength,
    )
