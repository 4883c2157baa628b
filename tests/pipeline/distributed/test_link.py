"""The contract of links, over every kind that runs here, and links that do what a bad network does."""

from __future__ import annotations

import random
import threading
from collections import deque

import pytest
import torch

from streamdiff.pipeline.distributed.link import SLOTS, LinkClosed
from streamdiff.pipeline.distributed.message import MessageLayout, StageMessage
from streamdiff.pipeline.ring import Ring
from tests.pipeline.distributed.local_link import LocalLink
from tests.pipeline.distributed.scenarios import SCENARIOS, SMALL, check, work
from tests.pipeline.playing import THREE, local_ring, play, same
from tests.pipeline.processes import run_ranks
from tests.small import CPU, small_model

LIMIT_S = 900.0
MODEL = small_model(1, layers=4, sink=2)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_local(scenario: str) -> None:
    """Sender and receiver on two threads."""
    wire, send, receive = SCENARIOS[scenario]
    link = LocalLink(wire)
    errors: list[BaseException] = []

    def sending() -> None:
        try:
            send(link)
        except BaseException as error:
            errors.append(error)
            raise

    sender = threading.Thread(target=sending)
    sender.start()
    receive(link)
    sender.join()
    assert not errors


@pytest.fixture(scope="module", params=["tcp", "lanes"])
def said(request: pytest.FixtureRequest) -> str:
    """All scenarios between two processes; what the receiver says."""
    return run_ranks("tests.pipeline.distributed.scenarios", [request.param], 2, LIMIT_S)[0]


@pytest.mark.slow
@pytest.mark.xdist_group("links of processes")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_processes(scenario: str, said: str) -> None:
    assert f"{scenario} passed" in said, said


def test_a_sender_waits_while_both_slots_are_full() -> None:
    link = LocalLink(SMALL, patience_s=0.05)
    for number in range(SLOTS):
        assert link.ready
        link.send(work(number))
    assert not link.ready
    with pytest.raises(RuntimeError):
        link.send(work(SLOTS))
    check(link.receive(), 0)
    assert not link.ready, "what is being read is not free"
    check(link.receive(), 1)
    assert link.ready


def test_closing_frees_a_sender_that_waits() -> None:
    link = LocalLink(SMALL)
    for number in range(SLOTS):
        link.send(work(number))
    ended = []

    def sending() -> None:
        with pytest.raises(LinkClosed):
            link.send(work(2))
        ended.append("sender")

    sender = threading.Thread(target=sending)
    sender.start()
    link.close()
    sender.join()
    assert ended == ["sender"]
    for number in range(SLOTS):
        check(link.receive(), number)
    with pytest.raises(LinkClosed):
        link.receive(None)


class Scribbling(LocalLink):
    """Fills a slot with rubbish as soon as its owner says it is free, and before it is written."""

    def _release(self) -> None:
        if self._reading is not None:
            self._buffers[self._reading].view(torch.float32).fill_(float("nan"))
        super()._release()


class Delaying(LocalLink):
    """Now and then says that nothing is there yet."""

    def __init__(self, wire: MessageLayout) -> None:
        super().__init__(wire)
        self.chance = random.Random(wire.nbytes)

    def receive(self, wait_s: float | None = 0.0) -> StageMessage | None:
        return None if self.chance.random() < 0.6 else super().receive(wait_s)


@pytest.mark.slow
@pytest.mark.parametrize("link", [Scribbling, Delaying])
@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.soak), 4])
def test_a_ring_over_bad_links_gives_the_same_numbers(link: type[LocalLink], stages: int) -> None:
    bad = play(local_ring(MODEL, CPU, stages, link=link), MODEL, THREE)
    good = play(Ring(MODEL, CPU), MODEL, THREE)
    for name in THREE:
        assert same(bad[name], good[name])


def test_a_lost_message_is_noticed() -> None:
    link = LocalLink(SMALL)
    link.send(work(0))
    link.send(work(1))
    link._full = deque([link._full[1]])
    with pytest.raises(RuntimeError):
        link.receive()
