"""A session's numbers are its own: whoever else runs, whenever a prompt changes, whatever was there before a reset."""

from __future__ import annotations

import pytest
import torch

from streamdiff.pipeline.ring import Ring
from tests.pipeline.playing import Order, same
from tests.small import BLUE, CPU, RED, WHITE, small_model

CHUNKS = 5
MODEL = small_model(3, sink=2)
CONTEXTS = ("clean", "staircase", "same_step")


ORDERS = {0: Order(RED, 5, 4, "clean"), 1: Order(BLUE, 6, 2, "staircase"), 2: Order(WHITE, 5, 4, "same_step")}


def open_session(ring: Ring, session: int, order: Order, epoch: int = 0) -> None:
    text = MODEL.text.encode(order.text)
    ring.open(session, text, seed=order.seed, epoch=epoch, steps=order.steps, kv_context=order.kv_context)


def run(ring: Ring, sessions: list[int], chunks: int) -> dict[int, list[torch.Tensor]]:
    """Run until every session has finished `chunks` chunks; their latents. The session furthest behind goes first."""
    done: dict[int, list[torch.Tensor]] = {session: [] for session in sessions}
    while any(len(latents) < chunks for latents in done.values()):
        for session in sessions:
            ahead = chunks + 6 - ring.scheduler.next_chunk(session)
            ring.scheduler.set_frame_credit(session, ahead * MODEL.spec.chunk_frames)
        rows, finished = ring.step_latents()
        assert rows, "nothing is ready"
        for row, latents in finished:
            assert row.chunk == len(done[row.session])
            done[row.session].append(latents)
    return {session: latents[:chunks] for session, latents in done.items()}


def alone(order: Order, chunks: int = CHUNKS) -> list[torch.Tensor]:
    ring = Ring(MODEL, CPU)
    open_session(ring, 7, order)
    return run(ring, [7], chunks)[7]


def test_interleaved_sessions_are_bit_identical_to_each_alone() -> None:
    ring = Ring(MODEL, CPU, max_rows=1)
    for session, order in ORDERS.items():
        open_session(ring, session, order)
    together = run(ring, list(ORDERS), CHUNKS)
    for session, order in ORDERS.items():
        assert same(together[session], alone(order)), f"session {session}"
    assert not torch.equal(together[0][0], together[2][0]), "the same seed with another prompt is another stream"


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [2, 4])
def test_batched_sessions_equal_each_alone(max_rows: int) -> None:
    ring = Ring(MODEL, CPU, max_rows=max_rows)
    for session, order in ORDERS.items():
        open_session(ring, session, order)
    together = run(ring, list(ORDERS), CHUNKS)
    for session, order in ORDERS.items():
        for got, expected in zip(together[session], alone(order), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_session_that_comes_and_one_that_goes_do_not_disturb() -> None:
    ring = Ring(MODEL, CPU)
    open_session(ring, 0, ORDERS[0])
    got = run(ring, [0], 2)[0]
    open_session(ring, 1, ORDERS[1])
    ring.scheduler.set_frame_credit(1, MODEL.spec.chunk_frames)
    ring.step_latents()
    ring.close_session(1)
    open_session(ring, 1, ORDERS[2], epoch=1)
    ring.scheduler.set_frame_credit(0, MODEL.spec.chunk_frames)
    finished: list[torch.Tensor] = []
    while len(finished) < 2:
        for session in (0, 1):
            ring.scheduler.set_frame_credit(session, MODEL.spec.chunk_frames)
        rows, latest = ring.step_latents()
        assert rows, "nothing is ready"
        finished += [latents for row, latents in latest if row.session == 0]
    assert same([*got, *finished], alone(ORDERS[0], 4))


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_a_prompt_change_touches_later_chunks_only_and_no_chunk_mixes(kv_context: str) -> None:
    order = Order(RED, 4, 4, kv_context)
    plain = alone(order, 6)
    ring = Ring(MODEL, CPU)
    open_session(ring, 0, order)
    changed: list[torch.Tensor] = []
    epochs: dict[int, set[int]] = {}
    first_new = None
    turns = 0
    while len(changed) < 6:
        if turns == 9:  # in the middle of a chunk
            first_new = ring.scheduler.next_chunk(0)
            ring.set_conditioning(0, MODEL.text.encode(BLUE), epoch=1)
        ring.scheduler.set_frame_credit(0, MODEL.spec.chunk_frames)
        rows, finished = ring.step_latents()
        assert rows, "the stream stands still"
        for row in rows:
            epochs.setdefault(row.chunk, set()).add(row.epoch)
        changed += [latents for _, latents in finished]
        turns += 1
    assert first_new is not None and 0 < first_new < 5
    assert same(changed[:first_new], plain[:first_new])
    assert all(not torch.equal(a, b) for a, b in zip(changed[first_new:], plain[first_new:], strict=False))
    assert all(seen == {int(chunk >= first_new)} for chunk, seen in epochs.items())


@pytest.mark.slow
@pytest.mark.parametrize("turns", [0, 1, 3, 4, 5, 11, 17])
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_a_reset_stream_is_a_fresh_one_bit_for_bit(kv_context: str, turns: int) -> None:
    """Wherever the reset falls: before the start, inside a chunk, between denoising and the clean pass."""
    order = Order(WHITE, 8, 4, kv_context)
    ring = Ring(MODEL, CPU)
    open_session(ring, 0, Order(RED, 1, 4, kv_context))
    for _ in range(turns):
        ring.scheduler.set_frame_credit(0, MODEL.spec.chunk_frames)
        ring.step_latents()
    ring.reset(0, MODEL.text.encode(WHITE), seed=8, epoch=1)
    assert same(run(ring, [0], 4)[0], alone(order, 4))
