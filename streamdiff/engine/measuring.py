"""What a pipeline is measured to do, as the engine tells it with every finished chunk."""

from __future__ import annotations

from streamdiff.engine.messages import Event, Measured
from streamdiff.engine.pipeline_api import Pipeline


def measured(pipeline: Pipeline) -> list[Event]:
    """The event; none before anything was measured."""
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
