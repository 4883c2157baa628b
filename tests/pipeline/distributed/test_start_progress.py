"""A start that hangs says where: the rank that everybody waits for, the phase, and the edge."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from queue import SimpleQueue

import pytest
from torch.distributed import TCPStore

from streamdiff.config import Config, ModelConfig
from streamdiff.engine.process.engine_process import loading_limit_s
from streamdiff.engine.process.launcher import open_store
from streamdiff.pipeline.distributed.heartbeat import PHASES, Heartbeat, RankWatch, Stillness, held_up
from streamdiff.pipeline.distributed.link import ring_edges
from streamdiff.pipeline.distributed.rendezvous import START_LIMIT, RankContext
from tests import fork_server
from tests.pipeline.processes import ROOT

LIMIT_S = 900.0  # ends what hangs
pytestmark = pytest.mark.xdist_group("rings that hang at the start")


class Starting:
    """What is found of ranks as they start."""

    def __init__(self, ranks: int) -> None:
        self.edges, self.still = ring_edges(ranks), Stillness()

    def fault(self, beats: list[Heartbeat], now_s: float) -> str | None:
        return held_up(beats, self.edges, self.still, now_s)


def beat(phase: str, edge: int = 0, made: int = 0, number: int = 0) -> Heartbeat:
    return Heartbeat(number, phase=phase, edge=edge, made=made)


def found(*beats: Heartbeat, silent: tuple[int, ...] = ()) -> str | None:
    """What is said of ranks that stay as they are."""
    watch, said = Starting(len(beats)), None
    for second in range(int(PHASES["graphs"]) + 2):
        told = [each if rank in silent else replace(each, number=second) for rank, each in enumerate(beats)]
        said = watch.fault(told, float(second))
        if said is not None:
            break
    return said


FIRST = "first transfers"


@pytest.mark.parametrize(
    ("states", "silent", "said"),
    [
        (
            (beat(FIRST, 3), beat(FIRST, 1), beat(FIRST, 1), beat(FIRST, 2)),
            (2,),
            "rank 2 says nothing .* first transfers, edge 1 from rank 1 to rank 2: 120 s",
        ),
        ((*(beat("ready"),) * 3, beat("graphs", made=7)), (), "rank 3 does not get on .* graphs: 1800 s"),
        ((beat("ready"),) * 4, (2,), None),
    ],
)
def test_who_is_least_far_is_named(states: tuple[Heartbeat, ...], silent: tuple[int, ...], said: str | None) -> None:
    told = found(*states, silent=silent)
    assert told is None if said is None else re.match(said, str(told))


def test_who_gets_on_may_take_any_time() -> None:
    watch = Starting(2)
    for graph in range(20):
        states = [beat("ready", number=graph), beat("graphs", made=graph, number=graph)]
        assert watch.fault(states, 1000.0 * graph) is None


def test_who_waits_for_a_slow_rank_does_not_count() -> None:
    """Minutes of weights are more than a communicator may take."""
    watch = Starting(2)
    for second in (0.0, 130.0, 239.0):
        assert watch.fault([beat("communicators"), beat("weights")], second) is None


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_the_rank_is_named_before_the_engine_is_ended_for_its_silence(compiled: str) -> None:
    """Rank 0 says each phase aloud."""
    limits = [START_LIMIT.total_seconds(), *PHASES.values()][:-1]
    if compiled == "off":
        limits.remove(PHASES["graphs"])
    assert max(limits) < loading_limit_s(Config(model=ModelConfig(compile=compiled)))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_rank_that_starts_ends_when_its_launcher_is_gone() -> None:
    """The store goes with the launcher."""
    store = open_store()
    context = RankContext(0, 2, TCPStore("127.0.0.1", store.port, wait_for_workers=False))
    faults: SimpleQueue[str] = SimpleQueue()
    watch = RankWatch(context, 2)
    watch.on_fault = faults.put
    watch.enter("communicators", 1)
    del store
    assert faults.get(timeout=LIMIT_S).startswith("the launcher of the ranks is gone: ")


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """What the other ranks of a real ring say, by where rank 2 stops."""
    command = [fork_server.interpreter(), "-m", "tests.pipeline.distributed.start_process"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    rings: dict[str, list[str]] = json.loads(done.stdout)
    return rings


EDGE = "edge 1 from rank 1 to rank 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("rendezvous", r"rank 2 did not come to the start's phase rendezvous within 5 s"),
        ("weights", r"rank 2 says nothing and does not get on in the start's phase weights: 30 s"),
        ("communicators", rf"rank 1, 2 does not get on in the start's phase communicators, {EDGE}: 5 s"),
        ("first transfers", rf"rank 2 says nothing and does not get on .* first transfers, {EDGE}: 5 s"),
        ("graphs", r"rank 2 does not get on in the start's phase graphs: 5 s"),
        ("warm-up", r"in the start's phase warm-up: rank 2 hangs: 10 s at session 0, "),
    ],
)
def test_a_rank_that_stops_in_a_phase_is_named(where: str, words: str, said: dict[str, list[str]]) -> None:
    assert re.search(words, said[where][0]), said[where]
    if where == "rendezvous":
        return  # rank 0 has noticed it, and rank 1 waits for rank 0
    assert "rank 2" in said[where][1], said[where]
