"""The engine on a pipeline: a painted one, and the real one with a small model. The same must hold on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from streamdiff.config import ModelConfig
from streamdiff.core import PROMPT_POLICIES, RECACHES
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import (
    Accepted,
    Applied,
    Close,
    Command,
    Event,
    FrameBatch,
    LoadFigures,
    Open,
    Opened,
    Refused,
    Reset,
    SetControls,
    SetMaxAhead,
    SetPaused,
    SetPrompt,
    SetSteps,
    Shown,
    Shutdown,
)
from streamdiff.engine.process.main import _load_runtime
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.engine.painted import CHUNK_FRAMES, INFO, PaintedPipeline
from tests.small import CONTROLS, save_model

pytestmark = pytest.mark.xdist_group("engine")  # one process loads the model
RED, BLUE, GREEN = "a red circle moving right over a meadow", "a blue star moving left at night", "a green heart"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamingPipeline]:
    """Of a small model, loaded as the product does."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, controls=CONTROLS)
    pipeline = _load_runtime(ModelConfig(name=str(folder)))
    yield pipeline
    pipeline.close()


@pytest.fixture(params=["painted", pytest.param("real", marks=pytest.mark.slow)])
def pipeline(request: pytest.FixtureRequest) -> StreamingPipeline:
    if request.param == "painted":
        painted = PaintedPipeline()
        painted.info = replace(INFO, controls=CONTROLS)
        return painted
    pipeline: StreamingPipeline = request.getfixturevalue("real")
    return pipeline


@pytest.fixture
def start(pipeline: StreamingPipeline) -> Iterator[Callable[[int], Engine]]:
    """Engines on `pipeline` with a lead of so many chunks; their sessions are closed afterwards."""
    engines: list[Engine] = []

    def start(max_ahead_chunks: int = 2) -> Engine:
        engines.append(Engine(pipeline, max_ahead_chunks * pipeline.info.chunk_frames))
        return engines[-1]

    yield start
    for engine in engines:
        engine.handle(Shutdown())


Start = Callable[[int], Engine]


def run(engine: Engine, *, until: Callable[[list[Event]], bool], show: bool = True) -> list[Event]:
    """Turn the crank until `until` is content with the events; report every frame as shown at once, if `show`."""
    events: list[Event] = []
    for _ in range(10_000):
        if until(events):
            return events
        assert engine.busy, f"nothing to do, and still waiting; so far {events}"
        new = engine.step(1.0)
        events += new
        for event in new if show else []:
            if isinstance(event, FrameBatch):
                engine.handle(Shown(event.session, event.first + len(event.pictures)))
    raise AssertionError(f"never content; so far {events[-20:]}")


def settle(engine: Engine) -> list[Event]:
    """Turn the crank until there is nothing to do."""
    return run(engine, until=lambda events: not engine.busy, show=False)


def batches(events: list[Event], session: str = "a") -> list[FrameBatch]:
    return [event for event in events if isinstance(event, FrameBatch) and event.session == session]


def count(events: list[Event], session: str = "a") -> int:
    return sum(len(batch.pictures) for batch in batches(events, session))


def pictures(events: list[Event], session: str = "a") -> np.ndarray:
    return np.concatenate([batch.pictures for batch in batches(events, session)])


def chunks(number: int, engine: Engine, session: str = "a") -> Callable[[list[Event]], bool]:
    frames = number * engine.ready().chunk_frames
    return lambda events: count(events, session) >= frames


def one(events: list[Event], kind: type[Event]) -> Event:
    found = [event for event in events if isinstance(event, kind)]
    assert len(found) == 1, events
    return found[0]


def ask(engine: Engine, command: Command, kind: type[Event]) -> Event:
    return one(engine.handle(command), kind)


def alone(engine: Engine, number: int, prompt: str = RED, seed: int = 1) -> np.ndarray:
    """The pictures of so many chunks of a session to which nothing else happens; it is closed again."""
    engine.handle(Open("alone", prompt, seed))
    made = run(engine, until=chunks(number, engine, "alone"))
    engine.handle(Close("alone"))
    return pictures(made, "alone")


def test_a_session_makes_numbered_frames_of_the_declared_size(start: Start) -> None:
    engine = start(2)
    ready = engine.ready()
    assert ready.examples and ready.vocabulary
    opened = ask(engine, Open("a", RED, 5), Opened)
    assert opened == Opened("a", 0, opened.text, opened.notice)  # type: ignore[attr-defined]
    events = run(engine, until=chunks(3, engine))
    assert one(events, Applied) == Applied("a", 0, 0, 0)
    expected = 0
    for batch in batches(events):
        assert batch.first == expected
        assert batch.pictures.shape[1:] == (ready.height, ready.width, 3) and batch.pictures.dtype == np.uint8
        expected += len(batch.pictures)
        finishes = expected % ready.chunk_frames == 0
        assert (batch.chunk_s is not None) == finishes, "the time is told with the last piece"
        assert batch.chunk == (expected - 1) // ready.chunk_frames


def test_the_engine_stops_at_its_lead_and_goes_on_when_frames_are_shown(start: Start) -> None:
    engine = start(2)
    size = engine.ready().chunk_frames
    engine.handle(Open("a", RED))
    assert count(settle(engine)) == 2 * size
    engine.handle(Shown("a", size - 1))
    assert count(settle(engine)) == 0, "no room for a whole chunk"
    engine.handle(Shown("a", size))
    assert count(settle(engine)) == size
    engine.handle(Shown("a", 10**9))
    assert count(settle(engine)) == 2 * size, "never more than the lead, whatever is reported"


def test_a_prompt_changes_later_chunks_only_and_nothing_is_written_meanwhile(
    start: Start, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = start(2)
    plain = alone(engine, 4)
    engine.handle(Open("a", RED, 1))
    before = run(engine, until=chunks(2, engine))
    accepted = ask(engine, SetPrompt("a", BLUE, "r1"), Accepted)
    assert accepted.request == "r1"  # type: ignore[attr-defined]
    after = run(engine, until=lambda events: any(isinstance(event, Applied) for event in events))
    applied = one(after, Applied)
    assert isinstance(applied, Applied) and isinstance(accepted, Accepted)
    assert applied.epoch == accepted.epoch
    every = [*before, *after]
    boundary = applied.first_frame
    assert boundary % engine.ready().chunk_frames == 0, "between two chunks"
    assert all(
        batch.epoch == (applied.epoch if batch.first >= boundary else applied.epoch - 1) for batch in batches(every)
    )
    made = pictures(every)
    assert np.array_equal(made[:boundary], plain[:boundary]), "frames before it are untouched"
    assert not np.array_equal(made[boundary:], plain[boundary : len(made)])
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_a_reset_equals_a_fresh_stream(start: Start) -> None:
    engine = start(2)
    fresh = alone(engine, 2, BLUE, 7)
    engine.handle(Open("a", RED, 1))
    before = run(engine, until=chunks(2, engine))
    for _ in range(2):
        engine.step(0.0)  # something is in flight
    engine.handle(SetPrompt("a", BLUE))
    accepted = ask(engine, Reset("a", 7, "r"), Accepted)
    assert isinstance(accepted, Accepted)
    after = run(engine, until=chunks(2, engine))
    assert all(batch.epoch == accepted.epoch for batch in batches(after)), "nothing of before comes out"
    assert np.array_equal(pictures(after)[: len(fresh)], fresh[: count(after)])
    assert batches(after)[0].first >= count(before), "frame numbers go on"
    assert batches(after)[0].chunk == 0


def test_a_pause_ends_the_work_and_resume_goes_on_as_if_nothing_was(start: Start) -> None:
    engine = start(2)
    plain = alone(engine, 4)
    engine.handle(Open("a", RED, 1))
    events = run(engine, until=chunks(1, engine))
    engine.handle(SetPaused("a", True))
    events += settle(engine)
    engine.handle(Shown("a", count(events)))
    assert not engine.busy, "paused, with room"
    engine.handle(SetPaused("a", True))
    engine.handle(SetPaused("a", False))
    events += run(engine, until=lambda new: count(events) + count(new) >= len(plain))
    shared = min(len(plain), count(events))
    assert np.array_equal(pictures(events)[:shared], plain[:shared])


def test_sessions_do_not_touch_each_other(start: Start) -> None:
    engine = start(2)
    own = {"a": alone(engine, 2, RED, 1), "b": alone(engine, 2, BLUE, 2)}
    engine.handle(Open("a", RED, 1))
    engine.handle(Open("b", BLUE, 2))
    both = run(engine, until=lambda e: chunks(2, engine)(e) and chunks(2, engine, "b")(e))
    for name, made in own.items():
        shared = min(len(made), count(both, name))
        assert np.array_equal(pictures(both, name)[:shared], made[:shared])
    assert [e.session for e in engine.handle(Close("a"))] == ["a"]  # type: ignore[union-attr]
    assert engine.handle(Shown("a", 5)) == [], "a report for a session that is gone is ignored"
    rest = run(engine, until=chunks(1, engine, "b"))
    assert not batches(rest, "a")


def test_a_slot_used_again_gives_a_stream_of_its_own(start: Start) -> None:
    engine = start(2)
    opened = ask(engine, Open("a", RED), Opened)
    engine.step(0.0)
    engine.handle(Close("a"))
    again = ask(engine, Open("b", BLUE), Opened)
    assert again.epoch > opened.epoch  # type: ignore[attr-defined]
    events = run(engine, until=chunks(1, engine, "b"))
    assert batches(events, "b")[0].first == 0
    assert not batches(events, "a")


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (Open("a", RED), "session"),
        (Open("", RED), "session"),
        (Open("b", "  \n"), "prompt"),
        (Open("b", RED, seed=2**31), "seed"),
        (Open("b", RED, steps=3), "steps"),
        (Open("b", RED, kv_context="dirty"), "kv_context"),
        (SetPrompt("a", BLUE, "r", "explode"), "switch"),
        (SetPrompt("nobody", RED, "r"), "session"),
        (SetSteps("a", 3, "r"), "steps"),
        (Reset("a", -5, "r"), "seed"),
        (SetPaused("nobody", True), "session"),
        (Close("nobody"), "session"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(start: Start, command: Command, field: str) -> None:
    engine = start(2)
    engine.handle(Open("a", RED, 3))
    refused = ask(engine, command, Refused)
    assert isinstance(refused, Refused)
    assert refused.field == field
    assert refused.request == getattr(command, "request", "")
    events = run(engine, until=chunks(1, engine))
    assert one(events, Applied) == Applied("a", batches(events)[0].epoch, 0, 0)
    assert len(engine.handle(Shutdown())) == 1, "only a is open"


def test_the_painter_gets_what_was_asked_and_nothing_twice() -> None:
    pipeline = PaintedPipeline()
    pipeline.info = replace(INFO, steps=2, kv_context="staircase")
    engine = Engine(pipeline, CHUNK_FRAMES)
    engine.handle(Open("a", "red", 4))
    engine.handle(Open("b", "blue", 4, 4, "same_step"))
    for text in ("green", "blue", "red"):
        engine.handle(SetPrompt("a", text))
    engine.step()
    engine.step()
    assert pipeline.calls == [
        ("open", 0, "red", 2, "staircase"),
        ("open", 1, "blue", 4, "same_step"),
        ("set_conditioning", 0, "red", 3, "keep"),
    ]
    assert "session 'a' at chunk 0" in engine.describe()
    engine.close()
    assert pipeline.closed


@pytest.mark.parametrize("kv_context", ["clean", "staircase", "same_step"])
def test_a_session_tells_which_switches_it_can_have(start: Start, kv_context: str) -> None:
    engine = start(2)
    opened = ask(engine, Open("a", RED, kv_context=kv_context), Opened)
    assert isinstance(opened, Opened)
    assert set(opened.switches) == {*PROMPT_POLICIES} - ({*RECACHES} if kv_context == "same_step" else set())
    for switch in PROMPT_POLICIES:
        answer = engine.handle(SetPrompt("a", BLUE, "r", switch))
        assert isinstance(answer[0], Accepted if switch in opened.switches else Refused)


def test_a_session_has_the_lead_it_asks_for(start: Start) -> None:
    engine = start(2)
    size = engine.ready().chunk_frames
    engine.handle(Open("a", RED, max_ahead_frames=4 * size))
    made = count(settle(engine))
    assert 3 * size < made <= 4 * size
    engine.handle(SetMaxAhead("a", 6 * size))
    assert 5 * size < made + count(settle(engine)) <= 6 * size


@pytest.mark.parametrize("late_frames", [0, 2, 5, 12, 99])
def test_a_steered_stream_s_next_chunk_is_admitted_as_late_as_the_lead_says(start: Start, late_frames: int) -> None:
    engine = start(2)
    size = engine.ready().chunk_frames
    engine.handle(Open("a", RED, max_ahead_frames=9 * size))
    engine.handle(SetControls("a", {"x": 1.0}))
    engine.handle(SetMaxAhead("a", max(1, 2 * size - late_frames)))
    made = count(settle(engine))
    waiting = max(size - late_frames, 0)  # frames that wait when the next chunk is admitted
    engine.handle(Shown("a", made - waiting - 1))
    assert count(settle(engine)) == 0
    engine.handle(Shown("a", made - waiting))
    assert count(settle(engine)) == size


@pytest.mark.slow
def test_the_engine_says_what_a_chunk_costs(real: StreamingPipeline) -> None:
    engine = Engine(real, 2 * real.info.chunk_frames)
    ready = engine.ready()
    assert ready.chunk_compute_s is not None and ready.max_sessions is not None
    assert ready.steps == 4 and ready.steps_known == (4, 2)
    engine.handle(Open("a", RED))
    events = run(engine, until=chunks(3, engine))
    engine.handle(Shutdown())
    measured = [event.chunk_compute_s for event in events if isinstance(event, LoadFigures)]
    assert 2 <= len(measured) <= 3 and min(measured) > 0, "two chunks may come out of one step, the lead is no longer"
    busy_s = [stage_s for event in events if isinstance(event, LoadFigures) for stage_s in event.busy_s]
    assert len(busy_s) == len(measured) and busy_s[0] > 0, "one stage"
    assert all(before < after for before, after in pairwise(busy_s))
