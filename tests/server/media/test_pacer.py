"""Time stamps on the wire, and the thread that shows frames on time."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.server.media.codecs import Format
from streamdiff.server.media.encoder import EncodedFrame, EncoderThread
from streamdiff.server.media.pacer import Pacer, RtpClock
from streamdiff.server.media.playout import PlayoutSlot


def test_stamps_follow_the_media_clock_while_it_runs() -> None:
    clock = RtpClock()
    stamps = [clock.media(n * 2250, 100 + n / 40 + (0.01 if n % 3 else 0.0)) for n in range(40)]
    assert np.diff(stamps).tolist() == [2250] * 39


def test_stamps_follow_real_time_over_a_pause() -> None:
    clock = RtpClock()
    before = clock.media(0, 0.0)
    still = clock.still(5.0)
    clock.jump()
    after = clock.media(2250, 10.0)
    assert (before, still, after) == (0, 450_000, 900_000)
    assert clock.media(4500, 10.025) == 902_250


def test_frames_are_evenly_stamped_after_a_short_pause_with_a_still_in_it() -> None:
    clock = RtpClock()
    clock.media(0, 0.0)
    clock.still(0.15)
    clock.jump()
    assert [clock.media(2250, 0.175), clock.media(4500, 0.2)] == [15_750, 18_000]


def test_a_long_gap_is_real_time_even_when_nobody_said_so() -> None:
    clock = RtpClock()
    clock.media(0, 0.0)
    assert clock.media(2250, 3.0) == 270_000


@given(st.lists(st.tuples(st.sampled_from(["media", "still", "jump"]), st.floats(0, 2), st.integers(1, 9000))))
def test_stamps_strictly_increase_whatever_happens(steps: list[tuple[str, float, int]]) -> None:
    clock, now_s, pts, stamps = RtpClock(), 0.0, 0, []
    for kind, passed_s, ticks in steps:
        now_s, pts = now_s + passed_s, pts + ticks
        if kind == "media":
            stamps.append(clock.media(pts, now_s))
        elif kind == "still":
            stamps.append(clock.still(now_s))
        else:
            clock.jump()
    assert all(after > before for before, after in pairwise(stamps))


def _pictures(count: int) -> np.ndarray:
    return np.full((count, 32, 32, 3), 90, np.uint8)


class _Scene:
    def __init__(self) -> None:
        self.shown: list[int] = []
        self.packets: list[EncodedFrame] = []
        self.changed = threading.Condition()
        self.pacer = Pacer(200.0, 4, self._on_shown)
        self.encoder: EncoderThread | None = None

    def watch(self) -> EncoderThread:
        self.encoder = EncoderThread("h264", Format(32, 32, 200.0), self._on_packet)
        self.pacer.set_encoders((self.encoder,))
        return self.encoder

    def _on_shown(self, due: PlayoutSlot) -> None:
        with self.changed:
            self.shown.append(due.frame)
            self.changed.notify()

    def _on_packet(self, encoded: EncodedFrame) -> None:
        with self.changed:
            self.packets.append(encoded)
            self.changed.notify()

    def wait(self, condition: object) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=20)  # type: ignore[arg-type]

    def close(self) -> None:
        self.pacer.set_encoders(())
        if self.encoder is not None:
            self.encoder.stop()
        self.pacer.stop()


def test_nothing_is_shown_while_nobody_watches_and_everything_in_order_afterwards() -> None:
    scene = _Scene()
    try:
        scene.pacer.push(0, _pictures(40), 0)
        assert scene.pacer.progress().shown == 0
        assert scene.pacer.picture() is not None
        scene.watch()
        scene.wait(lambda: len(scene.shown) == 40)
        assert scene.shown == list(range(40))
    finally:
        scene.close()
    stamps = [encoded.pts for encoded in scene.packets]
    assert stamps == sorted(set(stamps))
    assert scene.packets[0].key


def test_a_paused_stream_still_gives_a_key_frame_to_who_asks() -> None:
    scene = _Scene()
    try:
        encoder = scene.watch()
        scene.pacer.push(0, _pictures(8), 0)
        scene.wait(lambda: len(scene.shown) == 8)
        scene.pacer.set_paused(True)
        keys = sum(encoded.key for encoded in scene.packets)
        encoder.request_key()
        scene.pacer.wake()
        scene.wait(lambda: sum(encoded.key for encoded in scene.packets) > keys)
        assert scene.pacer.progress().shown == 8
    finally:
        scene.close()


def test_who_joins_a_stream_that_was_paused_before_its_first_frame_sees_it() -> None:
    scene = _Scene()
    try:
        scene.pacer.set_paused(True)
        scene.pacer.push(0, _pictures(8), 0)
        scene.watch()
        scene.wait(lambda: len(scene.packets) > 0)
        assert scene.packets[0].key
        assert scene.shown == []
    finally:
        scene.close()


def test_a_reset_drops_what_waits() -> None:
    scene = _Scene()
    try:
        scene.pacer.push(0, _pictures(8), 0)
        scene.pacer.clear_before(1)
        assert scene.pacer.progress().passed == 8
        scene.pacer.push(8, _pictures(8), 1)
        scene.watch()
        scene.wait(lambda: len(scene.shown) == 8)
        assert scene.shown == list(range(8, 16))
    finally:
        scene.close()
