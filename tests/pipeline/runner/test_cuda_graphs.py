"""Graphs of CUDA are bound to a pool of caches and to no session: rings whose graphs are stand-ins.

A stand-in does what a graph of CUDA does, as far as that can be without one: it carries out the blocks on the very
tensors that it was made with, and leaves the result in one place. Nothing is compiled here, see `test_compiled_stage`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from streamdiff.core import MicroStep
from streamdiff.models.model import Model
from streamdiff.models.transformer.attention_backend import attention_over_segments, row_by_row
from streamdiff.pipeline.distributed.message import Outcome, SessionUpdate
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches, RankMemory
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner import compiled_stage
from streamdiff.pipeline.runner.compiled_stage import Key
from streamdiff.pipeline.runner.graphs import Graph, GraphCache, Inputs, Run, Tensors
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.session_state import swap_store, walk
from streamdiff.session_state.swap_store import HostCopies, HostCopy
from tests.pipeline.playing import Order, end, local_ring, play
from tests.pipeline.test_controls import WORLD
from tests.small import BLUE, CPU, RED, WHITE, small_model, small_world

MODEL = small_model(3, sink=2)  # chunks of 2, window of 3 chunks, one of them sink
FULL = 2
"""The first chunk whose window is full, from which on there are graphs."""
TOLERANCE = 1e-5
TWO = {0: Order(RED, 5, 4, "clean"), 1: Order(WHITE, 6, 4, "clean")}


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


def record(run: Run, inputs: Inputs) -> tuple[Graph, Tensors]:
    caches = [layer for pair in inputs.caches for each in pair for layer in each]
    caches += [each for own, _ in inputs.acting for each in vars(own).values()]
    before = [layer.clone() for layer in caches]
    result = tuple(RESULTS.setdefault(each.shape, torch.empty_like(each)) for each in run(inputs))
    for layer, was in zip(caches, before, strict=True):
        layer.copy_(was)  # to capture carries nothing out
    return StandIn(run, inputs, result), result


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled_stage, "graph_cache_on", lambda device: GraphCache(record))
    with torch.compiler.set_stance("force_eager"):
        yield


def compiled(model: Model, stages: int = 1, sessions: int = 2, kv_context: str = "clean", max_rows: int = 1) -> Ring:
    """A ring whose stages have graphs, for a pool of so many sessions."""
    ring = local_ring(model, CPU, stages, max_rows)
    for stage in stages_of(ring):
        stage.compile(PreallocatedCaches(sessions, 4, kv_context), max_rows=max_rows)
    return ring


def stages_of(ring: Ring) -> list[ModelRunner]:
    return [ring.stage, *(worker.stage for worker in ring.local)]


def graphs_of(stage: ModelRunner) -> dict[Any, Any]:
    assert stage.compiled is not None and stage.compiled._graph_cache is not None
    return dict(stage.compiled._graph_cache.graphs)


def alike(got: dict[int, list[Tensor]], expected: dict[int, list[Tensor]]) -> bool:
    """As near as float32 can be: rows are attended to in another order where there are graphs."""
    return all(
        len(got[name]) == len(latents)
        and max(float((a - b).abs().max()) for a, b in zip(got[name], latents, strict=True)) <= TOLERANCE
        for name, latents in expected.items()
    )


@pytest.mark.parametrize("stages", [1, 2])
def test_what_cameras_do_is_copied_to_where_graphs_look_for_it(stages: int) -> None:
    """Two worlds steered apart, alone and in one forward; another chunk's cameras are other ones."""
    keys = {1: [{"forward": 1.0}], 6: [{"look_up": -1.0}]}
    orders = {0: Order(RED, 5, 4, "clean", 99, keys=keys), 1: Order(WHITE, 6, 4, "clean", keys={4: [{"right": 1.0}]})}
    ring = compiled(WORLD, stages, max_rows=2)
    assert alike(play(ring, WORLD, orders, 8), play(local_ring(WORLD, CPU), WORLD, orders, 8))
    for stage in stages_of(ring):
        assert stage.compiled is not None and stage.compiled.pool is not None
        assert len({number // stage.compiled.pool.caches for number in stage.compiled.replayed}) == 2
        assert all(len(session.steered) < 2 for session in stage.sessions.values()), "only of the chunk in flight"


@pytest.mark.parametrize(("kv_context", "stages"), [("clean", 2), ("same_step", 2)])
def test_action_modules_are_captured_and_forwards_of_several_worlds_are_not(kv_context: str, stages: int) -> None:
    """Of two worlds steered apart, through evictions; later sessions find the caches of earlier ones empty."""
    model = small_world(1)
    ring = compiled(model, stages, kv_context=kv_context, max_rows=2)
    learned = [graphs_of(stage) for stage in stages_of(ring)]
    assert all(isinstance(key, Key) and len(key.shapes) == 1 for graphs in learned for key, _ in graphs)
    for first in (0, 2):
        one = Order(RED, 5 + first, 4, kv_context, keys={1: [{"walk": 1.0}], 4: [{"yaw": -1.0}]})
        orders = {first: one, first + 1: Order(WHITE, 6, 4, kv_context, keys={3: [{"yaw": 1.0}]})}
        assert alike(play(ring, model, orders, 7), play(local_ring(model, CPU), model, orders, 7))
        end(ring, *orders)
    for stage, before in zip(stages_of(ring), learned, strict=True):
        assert stage.compiled is not None and stage.compiled.pool is not None and graphs_of(stage) == before
        assert len({number // stage.compiled.pool.caches for number in stage.compiled.replayed}) == 2


class Noted(TorchDispatchMode):
    """Notes the operations that a stage asks for, those of its graphs left aside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_a_replayed_micro_step_takes_no_memory(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """It looks at tensors and copies into what is there. A chunk's first step makes its table of rotary factors. While
    the window fills, nothing is replayed."""
    noted = asked_for(monkeypatch, stages, {0: TWO[0]})
    assert len(noted) >= stages * 3 * 4
    assert {name for names in noted for name in names} == {"aten.view.default", "aten.copy_.default"}


def asked_for(monkeypatch: pytest.MonkeyPatch, stages: int, orders: dict[int, Order]) -> list[list[str]]:
    """Operations of each forward of a chunk's later steps, while the sessions play."""
    ring = local_ring(MODEL, CPU, stages)
    replay = StandIn.replay
    monkeypatch.setattr(StandIn, "replay", lambda graph: outside(lambda: replay(graph)))
    noted: list[list[str]] = []

    def note(forward: Callable[..., Tensors], rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        with Noted() as mode:
            result = forward(rows, given)
        if all(row.step > 0 and row.chunk >= FULL for row in rows):
            noted.append(mode.names)
        return result

    for stage in [ring.stage, *(worker.stage for worker in ring.local)]:
        stage.compile(PreallocatedCaches(len(orders), 4, "clean"))
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
    ring = compiled(model)
    learned = graphs_of(ring.stage)
    got, expected = play(ring, model, TWO), play(Ring(model, CPU), model, TWO)
    assert alike(got, expected)
    assert graphs_of(ring.stage) == learned and {number for _, number in learned} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_context", "stages"),
    [
        ("clean", 1),
        ("same_step", 1),
        ("staircase", 2),
        *(pytest.param(*more, marks=pytest.mark.soak) for more in (("clean", 2), ("same_step", 2), ("staircase", 1))),
    ],
)
def test_rows_of_any_sessions_have_one_graph_for_each_number_of_them(
    kv_context: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of sessions that are opened later, on a ring too: nothing is captured once streams run."""
    replayed: Counter[int] = Counter()
    replay = StandIn.replay

    def counting(graph: StandIn) -> None:
        replayed[len(graph.inputs.rows)] += 1
        replay(graph)

    monkeypatch.setattr(StandIn, "replay", counting)
    count = 4 if stages == 1 else 7  # on two stages forwards are shared where there are two rows for each of 3 places
    ring = compiled(MODEL, stages, sessions=count, kv_context=kv_context, max_rows=3)
    stages_all = stages_of(ring)
    learned = [graphs_of(stage) for stage in stages_all]
    for graphs in learned:
        assert sorted(len(shapes) for _, shapes in several(graphs)) == [2, 3]
    before = Counter(replayed)
    texts = (RED, WHITE, BLUE)
    for first in (0, count):  # the later ones have the caches of those before, in another order
        orders = {first + n: Order(texts[n % 3], first + n, 4, kv_context) for n in range(count)}
        got = play(ring, MODEL, orders, 5)
        assert alike(got, play(Ring(MODEL, CPU), MODEL, orders, 5))
        for name in sorted(orders, key=lambda name: name % 3):
            end(ring, name)
    assert replayed[2] + replayed[3] > before[2] + before[3] + 10, "forwards of several sessions were replayed"
    assert [graphs_of(stage) for stage in stages_all] == learned


def several(graphs: dict[Any, Any]) -> list[Any]:
    """What graphs of rows of several sessions are known by: sessions, and shapes of rows."""
    return [place for place in graphs if isinstance(place[0], tuple) and not isinstance(place[0], Key)]


@pytest.mark.slow
def test_rows_that_attend_at_once_see_their_own_sessions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel over pages of the pool, of which this is a plain one."""
    called: list[int] = []

    def paged(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        called.append(len(query))
        return row_by_row(attention_over_segments("math"), query, key, value, seen)

    monkeypatch.setattr(compiled_stage, "try_paged", lambda *_: (paged, "here"))
    ring = compiled(MODEL, sessions=3, max_rows=3)
    called.clear()
    orders = {n: Order((RED, WHITE, BLUE)[n], n, 4, "clean") for n in range(3)}
    assert alike(play(ring, MODEL, orders), play(Ring(MODEL, CPU), MODEL, orders))
    assert set(called) <= {2, 3} and len(called) > 20


@pytest.mark.slow
def test_sessions_beyond_the_pool_and_of_other_kinds_make_the_plain_streams() -> None:
    orders = {name: Order(RED, name, 4, "clean") for name in range(3)} | {3: Order(WHITE, 3, 4, "same_step")}
    ring = compiled(MODEL, max_rows=2)
    learned = graphs_of(ring.stage)
    got, expected = play(ring, MODEL, orders), play(Ring(MODEL, CPU), MODEL, orders)
    assert alike(got, expected)
    assert graphs_of(ring.stage) == learned


@torch.inference_mode()
def test_caches_of_the_pool_are_empty_for_the_next_session_and_nobody_elses() -> None:
    ring = compiled(MODEL, sessions=2)
    stage = ring.stage
    for session in (0, 1, 2):
        stage.open(session, steps=4, kv_context="clean")
        stage.sessions[session].state.key.fill_(1.0 + session)
    pool = stage._pool
    assert pool is not None and pool.whole.keys[0].unique().tolist() == [1.0, 2.0], "the third has its own"
    assert pool.number_of(stage.sessions[2].state.layers(0)) is None
    for session in (2, 0):
        stage.close(session)
    stage.open(3, steps=4, kv_context="clean")
    assert pool.number_of(stage.sessions[3].state.layers(0)) == 0
    assert pool.whole.keys[0].unique().tolist() == [0.0, 2.0]


@torch.inference_mode()
@pytest.mark.parametrize("piece", [1, 1 << 24])
def test_a_session_whose_caches_are_the_pools_is_saved_and_swapped_as_any(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers lie apart in memory, and are copied one by one where they are large."""
    monkeypatch.setattr(swap_store, "_PIECE", piece)
    stage = compiled(MODEL, sessions=3).stage
    for session in (0, 1):
        stage.open(session, steps=4, kv_context="clean")
        stage.set_text(session, 0, MODEL.text.encode(RED), 0)
    state = stage.sessions[1].state
    for each in (state.key, state.value, state.sink_key):
        each.copy_(torch.randn(each.shape))
    expected = state.key.clone()
    copy = HostCopy(HostCopies(), stage.sessions[1])
    while not copy.go_on(1000):
        pass
    saved, tree = copy.result()
    assert all(tensor.is_contiguous() for tensor in saved.values())
    assert torch.equal(walk.restored(saved, tree).state.key, expected)
    stage.mover.copy_out(SessionUpdate(1))
    stage.open(2, steps=4, kv_context="clean")
    assert stage.mover.put_back(SessionUpdate(1, 0, 0, 4, "clean")) is Outcome.DONE
    assert torch.equal(stage.sessions[1].state.key, expected)
    assert not stage.sessions[2].state.key.any()


@pytest.mark.parametrize(
    ("room", "expected"), [(None, 3), (RankMemory(0), 1), (RankMemory(250, 20), 2), (RankMemory(10**4), 6)]
)
def test_the_pool_is_for_as_many_sessions_as_have_room(room: RankMemory | None, expected: int) -> None:
    """Of 100 each, and what a decoder remembers: three, or up to six in half of the memory."""
    stage = ModelRunner(MODEL.part(0, 1), CPU)
    stage.open(0, steps=4, kv_context="clean")
    unit = walk.nbytes(stage.sessions[0].state) / 100
    given = None if room is None else RankMemory(int(room.free * unit), int(room.decoding * unit))
    kept = PreallocatedCaches(3, 4, "clean", 6)
    stage.compile(kept, memory=given)
    assert stage._pool is not None and stage._pool.sessions == expected
