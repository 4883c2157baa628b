"""Sessions are saved as the product does it, and waited for."""

from __future__ import annotations

from collections.abc import Callable

from streamdiff.core import Frames
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import Event, Save, Saved
from streamdiff.pipeline.snapshot.file import Snapshot
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline


def saved(engine: Engine, name: str, take: Callable[[list[Event]], None] = lambda events: None) -> Snapshot:
    """A snapshot of an engine's session; `take` is given the events that come meanwhile."""
    events = engine.handle(Save(name))
    while not (answers := [each for each in events if isinstance(each, Saved)]):
        take(events)
        events = engine.step(0.01)
    take(events)
    return Snapshot.from_bytes(answers[0].data)


def save(pipeline: StreamingPipeline, session: int) -> tuple[Snapshot, list[Frames]]:
    """A snapshot of a pipeline's session, and the frames that came before it was taken; those after it come with the
    next step."""
    before: list[Frames] = []
    after: list[Frames] = []
    while not pipeline.resting.comes_to_rest(session):
        before += pipeline.step(0.01)
    ticket = pipeline.resting.save(session)
    while not (done := pipeline.resting.take_done()):
        after += pipeline.step(0.01)
    pipeline.undelivered += after
    assert done[0][0] == ticket and isinstance(done[0][1], Snapshot), done
    return done[0][1], before
