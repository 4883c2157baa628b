"""What is captured for whom, and when it is forgotten: the books alone, and a ring whose graphs are stand-ins.

A stand-in does what a graph of CUDA does, as far as that can be without one: it carries out the blocks on the very
tensors that it was made with, and leaves the result in one place. Nothing is compiled here, see `test_compiled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from streamdiff.models.model import Model
from streamdiff.pipeline.executor import LocalRing, RingExecutor
from streamdiff.pipeline.planner.kv_budget import RankMemory
from streamdiff.pipeline.runner import compiled_stage
from streamdiff.pipeline.runner.compiled_stage import Captured, CompiledStage, Inputs, Recorded, Run
from streamdiff.pipeline.runner.cuda_graph_cache import HOMES, GraphCache
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.runner.stage_forward import Tensors
from streamdiff.pipeline.scheduler.step import MicroStep
from streamdiff.session_state import walk
from tests.pipeline.playing import Order, play
from tests.small import CPU, RED, WHITE, small_model

MODEL = small_model(3, sink=2)  # chunks of 2, window of 3 chunks, one of them sink
FULL = 2
"""The first chunk whose window is full, from which on there are graphs."""
TOLERANCE = 1e-5
TWO = {0: Order(RED, 5, 4, "clean"), 1: Order(WHITE, 6, 4, "clean")}


def test_what_comes_while_learning_is_captured_at_once_and_later_at_the_second_time() -> None:
    books: GraphCache[str] = GraphCache()
    assert books.should_capture("learned", (1,), learning=True)
    assert not books.should_capture("met", (2,), learning=False)
    assert books.should_capture("met", (2,), learning=False)
    books.keep("met", (2,), "graph")
    assert (books.find("met"), books.find("learned"), books.homes) == ("graph", None, {2})


def test_a_home_that_is_forgotten_leaves_nothing_behind() -> None:
    """Its addresses may be another session's next, whose first forward must find nothing."""
    books: GraphCache[str] = GraphCache()
    for place, homes in (("a", (1,)), ("b", (2,)), ("both", (1, 2))):
        books.keep(place, homes, f"graph of {place}")
    books.should_capture("met once", (1,), learning=False)
    assert (books.count(1), books.count(2)) == (2, 2)
    books.forget(1)
    assert (books.places, books.count(1), books.count(2)) == ({"b"}, 0, 1)
    assert books.find("a") is None and books.find("both") is None
    assert not books.should_capture("met once", (1,), learning=False), "the other one has not met it before"


def test_sessions_beyond_the_bound_go_without_until_there_is_room() -> None:
    books: GraphCache[str] = GraphCache(2)
    for home in (1, 2):
        books.keep(home, (home,), "graph")
    for place, homes in (("third", (3,)), ("mixed", (1, 3))):
        assert not any(books.should_capture(place, homes, learning=False) for _ in range(5))
    assert [books.should_capture("another of the first", (1,), learning=False) for _ in range(2)] == [False, True]
    books.forget(2)
    assert [books.should_capture("third", (3,), learning=False) for _ in range(2)] == [False, True]


@dataclass(eq=False)
class StandIn:
    """See the module."""

    run: Run
    inputs: Inputs
    result: Tensors

    def replay(self) -> None:
        for to, source in zip(self.result, self.run(self.inputs), strict=True):
            to.copy_(source)


RESULTS: dict[torch.Size, Tensor] = {}
"""Where all graphs of a test put what they compute: a graph of CUDA may find its result overwritten by the next one's,
as they share memory."""


def record(run: Run, inputs: Inputs, warm_up: bool) -> tuple[Recorded, Tensors]:
    caches = [layer for pair in inputs.caches for each in pair for layer in each]
    before = [layer.clone() for layer in caches]
    result = tuple(RESULTS.setdefault(each.shape, torch.empty_like(each)) for each in run(inputs))
    for layer, was in zip(caches, before, strict=True):
        layer.copy_(was)  # to capture carries nothing out
    return StandIn(run, inputs, result), result


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled_stage, "captured_on", lambda device, live: Captured(record, live))
    with torch.compiler.set_stance("force_eager"):
        yield


def ring_of(model: Model) -> tuple[RingExecutor, CompiledStage, Captured]:
    ring = RingExecutor(model, CPU)
    ring.stage.compile(steps=4, kv_context="clean")
    blocks = ring.stage.compiled
    assert blocks is not None and blocks._captured is not None
    return ring, blocks, blocks._captured


def alike(got: dict[int, list[Tensor]], expected: dict[int, list[Tensor]]) -> bool:
    """As near as float32 can be: rows are attended to in another order where there are graphs."""
    return all(
        len(got[name]) == len(latents)
        and max(float((a - b).abs().max()) for a, b in zip(got[name], latents, strict=True)) <= TOLERANCE
        for name, latents in expected.items()
    )


def end(ring: RingExecutor, session: int) -> None:
    ring.close(session)
    while ring.has_work:
        ring.turn()


class Noted(TorchDispatchMode):
    """Notes the operations that a stage asks for, those of its graphs left aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_replayed_micro_step_takes_no_memory(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """It looks at tensors and copies into what is there. A chunk's first step makes its table of rotary factors. While
    the window fills, nothing is replayed."""
    noted = asked_for(monkeypatch, stages, {0: TWO[0]})
    assert len(noted) >= stages * 3 * 4
    assert {name for names in noted for name in names} == {"aten.view.default", "aten.copy_.default"}


def test_sessions_that_take_turns_copy_no_prompt_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is large: keys and values of each layer."""
    alone, together = asked_for(monkeypatch, 1, {0: TWO[0]}), asked_for(monkeypatch, 1, TWO)
    assert copies(alone) == copies(together)
    assert max(copies(alone)) <= 6, "what is new with every step"


def copies(noted: list[list[str]]) -> set[int]:
    return {names.count("aten.copy_.default") for names in noted}


def asked_for(monkeypatch: pytest.MonkeyPatch, stages: int, orders: dict[int, Order]) -> list[list[str]]:
    """Operations of each forward of a chunk's later steps, while the sessions play."""
    ring = LocalRing(MODEL, CPU, stages)
    replay = StandIn.replay
    monkeypatch.setattr(StandIn, "replay", lambda graph: outside(lambda: replay(graph)))
    noted: list[list[str]] = []

    def note(forward: Callable[..., Tensors], rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        with Noted() as mode:
            result = forward(rows, given)
        if all(row.step > 0 and row.chunk >= FULL for row in rows):
            noted.append(mode.names)
        return result

    for stage in [ring.stage, *(worker.stage for worker in ring.others)]:
        stage.compile(steps=4, kv_context="clean", sessions=len(orders))
        monkeypatch.setattr(stage, "forward", partial(note, stage.forward))
    play(ring, MODEL, orders, 6)
    return noted


def outside(work: Callable[[], None]) -> None:
    """Do it without the modes around."""
    with _disable_current_modes():
        work()


@pytest.mark.slow
@pytest.mark.parametrize("keep", [None, 0.5], ids=["plain sink", "averaged sink"])
def test_two_sessions_at_once_are_both_captured_and_make_the_plain_streams(keep: float | None) -> None:
    """Through first chunks, evictions and prompt switches. An averaged sink would show a forward that happens twice."""
    model = MODEL if keep is None else small_model(1, layers=1, window=6, sink=2)
    model = replace(model, spec=replace(model.spec, averaged_sink=keep))
    ring, blocks, captured = ring_of(model)
    learned = captured.kept.places
    assert blocks.captured_sessions == 1, "those whose caches wait for the first session"
    got, expected = play(ring, model, TWO), play(RingExecutor(model, CPU), model, TWO)
    assert alike(got, expected)
    assert blocks.captured_sessions == 2 and captured.kept.places > learned
    keys = [{place[0] for place in captured.kept.places if place[1] in spots} for spots in by_home(captured)]
    assert keys[0] & keys[1], "the steady state, of each"


def by_home(captured: Captured) -> list[set[object]]:
    """Addresses in the places, by home."""
    return [
        {place[1] for place, (homes, _) in captured.kept._graphs.items() if home in homes}  # type: ignore[index]
        for home in captured.kept.homes
    ]


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first goes first", "first goes last"])
def test_graphs_go_with_their_caches_and_the_most_wait_for_the_next_session(order: tuple[int, int]) -> None:
    ring, blocks, captured = ring_of(MODEL)
    learned = len(captured.kept.places)
    play(ring, MODEL, TWO)
    assert len(captured.kept.places) == 2 * learned
    for session in order:
        end(ring, session)
    assert blocks.captured_sessions == 1 and len(captured.kept.places) == learned
    got = play(ring, MODEL, TWO)
    expected = play(RingExecutor(MODEL, CPU), MODEL, TWO)
    assert alike(got, expected)
    assert blocks.captured_sessions == 2


def test_who_has_more_graphs_waits_for_the_next_session() -> None:
    ring, _, captured = ring_of(MODEL)
    learned = captured.kept.homes
    play(ring, MODEL, {0: TWO[0]})
    ring.open(1, MODEL.text.encode(WHITE), seed=6, epoch=0, steps=4, kv_context="clean")
    for session in (1, 0):
        end(ring, session)
    assert captured.kept.homes == learned


@pytest.mark.slow
def test_more_sessions_than_have_graphs_make_the_plain_streams() -> None:
    orders = {name: Order(RED, name, 4, "clean") for name in range(HOMES + 2)}
    ring, blocks, _ = ring_of(MODEL)
    got, expected = play(ring, MODEL, orders), play(RingExecutor(MODEL, CPU), MODEL, orders)
    assert alike(got, expected)
    assert blocks.captured_sessions == HOMES


@pytest.mark.slow
def test_in_a_ring_only_what_was_learned_is_captured_which_may_be_for_several_sessions() -> None:
    """Nothing more is captured while a third one plays beside them, and when they have ended their caches wait."""
    three = {**TWO, 2: Order(RED, 7, 4, "clean")}
    ring = LocalRing(MODEL, CPU, 2)
    stages = [ring.stage, *(worker.stage for worker in ring.others)]
    for stage in stages:
        stage.compile(steps=4, kv_context="clean", sessions=2)
    learned = [graphs_of(stage) for stage in stages]
    expected = play(LocalRing(MODEL, CPU, 2), MODEL, three)
    for order in ((0, 1, 2), (2, 1, 0)):
        assert alike(play(ring, MODEL, three), expected)
        assert [graphs_of(stage) for stage in stages] == learned
        for session in order:
            end(ring, session)
    assert [len(stage._waiting) for stage in stages] == [2, 2]
    assert [{compiled_stage.home_of(state.key) for state in stage._waiting} for stage in stages] == [
        {home for homes, _ in graphs.values() for home in homes} for graphs in learned
    ]


def graphs_of(stage: ModelRunner) -> dict[object, tuple[tuple[int, ...], object]]:
    assert stage.compiled is not None and stage.compiled._captured is not None
    return dict(stage.compiled._captured.kept._graphs)


@pytest.mark.parametrize(
    ("room", "expected"), [(None, 3), (RankMemory(0), 1), (RankMemory(250, 20), 2), (RankMemory(10**4), 3)]
)
def test_caches_wait_for_as_many_sessions_as_have_room(room: RankMemory | None, expected: int) -> None:
    """Of 100 each, and what a decoder remembers."""
    stage = ModelRunner(MODEL.part(0, 1), CPU)
    stage.open(0, steps=4, kv_context="clean")
    unit = walk.nbytes(stage.sessions[0].state) / 100
    given = None if room is None else RankMemory(int(room.free * unit), int(room.decoding * unit))
    stage.compile(steps=4, kv_context="clean", sessions=3, memory=given)
    assert len(stage._waiting) == expected
