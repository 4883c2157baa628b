"""A session that was copied, moved, saved and loaded goes on to the bit as one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamdiff.pipeline.ring import Ring
from tests.pipeline.playing import same
from tests.pipeline.processes import run_ranks
from tests.session_state.moved import CHUNKS, ORDERS, Streams, embedded, play
from tests.small import CPU

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ring processes")]
LIMIT_S = 600.0  # ends what hangs
MOMENTS = {"in mid-chunk", "between chunks"}


@pytest.fixture(scope="module")
def plain() -> Streams:
    """The sessions on one stage, left alone."""
    torch.set_num_threads(1)
    model = embedded()
    return play(Ring(model, CPU), model, moved=False)


def check(moved: Streams, plain: Streams) -> None:
    for name, order in ORDERS.items():
        assert len(plain.latents[name][:CHUNKS]) == CHUNKS
        one, other = (each.latents[name][:CHUNKS] for each in (moved, plain))
        assert same(one, other), f"latents of {order}"
        one, other = (each.pictures[name][:CHUNKS] for each in (moved, plain))
        assert same(one, other), f"pictures of {order}"


@pytest.mark.soak
def test_on_one_stage(plain: Streams) -> None:
    model = embedded()
    moved = play(Ring(model, CPU), model, moved=True)
    assert {(name, moment) for name in ORDERS for moment in MOMENTS} <= moved.moments
    check(moved, plain)


def test_on_four_stages_with_micro_steps_in_flight(plain: Streams, tmp_path: Path) -> None:
    """Each rank moves what it has on its own, while the others compute."""
    out = tmp_path / "streams.pt"
    run_ranks("tests.session_state.moved", [str(out)], 4, LIMIT_S)
    moved = Streams(*torch.load(out, weights_only=True))
    assert {(name, moment) for name in ORDERS for moment in {*MOMENTS, "two in the ring"}} <= moved.moments
    assert {(name, "two of its own") for name in ORDERS if ORDERS[name].kv_context != "clean"} <= moved.moments
    check(moved, plain)
