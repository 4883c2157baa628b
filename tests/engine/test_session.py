"""A session without anything around it: epochs, receipts, numbering, room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.engine.messages import Accepted, Applied, Event, FrameBatch, Opened
from streamdiff.engine.session import Session

CHUNK = 4


SLOT = 5


class Recorder:
    """Stands where the pipeline is, and writes down what it is asked for; a text's conditioning is the text."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def next_chunk(self, slot: int) -> int:
        return 0

    def reruns(self, slot: int) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(slot: int, *values: object, **named: object) -> None:
            assert slot == SLOT
            self.calls.append((name, *values, *named.values()))

        return call


def start(**given: Any) -> Session:
    more = {"text": "red", "seed": 3, "kv_context": "clean", "epoch": 0, "max_ahead_frames": 12} | given
    return Session("s", Recorder(), SLOT, str, **more)  # type: ignore[arg-type]


def session(max_ahead_frames: int = 12, epoch: int = 0) -> Session:
    return start(max_ahead_frames=max_ahead_frames, epoch=epoch)


def calls(session: Session) -> list[tuple[object, ...]]:
    """What the pipeline was asked for since the last look: names, and values after the slot's number."""
    recorder = session._pipeline
    assert isinstance(recorder, Recorder)
    found, recorder.calls = recorder.calls, []
    return found


def pending(session: Session) -> list[tuple[object, ...]]:
    """What the pipeline is asked for when it gets the changes that wait."""
    calls(session)
    session.apply_pending()
    return calls(session)


def make(session: Session, *, epoch: int, chunk: int, count: int = CHUNK, chunk_s: float | None = None) -> list[Event]:
    return session.made(epoch=epoch, chunk=chunk, pictures=np.zeros((count, 2, 2, 3), np.uint8), chunk_s=chunk_s)


def test_frames_are_numbered_over_chunks_pieces_and_resets() -> None:
    s = session(max_ahead_frames=100)
    batches = [*make(s, epoch=0, chunk=0, count=1), *make(s, epoch=0, chunk=0, count=3, chunk_s=0.5)]
    batches += make(s, epoch=0, chunk=1)
    calls(s)
    assert s.reset(None, "r") == [Accepted("s", "r", 1, "red")]
    assert calls(s) == [("reset", "red", 3, 1, None, {}), ("set_paused", False), ("set_frame_credit", 100)]
    assert make(s, epoch=0, chunk=2) == [], "frames of before the reset"
    batches += make(s, epoch=1, chunk=0)
    numbers = [(b.epoch, b.chunk, b.first, b.chunk_s) for b in batches if isinstance(b, FrameBatch)]
    assert numbers == [(0, 0, 0, None), (0, 0, 1, 0.5), (0, 1, 4, None), (1, 0, 8, None)]


def test_a_reset_takes_the_latest_prompt_and_keeps_its_seed_and_pause() -> None:
    s = session()
    s.set_paused(True)
    s.set_prompt("blue", "", "")
    calls(s)
    s.reset(9, "")
    assert calls(s)[:2] == [("reset", "blue", 9, 2, None, {}), ("set_paused", True)]
    assert pending(s) == [], "it went with the reset"
    s.reset(None, "")
    assert calls(s)[0] == ("reset", "blue", 9, 3, None, {})


def test_room_is_what_the_lead_leaves() -> None:
    s = session(max_ahead_frames=10)

    def shown(frames: int) -> list[tuple[object, ...]]:
        s.shown(frames)
        return calls(s)

    make(s, epoch=0, chunk=0)
    make(s, epoch=0, chunk=1)
    assert calls(s) == [("set_frame_credit", 6), ("set_frame_credit", 2)]
    assert shown(5) == [("set_frame_credit", 7)]
    assert shown(5) == [], "nothing new"
    assert shown(3) == [], "never back"
    assert shown(1_000_000) == [("set_frame_credit", 10)], "never more than was made"
    assert shown(-1) == []


def test_a_prompt_that_skips_is_made_at_once_and_what_waits_counts_as_shown() -> None:
    s = session(max_ahead_frames=CHUNK)
    make(s, epoch=0, chunk=0)
    assert calls(s)[-1] == ("set_frame_credit", 0), "nothing more before something was shown"
    s.set_prompt("blue", "", "r1", skip=True)
    assert calls(s) == [("set_frame_credit", CHUNK)]
    s.apply_pending()
    make(s, epoch=0, chunk=1, count=2)
    assert calls(s)[-1] == ("set_frame_credit", CHUNK), "what was on its way will not be shown either"
    make(s, epoch=0, chunk=1, count=2)
    assert make(s, epoch=1, chunk=2)[0] == Applied("s", 1, 2, 2 * CHUNK, skip=True)
    assert calls(s)[-1] == ("set_frame_credit", 0)
    s.shown(2 * CHUNK)
    assert calls(s) == [], "that is known"
    s.shown(3 * CHUNK)
    s.set_steps(2, 0, "r2")
    assert make(s, epoch=2, chunk=3)[0] == Applied("s", 2, 3, 3 * CHUNK, skip=False), "once"


@pytest.mark.parametrize("after", ["steps", "prompt"])
def test_what_is_asked_after_a_prompt_that_skips_comes_with_it(after: str) -> None:
    s = session(max_ahead_frames=CHUNK)
    make(s, epoch=0, chunk=0)
    s.set_prompt("blue", "", "r1", skip=True)
    _ = s.set_steps(2, 0, "r2") if after == "steps" else s.set_prompt("green", "", "r2")
    assert make(s, epoch=2, chunk=1)[0] == Applied("s", 2, 1, CHUNK, skip=True)


def test_a_reset_takes_what_was_to_be_skipped_with_it() -> None:
    s = session(max_ahead_frames=CHUNK)
    make(s, epoch=0, chunk=0)
    s.set_prompt("blue", "", "r1", skip=True)
    s.reset(None, "r2")
    assert make(s, epoch=2, chunk=0)[0] == Applied("s", 2, 0, CHUNK, skip=False)


ACTS = st.sampled_from(["chunk", "chunk", "chunk", "show", "prompt", "steps", "take", "reset", "pause", "resume"])


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTS, max_size=60))
def test_whatever_is_asked(acts: list[str]) -> None:
    """Numbers without gaps, epochs that never go back, one `Applied` per epoch seen, room never broken."""
    s = session(max_ahead_frames=3 * CHUNK)
    outputs: list[Event] = s.open()
    pipeline_epoch, chunk, shown = 0, 0, 0
    for act in acts:
        made = sum(len(o.pictures) for o in outputs if isinstance(o, FrameBatch))
        match act:
            case "chunk" if s.frame_credit >= CHUNK:
                outputs += make(s, epoch=pipeline_epoch, chunk=chunk)
                chunk += 1
            case "show":
                shown = min(shown + 3, made)
                s.shown(shown)
            case "prompt":
                outputs += s.set_prompt("other", "", "")
            case "steps":
                outputs += s.set_steps(2, 0, "")
            case "take":
                for name, _, epoch, *_ in pending(s):
                    assert name in ("set_conditioning", "set_steps") and isinstance(epoch, int)
                    assert epoch > pipeline_epoch
                    pipeline_epoch = epoch
            case "reset":
                outputs += s.reset(None, "")
                pipeline_epoch, chunk = s.epoch, 0
            case "pause" | "resume":
                s.set_paused(act == "pause")
        assert 0 <= s.frame_credit <= 3 * CHUNK
    batches = [o for o in outputs if isinstance(o, FrameBatch)]
    assert [b.first for b in batches] == [CHUNK * n for n in range(len(batches))]
    epochs = [b.epoch for b in batches]
    assert epochs == sorted(epochs)
    applied = [o for o in outputs if isinstance(o, Applied)]
    assert [a.epoch for a in applied] == sorted(set(epochs))
    assert [a.first_frame for a in applied] == [CHUNK * epochs.index(epoch) for epoch in sorted(set(epochs))]
    accepted = [o.epoch for o in outputs if isinstance(o, Accepted)]
    assert accepted == list(range(1, len(accepted) + 1))


def test_the_lead_may_change_but_not_below_what_the_pipeline_needs() -> None:
    stream = start(max_ahead_frames=12, min_ahead_frames=6)
    stream.set_max_ahead(24)
    stream.set_max_ahead(1)
    assert calls(stream) == [("set_frame_credit", 24), ("set_frame_credit", 6)]
    assert start(max_ahead_frames=1, min_ahead_frames=6).frame_credit == 6


def test_a_session_taken_up_goes_on_counting_and_has_room_for_what_was_not_shown() -> None:
    s = start(epoch=9)
    s.renumber(9, 100, 95)
    assert s.open() == [Opened("s", 9, "red", "")]
    applied, batch = make(s, epoch=9, chunk=0)
    assert applied == Applied("s", 9, 0, 100)
    assert isinstance(batch, FrameBatch) and batch.first == 100
    s.shown(98)
    assert calls(s) == [("set_frame_credit", 7), ("set_frame_credit", 3), ("set_frame_credit", 6)]


def test_a_reset_takes_the_steps_that_wait_with_it() -> None:
    s = session()
    s.set_steps(2, 0, "r1")
    calls(s)
    s.reset(None, "r2")
    assert calls(s)[:2] == [("set_steps", 2, 1), ("reset", "red", 3, 2, None, {})]
    assert pending(s) == []


def test_more_steps_may_need_a_longer_lead_and_fewer_give_it_back() -> None:
    s = session(max_ahead_frames=6)
    s.set_steps(4, 20, "")
    s.set_steps(2, 4, "")
    assert calls(s) == [("set_frame_credit", 20), ("set_frame_credit", 6)], "what was asked for when it was opened"


def test_prompt_steps_and_input_reach_the_pipeline_in_the_order_of_their_epochs() -> None:
    s = session()
    assert s.set_input(0.4, "a") == [Accepted("s", "a", 1, "")]
    s.set_prompt("blue", "", "b")
    s.set_steps(2, 0, "c")
    s.set_input(0.7, "d")
    assert pending(s) == [("set_conditioning", "blue", 2, "keep", {}), ("set_steps", 2, 3), ("set_input", 0.7, 4)]
    s.set_input(None, "e")
    s.set_prompt("red", "", "f")
    assert pending(s) == [("set_input", None, 5), ("set_conditioning", "red", 6, "keep", {})]
    assert pending(s) == []
    s.set_input(0.2, "g")
    s.reset(None, "h")
    assert [call[0] for call in calls(s)] == ["set_input", "reset", "set_paused", "set_frame_credit"]
