"""The clean pass of a chunk and the first step of the next in one forward: the same stream, with fewer forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.model import Model
from streamdiff.pipeline.executor import LocalRing, RingExecutor
from streamdiff.pipeline.load_plan import plan_load
from streamdiff.pipeline.scheduler.step import MicroStep
from tests.pipeline.playing import THREE, Order, play, same
from tests.small import BLUE, CPU, RED, WHITE, small_model

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""Of latents, in float32: a product over twice the rows may add in another order."""


def one(model: Model, with_next: bool) -> RingExecutor:
    return RingExecutor(model, CPU, clean_with_next=with_next)


def three(model: Model, with_next: bool) -> RingExecutor:
    return LocalRing(model, CPU, 3, clean_with_next=with_next)


def worst(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert len(got) == len(expected) > 0
    return max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))


def stream(
    ring: RingExecutor, text: Callable[[str], torch.Tensor], policy: str, chunks: int
) -> tuple[list[torch.Tensor], list[list[MicroStep]]]:
    """Latents, and the forwards' rows; the prompt changes between a chunk's clean pass and the step that goes with it:
    chunk 6 is admitted under the new one."""
    ring.open(0, text(RED), seed=4, epoch=0, steps=4, kv_context="clean")
    done: list[torch.Tensor] = []
    forwards: list[list[MicroStep]] = []
    changed = False
    frames = ring.scheduler.chunk_frames
    while len(done) < chunks:
        admitted = ring.scheduler.next_chunk(0)
        if admitted == 6 and not changed:
            changed = True
            ring.set_text(0, 1, text(BLUE), policy)
        ring.scheduler.set_frame_credit(0, (min(chunks, 6 if not changed else chunks) - admitted) * frames)
        rows, finished = ring.turn(1.0)
        if rows:
            forwards.append(rows)
        done += [latents for _, latents in finished]
    return done, forwards


@pytest.mark.parametrize("sink", [0, 2])
@pytest.mark.parametrize("policy", ["keep", "flush", "recache"])
@pytest.mark.parametrize("kind", [one, three])
def test_the_same_stream_through_evictions_a_sink_and_a_prompt_switch_between_the_two(
    kind: Callable[..., RingExecutor], policy: str, sink: int
) -> None:
    model = small_model(5, layers=3, sink=sink)
    expected, serial = stream(kind(model, False), model.text.encode, policy, 12)
    got, forwards = stream(kind(model, True), model.text.encode, policy, 12)
    assert worst(got, expected) <= TOLERANCE
    pairs = [rows for rows in forwards if len(rows) == 2 and not rows[-1].recaches]
    assert all(first.clean and second.step == 0 and second.chunk == first.chunk + 1 for first, second in pairs)
    assert len(pairs) >= 9
    assert len(forwards) <= len(serial) - len(pairs) + 1
    if policy == "keep":
        assert (0, 1) in [(first.epoch, second.epoch) for first, second in pairs], "each half has its own text"
    assert all(len(rows) == 1 or rows[-1].recaches for rows in serial)


def test_without_room_the_clean_pass_goes_alone_and_nothing_waits() -> None:
    model = small_model(5, sink=2)
    ring = one(model, True)
    ring.open(0, model.text.encode(RED), seed=4, epoch=0, steps=4, kv_context="clean")
    ring.scheduler.set_frame_credit(0, ring.scheduler.chunk_frames)
    steps = [ring.turn()[0] for _ in range(6)]
    assert [[row.step for row in rows] for rows in steps] == [[0], [1], [2], [3], [4], []]
    ring.scheduler.set_frame_credit(0, ring.scheduler.chunk_frames)
    assert ring.turn()[0] == [MicroStep(0, 1, 0, 4, 0)]


def test_in_a_ring_the_next_chunk_follows_a_clean_pass_that_is_on_its_way() -> None:
    """There was no room when it entered; the order on the links is enough."""
    model = small_model(5, layers=3)
    expected = play(RingExecutor(model, CPU), model, {0: Order(WHITE, 3, 4, "clean")})[0]
    ring = three(model, True)
    got = play(ring, model, {0: Order(WHITE, 3, 4, "clean")})[0]
    assert worst(got, expected) <= TOLERANCE


def test_an_adaptive_sink_is_adapted_before_the_next_chunk_reads_it() -> None:
    model = small_model(5, layers=3, sink=2)
    model = replace(model, spec=replace(model.spec, adaptive_sink=1.0))
    order = {0: Order(RED, 3, 4, "clean")}
    plain = play(RingExecutor(replace(model, spec=replace(model.spec, adaptive_sink=None)), CPU), model, order)[0]
    expected, got = play(one(model, False), model, order)[0], play(one(model, True), model, order)[0]
    assert worst(got, expected) <= TOLERANCE
    assert worst(plain, expected) > 1e-3, "the sink was adapted"


def test_other_kv_contexts_and_sessions_are_as_they_were() -> None:
    model = small_model(4)
    orders = {name: order for name, order in THREE.items() if order.kv_context != "clean"}
    expected, got = play(one(model, False), model, orders), play(one(model, True), model, orders)
    assert all(same(got[name], expected[name]) for name in orders)
    expected, got = play(one(model, False), model, THREE), play(one(model, True), model, THREE)
    assert max(worst(got[name], expected[name]) for name in THREE) <= TOLERANCE


def test_where_no_chunk_waits_for_a_clean_pass_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"clean_pass is with-next and kv_context is staircase.*use kv_context clean"):
        _ = plan_load(ModelConfig(clean_pass="with-next", kv_context="staircase"), CPU).spec
