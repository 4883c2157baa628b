"""A session that fails ends alone, and says why; the engine and its other sessions go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamdiff.api import StreamSession
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import Closed, Command, Event, FrameBatch, Open, Opened, Refused, Reset, SetPrompt
from streamdiff.errors import EngineFailure, StreamdiffError
from tests.engine.painted import CHUNK_FRAMES, PaintedPipeline


def opened(pipeline: PaintedPipeline, *names: str) -> Engine:
    engine = Engine(pipeline, 4 * CHUNK_FRAMES)
    for name in names:
        assert isinstance(engine.handle(Open(name, "red star"))[0], Opened)
    return engine


def failing(error: Exception) -> Callable[..., None]:
    def fail(*arguments: object, **named: object) -> None:
        raise error

    return fail


def until(engine: Engine, wanted: type[Event]) -> list[Any]:
    """The events of the first step that has one of a kind."""
    for _ in range(100):
        events = engine.step()
        if found := [event for event in events if isinstance(event, wanted)]:
            return [*found, *(event for event in events if not isinstance(event, wanted))]
    raise AssertionError(f"there is no {wanted.__name__}")


def test_what_the_pipeline_loses_is_closed_with_the_reason_and_its_slot_is_free() -> None:
    pipeline = PaintedPipeline()
    engine = opened(pipeline, "one", "two")
    pipeline.on_fault(0, "chunk 3, step 1: NaN")
    pipeline.on_fault(0, "said twice")
    assert until(engine, Closed)[0] == Closed("one", "chunk 3, step 1: NaN")
    assert pipeline.calls.count(("close_session", 0)) == 1 and list(pipeline.streams) == [1]
    assert until(engine, FrameBatch)[0].session == "two"
    [event] = engine.handle(Open("one", "blue star"))
    assert isinstance(event, Opened) and event.epoch == 1, "above all epochs of the one that failed"
    while engine.busy:
        assert not any(isinstance(event, Closed) for event in engine.step())


@pytest.mark.parametrize("command", [SetPrompt("one", "blue star", "7"), Reset("one", 5, "7")])
@pytest.mark.parametrize("error", [OSError("the disk is gone"), MemoryError("no memory")])
def test_an_error_of_a_session_s_own_ends_that_session(
    command: Command, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = PaintedPipeline()
    engine = opened(pipeline, "one", "two")

    monkeypatch.setattr(pipeline, "set_conditioning" if isinstance(command, SetPrompt) else "reset", failing(error))
    events = engine.handle(command)
    if isinstance(command, SetPrompt):  # given to the pipeline with the next step
        events = until(engine, Closed)
    assert Closed("one", f"{type(error).__name__}: {error}") in events
    assert list(pipeline.streams) == [1] and until(engine, FrameBatch)[0].session == "two"


@pytest.mark.parametrize(
    ("error", "code"), [(MemoryError("full"), "memory"), (RuntimeError("it cannot"), ""), (OSError("gone"), "")]
)
def test_a_session_that_cannot_be_opened_is_refused(
    error: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = PaintedPipeline()
    engine = opened(pipeline, "two")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "open", failing(error))
        [event] = engine.handle(Open("one", "red star"))
    assert isinstance(event, Refused) and event.code == code and str(error) in event.reason
    assert isinstance(engine.handle(Open("one", "red star"))[0], Opened), "nothing of it was left open"


@pytest.mark.parametrize("call", ["set_conditioning", "open"])
def test_the_engine_s_end_is_no_session_s(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = PaintedPipeline()
    engine = opened(pipeline, "one")

    monkeypatch.setattr(pipeline, call, failing(EngineFailure("rank 2 is gone")))
    tell: dict[str, Callable[[], object]] = {
        "set_conditioning": lambda: (engine.handle(SetPrompt("one", "blue star")), engine.step()),
        "open": lambda: engine.handle(Open("two", "red star")),
    }
    with pytest.raises(EngineFailure, match="rank 2 is gone"):
        tell[call]()


def test_a_stream_in_one_s_own_process_says_why_it_ended_and_can_begin_again() -> None:
    pipeline = PaintedPipeline()
    with StreamSession(pipeline, "red star") as stream:
        frames = iter(stream)
        first = next(frames)
        pipeline.on_fault(0, "chunk 1, step 0: NaN")
        with pytest.raises(StreamdiffError, match="the stream failed and has ended: chunk 1, step 0: NaN"):
            list(frames)
        with pytest.raises(StreamdiffError, match="has ended: chunk 1"):
            stream.set_prompt("blue star")
        stream.restart("red star")
        assert np.array_equal(next(iter(stream)), first)
