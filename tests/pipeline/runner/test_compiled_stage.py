"""Compiled blocks make the stream that the plain path makes, their number depends neither on blocks nor on the window,
and nothing that happens to a stream compiles again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from streamdiff.core import MicroStep
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.compiled_stage import CompiledStage
from streamdiff.pipeline.runner.graphs import Tensors
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.pipeline.compiling import BACKENDS, FINDING, FOUND, TRACED, compiled_by
from tests.pipeline.playing import Order, end, local_ring, play
from tests.small import BLUE, CPU, RED, WHITE, small_model, small_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("compiled stage"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

MODEL = small_model(3, sink=2)  # chunks of 2, window of 3 chunks, one of them sink
FULL = 2
"""The first chunk whose window is full."""
CHUNKS = 10
TOLERANCE = 1e-5
"""Of latents, in float32, over ten chunks that see each other; the seed of a stream moves them by more than 1."""


def stages(ring: Ring) -> list[ModelRunner]:
    others = ring.local
    return [ring.stage, *(worker.stage for worker in others)]


@pytest.fixture(scope="module", params=BACKENDS)
def ring(request: pytest.FixtureRequest) -> Ring:
    """Two stages of one block each, so that what links hand over comes in too."""
    ring = local_ring(MODEL, CPU, 2)
    with compiled_by(request.param):
        for stage in stages(ring):
            stage.compile(PreallocatedCaches(1, 4, "clean"))
    return ring


@contextmanager
def nothing_compiled() -> Iterator[None]:
    before = dict(counters["stats"])
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
    assert dict(counters["stats"]) == before


def worst(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    assert len(one) == len(other) > 0
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def test_there_are_graphs_without_breaks_for_a_full_window(ring: Ring) -> None:
    for stage in stages(ring):
        assert stage.compiled is not None
        assert [[(s.sink, s.window_frames) for s in key.shapes] for key in stage.compiled._graphs] == [[(2, 4)]]
    assert not counters["graph_break"]


ONE, FOUR = (1, 4, 2), (4, 8, 0)
SIZES = [ONE, (3, 4, 2), (2, 12, 2), FOUR]


@pytest.mark.parametrize(
    ("kv_context", "sizes"),
    [
        ("clean", [ONE, FOUR]),
        ("same_step", [FOUR]),
        ("staircase", [FOUR]),
        *(pytest.param(context, SIZES, marks=pytest.mark.soak) for context in ("clean", "same_step", "staircase")),
    ],
)
def test_neither_blocks_nor_the_window_make_more_graphs(kv_context: str, sizes: list[tuple[int, int, int]]) -> None:
    """Up to the first self-attention, from one to the next, from the last on. One block has no next. One more rotates
    the sink, if there is one, for all blocks; one more puts the results over a window in two pieces together.
    `sizes` are (blocks, window, sink)."""
    for layers, window, sink in sizes:
        ring = Ring(small_model(3, layers=layers, window=window, sink=sink), CPU)
        before = counters["stats"]["unique_graphs"]
        with compiled_by(FOUND):
            ring.stage.compile(PreallocatedCaches(1, 4, kv_context))
        graphs = 2 if layers == 1 else 3
        extra = (sink > 0) + (kv_context == "staircase")
        assert counters["stats"]["unique_graphs"] - before == graphs + extra


def test_a_stream_is_the_plain_one_through_first_chunks_evictions_and_a_prompt_switch(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is one after it, with the same caches."""
    with nothing_compiled():
        for order in (Order(RED, 5, 4, "clean"), Order(WHITE, 6, 4, "clean")):
            ran_a_graph: list[list[bool]] = []
            with monkeypatch.context() as patch:
                for stage in stages(ring):
                    ran_a_graph.append([])
                    patch.setattr(stage.compiled, "run", told(stage.compiled, ran_a_graph[-1]))
                got = play(ring, MODEL, {0: order}, CHUNKS)[0]
            assert all(full_window_only(ran, FULL * 5) for ran in ran_a_graph)
            expected = play(Ring(MODEL, CPU), MODEL, {0: order}, CHUNKS)[0]
            assert worst(got, expected) <= TOLERANCE
            end(ring, 0)
    assert worst(got, play(Ring(MODEL, CPU), MODEL, {0: Order(RED, 5, 4, "clean")}, CHUNKS)[0]) > 1


def full_window_only(ran_a_graph: list[bool], forwards: int) -> bool:
    """Whether so many forwards, while the window filled, ran the plain path, and all others graphs."""
    others = len(ran_a_graph) - forwards
    return others > forwards and ran_a_graph == [False] * forwards + [True] * others


def told(blocks: CompiledStage | None, ran_a_graph: list[bool]) -> Callable[..., Tensors | None]:
    """`blocks.run`, which notes whether there was a graph."""
    assert blocks is not None
    run = blocks.run

    def noting(*given: Any) -> Tensors | None:
        done = run(*given)
        ran_a_graph.append(done is not None)
        return done

    return noting


def tokens(rows: int) -> Tensors:
    """What a stage behind the first is given."""
    return tuple(torch.randn_like(each) for each in ModelRunner(MODEL, CPU, 1, 2).zeros(rows))


@pytest.mark.parametrize("policy", ["keep", "flush", "recache"])
def test_a_prompt_switch_of_any_policy_runs_graphs_that_are_there(ring: Ring, policy: str) -> None:
    with nothing_compiled():
        got, expected = switched(ring, policy), switched(Ring(MODEL, CPU), policy)
    assert worst(got, expected) <= TOLERANCE


def switched(ring: Ring, policy: str, chunks: int = 8) -> list[torch.Tensor]:
    ring.open(0, MODEL.text.encode(RED), seed=4, epoch=0, steps=4, kv_context="clean")
    done: list[torch.Tensor] = []
    due = True
    while len(done) < chunks:
        if due and len(done) == 5:
            due = False
            ring.set_conditioning(0, MODEL.text.encode(BLUE), epoch=1, switch=policy)
        ring.scheduler.set_frame_credit(0, (min(chunks, 8 if not due else 5) - ring.scheduler.next_chunk(0)) * 4 * 4)
        done += [latents for _, latents in ring.step_latents(1.0)[1]]
    end(ring, 0)
    return done


def test_what_no_graph_was_made_for_runs_the_plain_path(ring: Ring) -> None:
    """Three sessions of other kinds at once, whose caches have other sizes."""
    orders = {0: Order(RED, 5, 4, "same_step"), 1: Order(WHITE, 6, 4, "staircase"), 2: Order(RED, 7, 2, "clean")}
    with nothing_compiled():
        got = play(ring, MODEL, orders)
    expected = play(local_ring(MODEL, CPU, 2), MODEL, orders)
    assert max(worst(got[name], expected[name]) for name in orders) <= TOLERANCE
    end(ring, *orders)


@pytest.mark.parametrize("backend", FINDING)
def test_around_action_modules_blocks_run_compiled(backend: str) -> None:
    world = small_world(3)
    orders = {0: Order(RED, 5, 4, "clean", keys={1: [{"walk": 1.0}], 4: [{"yaw": -1.0}]})}
    ring = local_ring(world, CPU, 2)
    with compiled_by(backend):
        for stage in stages(ring):
            stage.compile(PreallocatedCaches(1, 4, "clean"))
    with nothing_compiled():
        got = play(ring, world, orders, CHUNKS)
    assert worst(got[0], play(local_ring(world, CPU), world, orders, CHUNKS)[0]) <= TOLERANCE


@pytest.mark.parametrize(
    ("kv_context", "window", "sink", "dtype"),
    [
        ("same_step", 6, 2, torch.bfloat16),
        ("staircase", 8, 0, torch.float32),
        pytest.param("same_step", 6, 2, torch.float32, marks=pytest.mark.soak),
        pytest.param("staircase", 8, 0, torch.bfloat16, marks=pytest.mark.soak),
    ],
)
@torch.inference_mode()
def test_what_is_compiled_is_the_plain_path_to_the_bit(
    kv_context: str, window: int, sink: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is handed to the compiler, whose own sums have another order: see docs/decisions/0020. In float32 the plain
    path of a CPU rotates by complex numbers, so there it is told to do as on other devices."""
    if dtype is torch.float32:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    results, keys = [], []
    for compiles in (False, True):
        model = small_model(3, window=window, sink=sink)
        model.denoiser.model.to(dtype)
        model.denoiser.fuse()
        stage = ModelRunner(model.part(0, 2), CPU)
        if compiles:
            with compiled_by(TRACED):
                stage.compile(PreallocatedCaches(1, 4, kv_context))
        stage.open(0, steps=4, kv_context=kv_context)
        stage.set_text(0, 0, model.text.encode(RED), 0)
        generator = torch.Generator().manual_seed(1)
        state = stage.sessions[0].state
        for cache in (state.key, state.value, state.sink_key):
            cache.copy_(torch.randn(cache.shape, generator=generator))
        for chunk in range(14, 18):  # of a staircase's window in one and in two pieces
            for step in range(4):
                like = stage.zeros(1)
                given = tuple(torch.randn(each.shape, generator=generator).to(dtype) for each in like)
                results.append(stage.forward([MicroStep(0, chunk, step, 4, 0)], given)[0].clone())
        keys.append(state.key)
    assert results[0].dtype == dtype
    assert all(map(torch.equal, results[:16], results[16:]))
    assert torch.equal(*keys)


@pytest.mark.parametrize("backend", FINDING)
def test_rows_of_several_sessions_run_compiled_whosever_they_are(backend: str) -> None:
    """Of sessions that no graph was made with, at different chunks; while one's window fills the plain path runs."""
    plain, compiled = (ModelRunner(MODEL.part(1, 2), CPU, 1, 2) for _ in range(2))
    with compiled_by(backend):
        compiled.compile(PreallocatedCaches(1, 4, "clean"), max_rows=2)
    ran_a_graph: list[bool] = []
    compiled.compiled.run = told(compiled.compiled, ran_a_graph)  # type: ignore[method-assign, union-attr]
    given, results = tokens(2), list[torch.Tensor]()
    for stage in (plain, compiled):
        for session, text in ((7, RED), (8, BLUE)):
            stage.open(session, steps=4, kv_context="clean")
            stage.set_text(session, 0, MODEL.text.encode(text), 0)
    with nothing_compiled():
        for stage in (plain, compiled):
            for chunk in (FULL + 1, 0):
                rows = [MicroStep(7, FULL + 3, 1, 4, 0), MicroStep(8, chunk, 0, 4, 0)]
                results.append(stage.forward(rows, given)[0].clone())
    assert ran_a_graph == [True, False]
    assert worst(results[2:], results[:2]) <= TOLERANCE


@pytest.mark.parametrize("backend", FINDING)
@pytest.mark.parametrize(("window", "sink", "keep"), [(6, 2, 0.5), (5, 1, None)])
def test_averaged_sinks_and_windows_that_cut_chunks_have_graphs_too(
    window: int, sink: int, keep: float | None, backend: str
) -> None:
    model = small_model(3, layers=1, window=window, sink=sink)
    model = replace(model, spec=replace(model.spec, averaged_sink=keep))
    ring = Ring(model, CPU)
    with compiled_by(backend):
        ring.stage.compile(PreallocatedCaches(1, 2, "clean"))
    order = Order(RED, 5, 2, "clean")
    ran_a_graph: list[bool] = []
    with pytest.MonkeyPatch.context() as patch, nothing_compiled():
        patch.setattr(ring.stage.compiled, "run", told(ring.stage.compiled, ran_a_graph))
        got = play(ring, model, {0: order})[0]
    assert worst(got, play(Ring(model, CPU), model, {0: order})[0]) <= TOLERANCE
    assert full_window_only(ran_a_graph, 3 * FULL)


@pytest.mark.parametrize("backend", FINDING)
@pytest.mark.parametrize("kv_context", ["clean", pytest.param("same_step", marks=pytest.mark.soak)])
def test_after_chunks_that_are_made_together_graphs_run(kv_context: str, backend: str) -> None:
    model = replace(MODEL, spec=replace(MODEL.spec, first_chunks=2))
    ring = Ring(model, CPU)
    with compiled_by(backend):
        ring.stage.compile(PreallocatedCaches(1, 2, kv_context))
    ran_a_graph: list[bool] = []
    ring.stage.compiled.run = told(ring.stage.compiled, ran_a_graph)  # type: ignore[method-assign, union-attr]
    order = {0: Order(RED, 5, 2, kv_context)}
    with nothing_compiled():
        got = play(ring, model, order, 6)[0]
    assert worst(got, play(Ring(model, CPU), model, order, 6)[0]) <= TOLERANCE
    steps = 3 if kv_context == "clean" else 2
    assert full_window_only(ran_a_graph, steps), "of the first two, which are made in one forward"
