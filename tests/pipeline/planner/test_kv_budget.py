"""Caches that do not fit are refused, with the numbers, before anything is allocated; what is closed is given back."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from streamdiff.config import Config, ModelConfig, ServeConfig
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.load_plan import plan_load
from streamdiff.pipeline.planner import kv_budget
from streamdiff.pipeline.planner.kv_budget import KVCacheBudget, PreallocatedCaches, RankMemory, free_bytes, host_bytes
from streamdiff.pipeline.planner.model_sizes import read_sizes
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.small import CPU

SIZES = read_sizes("tiny")


def test_sessions_fit_until_one_rank_is_full() -> None:
    need = 4 * SIZES.cache_values(2, steps=4, kv_context="same_step")
    budget = KVCacheBudget(SIZES, [RankMemory(10 * need), RankMemory(3 * need - 1)], [1, 2], 4)
    for session in range(2):
        budget.take(session, budget.need(steps=4, kv_context="same_step"))
    with pytest.raises(ValueError, match=r"on rank 1, where .* \(2 sessions open\).*model\.device_memory_gb"):
        budget.need(steps=4, kv_context="same_step")
    assert budget.need(steps=4, kv_context="clean")[1] < need, "a smaller one still fits"
    budget.give_back(0)
    assert budget.need(steps=4, kv_context="same_step")[1] == need


def test_caches_that_wait_for_sessions_are_nobody_elses() -> None:
    """Two wait for sessions of one kind, and there is room for two of another kind beside them, or for four such."""
    other, kind = (4 * SIZES.cache_values(1, steps=4, kv_context=each) for each in ("staircase", "clean"))
    memory = RankMemory(2 * kind + 2 * (other + 1), 1)

    def opened(kv_context: str) -> int:
        budget = KVCacheBudget(SIZES, [memory], [1], 4, PreallocatedCaches(2, 4, "clean"))
        for session in count():
            try:
                budget.take(session, budget.need(steps=4, kv_context=kv_context))
            except ValueError:
                return session
        raise AssertionError

    assert opened("staircase") == 2
    assert opened("clean") == memory.free // (kind + 1)
    assert opened("same_step") == 0, "which would fit if nothing waited"
    assert KVCacheBudget(SIZES, [memory], [1], 4).need(steps=4, kv_context="same_step")


def test_everything_that_lies_in_host_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of a server in a container of 1 GB: what plays, is swapped out and is kept, and the spare engine."""
    monkeypatch.setattr(kv_budget, "host_memory", lambda: (1_000_000_000, 1_500_000_000))

    def taken(serve: ServeConfig, sharers: int = 1) -> int:
        model = Config(serve=serve).served_model()
        away = host_bytes(model, sharers)
        return sharers * (free_bytes(model, CPU, sharers, 0, away) + away)

    plain, spare = taken(ServeConfig(warm_standby=False)), taken(ServeConfig())
    assert plain == 750_000_000 and spare < 0.75 * plain
    assert (
        taken(ServeConfig(warm_standby=False, keep_s=5))
        == plain // 2
        == taken(ServeConfig(warm_standby=False, keep_s=5), 2)
    )
    assert taken(ServeConfig(warm_standby=False, keep_s=5, state_dir="state")) == plain
    assert taken(ServeConfig(), sharers=4) == 0, "four spare engines leave nothing"


@pytest.mark.slow
def test_the_runtime_asks_before_it_opens() -> None:
    values = SIZES.cache_values(SIZES.blocks, steps=4, kv_context="clean") + SIZES.decoder.remembered
    plan = plan_load(ModelConfig(), CPU)
    taken = plan.demand.totals[0] - plan.demand.memory()[0].sessions
    runtime = build_pipeline(ModelConfig(device_memory_gb=1e-9 * (taken + 4 * values * 1.01)))
    text = runtime.text.encode(runtime.text.examples[0])
    epochs = count(1)

    def start(runtime: StreamingPipeline, session: int, kv_context: str) -> None:
        runtime.open(session, text, seed=0, epoch=next(epochs), steps=4, kv_context=kv_context)

    with pytest.raises(ValueError, match=r"staircase, 4 steps\) and .* decoder's memory need .*\(0 sessions open\)"):
        start(runtime, 0, "staircase")
    start(runtime, 0, "clean")
    with pytest.raises(ValueError, match="1 sessions open"):
        start(runtime, 1, "clean")
    runtime.close_session(0)
    start(runtime, 1, "clean")
    runtime.close()


def test_the_decoder_counts_where_it_works() -> None:
    caches = 4 * SIZES.cache_values(1, steps=4, kv_context="clean")
    rooms = [
        RankMemory(2 * caches),
        RankMemory(2 * caches, caches + 1),
        RankMemory(10, 10),
    ]  # the last rank decodes only
    with pytest.raises(ValueError, match=r"GB of decoder's memory need .* on rank 1, where"):
        KVCacheBudget(SIZES, rooms, [1, 1, 0], 4).need(steps=4, kv_context="clean")
    rooms[1] = RankMemory(2 * caches, caches)
    assert KVCacheBudget(SIZES, rooms, [1, 1, 0], 4).need(steps=4, kv_context="clean") == [caches, 2 * caches, 10]


def test_on_a_gpu_computing_keeps_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of Wan's decoder takes more than the tenth that was kept back."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 10**9, 24 * 10**9))
    assert free_bytes(ModelConfig(), torch.device("cuda", 0), 1, 9 * 10**9) == 11 * 10**9
    loader = plan_load(ModelConfig(name="random:wan2.1-1.3b", vae="random:wan2.1"), torch.device("cuda", 0))
    assert loader.session_bytes() == 20 * 10**9 - loader.demand.memory()[0].work


def test_a_session_that_is_swapped_out_leaves_its_memory_and_takes_host_memory() -> None:
    need = 4 * SIZES.cache_values(1, steps=4, kv_context="clean")
    budget = KVCacheBudget(SIZES, [RankMemory(2 * need, host=need)], [1], 4)
    kind: dict[str, Any] = {"steps": 4, "kv_context": "clean"}
    for session in range(2):
        budget.take(session, budget.need(**kind))
    assert budget.away_count(**kind) == 1 and budget.away_fits(0, spills=False)
    budget.swap_out(0)
    budget.take(2, budget.need(**kind))
    assert not budget.away_fits(1, spills=False), "host memory is full"
    assert budget.away_fits(1, spills=True) and budget.away_fits(1, spills=False, returning=0)
    with pytest.raises(ValueError, match="caches of a session that was swapped out need"):
        budget.swap_in(0)
    budget.swap_out(1)
    budget.swap_in(0)
    budget.give_back(1)
    assert budget.away_fits(2, spills=False)
