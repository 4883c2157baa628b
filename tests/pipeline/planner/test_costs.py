"""Sizes are those of the real model, the estimate counts its operations, a profile is read or refused by its key."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from streamdiff.core import KV_CONTEXTS
from streamdiff.errors import ConfigError
from streamdiff.models.model import Model
from streamdiff.models.transformer.wan import attend
from streamdiff.pipeline.planner.costs import Ceilings, estimate, read_profile
from streamdiff.pipeline.planner.memory import Demand, Storage
from streamdiff.pipeline.planner.model_sizes import ModelSizes, read_sizes
from streamdiff.pipeline.planner.partition import Workload, split_evenly
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
