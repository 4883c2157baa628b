"""Start pictures in the engine: encoded beside the loop, kept over resets, refused without harm."""

from __future__ import annotations

import threading
from concurrent import futures

import numpy as np
import pytest

from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import (
    Accepted,
    Command,
    Event,
    FrameBatch,
    Open,
    Opened,
    Pictures,
    Refused,
    Reset,
    SetPrompt,
    Shown,
)
from tests.engine.painted import CHUNK_FRAMES, SIZE, PaintedPipeline, checksum


def picture(value: int) -> Pictures:
    return np.full((1, SIZE, SIZE, 3), value, np.uint8)


class Held(PaintedPipeline):
    """Encodes no picture before it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.let = threading.Event(), threading.Event()

    def encode_picture(self, picture: Pictures) -> Pictures:
        self.begun.set()
        assert self.let.wait(240)
        return super().encode_picture(picture)


def ask(engine: Engine, command: Command) -> list[Event]:
    """A command's answers, those of a picture that had to be encoded included."""
    events = engine.handle(command)
    while encodings := engine.encodings():
        futures.wait(encodings, 60)
        events += engine.settle()
    return events


def first_frames(
    engine: Engine, session: str, count: int = 2 * CHUNK_FRAMES, answers: list[Event] | None = None
) -> list[np.ndarray]:
    """The next frames of a session, shown at once; answers that come meanwhile are added to `answers`."""
    frames: list[np.ndarray] = []
    while len(frames) < count:
        for event in engine.step():
            if answers is not None and isinstance(event, Opened | Accepted):
                answers.append(event)
            if isinstance(event, FrameBatch):
                engine.handle(Shown(event.session, event.first + len(event.pictures)))
                if event.session == session:
                    frames += list(event.pictures)
    return frames


@pytest.fixture
def engine() -> Engine:
    return Engine(PaintedPipeline(), 2 * CHUNK_FRAMES)


def test_other_sessions_go_on_while_a_picture_is_encoded_and_its_own_requests_wait() -> None:
    pipeline = Held()
    engine = Engine(pipeline, 2 * CHUNK_FRAMES)
    engine.handle(Open("other", "red"))
    assert engine.handle(Open("a", "red", image=picture(77))) == []
    assert pipeline.begun.wait(240)
    assert len(first_frames(engine, "other", 5 * CHUNK_FRAMES)) >= 5 * CHUNK_FRAMES
    assert engine.handle(SetPrompt("a", "blue", "p")) == []
    pipeline.let.set()
    answers: list[Event] = []
    frames = first_frames(engine, "a", answers=answers)
    while len(answers) < 2:  # a text is read beside the stream
        frames += first_frames(engine, "a", answers=answers)
    frames += first_frames(engine, "a", 4 * CHUNK_FRAMES)
    assert [type(event) for event in answers] == [Opened, Accepted]
    assert (frames[0] == 77).all() and frames[-1][0, 0, 2] == checksum("blue")


def test_a_picture_that_cannot_be_encoded_refuses_the_request_alone(engine: Engine) -> None:
    [refused] = ask(engine, Open("a", "red", image=picture(13)))
    assert isinstance(refused, Refused) and refused.field == "image"
    assert refused.reason == "the picture could not be encoded: the painter cannot look at this"
    ask(engine, Open("a", "red", image=picture(77)))
    [refused] = ask(engine, Reset("a", None, "r", picture(13)))
    assert isinstance(refused, Refused) and (refused.field, refused.request) == ("image", "r")
    assert (first_frames(engine, "a")[0] == 77).all(), "the stream goes on"


@pytest.mark.parametrize("shape", [(1, 8, 8, 3), (SIZE, SIZE, 3), (2, SIZE, SIZE, 3)])
def test_a_picture_of_another_size_is_refused(engine: Engine, shape: tuple[int, ...]) -> None:
    [refused] = engine.handle(Open("a", "red", image=np.zeros(shape, np.uint8)))
    assert isinstance(refused, Refused) and refused.field == "image"
    assert f"[1, {SIZE}, {SIZE}, 3]" in refused.reason
