"""Time stamps on the wire, and the thread that shows frames on time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff import clock
from streamdiff.server.media.encoder import EncodedFrame, EncoderThread, Format
from streamdiff.server.media.pacer import Pacer, RtpClock


def test_stamps_follow_the_media_clock_while_it_runs() -> None:
    rtp = RtpClock()
    stamps = [rtp.media(n * 2250, 100 + n / 40 + (0.01 if n % 3 else 0.0)) for n in range(40)]
    assert np.diff(stamps).tolist() == [2250] * 39


def test_stamps_follow_real_time_over_a_pause() -> None:
    rtp = RtpClock()
    before = rtp.media(0, 0.0)
    still = rtp.still(5.0)
    rtp.jump()
    after = rtp.media(2250, 10.0)
    assert (before, still, after) == (0, 450_000, 900_000)
    assert rtp.media(4500, 10.025) == 902_250


@given(st.lists(st.tuples(st.sampled_from(["media", "still", "jump"]), st.floats(0, 2), st.integers(1, 9000))))
def test_stamps_strictly_increase_whatever_happens(steps: list[tuple[str, float, int]]) -> None:
    rtp, now_s, pts, stamps = RtpClock(), 0.0, 0, []
    for kind, passed_s, ticks in steps:
        now_s, pts = now_s + passed_s, pts + ticks
        if kind == "media":
            stamps.append(rtp.media(pts, now_s))
        elif kind == "still":
            stamps.append(rtp.still(now_s))
        else:
            rtp.jump()
    assert all(after > before for before, after in pairwise(stamps))


def _pictures(count: int) -> np.ndarray:
    return np.full((count, 32, 32, 3), 90, np.uint8)


class _Scene:
    """A pacer, and what came of it. A context manager."""

    def __init__(self) -> None:
        self.shown: list[int] = []
        self.packets: list[EncodedFrame] = []
        self.changed = threading.Condition()
        self.pacer = Pacer(200.0, 4, lambda slot: self._note(self.shown, slot.frame))
        self.encoder: EncoderThread | None = None

    def watch(self) -> EncoderThread:
        self.encoder = EncoderThread("h264", Format(32, 32, 200.0), lambda encoded: self._note(self.packets, encoded))
        self.pacer.set_encoders((self.encoder,))
        return self.encoder

    def _note(self, where: list[Any], what: object) -> None:
        with self.changed:
            where.append(what)
            self.changed.notify()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=240)

    def __enter__(self) -> _Scene:
        return self

    def __exit__(self, *error: object) -> None:
        self.pacer.set_encoders(())
        if self.encoder is not None:
            self.encoder.stop()
        self.pacer.stop()


def test_nothing_is_shown_while_nobody_watches_and_everything_in_order_afterwards() -> None:
    with _Scene() as scene:
        scene.pacer.push(0, _pictures(40), 0)
        assert scene.pacer.progress().shown == 0
        assert scene.pacer.picture() is not None
        scene.watch()
        scene.wait(lambda: len(scene.shown) == 40)
        assert scene.shown == list(range(40))
    stamps = [encoded.pts for encoded in scene.packets]
    assert stamps == sorted(set(stamps))
    assert scene.packets[0].key


def test_who_joins_a_stream_that_was_paused_before_its_first_frame_sees_it() -> None:
    with _Scene() as scene:
        scene.pacer.set_paused(True)
        scene.pacer.push(0, _pictures(8), 0)
        scene.watch()
        scene.wait(lambda: len(scene.packets) > 0)
        assert scene.packets[0].key
        assert scene.shown == []


def test_the_first_stamp_after_a_short_pause_is_of_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than what the stamps may lag: a viewer's jitter buffer would keep that delay for good."""
    now_s, stamps, came = 100.0, list[int](), threading.Semaphore(0)
    monkeypatch.setattr(clock, "monotonic_s", lambda: now_s)

    def submit(picture: np.ndarray, pts: int) -> None:
        stamps.append(pts)
        came.release()

    pacer = Pacer(100.0, 1, lambda slot: None)
    try:
        pacer.push(0, _pictures(8), 0)
        pacer.set_encoders((Mock(submit=submit, key_due_s=lambda: None),))
        assert came.acquire(timeout=240)
        pacer.set_paused(True)
        now_s += 0.15
        pacer.set_paused(False)
        now_s += 0.01  # when the next slot is due
        pacer.wake()
        assert came.acquire(timeout=240)
    finally:
        pacer.stop()
    assert stamps == [0, 14_400]
