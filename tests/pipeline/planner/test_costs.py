"""Sizes are those of the real model, the estimate counts its operations, a profile is read or refused by its key.
Blocks per stage are split as well as can be."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from streamdiff.config import BatchingConfig, BatchingRule, Config, ModelConfig
from streamdiff.core import KV_CONTEXTS
from streamdiff.errors import ConfigError
from streamdiff.models.model import Model
from streamdiff.models.transformer.wan import attend
from streamdiff.pipeline.planner.costs import Ceilings, Costs, estimate, in_proportion, read_profile
from streamdiff.pipeline.planner.memory import Demand, Storage
from streamdiff.pipeline.planner.model_sizes import ModelSizes, read_sizes, sizes_of
from streamdiff.pipeline.planner.partition import Workload, choose_layout, max_rows_of, split_blocks, split_evenly
from training import embedded as tiny


@pytest.fixture(scope="module")
def sizes() -> ModelSizes:
    return read_sizes("tiny")


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny.load_model(tiny.WEIGHTS, torch.device("cpu"))


def test_sizes_are_those_of_the_loaded_model(sizes: ModelSizes, model: Model) -> None:
    spec, denoiser = model.spec, model.denoiser
    assert replace(sizes.spec, context_sigma=spec.context_sigma) == spec, "a plan asks for no noise of the clean pass"
    assert [sizes.spec.window_chunks(c) for c in KV_CONTEXTS] == [spec.window_chunks(c) for c in KV_CONTEXTS]
    assert sizes.blocks == len(denoiser.blocks)
    assert sizes.text_tokens == model.text.encode(model.text.examples[0]).shape[0]
    state = denoiser.embed(torch.zeros(1, *spec.chunk_shape), torch.zeros(1, spec.chunk_latents))
    assert sizes.hidden_values == sum(tensor.numel() for tensor in state[:2])
    assert sizes.tokens == state.hidden.shape[1]
    assert sizes.flow_values == denoiser.output_layer(state, spec.chunk_shape[1:]).numel()


def test_weights_add_up_to_the_models(sizes: ModelSizes, model: Model) -> None:
    parts = {name: parameter.numel() for name, parameter in model.denoiser.model.named_parameters()}

    def count(*prefixes: str) -> int:
        return sum(number for name, number in parts.items() if name.startswith(prefixes))

    assert [count(f"blocks.{n}.") for n in range(sizes.blocks)] == [sizes.block_values] * sizes.blocks
    assert count("condition_embedder.time_proj", "condition_embedder.text_embedder") == sizes.shared_values
    assert count("patch_embedding", "condition_embedder.time_embedder") == sizes.embed_values
    assert count("proj_out", "scale_shift_table") == sizes.output_values
    ours = sizes.embed_values + sizes.shared_values + sizes.output_values + sizes.blocks * sizes.block_values
    assert ours == sum(parts.values())


def test_the_estimate_counts_the_operations_of_the_real_model(sizes: ModelSizes, model: Model) -> None:
    """With a slow processor and infinitely fast memory, seconds are operations."""
    spec, denoiser = model.spec, model.denoiser
    slow = Ceilings(tflops=1e-9, gbps=1e30)
    found = estimate(sizes, slow, kv_context="same_step", max_rows=1, value_bytes=4)
    past = torch.zeros(1, sizes.tokens * sizes.spec.window_chunks("same_step"), denoiser.heads, denoiser.head_dim)
    text = denoiser.text(torch.zeros(1, sizes.text_tokens, sizes.text_dim))
    state = denoiser.embed(torch.zeros(1, *spec.chunk_shape), torch.zeros(1, spec.chunk_latents))
    modulation = denoiser.modulation(state.time)
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            query, _, _ = denoiser.before_attention(denoiser.weights(0), state.hidden, modulation)
            mixed = attend(query, past, past)
            denoiser.after_attention(denoiser.weights(0), state.hidden, modulation, text[0], mixed, attend)
        with FlopCounterMode(display=False) as decoding:
            model.decoder.decode(torch.zeros(1, *spec.chunk_shape), model.decoder.new_memory())
    assert found.block_s[0][0] * 1e3 == pytest.approx(counter.get_total_flops(), rel=1e-6)
    assert found.decode_s * 1e3 == pytest.approx(decoding.get_total_flops(), rel=1e-6)


def test_memory_holds_everything_once_and_where_it_lives(sizes: ModelSizes) -> None:
    model, runs = sizes.embed_values + sizes.output_values + sizes.blocks * sizes.block_values, split_evenly(6, 4)
    for place, home in (("head", 0), ("own-stream", 0), ("last", 3), ("dedicated", 4)):
        rows = Demand(sizes, Storage(2), runs, place, Workload(4, 2, 4, "same_step", 3)).memory()
        assert [row.rank for row in rows] == list(range(5 if place == "dedicated" else 4))
        assert [row.rank for row in rows if "decode" in row.role] == [home]
        stored = model + 4 * sizes.shared_values + sizes.text_values + sizes.decoder.weights
        assert sum(row.weights for row in rows) == 2 * stored
        caches = 2 * 2 * sizes.cache_values(sizes.blocks, steps=4, kv_context="same_step")
        assert sum(row.caches for row in rows) == caches
        assert [row.decoder_state for row in rows if row.decoder_state] == [2 * 2 * sizes.decoder.remembered]
        assert rows[home].decoder_state
    one_row = Demand(sizes, Storage(2), runs, "head", Workload(4, 1, 4, "same_step", 1)).memory()
    assert [row.forward * 3 for row in one_row] == [row.forward for row in rows[:4]]


PROFILE = {
    "block_s": [0.1, 0.1, 0.1, 0.2, 0.3, 0.4],
    "embed_s": 0.05,
    "head_s": [0.01, 0.015],
    "decode_s": 0.2,
    "link_s": 0,
}


def write(path: Path, tree: object) -> Path:
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_a_profile_is_read_row_by_row(sizes: ModelSizes, tmp_path: Path) -> None:
    found = read_profile(write(tmp_path / "p.json", PROFILE), sizes, max_rows=2)
    assert found.block_s == (*[(0.1, 0.2)] * 3, (0.2, 0.4), (0.3, 0.6), (0.4, 0.8)), "more rows in proportion"
    assert (found.embed_s, found.head_s) == ((0.05, 0.1), (0.01, 0.015))
    assert (found.decode_s, found.link_s, found.flow_s) == (0.2, 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"link_s": None},
        {"blocks": [1]},
        {"block_s": [0.1, 0.2]},
        {"block_s": [0.1, 0, 0.1, 0.1, 0.1, 0.1]},
        {"decode_s": True},
        {"link_s": 10**400},
    ],
)
def test_a_profile_that_cannot_be_is_refused_by_its_key(
    sizes: ModelSizes, tmp_path: Path, change: dict[str, object]
) -> None:
    tree = {name: value for name, value in {**PROFILE, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as error:
        read_profile(write(tmp_path / "p.json", tree), sizes, max_rows=2)
    assert error.value.field == "profile"


def test_another_folder_is_read_and_its_faults_are_told(tmp_path: Path, sizes: ModelSizes) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.WEIGHTS, folder)
    assert read_sizes(str(folder)).block_values == sizes.block_values
    config = folder / "transformer" / "config.json"
    good = json.loads(config.read_text())

    def broken(**change: Any) -> str:
        write(config, {key: value for key, value in {**good, **change}.items() if value is not None})
        with pytest.raises(ConfigError) as caught:
            read_sizes(str(folder))
        return str(caught.value)

    assert "ffn_dim" in broken(ffn_dim=None)
    assert "num_layers" in broken(num_layers=0)
    assert "patch_size" in broken(patch_size=[1, 2])
    write(config, good)
    (folder / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError):
        read_sizes(str(folder))
    config.unlink()
    with pytest.raises(ConfigError):
        read_sizes(str(folder))


SIZES = sizes_of(ModelConfig(name="self-forcing"))
"""832x480 pixels; a row has 4,680 tokens, and takes 40,405 * 10^9 operations with its window full."""


def slowest(ends: tuple[int, ...], block_s: list[float], extra_s: list[float]) -> float:
    return max(sum(block_s[a:b]) + extra for (a, b), extra in zip(pairwise(ends), extra_s, strict=True))


@given(st.data())
def test_no_other_split_is_faster(data: st.DataObject) -> None:
    block_s = [n / 8 for n in data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))]
    ranks = data.draw(st.integers(1, len(block_s)))
    extra_s = [n / 8 for n in data.draw(st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks))]
    blocks = len(block_s)
    every = [(0, *inner, blocks) for inner in combinations(range(1, blocks), ranks - 1)]
    split = split_blocks(block_s, extra_s)
    ends = (0, *(last for _, last in split))
    assert ends in every, "contiguous, all blocks, none empty"
    assert [first for first, _ in split] == list(ends[:-1])
    best = min(slowest(other, block_s, extra_s) for other in every)
    assert slowest(ends, block_s, extra_s) == best

    def unevenness(ends: tuple[int, ...]) -> float:
        return sum((sum(block_s[a:b]) + x) ** 2 for (a, b), x in zip(pairwise(ends), extra_s, strict=True))

    fastest = [other for other in every if slowest(other, block_s, extra_s) == best]
    even = min(unevenness(other) for other in fastest)
    assert ends == max(other for other in fastest if unevenness(other) == even), "the first ranks have more blocks"


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
def test_equal_blocks_are_split_as_even_as_can_be_the_longer_runs_first(blocks: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, blocks))
    runs = split_evenly(blocks, stages)
    short, more = divmod(blocks, stages)
    assert [last - first for first, last in runs] == [short + 1] * more + [short] * (stages - more)
    assert [first for first, _ in runs] == [0, *(last for _, last in runs[:-1])] and runs[-1][1] == blocks
    assert runs == split_blocks([1.0] * blocks, [0.0] * stages)


@pytest.mark.parametrize("stages", [0, 5, -1])
def test_a_stage_without_a_block_is_refused(stages: int) -> None:
    with pytest.raises(ConfigError) as error:
        split_evenly(4, stages)
    assert error.value.field == "model.stages"


def costs(blocks: int, *, embed: float = 0.0, head: float = 0.0, decode: float = 0.0) -> Costs:
    """Blocks of 1 s, for up to three rows in proportion."""
    parts = (in_proportion(time_s, 3) for time_s in (embed, head))
    return Costs("", (in_proportion(1.0, 3),) * blocks, *parts, decode, 0.0, 0.0)


def test_decode_goes_where_it_costs_least_and_blocks_make_room_for_it() -> None:
    """12 blocks, 4 ranks, a decode of 8 s once in 4 forwards: 2 s per forward, as much as two blocks."""
    load = Workload(4, 1, 4, "same_step", 1)
    busy_head = choose_layout(costs(12, embed=2.0, decode=8.0), load)
    assert (busy_head.decode, busy_head.slowest_s(load)) == ("last", 4.0)
    busy_last = choose_layout(costs(12, head=2.0, decode=8.0), load)
    assert (busy_last.decode, busy_last.decode_stage, busy_last.slowest_s(load)) == ("head", 0, 4.0)
    alone = choose_layout(costs(12, decode=8.0), load, "dedicated")
    assert (alone.decode_stage, alone.slowest_s(load)) == (None, 3.0)
    assert alone.blocks == ((0, 3), (3, 6), (6, 9), (9, 12))
    on_last = choose_layout(costs(10, decode=8.0), load, "last")
    assert [last - first for first, last in on_last.blocks] == [3, 3, 3, 1]
    assert on_last.stage_s[3] == (1.0, 2.0, 3.0), "decode is no part of the stage's forward"


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], 8),
        ([{"max_rows": 2}], 2),
        ([{"model": "longlive-*", "max_rows": 3}, {"max_rows": 2}], 2),
        ([{"size": "480x832", "max_rows": 2}], 8),
        ([{"size": "832x480", "max_rows": 2}], 2),
        ([{"min_tokens": 4680, "max_rows": 5}], 5),
        ([{"min_tokens": 4681, "max_rows": 1}], 8),
        ([{"min_gflop": 40405.0, "max_rows": 4}], 4),
        ([{"min_gflop": 40405.5, "max_rows": 4}], 8),
        ([{"min_tokens": 1, "min_gflop": 90000.0, "max_rows": 1}], 8),
    ],
)
def test_the_first_rule_that_applies_lowers_what_is_configured(rules: list[dict[str, object]], expected: int) -> None:
    given = tuple(BatchingRule.model_validate(rule) for rule in rules)
    told = Config(batching=BatchingConfig(max_rows=8, rules=given))
    assert max_rows_of(told.served_model(), SIZES) == expected


def test_only_a_server_that_is_told_so_shares_forwards() -> None:
    sizes = read_sizes("tiny")
    assert max_rows_of(Config().served_model(), sizes) == max_rows_of(ModelConfig(), sizes) == 1
    told = Config(batching=BatchingConfig(max_rows=4))
    assert max_rows_of(told.served_model(), sizes) == 4
