"""Video jobs in an SQLite database beside their files, in one folder that one server uses at a time.

A file is complete when it has its name, and a job is `completed` only after that, so a server that is killed at any
moment leaves no half video: `recover` has what was running begin again. Methods block; `JobRunner` calls them on a
thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from pydantic import ConfigDict, TypeAdapter, ValidationError

from streamdiff.atomic_write import check_room, open_private
from streamdiff.engine.features import NAMES, NOTHING, Features
from streamdiff.engine.messages import DEFAULT_STRENGTH, Pictures
from streamdiff.errors import ConfigError, StreamdiffError

logger = logging.getLogger(__name__)

Status = Literal["queued", "in_progress", "completed", "failed"]
ENDED: tuple[Status, ...] = ("completed", "failed")
ATTEMPTS = 3
"""After so many that ended with the engine, the server or the disk's last room a job is taken to be the reason."""


@dataclass(frozen=True)
class VideoRequest:
    """Parameters of a video. `frames` at `fps` per second, of `width` x `height` pixels. `image`: whether it begins
    with the picture that the store keeps with it; `features`: names of the feature files there, see `Features`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # as the store reads one

    model: str
    prompt: str
    seed: int
    steps: int
    frames: int
    fps: float
    width: int
    height: int
    image: bool = False
    features: tuple[str, ...] = ()
    strength: float = DEFAULT_STRENGTH


@dataclass(frozen=True)
class Job:
    """A request and where it stands. Times are in seconds since the Unix epoch; None: not yet.

    `attempts`: how often it was begun and did not end, the current time included. `error` says why it failed.
    `inference_s`: seconds from the opening of its session to its last frame; `peak_memory_mb`: MiB of the engine
    meanwhile, at most.
    """

    id: str
    request: VideoRequest
    status: Status
    created_s: float
    attempts: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    expires_s: float | None = None
    error: str = ""
    inference_s: float | None = None
    peak_memory_mb: float | None = None


Order = Literal["asc", "desc"]
DATABASE, SUFFIX, PICTURE_SUFFIX, FEATURES_SUFFIX = "jobs.sqlite3", ".mp4", ".png", ".safetensors"
VERSION = 1
_REQUEST = TypeAdapter(VideoRequest)
_UNREADABLE = VideoRequest("unknown", "", 0, 1, 1, 1.0, 1, 1)
"""What is shown of a request that cannot be read."""
_UNFINISHED = r"\.streamdiff-[0-9a-f]{12}\.part"
_OF_A_JOB = r"video_([a-z0-9]+_)?[0-9a-f]{32}(\.\w+)?\.(mp4|png|safetensors)"
LONGEST_DOWN_S = 3600.0
"""What the time between two servers counts for at most, as nobody saw it pass."""
LOCKED_S = 0.5
"""How long another server's hold on the folder is waited for."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    request TEXT NOT NULL,
    status TEXT NOT NULL,
    created_s REAL NOT NULL,
    owner TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    started_s REAL,
    ended_s REAL,
    expires_s REAL,
    error TEXT NOT NULL DEFAULT '',
    bytes INTEGER NOT NULL DEFAULT 0,
    request_key TEXT UNIQUE,
    request_digest TEXT,
    inference_s REAL,
    peak_memory_mb REAL
);
CREATE INDEX IF NOT EXISTS jobs_status ON jobs (status, number);
CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 1), wall_s REAL NOT NULL);
"""
_COLUMNS = "id, request, status, created_s, attempts, started_s, ended_s, expires_s, error, inference_s, peak_memory_mb"


class KeyReused(StreamdiffError):
    """A request has the key of another one."""


class JobStore:
    """All jobs of a folder. For one thread at a time."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        """Opens the folder, which is made where it is missing, and keeps other servers out of it. `name` is the
        server's, which ids of jobs have in them.

        Raises:
            ConfigError: it cannot be made or written, another server uses it, or it is of a later version.
        """
        self.folder = folder.absolute()
        self._prefix = "video_" if name is None else f"video_{name}_"
        self._seen_s: tuple[float, float] | None = None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # what SQLite writes beside it has its mode
                open_private(self.folder / DATABASE).close()
            self._database = sqlite3.connect(
                self.folder / DATABASE, timeout=LOCKED_S, isolation_level=None, check_same_thread=False
            )
            # Exclusive: a second server in the same folder would begin the same jobs and remove files being written.
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                self._database.execute(f"PRAGMA {pragma}").fetchall()
            with self._transaction():
                (found,) = self._database.execute("PRAGMA user_version").fetchone()
            if found not in (0, VERSION):
                why = f"serve.jobs_dir: {self.folder} is of version {found}, and this program of {VERSION}"
                raise ConfigError(why, field="serve.jobs_dir")
            self._database.executescript(_SCHEMA)
            self._database.execute(f"PRAGMA user_version = {VERSION}")
        except OSError as error:
            why = f"serve.jobs_dir: {folder} cannot be used: {error.strerror}"
            raise ConfigError(why, field="serve.jobs_dir") from error
        except sqlite3.Error as error:
            why = "another server uses it" if "locked" in str(error) else str(error)
            why = f"serve.jobs_dir: {folder} cannot be used: {why}; name another folder"
            raise ConfigError(why, field="serve.jobs_dir") from error

    def close(self) -> None:
        self._database.close()

    def path(self, id: str) -> Path:
        """Where a job's video is when it is complete."""
        return self.folder / f"{id}{SUFFIX}"

    def picture(self, id: str) -> Pictures:
        """The picture that a job's video begins with, as it was given. Raises OSError where somebody took it away."""
        with Image.open(self._picture_path(id)) as image:
            return np.asarray(image, dtype=np.uint8)[None]

    def features(self, id: str, request: VideoRequest) -> Features:
        """Those that a job's video is made with. Raises OSError where somebody took them away."""
        files = {name: self._feature_path(id, name).read_bytes() for name in request.features}
        return Features(**files, strength=request.strength)

    def _feature_path(self, id: str, name: str) -> Path:
        return self.folder / f"{id}.{name}{FEATURES_SUFFIX}"

    def _given_paths(self, id: str) -> tuple[Path, ...]:
        """Where the picture and the features of a job are, if it has any."""
        return (self._picture_path(id), *(self._feature_path(id, name) for name in NAMES))

    def _given_bytes(self, id: str) -> int:
        return sum(path.stat().st_size for path in self._given_paths(id) if path.exists())

    def _picture_path(self, id: str) -> Path:
        return self.folder / f"{id}{PICTURE_SUFFIX}"

    def recover(self, expires_s: float = math.inf) -> int:
        """Requeue jobs that were in progress when the last server ended, and completed jobs whose file is missing;
        remove files that were not finished. Jobs that cannot be read, of another version, have failed, as have
        those during which servers ended ATTEMPTS times; they are kept until `expires_s`. Returns the number of queued
        jobs."""
        with self._transaction():
            self._database.execute("UPDATE jobs SET status = 'queued', started_s = NULL WHERE status = 'in_progress'")
            complete = {
                self.path(id).name: id for (id,) in self._select("SELECT id FROM jobs WHERE status = 'completed'")
            }
            found = {entry.name for entry in self.folder.iterdir()}
            known = [id for (id,) in self._select("SELECT id FROM jobs")]
            given = {path.name for id in known for path in self._given_paths(id)}
            for name in complete.keys() - found:
                id = complete[name]
                again = {"status": "queued", "started_s": None, "ended_s": None, "expires_s": None, "attempts": 0}
                self._update(id, **again, bytes=self._given_bytes(id))
            waiting = self._select("SELECT id, request, created_s, attempts FROM jobs WHERE status = 'queued'")
        for id, text, created_s, attempts in waiting:
            if attempts >= ATTEMPTS:
                self.fail(id, f"the server ended {ATTEMPTS} times while this was made", created_s, expires_s)
            if _request_of(text) is _UNREADABLE:
                self.fail(id, "this version of streamdiff cannot read what was asked for", created_s, expires_s)
        for name in found:
            if re.fullmatch(_UNFINISHED, name):
                (self.folder / name).unlink(missing_ok=True)
        # Of another database, or of one that was lost: whatever has its name is whole, and somebody's.
        strange = sorted(name for name in found - complete.keys() - given if re.fullmatch(_OF_A_JOB, name))
        if strange:
            logger.warning(
                "%d files in %s are of no job in %s, such as %s. They stay; delete them, or restore their database.",
                len(strange), self.folder, DATABASE, strange[0],
            )  # fmt: skip
        return self.count()

    # ---- a job's life -------------------------------------------------------------------------------------------

    def add(
        self,
        request: VideoRequest,
        owner: str,
        now_s: float,
        picture: Pictures | None = None,
        features: Features = NOTHING,
        key: tuple[str, str] | None = None,
    ) -> Job:
        """A new job at the end of the queue. Its video begins with `picture` `[1, H, W, 3]`; `features` stand for that,
        for the prompt, or for a video. `key`: see `of_key`.

        Raises:
            OSError, sqlite3.Error: the disk has no room, say; then there is no such job, and nothing of it.
        """
        check_room(self.folder)
        request = replace(request, image=picture is not None, features=features.names, strength=features.strength)
        job = Job(f"{self._prefix}{secrets.token_hex(16)}", request, "queued", now_s)
        try:
            if picture is not None:  # before the job is there, so that it never lacks it
                with open_private(self._picture_path(job.id)) as file:
                    Image.fromarray(picture[0]).save(file, "PNG")
            for name in features.names:
                with open_private(self._feature_path(job.id, name)) as file:
                    file.write(getattr(features, name))
            self._database.execute(
                "INSERT INTO jobs (id, request, status, created_s, owner, bytes, request_key, request_digest) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(
                        job.id,
                        _REQUEST.dump_json(request).decode(),
                        job.status,
                        now_s,
                        owner,
                        self._given_bytes(job.id),
                    ),
                    *(key or (None, None)),
                ),
            )
        except BaseException:
            self._remove_files(job.id)
            raise
        return job

    def begin(self, now_s: float) -> Job | None:
        """The oldest job that waits, which is in progress from now on, with one attempt more; None: none waits.

        Raises:
            OSError, sqlite3.Error: the disk has no room.
        """
        with self._transaction():
            waiting = self._select("SELECT id, attempts FROM jobs WHERE status = 'queued' ORDER BY number LIMIT 1")
            for id, attempts in waiting:
                check_room(self.folder)
                self._update(id, status="in_progress", started_s=now_s, attempts=attempts + 1)
        return self.get(waiting[0][0]) if waiting else None

    def put_back(self, id: str, *, attempt: bool) -> None:
        """Return a job in progress to its position in the queue; `attempt`: this counts as one."""
        self._put_back("id = ?", id, attempt=attempt)

    def put_back_all(self) -> None:
        """The server ends as it should: what is in progress begins again with the next."""
        self._put_back("status = 'in_progress'", attempt=False)

    def _put_back(self, condition: str, *values: object, attempt: bool) -> None:
        self._database.execute(
            f"UPDATE jobs SET status = 'queued', started_s = NULL, attempts = attempts - ? WHERE {condition}",
            (not attempt, *values),
        )

    def complete(
        self,
        id: str,
        now_s: float,
        expires_s: float,
        measured: tuple[float | None, float | None] = (None, None),
    ) -> None:
        """A job's file is complete; `measured`: its `inference_s` and `peak_memory_mb`."""
        size = self.path(id).stat().st_size + self._given_bytes(id)
        self._update(
            id, status="completed", ended_s=now_s, expires_s=expires_s, bytes=size,
            inference_s=measured[0], peak_memory_mb=measured[1],
        )  # fmt: skip

    def fail(self, id: str, error: str, now_s: float, expires_s: float) -> None:
        """A job cannot be made, ever: what was given for it is removed."""
        self._update(id, status="failed", ended_s=now_s, expires_s=expires_s, error=error, bytes=0)
        for path in self._given_paths(id):
            path.unlink(missing_ok=True)

    def delete(self, id: str) -> bool:
        """Forget a job and its file; False if there is none."""
        query = "DELETE FROM jobs WHERE id = ?", (id,)
        try:
            deleted = self._database.execute(*query).rowcount
        except sqlite3.OperationalError:  # no room even for this, and the files take some
            self._remove_files(id)
            deleted = self._database.execute(*query).rowcount
        self._remove_files(id)
        return bool(deleted)

    def _remove_files(self, id: str) -> None:
        for path in (self.path(id), *self._given_paths(id)):
            path.unlink(missing_ok=True)

    def see_time(self, wall_s: float, monotonic_s: float) -> None:
        """Move the expiry of jobs along with a wall clock that jumps: what they have left passes by the monotonic
        clock, and between two servers by the wall clock, LONGEST_DOWN_S at most. To be called before jobs end or
        expire. Mutates: self."""
        if self._seen_s is None:
            before = self._select("SELECT wall_s FROM clock")
            passed_s = min(max(wall_s - before[0][0], 0.0), LONGEST_DOWN_S) if before else 0.0
            jump_s = wall_s - before[0][0] - passed_s if before else 0.0
        else:
            jump_s = (wall_s - self._seen_s[0]) - (monotonic_s - self._seen_s[1])
        if abs(jump_s) >= 1:
            with self._transaction():
                self._database.execute("UPDATE jobs SET expires_s = expires_s + ?", (jump_s,))
                self._note_time(wall_s)
            logger.warning("The clock says %.0f s more than were seen to pass; jobs expire so much later.", jump_s)
        self._seen_s = wall_s, monotonic_s

    def _note_time(self, now_s: float) -> None:
        self._database.execute("INSERT OR REPLACE INTO clock (id, wall_s) VALUES (1, ?)", (now_s,))

    def expire(self, now_s: float) -> list[str]:
        """Forget the jobs that have been kept long enough, and their files; returns which. Notes the time for the next
        server."""
        old = [id for (id,) in self._select("SELECT id FROM jobs WHERE expires_s <= ?", now_s)]
        for id in old:
            self.delete(id)
        self._note_time(now_s)
        return old

    # ---- what there is ------------------------------------------------------------------------------------------

    def get(self, id: str) -> Job | None:
        return next(iter(self._jobs("WHERE id = ?", id)), None)

    def of_key(self, key: str, digest: str) -> Job | None:
        """The job of an earlier request with this key, or None. Raises KeyReused where that was another request."""
        found = self._select("SELECT id, request_digest FROM jobs WHERE request_key = ?", key)
        if found and found[0][1] != digest:
            raise KeyReused("`Idempotency-Key` belongs to another request; send one of its own with each new request")
        return self.get(found[0][0]) if found else None

    def page(self, *, after: str | None, limit: int, order: Order) -> list[Job] | None:
        """At most `limit` jobs in the order in which they were asked for, those behind `after`; None: there is no such
        job."""
        where, given = "", list[object]()
        if after is not None:
            (found,) = self._database.execute("SELECT max(number) FROM jobs WHERE id = ?", (after,)).fetchone()
            if found is None:
                return None
            where, given = f"WHERE number {'>' if order == 'asc' else '<'} ?", [found]
        return self._jobs(f"{where} ORDER BY number {'ASC' if order == 'asc' else 'DESC'} LIMIT ?", *given, limit)

    def count(self, owner: str | None = None) -> int:
        """Jobs that wait or run, of `owner` or of all."""
        unended = f"SELECT count(*) FROM jobs WHERE status NOT IN {ENDED}"
        query = (unended, ()) if owner is None else (f"{unended} AND owner = ?", (owner,))
        (count,) = self._database.execute(*query).fetchone()
        return int(count)

    def used_bytes(self) -> int:
        """Bytes of all videos."""
        (total,) = self._database.execute("SELECT coalesce(sum(bytes), 0) FROM jobs").fetchone()
        return int(total)

    def next_expiry_s(self) -> float | None:
        """When the next job expires; None: none does."""
        (soonest,) = self._database.execute("SELECT min(expires_s) FROM jobs").fetchone()
        return None if soonest is None else float(soonest)

    def _jobs(self, condition: str, *values: object) -> list[Job]:
        rows = self._select(f"SELECT {_COLUMNS} FROM jobs {condition}", *values)
        return [Job(id, _request_of(request), *rest) for id, request, *rest in rows]

    def _update(self, id: str, **values: object) -> None:
        """Set columns of a job."""
        columns = ", ".join(f"{column} = ?" for column in values)
        self._database.execute(f"UPDATE jobs SET {columns} WHERE id = ?", (*values.values(), id))

    def _select(self, query: str, *values: object) -> list[Any]:
        return self._database.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Context manager: a database transaction, rolled back on an exception."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")


def _request_of(text: str) -> VideoRequest:
    try:
        return _REQUEST.validate_json(text)
    except ValidationError:  # of another version, or damaged
        return _UNREADABLE


def sync(path: Path) -> None:
    """Have a file and its name on the disk, not only in its cache."""
    for each in (path, path.parent):
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
