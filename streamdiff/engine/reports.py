"""What an engine tells of its pipeline and its sessions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from streamdiff.engine.messages import Event, InputUsed, Measured, Ready
from streamdiff.engine.pipeline_api import FeedingPipeline, Pipeline
from streamdiff.engine.session import Session


def ready(pipeline: Pipeline, sessions_away: int | None) -> Ready:
    """What the pipeline is, for whoever connects; `sessions_away`: see `Ready`."""
    return Ready(
        **asdict(pipeline.info),
        examples=tuple(pipeline.text.examples),
        suggestions=pipeline.text.suggestions,
        vocabulary=pipeline.text.vocabulary,
        work_s=pipeline.work_s(),
        sessions_fit=pipeline.sessions_fit(),
        sessions_away=sessions_away,
    )


def measured(pipeline: Pipeline) -> list[Event]:
    """What was measured by now; nothing before the first chunk."""
    work_s = pipeline.work_s()
    if work_s is None:
        return []
    counts = pipeline.forwards()
    forwards = tuple(counts.rows[rows] for rows in range(1, max(counts.rows, default=0) + 1))
    return [
        Measured(
            work_s, tuple(pipeline.occupancy()), tuple(pipeline.busy_s()),
            forwards, tuple(counts.alone), tuple(counts.alone.values()),
        )
    ]  # fmt: skip


def input_used(pipeline: Pipeline, slot: int, session: Session) -> list[Event]:
    """How the input of a session in `slot` does; nothing where it has none."""
    figures = pipeline.input_figures(slot) if isinstance(pipeline, FeedingPipeline) else None
    if figures is None:
        return []
    return [InputUsed(session.name, figures.level, figures.used, figures.dropped, figures.fault)]


def describe(sessions: Iterable[Session]) -> str:
    """Where every session is, for an error message."""
    where = [f"session {each.name!r} at chunk {each.chunk + 1} (epoch {each.epoch})" for each in sessions]
    return ", ".join(where) or "no session open"
