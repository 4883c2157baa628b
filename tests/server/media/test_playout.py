"""Playout under virtual time: even, in order, nothing left out, exact for hours; and how far the engine is ahead."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.server.media import playout as playout_module
from streamdiff.server.media.playout import MARGIN_S, STEP_S, PlayoutBuffer, PlayoutLead, PlayoutSlot


def frames(first: int, count: int) -> np.ndarray:
    """Pictures that carry their own number."""
    pictures = np.zeros((count, 2, 2, 3), np.uint8)
    pictures[:] = (np.arange(first, first + count) % 256).astype(np.uint8)[:, None, None, None]
    return pictures


def take(playout: PlayoutBuffer, until_s: float, from_s: float = 0.0) -> list[tuple[float, PlayoutSlot]]:
    """Everything due from `from_s` up to `until_s`, asked for at exactly the right moments."""
    taken = []
    while (next_s := playout.next_due_s) is not None and next_s <= until_s:
        now_s = max(next_s, from_s)
        due = playout.due(now_s)
        if due is None and playout.next_due_s == next_s:
            break
        if due is not None:
            taken.append((now_s, due))
    return taken


def live(seconds: float, chunk_s: Callable[[float], float], lead: int = 24) -> list[tuple[float, PlayoutSlot]]:
    """An engine of chunks of 12 frames, handed over in three pieces, that keeps `lead` frames ahead at most."""
    playout = PlayoutBuffer(40, start_frames=12)
    taken: list[tuple[float, PlayoutSlot]] = []
    made, begun_s, pushed_s = 0, 0.0, 0.0
    while begun_s < seconds:
        for piece in range(3):
            at_s = begun_s + chunk_s(begun_s) * (0.8 + 0.1 * piece)
            taken += take(playout, at_s, pushed_s)
            playout.push(made, frames(made, 4))
            pushed_s = at_s
            made += 4
        begun_s += chunk_s(begun_s)
        while made - playout.progress.passed > lead - 12:
            wait_s = playout.next_due_s
            assert wait_s is not None
            begun_s = max(begun_s, wait_s)
            taken += take(playout, begun_s, pushed_s)
    return taken


def gaps(taken: list[tuple[float, PlayoutSlot]], from_s: float) -> list[int]:
    """Slots from each new frame to the next."""
    slots = [due.pts // 2250 for now_s, due in taken if now_s >= from_s and not due.repeated]
    return [after - before for before, after in itertools.pairwise(slots)]


@pytest.mark.parametrize("fps", [36, 30, 20, 10, 5])
def test_a_slow_engine_is_followed_evenly(fps: float) -> None:
    seen = gaps(live(60.0, lambda _: 12 / fps), from_s=10.0)
    assert 40 * len(seen) / sum(seen) == pytest.approx(fps, rel=0.03)
    # Evenly would be 40 / fps slots each; a chunk shown at full rate and then waited for leaves 480 / fps - 11.
    assert max(seen) <= 1.5 * 40 / fps + 1.5


@pytest.mark.parametrize("fps", [41, 45, 80])
def test_an_engine_that_is_fast_enough_is_never_slowed_down(fps: float) -> None:
    assert set(gaps(live(60.0, lambda _: 12 / fps), from_s=1.0)) == {1}


@pytest.mark.parametrize(("at_s", "stall_s"), [(0.0, 2.5), (10.0, 0.5), (10.0, 2.0), (10.0, 2.9), (10.0, 3.5)])
def test_a_stall_of_a_fast_engine_is_forgotten_within_seconds(at_s: float, stall_s: float) -> None:
    taken = live(60.0, lambda now_s: stall_s if at_s <= now_s < at_s + 0.3 else 12 / 60)
    assert set(gaps(taken, from_s=at_s + stall_s + 9)) == {1}


def test_start_waits_for_the_start_buffer_but_not_for_ever() -> None:
    playout = PlayoutBuffer(10, start_frames=5)
    playout.push(0, frames(0, 2))
    assert playout.due(10.0) is None
    assert playout.next_due_s == 10.5
    assert playout.due(10.4) is None
    first = playout.due(10.5)
    assert first is not None and first.frame == 0
    eager = PlayoutBuffer(10, start_frames=5)
    eager.push(0, frames(0, 5))
    assert eager.next_due_s == -math.inf
    assert eager.due(10.0) is not None


def test_a_dry_buffer_repeats_and_goes_on_at_once_a_little_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playout_module, "START_WAIT_S", 5)
    playout = PlayoutBuffer(10, start_frames=3)
    playout.push(0, frames(0, 3))
    taken = take(playout, 0.5)
    assert [(due.frame, due.repeated) for _, due in taken] == [
        (0, False), (1, False), (2, False), (2, True), (2, True), (2, True),
    ]  # fmt: skip
    assert playout.progress.repeated == playout.progress.dry == 3
    playout.push(3, frames(3, 2))
    later = take(playout, 0.9)
    assert [(due.frame, due.repeated) for _, due in later] == [(3, False), (4, False), (4, True), (4, True)]
    assert [due.pts for _, due in [*taken, *later]] == [9000 * slot for slot in range(10)]


def test_pause_holds_the_media_clock() -> None:
    playout = PlayoutBuffer(10)
    playout.push(0, frames(0, 10))
    assert [due.frame for _, due in take(playout, 0.35)] == [0, 1, 2, 3]
    playout.pause(0.35)
    playout.pause(5.0)  # again: nothing
    assert playout.paused
    assert playout.next_due_s is None
    assert playout.due(7.0) is None
    playout.push(10, frames(10, 2))
    playout.resume(100.35)
    assert playout.next_due_s == pytest.approx(100.4)
    due = playout.due(100.4)
    assert due is not None and due.frame == 4 and due.pts == 4 * 9000
    assert playout.progress.missed == playout.progress.repeated == 0


def test_reset_drops_what_waits_of_older_epochs_and_what_still_comes() -> None:
    playout = PlayoutBuffer(10)
    playout.push(0, frames(0, 6), epoch=1)
    assert [due.frame for _, due in take(playout, 0.15)] == [0, 1]
    playout.clear_before(2)
    assert (playout.buffered, playout.progress.dropped, playout.progress.passed) == (0, 4, 6)
    playout.push(6, frames(6, 2), epoch=1)  # was on its way
    assert (playout.buffered, playout.progress.dropped, playout.progress.passed) == (0, 6, 8)
    repeated = playout.due(0.2)
    assert repeated is not None and repeated.repeated and repeated.frame == 1
    playout.push(8, frames(8, 2), epoch=2)
    due = playout.due(0.3)
    assert due is not None and (due.frame, due.epoch, due.pts) == (8, 2, 27000)
    playout.clear_before(2)
    assert playout.buffered == 1, "its own epoch stays"


def test_a_slow_engine_is_followed_evenly_through_frames_that_are_skipped() -> None:
    """Twelve frames every 0.6 s, at 40 frames per second; a prompt's first ones come after 24 s."""
    playout, pictures = PlayoutBuffer(40, start_frames=12), np.zeros((12, 2, 2, 3), np.uint8)
    new_s, burst = list[float](), 0
    for tick in range(16_000):
        now_s = tick / 400
        if tick == 240 * burst:
            if burst == 40:
                playout.clear_before(1, reset=False)
                assert playout.progress.dropped > 0
            playout.push(12 * burst, pictures, epoch=int(burst >= 40))
            burst += 1
        while (slot := playout.due(now_s)) is not None:
            new_s += [] if slot.repeated else [now_s]
    late = [before for before, after in itertools.pairwise(new_s) if before > 15 and after - before > 0.08]
    assert late == []


def test_a_late_caller_catches_up_within_limits() -> None:
    playout = PlayoutBuffer(40)
    playout.push(0, frames(0, 100))
    assert playout.due(0.0) is not None
    caught_up = [playout.due(0.1) for _ in range(5)]
    assert [due.pts for due in caught_up if due] == [2250, 4500, 6750, 9000], "regular times, though asked late"
    assert caught_up[4] is None
    stalled = playout.due(10.0)
    assert stalled is not None
    assert stalled.frame == 5, "no frame is left out"
    assert stalled.pts == 10 * 90_000, "but the media clock went on with real time"
    assert playout.progress.missed == 395
    assert playout.due(10.0) is None, "and there is no burst"


def test_more_than_the_capacity_drops_the_oldest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playout_module, "CAPACITY_FRAMES", 4)
    playout = PlayoutBuffer(10)
    playout.push(0, frames(0, 6))
    assert (playout.buffered, playout.progress.dropped, playout.progress.passed) == (4, 2, 2)
    due = playout.due(0.0)
    assert due is not None and due.frame == 2


STEPS = st.one_of(
    st.tuples(st.just("push"), st.integers(1, 12)),
    st.tuples(st.just("ask"), st.floats(0, 0.2)),
    st.tuples(st.just("jump"), st.floats(0, 50)),
    st.tuples(st.just("pause"), st.just(0)),
    st.tuples(st.just("resume"), st.just(0)),
    st.tuples(st.just("clear"), st.just(0)),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=60), st.sampled_from([1, 4]), st.sampled_from([24.0, 29.97, 40.0]))
def test_whatever_happens(steps: list[tuple[str, float]], start_frames: int, fps: float) -> None:
    """In order, nothing left out but what was cleared, strictly increasing pts, bounded, no freeze."""
    playout = PlayoutBuffer(fps, start_frames=start_frames)
    now_s, pushed, epoch, last_pts, new = 0.0, 0, 0, -1, []
    for what, amount in steps:
        if what == "push" and playout.buffered + amount <= 48:
            playout.push(pushed, frames(pushed, int(amount)), epoch=epoch)
            pushed += int(amount)
        elif what in ("ask", "jump"):
            now_s += amount
            while due := playout.due(now_s):
                assert due.pts > last_pts
                last_pts = due.pts
                if not due.repeated:
                    new.append(due.frame)
            next_s = playout.next_due_s
            assert next_s is None or next_s > now_s
            assert next_s is None or next_s <= now_s + max(0.5, 2.5 / fps), "something is due soon"
        elif what == "pause":
            playout.pause(now_s)
        elif what == "resume":
            playout.resume(now_s)
        elif what == "clear":
            epoch += 1
            playout.clear_before(epoch)
    assert new == sorted(set(new))
    assert playout.progress.shown == len(new)
    assert playout.progress.shown + playout.progress.dropped + playout.buffered == pushed
    assert playout.progress.passed == pushed - playout.buffered
    assert playout.buffered <= 48


@given(st.integers(1, 60), st.sampled_from([10.0, 24.0, 30.0, 59.94, 60.0, 120.0]))
def test_another_rate_goes_on_from_the_next_slot(before: int, fps: float) -> None:
    """No slot comes twice or early, the media clock never goes back, and the new rate is exact."""
    playout = PlayoutBuffer(40)
    playout.push(0, frames(0, 200))
    first = take(playout, (before - 1) / 40)
    next_s = playout.next_due_s
    playout.set_fps(fps)
    assert playout.next_due_s == pytest.approx(next_s)
    second = take(playout, (next_s or 0) + 20.5 / fps)
    assert len(first) == before and len(second) == 21
    assert [due.frame for _, due in first + second] == list(range(before + 21))
    stamps = [due.pts for _, due in first + second]
    assert stamps[before] - stamps[before - 1] == 2250
    assert np.allclose(np.diff(stamps[before:]), 90_000 / fps, atol=1)
    assert np.allclose(np.diff([now_s for now_s, _ in second]), 1 / fps)


# ---- the lead: an engine that begins a chunk when it fits, and a buffer that is shown in real time ----------------

CHUNK_S, LIMIT_S = 0.2, 0.6


class LeadStream:
    """An engine that begins a chunk when it fits into the lead, and a buffer that is shown in real time."""

    def __init__(self, work_s: Callable[[float], float]) -> None:
        self.lead = PlayoutLead(CHUNK_S, LIMIT_S)
        self.work_s = work_s
        self.now_s, self.made_s, self.shown_until_s = 0.0, 0.0, 0.0
        self.slacks: list[float] = []

    def run(self, chunks: int) -> LeadStream:
        for _ in range(chunks):
            begin_s = max(self.now_s, self.shown_until_s - (self.lead.lead_s - CHUNK_S))
            self.now_s = begin_s + self.work_s(begin_s)
            slack_s = self.shown_until_s - self.now_s  # negative: nothing waited
            self.slacks.append(slack_s)
            self.lead.arrived(slack_s)
            self.shown_until_s = max(self.shown_until_s, self.now_s) + CHUNK_S
        return self


def test_on_a_steady_machine_the_lead_is_a_chunk_its_work_and_the_margin() -> None:
    stream = LeadStream(lambda _: 0.1).run(200)
    assert stream.lead.lead_s == pytest.approx(CHUNK_S + 0.1 + MARGIN_S, abs=0.01)
    assert min(stream.slacks[1:]) > 0


def test_it_shrinks_by_steps_and_grows_at_once() -> None:
    stream = LeadStream(lambda _: 0.1)
    leads = [stream.run(1).lead.lead_s for _ in range(200)]
    assert max(before - after for before, after in itertools.pairwise(leads)) <= STEP_S + 1e-9
    stream.work_s = lambda _: 0.19
    stream.run(6)
    assert stream.lead.lead_s > leads[-1] + 0.05


@pytest.mark.parametrize("seed", range(5))
def test_an_unsteady_machine_keeps_more_and_does_not_run_dry(seed: int) -> None:
    chance = random.Random(seed)
    steady = LeadStream(lambda _: 0.1).run(400).lead.lead_s
    stream = LeadStream(lambda _: chance.uniform(0.07, 0.16)).run(400)
    assert steady + 0.02 < stream.lead.lead_s < LIMIT_S
    assert min(stream.slacks[1:]) > 0


def test_a_stall_takes_the_lead_to_its_limit_and_no_further() -> None:
    stream = LeadStream(lambda _: 0.1).run(200)
    stream.work_s = lambda _: 2.0
    stream.run(1)
    assert stream.lead.lead_s == LIMIT_S
