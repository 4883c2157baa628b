"""A text encoder that takes its time: streams go on, requests are answered in order, and the latest prompt wins."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace

import numpy as np
import pytest

from streamdiff.api import StreamSession
from streamdiff.config import ModelConfig
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import (
    Accepted,
    Applied,
    Close,
    Closed,
    Command,
    Event,
    Open,
    Opened,
    Refused,
    Reset,
    SetPaused,
    SetPrompt,
    Shown,
    Shutdown,
)
from streamdiff.engine.process.main import _load_runtime
from streamdiff.errors import RequestError, StreamdiffError
from tests.engine.painted import CHUNK_FRAMES, PaintedPipeline, PaintedText, checksum
from tests.engine.test_engine import chunks, pictures, run

LIMIT_S = 240.0


class Ink(str):
    """Conditioning of which one can tell whether it is still held."""


class SlowText(PaintedText):
    """Encodes when it may: a text that is held waits for `release`, one in `errors` fails."""

    slow = True

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.made: list[weakref.ref[Ink]] = []
        self.threads: set[int] = set()
        self.errors: dict[str, Exception] = {}
        self.begun: queue.Queue[str] = queue.Queue()
        self._held: dict[str, threading.Event] = {}

    def encode(self, text: str) -> str:
        conditioning = Ink(text)
        self.made.append(weakref.ref(conditioning))
        self.encoded.append(text)
        self.threads.add(threading.get_ident())
        self.begun.put(text)
        if (held := self._held.get(text)) is not None:
            assert held.wait(LIMIT_S)
        if (error := self.errors.get(text)) is not None:
            raise error
        return conditioning

    def hold(self, *texts: str) -> None:
        self._held.update({text: threading.Event() for text in texts})

    def release(self, *texts: str) -> None:
        for text in texts or tuple(self._held):
            self._held[text].set()


class SlowPipeline(PaintedPipeline):
    def __init__(self) -> None:
        super().__init__()
        self.text: SlowText = SlowText()


@pytest.fixture
def pipeline() -> Iterator[SlowPipeline]:
    pipeline = SlowPipeline()
    yield pipeline
    pipeline.text.release()
    assert threading.get_ident() not in pipeline.text.threads, "encoded on the thread that makes frames"


@pytest.fixture
def text(pipeline: SlowPipeline) -> SlowText:
    return pipeline.text


@pytest.fixture
def engine(pipeline: SlowPipeline) -> Iterator[Engine]:
    """With session `a` open on "red"."""
    engine = Engine(pipeline, 2 * CHUNK_FRAMES)
    assert tell(engine, Open("a", "red", 1)) == [Opened("a", 0, "red")]
    yield engine
    pipeline.text.release()
    engine.close()


def encoded(engine: Engine) -> list[Event]:
    """What there is to tell once everything that is being encoded, and need not wait, is done."""
    events: list[Event] = []
    while engine.encodings():
        done, _ = futures.wait(engine.encodings(), LIMIT_S)
        assert done
        events += engine.settle()
    return events


def tell(engine: Engine, command: Command) -> list[Event]:
    """Everything that is told about a command whose text is not held."""
    return [*engine.handle(command), *encoded(engine)]


def follow(engine: Engine, number: int, session: str = "a") -> list[Event]:
    return run(engine, until=chunks(number, engine, session))


def colours(events: list[Event], session: str = "a") -> set[int]:
    return set(pictures(events, session)[:, 0, 0, 2].tolist())


def test_the_stream_goes_on_while_a_prompt_is_encoded(engine: Engine, text: SlowText) -> None:
    text.hold("blue")
    assert engine.handle(SetPrompt("a", "blue", "r1")) == [], "answered when it is encoded"
    events = follow(engine, 20)
    assert text.begun.get(timeout=LIMIT_S) == "red" and text.begun.get(timeout=LIMIT_S) == "blue"
    assert colours(events) == {checksum("red")} and not any(isinstance(event, Accepted) for event in events)
    text.release()
    assert encoded(engine) == [Accepted("a", "r1", 1, "blue")]
    after = run(engine, until=lambda events: any(isinstance(event, Applied) for event in events))
    applied = next(event for event in after if isinstance(event, Applied))
    assert applied.epoch == 1
    numbers = pictures(events + after)[:, 0, 0]
    assert [n for n, _, _ in numbers.tolist()] == [n % 256 for n in range(len(numbers))], "no frame is lost or twice"
    assert [c == checksum("blue") for _, _, c in numbers.tolist()] == [
        n >= applied.first_frame for n in range(len(numbers))
    ]


def test_the_latest_prompt_wins_and_those_between_are_not_encoded(engine: Engine, text: SlowText) -> None:
    text.hold("blue")
    for number, prompt in enumerate(["blue", "green", "star", "circle"]):
        assert engine.handle(SetPrompt("a", prompt, str(number))) == []
    assert text.begun.get(timeout=LIMIT_S) == "red" and text.begun.get(timeout=LIMIT_S) == "blue"
    text.release()
    assert encoded(engine) == [
        Accepted("a", "0", 1, "blue"),
        Accepted("a", "1", 2, "green"),
        Accepted("a", "2", 3, "star"),
        Accepted("a", "3", 4, "circle"),
    ]
    assert text.encoded == ["red", "blue", "circle"]
    events = follow(engine, 3)
    assert [event.epoch for event in events if isinstance(event, Applied)] == [4]
    assert colours(events) == {checksum("circle")}


def test_a_prompt_that_is_encoded_holds_until_the_next_is(engine: Engine, pipeline: SlowPipeline) -> None:
    """Prompts that come faster than they can be encoded do not keep each other from being shown."""
    pipeline.text.hold("blue", "green")
    engine.handle(SetPrompt("a", "blue", "1"))
    engine.handle(SetPrompt("a", "green", "2"))
    pipeline.text.release("blue")
    futures.wait(engine.encodings(), LIMIT_S)
    events = follow(engine, 5)
    assert [event.request for event in events if isinstance(event, Accepted)] == ["1"]
    assert colours(events) == {checksum("blue")}
    pipeline.text.release("green")
    assert encoded(engine) == [Accepted("a", "2", 2, "green")]
    assert checksum("green") in colours(follow(engine, 5))


def test_a_prompt_that_fails_takes_no_other_with_it(engine: Engine, text: SlowText) -> None:
    """The one before it, which it would have replaced, is the latest again."""
    text.hold("star")
    text.errors["blue"] = OSError("disk")
    for number, prompt in enumerate(["star", "green", "blue"]):
        engine.handle(SetPrompt("a", prompt, str(number)))
    text.release()
    assert encoded(engine) == [
        Accepted("a", "0", 1, "star"),
        Refused("a", "2", "prompt", "the prompt could not be encoded: OSError: disk"),
        Accepted("a", "1", 2, "green"),
    ]
    assert checksum("green") in colours(follow(engine, 3))


def test_a_fault_of_the_program_ends_the_engine(engine: Engine, text: SlowText) -> None:
    text.errors["blue"] = TypeError("no such thing")
    text.hold("blue")
    engine.handle(SetPrompt("a", "blue"))
    text.release()
    futures.wait(engine.encodings(), LIMIT_S)
    with pytest.raises(TypeError, match="no such thing"):
        engine.step()


def test_a_reset_begins_with_the_latest_prompt_before_it(engine: Engine, pipeline: SlowPipeline) -> None:
    text = pipeline.text
    text.hold("blue")
    for number, command in enumerate([SetPrompt("a", "blue", "0"), SetPrompt("a", "green", "1"), Reset("a", 3, "2")]):
        assert engine.handle(command) == [], number
    engine.handle(SetPrompt("a", "star", "3"))
    text.release()
    answers = [event for event in encoded(engine) if isinstance(event, Accepted)]
    assert [(event.request, event.text) for event in answers] == [
        ("0", "blue"),
        ("1", "green"),
        ("2", "green"),
        ("3", "star"),
    ]
    assert text.encoded == ["red", "blue", "green", "star"]
    assert [call for call in pipeline.calls if call[0] == "reset"] == [("reset", 0, "green", 3, 3)]


def test_a_reset_with_nothing_to_wait_for_is_immediate(engine: Engine, text: SlowText) -> None:
    assert engine.handle(Reset("a", 4, "r")) == [Accepted("a", "r", 1, "red")]
    assert text.encoded == ["red"], "what was encoded is kept while it is in force"


def test_pausing_does_not_wait(engine: Engine, pipeline: SlowPipeline) -> None:
    pipeline.text.hold("blue")
    engine.handle(SetPrompt("a", "blue", "1"))
    engine.handle(SetPaused("a", True))
    assert pipeline.calls[-1] == ("set_paused", 0, True)
    engine.handle(SetPaused("a", False))
    assert pipeline.calls[-1] == ("set_paused", 0, False)


def test_an_idle_engine_waits_for_the_text(engine: Engine, text: SlowText) -> None:
    """In one step, without being asked again and again."""
    engine.handle(SetPaused("a", True))
    run(engine, until=lambda events: not engine.busy)
    text.hold("blue")
    assert engine.handle(SetPrompt("a", "blue", "1")) == [] and engine.busy
    threading.Timer(0.05, text.release).start()
    assert engine.step(LIMIT_S) == [Accepted("a", "1", 1, "blue")]
    assert not engine.busy


def test_opening_a_session_does_not_stop_the_others(engine: Engine, pipeline: SlowPipeline) -> None:
    text = pipeline.text
    text.hold("blue", "green")
    assert engine.handle(Open("b", "blue", 2)) == []
    follow(engine, 5)
    early = [
        *engine.handle(Shown("b", 0)),
        *engine.handle(SetPaused("b", True)),
        *engine.handle(Reset("b", 7, "r")),
        *engine.handle(SetPrompt("b", "green", "p")),
        *engine.handle(SetPaused("b", False)),
    ]
    assert early == [], "all of that waits for the session"
    for refused, field in ((Open("b", "red"), "session"), (SetPrompt("b", ""), "prompt"), (Reset("b", -1), "seed")):
        assert [event.field for event in engine.handle(refused) if isinstance(event, Refused)] == [field]
    text.release("blue")
    futures.wait(engine.encodings(), LIMIT_S)
    assert engine.settle() == [Opened("b", 0, "blue"), Accepted("b", "r", 1, "blue")]
    assert ("reset", 1, "blue", 7, 1) in pipeline.calls and pipeline.streams[1].paused
    text.release("green")
    assert encoded(engine) == [Accepted("b", "p", 2, "green")]
    assert not pipeline.streams[1].paused, "it went on after the prompt, as asked"
    assert colours(follow(engine, 4, "b"), "b") <= {checksum("blue"), checksum("green")}


def test_only_the_conditioning_in_force_is_held(engine: Engine, pipeline: SlowPipeline) -> None:
    for number in range(20):
        tell(engine, SetPrompt("a", ("blue", "green")[number % 2], "r"))
        engine.step()
    pipeline.calls.clear()  # the painter's diary
    run(engine, until=lambda events: not engine.busy, show=False)
    assert [made() for made in pipeline.text.made if made() is not None] == ["green"]
    engine.handle(Close("a"))
    pipeline.calls.clear()
    assert not any(made() for made in pipeline.text.made)


@pytest.mark.slow
def test_what_cannot_be_opened_is_refused_with_all_that_waits(engine: Engine, pipeline: SlowPipeline) -> None:
    pipeline.text.hold("blue")
    pipeline.text.errors["blue"] = RuntimeError("no memory")
    assert engine.handle(Open("x", "red", kv_context="dirty"))[0].reason.startswith("kv_context is")  # type: ignore[union-attr]
    engine.handle(Open("b", "blue"))
    engine.handle(SetPaused("b", True))
    engine.handle(SetPrompt("b", "green", "p"))
    pipeline.text.release()
    reason = "the prompt could not be encoded: RuntimeError: no memory"
    assert encoded(engine) == [Refused("b", "", "prompt", reason), Refused("b", "p", "prompt", reason)]
    pipeline.text.hold("green")
    engine.handle(Open("b", "green", steps=3))
    engine.handle(SetPrompt("b", "star", "q"))
    pipeline.text.release()
    refused = encoded(engine)
    assert [(event.request, event.field) for event in refused if isinstance(event, Refused)] == [
        ("", "steps"),
        ("q", "session"),
    ]
    pipeline.text.errors.clear()  # an error holds what was at hand when it was raised
    gc.collect()
    held = {made() for made in pipeline.text.made} - {None}
    assert held == {"red"}, "nothing is kept for what could not be opened"
    assert tell(engine, Open("b", "green")) == [Opened("b", 0, "green")]


def test_closing_answers_what_waits_and_late_texts_are_dropped(engine: Engine, pipeline: SlowPipeline) -> None:
    text = pipeline.text
    text.hold("blue", "green")
    engine.handle(SetPrompt("a", "blue", "1"))
    engine.handle(Reset("a", 1, "2"))
    engine.handle(Open("b", "green", 2))
    engine.handle(SetPaused("b", True))
    why = "session 'a' was closed before this was done"
    assert engine.handle(Close("a")) == [
        Refused("a", "1", "session", why),
        Refused("a", "2", "session", why),
        Closed("a"),
    ]
    assert engine.handle(Shutdown()) == [
        Refused("b", "", "session", "session 'b' was closed before this was done"),
        Closed("b"),
    ]
    assert not engine.busy
    opened = engine.handle(Open("a", "star", 3))
    text.release()
    assert [*opened, *encoded(engine)] == [Opened("a", 1, "star")]
    assert "green" not in text.encoded and not any(call[0] == "set_conditioning" for call in pipeline.calls)
    assert colours(follow(engine, 2)) == {checksum("star")}


@pytest.mark.parametrize(("own", "said", "done"), [("flush", None, "flush"), ("flush", "keep", "keep")])
def test_a_prompt_does_to_the_past_what_the_model_was_made_for_unless_it_says(
    pipeline: SlowPipeline, own: str, said: str | None, done: str
) -> None:
    pipeline.info = replace(pipeline.info, switch=own)
    with StreamSession(pipeline, "red") as session:
        next(iter(session))
        session.set_prompt("blue", said)
        for _ in range(2 * CHUNK_FRAMES):
            next(iter(session))
        assert pipeline.calls[-1][0] == "set_conditioning" and pipeline.calls[-1][-1] == done


def test_frames_are_taken_while_another_thread_waits_for_its_prompt(pipeline: SlowPipeline) -> None:
    pipeline.text.hold("blue")
    with StreamSession(pipeline, "red") as session:
        steering = threading.Thread(target=lambda: session.set_prompt("blue"))
        steering.start()
        frames = iter(session)
        assert {int(next(frames)[0, 0, 2]) for _ in range(200)} == {checksum("red")}
        assert steering.is_alive()
        pipeline.text.release()
        steering.join()
        assert checksum("blue") in {int(next(frames)[0, 0, 2]) for _ in range(3 * CHUNK_FRAMES)}


def test_closing_lets_a_thread_go_that_waits(pipeline: SlowPipeline) -> None:
    pipeline.text.hold("blue")
    session = StreamSession(pipeline, "red")
    caught: list[StreamdiffError] = []

    def steer() -> None:
        try:
            session.set_prompt("blue")
        except StreamdiffError as error:
            caught.append(error)

    steering = threading.Thread(target=steer)
    steering.start()
    assert pipeline.text.begun.get(timeout=LIMIT_S) == "red" and pipeline.text.begun.get(timeout=LIMIT_S) == "blue"
    session.close()
    steering.join()
    assert "closed" in str(caught[0])


def test_an_opening_that_fails_frees_the_pipeline(pipeline: SlowPipeline) -> None:
    pipeline.text.errors["red"] = OSError("no such file")
    with pytest.raises(RequestError, match="could not be encoded: OSError: no such file"):
        StreamSession(pipeline, "red")
    assert pipeline.closed


@pytest.mark.slow
def test_slowness_changes_no_frame_of_the_real_model() -> None:
    """A prompt is in force from the same chunk on, whether it is encoded at once or on a thread."""

    def frames(slow: bool) -> np.ndarray:
        pipeline = _load_runtime(ModelConfig(steps=2))
        pipeline.text.slow = slow  # type: ignore[misc]
        with StreamSession(pipeline, "a red circle moving left", seed=3) as session:
            made = []
            for number, frame in enumerate(session):
                made.append(frame)
                if number == 9:
                    session.set_prompt("a blue star")
                if number == 40:
                    session.reset(seed=4)
                if number == 60:
                    return np.stack(made)
        raise AssertionError

    assert np.array_equal(frames(slow=False), frames(slow=True))
