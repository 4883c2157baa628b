"""The playout lead on machines that are steady, unsteady, too slow, and busy for a second: a simulated buffer."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from streamdiff.server.media.playout import MARGIN_S, STEP_S, PlayoutLead

CHUNK_S, LIMIT_S = 0.2, 0.6


class Stream:
    """An engine that begins a chunk when it fits into the lead, and a buffer that is shown in real time."""

    def __init__(self, work_s: Callable[[float], float], needs_s: float = 0.0) -> None:
        self.lead = PlayoutLead(CHUNK_S, LIMIT_S)
        self.work_s, self.needs_s = work_s, needs_s
        self.now_s, self.made_s, self.shown_until_s = 0.0, 0.0, 0.0
        self.slacks: list[float] = []

    def run(self, chunks: int) -> Stream:
        for _ in range(chunks):
            ahead_s = max(self.lead.lead_s, self.needs_s)
            begin_s = max(self.now_s, self.shown_until_s - (ahead_s - CHUNK_S))
            self.now_s = begin_s + self.work_s(begin_s)
            slack_s = self.shown_until_s - self.now_s  # negative: nothing waited
            self.slacks.append(slack_s)
            self.lead.arrived(slack_s)
            self.shown_until_s = max(self.shown_until_s, self.now_s) + CHUNK_S
        return self


def test_on_a_steady_machine_the_lead_is_a_chunk_its_work_and_the_margin() -> None:
    stream = Stream(lambda _: 0.1).run(200)
    assert stream.lead.lead_s == pytest.approx(CHUNK_S + 0.1 + MARGIN_S, abs=0.01)
    assert min(stream.slacks[1:]) > 0


def test_it_shrinks_by_steps_and_grows_at_once() -> None:
    stream = Stream(lambda _: 0.1)
    leads = [stream.run(1).lead.lead_s for _ in range(200)]
    assert max(before - after for before, after in pairwise(leads)) <= STEP_S + 1e-9
    stream.work_s = lambda _: 0.19
    stream.run(6)
    assert stream.lead.lead_s > leads[-1] + 0.05


@pytest.mark.parametrize("seed", range(5))
def test_an_unsteady_machine_keeps_more_and_does_not_run_dry(seed: int) -> None:
    chance = random.Random(seed)
    steady = Stream(lambda _: 0.1).run(400).lead.lead_s
    stream = Stream(lambda _: chance.uniform(0.07, 0.16)).run(400)
    assert steady + 0.02 < stream.lead.lead_s < LIMIT_S
    assert min(stream.slacks[1:]) > 0


def test_a_second_in_which_all_takes_half_as_long_again_empties_nothing() -> None:
    stream = Stream(lambda _: 0.1).run(200)
    begin_s = stream.now_s
    stream.work_s = lambda now_s: 0.15 if now_s < begin_s + 1 else 0.1
    stream.run(200)
    assert min(stream.slacks[1:]) > 0
    assert stream.lead.lead_s == pytest.approx(CHUNK_S + 0.1 + MARGIN_S, abs=0.01), "and it comes back"


def test_it_begins_with_a_part_of_what_it_may_be() -> None:
    assert PlayoutLead(CHUNK_S, 0.9).lead_s == pytest.approx(0.6)


def test_a_stall_takes_the_lead_to_its_limit_and_no_further() -> None:
    stream = Stream(lambda _: 0.1).run(200)
    stream.work_s = lambda _: 2.0
    stream.run(1)
    assert stream.lead.lead_s == LIMIT_S


def test_where_the_engine_needs_more_ahead_the_lead_follows_from_there() -> None:
    stream = Stream(lambda _: 0.1, needs_s=0.5).run(200)
    assert stream.lead.lead_s == pytest.approx(0.4, abs=0.01), "what is there when a chunk has come"
    stream.work_s, stream.needs_s = lambda _: 0.25, 0.0
    stream.run(8)
    assert stream.lead.lead_s > 0.45


def test_a_chunk_always_fits() -> None:
    lead = PlayoutLead(1.0, 0.6)
    for _ in range(100):
        lead.arrived(5.0)
    assert lead.lead_s == 1.0
