"""Ranks that share a stage make what one rank makes, over real processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from streamdiff.pipeline.device_timer import DeviceTimer
from streamdiff.pipeline.distributed.context_parallel import ContextGroup
from streamdiff.pipeline.distributed.heartbeat import RankWatch
from streamdiff.pipeline.distributed.link import GroupBroken
from streamdiff.pipeline.distributed.rendezvous import RankContext
from streamdiff.pipeline.planner.model_sizes import read_sizes
from streamdiff.pipeline.rank_process import link_fault
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.snapshot.parts import SavedParts
from streamdiff.session_state import walk
from tests.pipeline.distributed.context_process import ADAPTIVE, ORDERS, STEERED, WORLDS, Case, shared_model
from tests.pipeline.playing import Order, play
from tests.pipeline.processes import run_ranks
from tests.small import CPU, small_world
from training.embedded import WEIGHTS, load_model

LIMIT_S = 900.0  # ends what hangs; a busy machine takes minutes
LAYOUTS = ("1x2", "1x4", "2x2", "4x1", "2x1")


def alone(orders: Mapping[int, Order], chunks: int) -> dict[int, list[torch.Tensor]]:
    """Every session by itself, in this process, on one rank."""
    model = shared_model(orders)
    return {name: play(Ring(model, CPU), model, {name: orders[name]}, chunks)[name] for name in orders}


def check(cases: list[str], folder: Path) -> None:
    """Play the cases on four ranks, and compare every session with itself on one, within 1e-6."""
    out = folder / "latents.pt"
    run_ranks("tests.pipeline.distributed.context_process", [str(out), *cases], 4, LIMIT_S)
    made = torch.load(out, weights_only=True)
    expected = {}
    for text in cases:
        chunks, names = Case.of(text).chunks, Case.of(text).names
        orders = {name: (ORDERS | ADAPTIVE | STEERED | WORLDS)[name] for name in names}
        if names not in expected:
            expected[names] = alone(orders, chunks)
        for name in names:
            for chunk, (one, other) in enumerate(zip(made[text][name], expected[names][name], strict=True)):
                worst = float((one - other).abs().max())
                assert worst <= 1e-6, f"{text}: session {name}, chunk {chunk} is {worst:g} off"


def case(layout: str, chunks: int, names: Mapping[int, Order] = ORDERS, link: str = "gloo") -> str:
    return f"{layout}/{chunks}/{','.join(map(str, names))}/{link}"


@pytest.mark.slow
def test_shared_stages_make_what_one_rank_makes(tmp_path: Path) -> None:
    """Five sessions at once, of all contexts, with a sink, evictions, a prompt switch and both recaches; also over a
    CPU stand-in for NCCL, where a send waits for its receive; of a model whose sink takes chunks in; and of one that is
    steered."""
    cases = [case("1x2", 12), case("2x2", 12, link="nccl"), case("2x2", 12, ADAPTIVE), case("2x2", 12, STEERED)]
    check(cases, tmp_path)


def test_ranks_that_share_a_world_make_what_one_makes(tmp_path: Path) -> None:
    """The mouse's keys and values are shared by tokens; in all contexts, with a recache and a change of steps."""
    check([case("1x2", 8, WORLDS), case("2x2", 8, WORLDS)], tmp_path)


@torch.inference_mode()
def test_what_ranks_have_of_a_world_is_one_state_and_is_cut_again() -> None:
    model = small_world(1)
    stages = []
    for share in range(2):
        stage = ModelRunner(model, CPU, group=ContextGroup((0, 1), share, None, model.spec.chunk_latents))
        stage.open(0, steps=4, kv_context="same_step")
        for each in vars(stage.sessions[0].actions).values():
            each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(share * each.shape[4] // 2)))
        stages.append(stage.sessions[0])
    parts = SavedParts([stages], [], ({}, None), ({}, None))
    whole, alone = parts.whole.actions, ModelRunner(model, CPU)
    alone.open(0, steps=4, kv_context="same_step")
    assert whole is not None and walk.outline(whole) == walk.outline(alone.sessions[0].actions)
    for part, again in zip(stages, parts.cut(parts.whole)[0], strict=True):
        pairs = zip(vars(part.actions).values(), vars(again.actions).values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.soak
def test_no_long_stream_of_shared_stages_drifts_from_that_of_one_rank(tmp_path: Path) -> None:
    cases = [case(layout, 60) for layout in LAYOUTS]
    check([*cases, case("1x2", 60, link="nccl"), case("1x4", 60, ADAPTIVE)], tmp_path)


def test_a_rank_keeps_its_share_of_the_heads_and_that_is_counted() -> None:
    model, sizes = load_model(WEIGHTS, CPU), read_sizes("tiny")
    for kv_context in ("clean", "staircase", "same_step"):
        group = ContextGroup((0, 1), 1, None, model.spec.chunk_latents)
        stage = ModelRunner(model, CPU, group=group)
        stage.open(0, steps=4, kv_context=kv_context)
        stage.set_text(0, 0, torch.zeros(model.spec.text_shape), 0)
        text = sum(pair.key.nbytes + pair.value.nbytes for pair in stage.sessions[0].text[0])
        counted = 4 * sizes.cache_values(sizes.blocks, steps=4, kv_context=kv_context, shares=2)
        assert walk.nbytes(stage.sessions[0].state) + text == counted, kv_context
        assert counted < 0.6 * 4 * sizes.cache_values(sizes.blocks, steps=4, kv_context=kv_context)


class Idle:
    """A rank's loop that computes nothing."""

    timer, done, now, awaits_others = DeviceTimer.on(CPU), 0, None, True

    def where(self) -> str:
        return "here"


@pytest.mark.slow
def test_of_ranks_that_exchange_the_one_that_says_nothing_more_is_named() -> None:
    """Rank 0's exchange ended; rank 1 goes on saying how it is, rank 2 does not."""
    store, loop = dist.HashStore(), Idle()
    watches = [RankWatch(RankContext(rank, 3, store)) for rank in range(3)]
    for watch in watches:
        watch.begin([loop], 60.0)  # type: ignore[list-item]
    watches[2].finish()
    error = GroupBroken("the exchange among ranks 0, 1, 2 ended: connection closed", (1, 2))
    try:
        fault = link_fault(error, 0, watches[0], watches[0])
    finally:
        for watch in watches[:2]:
            watch.finish()
    assert fault.startswith("rank 2 is gone (the exchange among ranks 0, 1, 2 ended: ")
