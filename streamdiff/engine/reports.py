"""Events with the properties and measurements of an engine's pipeline and sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Generic, TypeVar

from streamdiff.engine.messages import Event, InputUsed, Measured, Ready
from streamdiff.engine.pipeline_api import Pipeline
from streamdiff.engine.session import Session

_Given = TypeVar("_Given")


def ready(pipeline: Pipeline) -> Ready:
    """The `Ready` event of a pipeline."""
    return Ready(
        **asdict(pipeline.info),
        examples=tuple(pipeline.text.examples),
        suggestions=pipeline.text.suggestions,
        vocabulary=pipeline.text.vocabulary,
        work_s=pipeline.work_s(),
        sessions_fit=pipeline.sessions_fit(),
        sessions_away=pipeline.sessions_away(),
    )


class Counted(Generic[_Given]):
    """Wraps a function and counts its calls. Thread-safe."""

    def __init__(self, call: Callable[[_Given], Any]) -> None:
        self.calls = 0
        self._call, self._lock = call, threading.Lock()

    def __call__(self, given: _Given) -> Any:
        with self._lock:
            self.calls += 1
        return self._call(given)


def measured(pipeline: Pipeline, texts: int, pictures: int) -> list[Event]:
    """The `Measured` event, with counts of encoded texts and pictures; empty before the first chunk."""
    work_s = pipeline.work_s()
    if work_s is None:
        return []
    counts = pipeline.forwards()
    forwards = tuple(counts.rows[rows] for rows in range(1, max(counts.rows, default=0) + 1))
    return [
        Measured(
            work_s, tuple(pipeline.occupancy()), tuple(pipeline.busy_s()),
            forwards, tuple(counts.alone), tuple(counts.alone.values()), (texts, pictures, pipeline.video_encodings),
        )
    ]  # fmt: skip


def input_used(pipeline: Pipeline, slot: int, session: Session) -> list[Event]:
    """How the input of a session in `slot` does; nothing where it has none."""
    if (figures := pipeline.input_figures(slot)) is None:
        return []
    return [InputUsed(session.name, figures.level, figures.used, figures.dropped, figures.fault)]


def describe(sessions: Iterable[Session]) -> str:
    """Where every session is, for an error message."""
    where = [f"session {each.name!r} at chunk {each.chunk + 1} (epoch {each.epoch})" for each in sessions]
    return ", ".join(where) or "no session open"
