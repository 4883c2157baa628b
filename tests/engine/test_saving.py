"""What is saved over the bridge's messages goes on, to the bit, on another engine; what does not fit is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from streamdiff.config import ModelConfig
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import (
    Accepted,
    Applied,
    Close,
    Closed,
    Command,
    Event,
    FrameBatch,
    Open,
    Opened,
    Refused,
    Reset,
    Save,
    Saved,
    SetActive,
    SetPaused,
    SetPrompt,
    SetSteps,
    Shown,
    Shutdown,
)
from streamdiff.engine.process.main import _load_runtime
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.snapshot_header import read_saved_session
from tests.saving import saved as saved_by
from tests.small import BLUE, CPU, RED, small_model

CHUNK = 12


@pytest.fixture(scope="module")
def pipeline() -> Iterator[StreamingPipeline]:
    pipeline = _load_runtime(ModelConfig(steps=2))
    yield pipeline
    pipeline.close()


class Driven:
    """An engine, everything it said, and its frames by session and number."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self.engine = Engine(pipeline, 4 * CHUNK)
        self.events: list[Event] = []
        self.frames: dict[str, dict[int, np.ndarray]] = {}

    def tell(self, *commands: Command) -> None:
        for command in commands:
            self._take(self.engine.handle(command))

    def play(self, session: str, until: Callable[[], bool]) -> None:
        """Show what is made at once."""
        while not until():
            assert self.engine.busy, f"nothing to do, and still waiting; the last events are {self.events[-5:]}"
            self._take(self.engine.step(0.01))
            self.tell(Shown(session, max(self.frames.get(session, {0: None})) + 1))

    def frames_to(self, session: str, count: int) -> None:
        self.play(session, lambda: max(self.frames.get(session, {-1: None})) + 1 >= count)

    def last(self, kind: type) -> Event:
        return next(event for event in reversed(self.events) if isinstance(event, kind))

    def _take(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, FrameBatch):
                own = self.frames.setdefault(event.session, {})
                own |= {event.first + index: picture for index, picture in enumerate(event.pictures)}


@pytest.fixture
def driven(pipeline: StreamingPipeline) -> Iterator[Driven]:
    """Its sessions are ended whatever happens: other tests have the pipeline next."""
    made = Driven(pipeline)
    yield made
    made.engine.handle(Shutdown())


def saved(driven: Driven, session: str) -> bytes:
    told = len(driven.events)
    driven.tell(Save(session, "s1"))
    driven.play(session, lambda: any(isinstance(event, Saved) for event in driven.events[told:]))
    event = driven.last(Saved)
    assert isinstance(event, Saved) and (event.session, event.request) == (session, "s1")
    return bytes(event.data)


@pytest.mark.slow
def test_a_stream_goes_on_from_the_bytes_beside_others(driven: Driven) -> None:
    driven.tell(Open("a", RED, 4), Open("b", BLUE, 5))
    driven.frames_to("a", 2 * CHUNK)
    driven.tell(SetPrompt("a", BLUE, "r1"))
    data = saved(driven, "a")
    told = read_saved_session(data)
    assert (told.text, told.seed, told.steps) == (BLUE, 4, 2)
    assert 2 * CHUNK <= told.made_frames <= max(driven.frames["a"]) + 1, "it plays on while the file is made"
    driven.tell(Open("c", "", snapshot=data))
    opened = driven.last(Opened)
    assert isinstance(opened, Opened) and (opened.session, opened.text, opened.epoch) == ("c", BLUE, 1)
    end = told.made_frames + 2 * CHUNK
    driven.frames_to("a", end)
    driven.frames_to("c", end)
    driven.frames_to("b", 2 * CHUNK)
    own = range(told.made_frames, end)
    assert min(driven.frames["c"]) == told.made_frames
    assert all(np.array_equal(driven.frames["a"][number], driven.frames["c"][number]) for number in own)
    assert not np.array_equal(driven.frames["a"][end - 1], driven.frames["b"][2 * CHUNK - 1])
    driven.tell(Close("a"), Close("b"), Close("c"))


@pytest.mark.slow
def test_what_changed_after_it_was_saved_holds_from_the_next_chunk(driven: Driven) -> None:
    """As a session that comes back: frames and epochs go on from what viewers know, and the last epoch has it all."""
    driven.tell(Open("a", RED, 4))
    driven.frames_to("a", 2 * CHUNK)
    driven.tell(SetPaused("a", True))  # or further chunks of the old prompt may come before the new one
    data = saved(driven, "a")
    made = read_saved_session(data).made_frames
    driven.tell(SetPrompt("a", BLUE, "r1"), SetSteps("a", 4, "r2"), SetPaused("a", False))
    driven.frames_to("a", made + 2 * CHUNK)
    driven.tell(Close("a"))

    driven.tell(Open("c", BLUE, steps=4, snapshot=data, epoch=9, made_frames=200, shown_frames=190))
    opened = driven.last(Opened)
    assert isinstance(opened, Opened) and (opened.text, opened.epoch) == (BLUE, 9)
    driven.tell(SetPaused("c", False))
    driven.frames_to("c", 200 + 2 * CHUNK)
    applied = [event for event in driven.events if isinstance(event, Applied) and event.session == "c"]
    assert (applied[-1].epoch, min(driven.frames["c"])) == (9, 200)
    before = made - 200
    assert all(
        np.array_equal(driven.frames["c"][n], driven.frames["a"][n + before]) for n in range(200, 200 + 2 * CHUNK)
    )
    driven.tell(SetPrompt("c", RED, "r3"))
    accepted = driven.last(Accepted)
    assert isinstance(accepted, Accepted) and accepted.epoch == 10
    driven.play("c", lambda: any(isinstance(event, Applied) and event.epoch == 10 for event in driven.events))
    again = read_saved_session(saved(driven, "c"))
    assert (again.text, again.steps) == (RED, 4)
    driven.tell(Close("c"))


@pytest.mark.slow
def test_what_does_not_fit_is_refused_by_name_and_others_go_on(driven: Driven, tmp_path: Path) -> None:
    driven.tell(Open("a", RED, 4))
    driven.frames_to("a", CHUNK)
    data = saved(driven, "a")

    def refused(command: Command) -> tuple[str, str]:
        driven.tell(command)
        event = driven.events[-1]
        assert isinstance(event, Refused)
        return event.field, event.reason

    assert refused(Open("c", "", snapshot=data[:-1]))[0] == "snapshot"
    assert refused(Open("c", "", snapshot=b"PK\x03\x04"))[0] == "snapshot"
    assert refused(Open("c", "", snapshot=data, background=True))[0] == "snapshot"
    assert refused(Open("a", "", snapshot=data))[0] == "session"
    assert refused(Open("c", "", snapshot=data, steps=3))[0] == "steps"
    assert refused(Save("c", "s2"))[0] == "session"
    driven.frames_to("a", 3 * CHUNK)
    driven.tell(Open("c", "", snapshot=data), Close("a"), Close("c"))
    assert isinstance(driven.last(Opened), Opened)


@pytest.mark.slow
def test_a_session_that_is_closed_while_it_is_saved_leaves_nothing_behind(
    driven: Driven, pipeline: StreamingPipeline
) -> None:
    assert isinstance(pipeline, StreamingPipeline)
    driven.tell(Open("a", RED, 4))
    driven.frames_to("a", CHUNK)
    driven.tell(Save("a", "s1"))
    driven.play("a", lambda: pipeline.resting.savings)
    [saving] = pipeline.resting.savings.values()
    driven.tell(Close("a"))
    refused = driven.last(Refused)
    assert isinstance(refused, Refused) and refused.request == "s1" and "was closed" in refused.reason
    while saving.made is None or not saving.made.done():
        driven.engine.step(0.01)
    driven.engine.step()
    assert not pipeline.resting.savings and not driven.engine.busy


Small = tuple[StreamingPipeline, Engine]


@pytest.fixture
def small() -> Iterator[Small]:
    """A small model's pipeline, and an engine that may make four chunks ahead."""
    model = small_model(4, layers=4, sink=2)
    pipeline = StreamingPipeline(model, CPU)
    yield pipeline, Engine(pipeline, 4 * model.spec.chunk_frames)
    pipeline.close()


def test_a_session_is_saved_with_the_prompt_that_came_while_it_was_swapped_out(small: Small) -> None:
    """Its stages have nothing of it meanwhile, so it comes back first."""
    pipeline, engine = small
    engine.handle(Open("a", RED, 1))
    events: list[Event] = []

    def until(condition: Callable[[], bool]) -> None:
        while not condition():
            events.extend(engine.step(0.01))

    until(lambda: any(isinstance(each, FrameBatch) for each in events))
    engine.handle(SetPaused("a", True))
    engine.handle(SetActive("a", False, True))
    until(lambda: pipeline.resting.is_away(0))
    engine.handle(SetPrompt("a", BLUE, "prompt", "keep"))
    engine.handle(Save("a", "save"))
    until(lambda: any(isinstance(each, Saved | Refused) for each in events))
    [saved] = [each for each in events if isinstance(each, Saved | Refused)]
    assert isinstance(saved, Saved) and read_saved_session(saved.data).text == BLUE
    until(lambda: pipeline.resting.is_away(0))
    events.clear()
    engine.handle(SetActive("a", True))
    engine.handle(SetPaused("a", False))
    engine.handle(Shown("a", 10**6))
    until(lambda: any(isinstance(each, FrameBatch | Closed) for each in events))
    assert not [each for each in events if isinstance(each, Closed)]


def test_a_reset_of_a_stream_from_a_snapshot_has_its_slow_text_encoded_beside_the_others(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, engine = small
    threads: list[str] = []
    encode = pipeline.text.encode

    def noted(text: str) -> object:
        threads.append(threading.current_thread().name)
        return encode(text)

    engine.handle(Open("a", RED, 1))
    data = saved_by(engine, "a").to_bytes()
    engine.handle(Close("a"))
    engine.handle(Open("b", "", snapshot=data))
    monkeypatch.setattr(pipeline.text, "slow", True)
    monkeypatch.setattr(pipeline.text, "encode", noted)
    events = engine.handle(Reset("b", None, "reset"))
    while not any(isinstance(each, Accepted) for each in events):
        events += engine.step(0.01)
    assert [name.split("_")[0] for name in threads] == ["text"]
