"""Video jobs and what was given for them in an SQLite database, beside the videos, in one folder that one server uses
at a time.

A video is complete when it has its name, and a job is `completed` only after that, so a server that is killed at any
moment leaves no half video: `recover` has what was running begin again. Methods block; `JobRunner` calls them on a
thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from streamdiff import clock
from streamdiff.atomic_write import check_room, open_private
from streamdiff.engine.features import Features
from streamdiff.engine.messages import DEFAULT_STRENGTH, Data, Pictures
from streamdiff.errors import ConfigError
from streamdiff.server.problem import Problem

logger = logging.getLogger(__name__)

Status = Literal["queued", "in_progress", "completed", "failed"]
ENDED: tuple[Status, ...] = ("completed", "failed")
ATTEMPTS = 3
"""After so many that ended with the engine, the server or the disk's last room a job is taken to be the reason."""


@dataclass(frozen=True)
class VideoRequest:
    """Parameters of a video. `frames` at `fps` per second, of `width` x `height` pixels. Its picture and its features
    lie in the store."""

    model: str
    prompt: str
    seed: int
    steps: int
    frames: int
    fps: float
    width: int
    height: int
    strength: float = DEFAULT_STRENGTH


@dataclass(frozen=True, kw_only=True)
class Job(VideoRequest):
    """A request and where it stands: a row of the database. Times are in seconds since the Unix epoch; None: not yet.

    `attempts`: how often it was begun and did not end, the current time included. `error` says why it failed.
    `inference_s`: seconds from the opening of its session to its last frame; `peak_memory_mb`: MiB of the engine
    meanwhile, at most.
    """

    id: str
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
DATABASE, SUFFIX = "jobs.sqlite3", ".mp4"
VERSION = 2
PICTURE = "picture"
_UNFINISHED = r"\.streamdiff-[0-9a-f]{12}\.part"
_OF_A_JOB = r"video_([a-z0-9]+_)?[0-9a-f]{32}\.mp4"
KEEP_S = 86_400.0
"""Seconds after its end at which a job and its video are deleted."""
LONGEST_DOWN_S = 3600.0
"""What the time between two servers counts for at most, as nobody saw it pass."""
LOCKED_S = 0.5
"""How long another server's hold on the folder is waited for."""
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    {", ".join(each.name for each in fields(Job) if each.name != "id")},
    owner TEXT NOT NULL,
    bytes INTEGER NOT NULL DEFAULT 0,
    request_key TEXT UNIQUE,
    request_digest TEXT
);
CREATE INDEX IF NOT EXISTS jobs_status ON jobs (status, number);
CREATE TABLE IF NOT EXISTS inputs (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (job, name)
);
CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 1), wall_s REAL NOT NULL);
PRAGMA user_version = {VERSION};
"""
_COLUMNS = ", ".join(each.name for each in fields(Job))
_PRAGMAS = (
    "auto_vacuum = FULL",
    "foreign_keys = ON",
    "locking_mode = EXCLUSIVE",  # a second server would begin the same jobs and remove files being written
    "journal_mode = WAL",
    "synchronous = FULL",
)


class JobStore:
    """All jobs of a folder. For one thread at a time."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        """Opens the folder, which is made where it is missing, and keeps other servers out of it. `name` is the
        server's, which ids of jobs have in them.

        Raises:
            ConfigError: it cannot be made or written, another server uses it, or it is of another version.
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
            for pragma in _PRAGMAS:
                self._execute(f"PRAGMA {pragma}")
            with self._transaction():
                found = self._value("PRAGMA user_version")
            if found not in (0, VERSION):
                raise _unusable(self.folder, f"it is of version {found}, and this program of {VERSION}")
            self._database.executescript(_SCHEMA)
        except OSError as error:
            raise _unusable(folder, error.strerror) from error
        except sqlite3.Error as error:
            raise _unusable(folder, "another server uses it" if "locked" in str(error) else error) from error

    def close(self) -> None:
        self._database.close()

    def path(self, id: str) -> Path:
        """Where a job's video is when it is complete."""
        return self.folder / f"{id}{SUFFIX}"

    def inputs(self, job: Job) -> tuple[Pictures | None, Features]:
        """The picture `[1, H, W, 3]` that a job's video begins with, and the features that it is made with."""
        given = dict(self._execute("SELECT name, data FROM inputs WHERE job = ?", job.id))
        raw = given.pop(PICTURE, None)
        picture = None if raw is None else np.frombuffer(raw, np.uint8).reshape(1, job.height, job.width, 3)
        return picture, Features(**given, strength=job.strength)

    def recover(self) -> int:
        """Requeue jobs that were in progress when the last server ended, and completed jobs whose file is missing;
        remove files that were not finished. Jobs during which servers ended ATTEMPTS times have failed. Returns the
        number of queued jobs."""
        found = {entry.name for entry in self.folder.iterdir()}
        self.put_back(attempt=True)
        complete = {self.path(job.id).name: job.id for job in self._jobs("WHERE status = 'completed'")}
        for name in complete.keys() - found:
            again = {"started_s": None, "ended_s": None, "expires_s": None, "attempts": 0, "bytes": 0}
            self._update(complete[name], status="queued", **again)
        for job in self._jobs("WHERE status = 'queued' AND attempts >= ?", ATTEMPTS):
            self.fail(job.id, f"the server ended {ATTEMPTS} times while this was made")
        for name in found:
            if re.fullmatch(_UNFINISHED, name):
                (self.folder / name).unlink(missing_ok=True)
        # Of another database, or of one that was lost: whatever has its name is whole, and somebody's.
        strange = sorted(name for name in found - complete.keys() if re.fullmatch(_OF_A_JOB, name))
        if strange:
            logger.warning(
                "%d files in %s are of no job in %s, such as %s. They stay; delete them, or restore their database.",
                len(strange), self.folder, DATABASE, strange[0],
            )  # fmt: skip
        return self.count()

    # ---- a job's life -------------------------------------------------------------------------------------------

    def add(
        self, request: VideoRequest, owner: str, given: Mapping[str, Data] = {}, key: tuple[str, str] | None = None
    ) -> Job:
        """A new job at the end of the queue. `given`: the pixels `[1, H, W, 3]` of the PICTURE that its video begins
        with, and by their names features that stand for that, for the prompt, or for a video. `key`: see `of_key`.

        Raises:
            OSError, sqlite3.Error: the disk has no room, say; then there is no such job, and nothing of it.
        """
        check_room(self.folder)
        id = f"{self._prefix}{secrets.token_hex(16)}"
        job = Job(**asdict(request), id=id, status="queued", created_s=clock.wall_s())
        row = asdict(job) | {"owner": owner} | dict(zip(("request_key", "request_digest"), key or (), strict=False))
        with self._transaction():
            places = ", ".join("?" * len(row))
            self._execute(f"INSERT INTO jobs ({', '.join(row)}) VALUES ({places})", *row.values())
            self._database.executemany(
                "INSERT INTO inputs VALUES (?, ?, ?)", [(job.id, name, data) for name, data in given.items()]
            )
        return job

    def begin(self) -> Job | None:
        """The oldest job that waits, which is in progress from now on, with one attempt more; None: none waits.

        Raises:
            OSError, sqlite3.Error: the disk has no room.
        """
        for job in self._jobs("WHERE status = 'queued' ORDER BY number LIMIT 1"):
            check_room(self.folder)
            self._update(job.id, status="in_progress", started_s=clock.wall_s(), attempts=job.attempts + 1)
            return self.get(job.id)
        return None

    def put_back(self, id: str | None = None, *, attempt: bool) -> None:
        """Return a job in progress to its position in the queue, None: all of them; `attempt`: this counts as one."""
        query = (
            "UPDATE jobs SET status = 'queued', started_s = NULL, attempts = attempts - ? WHERE status = 'in_progress'"
        )
        self._execute(f"{query} AND id = coalesce(?, id)", not attempt, id)

    def complete(self, id: str, inference_s: float | None, peak_memory_mb: float | None) -> None:
        """A job's file is complete."""
        measured = {"inference_s": inference_s, "peak_memory_mb": peak_memory_mb}
        self._end(id, status="completed", bytes=self.path(id).stat().st_size, **measured)

    def fail(self, id: str, error: str) -> None:
        """A job cannot be made, ever: what was given for it is removed."""
        self._end(id, status="failed", error=error, bytes=0)
        self._execute("DELETE FROM inputs WHERE job = ?", id)

    def _end(self, id: str, **values: object) -> None:
        now_s = self._now_s()
        self._update(id, ended_s=now_s, expires_s=now_s + KEEP_S, **values)

    def delete(self, id: str) -> bool:
        """Forget a job and its file; False if there is none."""
        query = "DELETE FROM jobs WHERE id = ?", (id,)
        try:
            deleted = self._database.execute(*query).rowcount
        except sqlite3.OperationalError:  # no room even for this, and the file takes some
            self.path(id).unlink(missing_ok=True)
            deleted = self._database.execute(*query).rowcount
        self.path(id).unlink(missing_ok=True)
        return bool(deleted)

    def _now_s(self) -> float:
        """The wall clock. Where it has jumped, the expiry of jobs moves along: what they have left passes by the
        monotonic clock, and between two servers by the wall clock, LONGEST_DOWN_S at most. Mutates: self."""
        wall_s, monotonic_s = clock.wall_s(), clock.monotonic_s()
        if self._seen_s is not None:
            jump_s = (wall_s - self._seen_s[0]) - (monotonic_s - self._seen_s[1])
        elif (last_s := self._value("SELECT max(wall_s) FROM clock")) is not None:
            jump_s = wall_s - last_s - min(max(wall_s - last_s, 0.0), LONGEST_DOWN_S)
        else:
            jump_s = 0.0
        if abs(jump_s) >= 1:
            with self._transaction():
                self._execute("UPDATE jobs SET expires_s = expires_s + ?", jump_s)
                self._note_time(wall_s)
            logger.warning("The clock says %.0f s more than were seen to pass; jobs expire so much later.", jump_s)
        self._seen_s = wall_s, monotonic_s
        return wall_s

    def _note_time(self, now_s: float) -> None:
        self._execute("INSERT OR REPLACE INTO clock (id, wall_s) VALUES (1, ?)", now_s)

    def expire(self) -> list[str]:
        """Forget the jobs that have been kept long enough, and their files; returns which. Notes the time for the next
        server."""
        now_s = self._now_s()
        old = [id for (id,) in self._execute("SELECT id FROM jobs WHERE expires_s <= ?", now_s)]
        for id in old:
            self.delete(id)
        self._note_time(now_s)
        return old

    # ---- what there is ------------------------------------------------------------------------------------------

    def get(self, id: str) -> Job | None:
        return next(iter(self._jobs("WHERE id = ?", id)), None)

    def of_key(self, key: str, digest: str) -> Job | None:
        """The job of an earlier request with this key, or None. Raises Problem, 409, where that was another request."""
        found = self._execute("SELECT id, request_digest FROM jobs WHERE request_key = ?", key)
        if found and found[0][1] != digest:
            why = "`Idempotency-Key` belongs to another request; send one of its own with each new request"
            raise Problem(409, why, code="idempotency_key", field="Idempotency-Key")
        return self.get(found[0][0]) if found else None

    def page(self, *, after: str | None, limit: int, order: Order) -> list[Job] | None:
        """At most `limit` jobs in the order in which they were asked for, those behind `after`; None: there is no such
        job."""
        where, given = "", list[object]()
        if after is not None:
            found = self._value("SELECT max(number) FROM jobs WHERE id = ?", after)
            if found is None:
                return None
            where, given = f"WHERE number {'>' if order == 'asc' else '<'} ?", [found]
        return self._jobs(f"{where} ORDER BY number {'ASC' if order == 'asc' else 'DESC'} LIMIT ?", *given, limit)

    def count(self, owner: str | None = None) -> int:
        """Jobs that wait or run, of `owner` or of all."""
        whose, given = ("", ()) if owner is None else (" AND owner = ?", (owner,))
        return int(self._value(f"SELECT count(*) FROM jobs WHERE status NOT IN {ENDED}{whose}", *given))

    def used_bytes(self) -> int:
        """Bytes of all videos, and of what was given for them."""
        tables = "SELECT bytes AS size FROM jobs UNION ALL SELECT length(data) FROM inputs"
        return int(self._value(f"SELECT coalesce(sum(size), 0) FROM ({tables})"))

    def next_expiry_s(self) -> float | None:
        """When the next job expires; None: none does."""
        soonest_s: float | None = self._value("SELECT min(expires_s) FROM jobs")
        return soonest_s

    def _jobs(self, condition: str, *values: object) -> list[Job]:
        names = [each.name for each in fields(Job)]
        rows = self._execute(f"SELECT {_COLUMNS} FROM jobs {condition}", *values)
        return [Job(**dict(zip(names, row, strict=True))) for row in rows]

    def _update(self, id: str, **values: object) -> None:
        """Set columns of a job."""
        columns = ", ".join(f"{column} = ?" for column in values)
        self._execute(f"UPDATE jobs SET {columns} WHERE id = ?", *values.values(), id)

    def _execute(self, query: str, *values: object) -> list[Any]:
        return self._database.execute(query, values).fetchall()

    def _value(self, query: str, *values: object) -> Any:
        """The first column of the first row."""
        return self._execute(query, *values)[0][0]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Context manager: a database transaction, rolled back on an exception."""
        self._database.execute("BEGIN IMMEDIATE")
        with self._database:
            yield


def _unusable(folder: Path, why: object) -> ConfigError:
    field = "serve.jobs_dir"
    return ConfigError(f"{field}: {folder} cannot be used: {why}; name another folder", field=field)


def sync(path: Path) -> None:
    """Have a file and its name on the disk, not only in its cache."""
    for each in (path, path.parent):
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
