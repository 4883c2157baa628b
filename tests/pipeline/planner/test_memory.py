"""Sizes of catalogue models, found without weights: those of diffusers' own model, and the published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel

from streamdiff.config import ModelConfig
from streamdiff.models import catalogue
from streamdiff.models.model import StageModel
from streamdiff.models.spec import with_size
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import kept_dtype
from streamdiff.pipeline.load_plan import plan_load
from streamdiff.pipeline.planner.memory import Storage, memory, offloaded_bytes, stage_memory
from streamdiff.pipeline.planner.model_sizes import entry_sizes, read_sizes, sizes_from
from streamdiff.pipeline.planner.stage_layout import Layout, Workload
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.scheduler.step import MicroStep
from tests.peak_memory import peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("wan2.1-t2v-1.3b", 1.419e9), ("wan2.1-t2v-14b", 14.288e9)])
def test_weights_are_counted_as_diffusers_has_them(name: str, count: float) -> None:
    sizes = entry_sizes(catalogue.find(name))
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=sizes.heads,
            attention_head_dim=sizes.width // sizes.heads,
            in_channels=sizes.in_channels,
            out_channels=sizes.out_channels,
            text_dim=sizes.text_dim,
            freq_dim=sizes.freq_dim,
            ffn_dim=sizes.ffn_dim,
            num_layers=sizes.blocks,
        )
    theirs = sum(parameter.numel() for parameter in model.parameters())
    assert theirs == pytest.approx(count, rel=5e-4)
    (stage,) = stage_memory(catalogue.find(name), 1)
    assert stage.weights == 2 * theirs


@pytest.mark.parametrize(("name", "per_latent"), [("self-forcing", 0.288e9), ("krea-realtime-14b", 1.28e9)])
def test_a_latent_frame_of_cache_has_the_published_size(name: str, per_latent: float) -> None:
    """bfloat16, 480x832; the text's keys and values apart."""
    entry = catalogue.find(name)
    sizes = entry_sizes(entry)
    (stage,) = stage_memory(entry, 1)
    assert entry.stream
    text = 2 * 2 * sizes.blocks * sizes.width * sizes.text_tokens
    assert (stage.caches - text) / entry.stream.window_latents == pytest.approx(per_latent, rel=2e-3)
    assert sizes.tokens == 1560 * entry.stream.chunk_latents


def test_same_step_keeps_a_cache_per_step() -> None:
    entry = catalogue.find("streamdiffusionv2-1.3b")
    (stage,) = stage_memory(entry, 1)
    sizes = entry_sizes(entry)
    text = 2 * 2 * sizes.blocks * sizes.width * sizes.text_tokens
    assert stage.caches - text == pytest.approx(4 * 6 * 0.288e9, rel=2e-3), "keys of its sink stay as they are"
    moving = replace(sizes, spec=replace(sizes.spec, rope="relative"))
    values = [each.cache_values(sizes.blocks, steps=4, kv_context="same_step") for each in (sizes, moving)]
    sink_keys = 3 * 0.288e9 / 2  # kept un-rotated too
    assert 2 * (values[1] - values[0]) == pytest.approx(4 * sink_keys, rel=2e-3)


def test_stages_share_weights_and_caches() -> None:
    entry = catalogue.find("longlive-1.3b")
    whole = stage_memory(entry, 1)[0]
    parts = stage_memory(entry, 4)
    assert len(parts) == 4
    assert sum(stage.caches for stage in parts) == whole.caches
    assert whole.weights / 4 < max(stage.weights for stage in parts) < whole.weights / 3


def test_a_model_of_whole_clips_has_no_caches() -> None:
    assert [stage.caches for stage in stage_memory(catalogue.find("wan2.1-t2v-14b"), 2)] == [0, 0]


def test_the_embedded_models_facts_are_its_folders() -> None:
    assert entry_sizes(catalogue.find("tiny")) == read_sizes("tiny")


def test_a_checkpoint_says_what_the_catalogue_says() -> None:
    """Of LongLive's architecture and stream, before anything is there and from the shapes of tensors."""
    told = entry_sizes(catalogue.find("longlive-1.3b"))
    read = plan_load(ModelConfig(name="random:wan2.1-1.3b"), torch.device("cpu")).sizes
    assert read == replace(told, spec=read.spec), "the decoder's sizes too"
    own = {name: getattr(read.spec, name) for name in ("name", "shift", "rope", "schedules")}
    assert read.spec == replace(told.spec, steps=(4, 2, 1), **own)


def test_another_picture_has_other_tokens() -> None:
    entry = catalogue.find("self-forcing")
    assert entry_sizes(entry, (512, 512)).tokens == 3 * 1024


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # said where its flags are set
@pytest.mark.parametrize("ffn", [5.833, 2.7])
def test_a_forward_takes_the_memory_that_is_counted(ffn: float) -> None:
    """Wan's proportions, 1.3B's and 14B's, in bfloat16, at the widest moment, without compilation."""
    width = 4 * 64
    architecture = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 4,
        "attention_head_dim": 64,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 64,
        "freq_dim": 64,
        "ffn_dim": int(width * ffn),
        "num_layers": 2,
        "cross_attn_norm": True,
    }
    network = WanTransformer3DModel(**architecture).eval().requires_grad_(False)
    for name, weight in network.named_parameters():
        weight.data = weight.data.to(kept_dtype(name, torch.bfloat16))
    spec = with_size(catalogue.make_spec("small", catalogue.find("longlive-1.3b"), architecture), 256, 256)
    runner = ModelRunner(StageModel(spec, WanDenoiser(network).fuse()), torch.device("cpu"))
    runner.open(0, steps=4, kv_context="clean")
    runner.set_text(0, 0, torch.zeros(spec.text_shape), 0)
    given = (
        torch.zeros(1, *spec.chunk_shape, dtype=torch.bfloat16),
        torch.zeros(1, spec.chunk_latents, width).bfloat16(),
    )
    for chunk in range(4):
        runner.forward([MicroStep(0, chunk, 0, 4, 0)], given)
    with torch.backends.mkldnn.flags(enabled=False):  # it widens bfloat16 where a CPU does not multiply that
        taken = peak_bytes(lambda: runner.forward([MicroStep(0, 4, 0, 4, 0)], given))
    sizes = sizes_from(architecture, spec)
    (counted,) = memory(sizes, Layout(((0, 2),), (), "head", 0.0), Workload(1, 1, 4, "clean", 1), Storage(2))
    assert 0.9 * counted.activations < taken < 1.1 * counted.activations


def test_offloaded_blocks_leave_two_of_them_on_the_device() -> None:
    sizes, load = entry_sizes(catalogue.find("wan2.1-t2v-14b")), Workload(1, 0, 4, "clean", 1)
    layout = Layout(((0, 40),), (), "head", 0.0)
    whole, offloaded = (memory(sizes, layout, load, Storage(2, offload=each))[0] for each in ("none", "blocks"))
    assert whole.weights - offloaded.weights == 38 * 2 * sizes.block_values
    assert offloaded.weights < 2.4e9 < 28e9 < whole.weights
    assert offloaded_bytes(sizes, 40, Storage(2, offload="blocks")) == 40 * 2 * sizes.block_values
    assert offloaded_bytes(sizes, 2, Storage(2, offload="blocks")) == 0, "both have a buffer"
