"""Another number of steps while a stream plays, against streams computed without scheduler, ring or caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from streamdiff.core import MicroStep
from streamdiff.models.model import Model
from streamdiff.pipeline.ring import Ring
from tests.pipeline.playing import OTHER_STEPS, Order, local_ring, play, same
from tests.pipeline.reference import Reference
from tests.small import BLUE, CPU, RED, WHITE, small_model

CHUNKS = 9


def plain(model: Model, order: Order) -> list[torch.Tensor]:
    """What the order makes when nothing changes."""
    return play(Ring(model, CPU), model, {0: replace(order, change_at=10**6, then_steps=None)}, CHUNKS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("order", OTHER_STEPS.values(), ids=lambda order: f"{order.kv_context}-{order.steps}")
def test_chunks_before_the_change_stay_and_those_after_equal_the_reference(order: Order) -> None:
    model = small_model(1, sink=2)
    model = replace(model, spec=replace(model.spec, context_sigma=0.1))
    got = play(Ring(model, CPU), model, {0: order}, CHUNKS)[0]
    before = plain(model, order)
    assert same(got[: order.change_at], before[: order.change_at]), "frames already made stay"
    assert (got[order.change_at] - before[order.change_at]).abs().max() > 1e-2, "the change makes a difference"
    assert order.then_steps is not None
    reference = Reference(
        model,
        lambda chunk: order.text,
        seed=order.seed,
        steps=order.steps,
        kv_context=order.kv_context,
        then=(order.change_at, order.then_steps),
    ).chunks(CHUNKS)
    for one, expected in zip(got, reference, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)


def entered(ring: Ring, orders: dict[int, int], turns: int) -> list[MicroStep]:
    """The rows of so many turns; `orders` says for a session with room how many chunks it may have admitted."""
    rows: list[MicroStep] = []
    for _ in range(turns):
        for name, limit in orders.items():
            chunks = limit - ring.scheduler.next_chunk(name)
            ring.scheduler.set_frame_credit(name, chunks * ring.scheduler.chunk_frames)
        rows += ring.step_latents()[0]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("make", [Ring, lambda model, device: local_ring(model, device, 3)])
def test_in_a_staircase_no_chunk_overtakes_and_other_sessions_go_on(make: Callable[..., Ring]) -> None:
    model = small_model(3, layers=3)
    ring = make(model, CPU)
    for name, seed in ((0, 1), (1, 2)):
        ring.open(name, model.text.encode(RED), seed=seed, epoch=0, steps=4, kv_context="staircase")
    entered(ring, {0: 99, 1: 99}, 60)
    first = ring.scheduler.next_chunk(0)
    assert ring.scheduler.oldest_epoch(0) == 0 and not ring.scheduler.drained(0), "several are in flight"
    ring.set_steps(0, 2, epoch=1)
    rows = entered(ring, {0: 99, 1: 99}, 200)
    mine = [row for row in rows if row.session == 0]
    change = next(place for place, row in enumerate(mine) if row.epoch == 1)
    assert {row.chunk for row in mine[change:]} == set(range(first, ring.scheduler.next_chunk(0)))
    assert all((row.epoch, row.steps) == (0, 4) and row.chunk < first for row in mine[:change])
    assert all((row.epoch, row.steps) == (1, 2) and row.chunk >= first for row in mine[change:])
    drain = [row.session for row in rows[: rows.index(mine[change])]]
    assert drain.count(0) > 4 and drain.count(1) > 2
    assert len({row.chunk for row in mine[change : change + 8]}) >= 3, "the new chunks overlap again"


def test_the_latest_of_several_changes_holds_and_a_prompt_meanwhile_too() -> None:
    """Steps 2, a prompt, then steps 1 and 2 again, all before anything could be admitted."""
    model = small_model(1)
    ring = Ring(model, CPU)
    ring.open(0, model.text.encode(RED), seed=5, epoch=0, steps=4, kv_context="staircase")
    entered(ring, {0: 3}, 6)
    ring.set_steps(0, 2, epoch=1)
    ring.set_conditioning(0, model.text.encode(BLUE), epoch=2)
    ring.set_steps(0, 4, epoch=3)
    ring.set_conditioning(0, model.text.encode(WHITE), epoch=4)
    ring.set_steps(0, 2, epoch=5)
    done: dict[int, torch.Tensor] = {}
    while len(done) < 6:
        ring.scheduler.set_frame_credit(0, 4 * model.spec.chunk_frames)
        rows, finished = ring.step_latents()
        assert rows or finished, "the stream stands still"
        assert all((row.epoch, row.steps) == ((0, 4) if row.chunk < 3 else (5, 2)) for row in rows)
        done |= {row.chunk: latents for row, latents in finished}
    text = lambda chunk: RED if chunk < 3 else WHITE  # noqa: E731
    reference = Reference(model, text, seed=5, steps=4, kv_context="staircase", then=(3, 2)).chunks(6)
    for chunk, expected in enumerate(reference):
        torch.testing.assert_close(done[chunk], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("waiting", [True, False])
def test_a_reset_begins_in_the_steps_that_were_asked_for_last(waiting: bool) -> None:
    """Whether chunks were in flight, for which the change had to wait, or not."""
    model = small_model(1)
    ring = Ring(model, CPU)
    ring.open(0, model.text.encode(RED), seed=5, epoch=0, steps=4, kv_context="staircase")
    entered(ring, {0: 3}, 6 if waiting else 0)
    ring.set_steps(0, 2, epoch=1)
    ring.reset(0, model.text.encode(RED), seed=5, epoch=2)
    done: dict[int, torch.Tensor] = {}
    while len(done) < 5:
        ring.scheduler.set_frame_credit(0, 3 * model.spec.chunk_frames)
        done |= {row.chunk: latents for row, latents in ring.step_latents()[1] if row.epoch == 2}
    fresh = play(Ring(model, CPU), model, {0: Order(RED, 5, 2, "staircase", 10**6)}, 5)[0]
    assert same([done[chunk] for chunk in range(5)], fresh)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Ring, lambda model, device: local_ring(model, device, 3)])
def test_a_past_cached_again_is_the_same_before_and_after_the_steps_change(make: Callable[..., Ring]) -> None:
    """A context with noise, which is drawn by the number of the step: by that which the chunk was made in."""
    model = small_model(3, layers=3, sink=2)
    model = replace(model, spec=replace(model.spec, context_sigma=0.1))

    def stream(prompt_after_turns: int) -> list[torch.Tensor]:
        ring = make(model, CPU)
        ring.open(0, model.text.encode(RED), seed=5, epoch=0, steps=4, kv_context="clean")
        done: dict[int, torch.Tensor] = {}
        turns = 0
        while len(done) < 7:
            admitted = ring.scheduler.next_chunk(0)
            if admitted == 4:
                if turns == 0:
                    ring.set_steps(0, 2, epoch=1)
                if turns == prompt_after_turns:
                    ring.set_conditioning(0, model.text.encode(BLUE), epoch=2, switch="recache")
                turns += 1
            limit = 8 if turns > prompt_after_turns else 4
            ring.scheduler.set_frame_credit(0, (limit - admitted) * model.spec.chunk_frames)
            done |= {row.chunk: latents for row, latents in ring.step_latents()[1]}
        return [done[chunk] for chunk in range(7)]

    assert same(stream(0), stream(40)), "the change of steps still waits, or has long been carried out"
