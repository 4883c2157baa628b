"""Memory is counted without weights, as published; a model that does not fit is refused before anything is loaded, with
options that make it fit, and true figures."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel

from streamdiff.cli import parser
from streamdiff.commands import plan
from streamdiff.commands.jobs import PlanJob
from streamdiff.config import ModelConfig
from streamdiff.core import MicroStep
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue
from streamdiff.models.loader import ModelLoader
from streamdiff.models.model import StageModel
from streamdiff.models.spec import with_size
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import kept_dtype
from streamdiff.pipeline import rank_process
from streamdiff.pipeline.load_plan import plan_load, plan_rank
from streamdiff.pipeline.planner.memory import Demand, Storage, misfit, stage_memory
from streamdiff.pipeline.planner.model_sizes import entry_sizes, read_sizes, sizes_from
from streamdiff.pipeline.planner.partition import Workload, split_evenly
from streamdiff.pipeline.rank_process import load_rank
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.peak_memory import peak_bytes
from tests.small import CPU

SMALL: dict[str, Any] = {"name": "random:wan2.1-1.3b", "vae": "random:wan2.1", "dtype": "bfloat16", "preset": "plain"}
GPU = torch.device("cuda", 0)
LARGE = {**SMALL, "name": "random:wan2.1-14b"}


@pytest.mark.parametrize(("name", "count"), [("wan2.1-t2v-1.3b", 1.419e9), ("wan2.1-t2v-14b", 14.288e9)])
def test_weights_are_counted_as_published(name: str, count: float) -> None:
    """The decoder's apart."""
    entry = catalogue.find(name)
    (stage,) = stage_memory(entry, 1)
    assert stage.weights - 2 * entry_sizes(entry).decoder.weights == pytest.approx(2 * count, rel=5e-4)


def test_a_stage_has_what_is_planned_and_checked_at_the_start() -> None:
    """On one GPU, where blocks cannot be spread otherwise."""
    planned = plan.make(ModelConfig(name="self-forcing"), PlanJob(gpu="H100"))
    assert planned.memory == stage_memory(catalogue.find("self-forcing"), 1)
    assert planned.memory[0].total == sum(planned.memory[0].parts.values()) > 20e9


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


def test_the_embedded_models_facts_are_its_folders() -> None:
    assert entry_sizes(catalogue.find("tiny")) == read_sizes("tiny")


def test_a_checkpoint_says_what_the_catalogue_says() -> None:
    """Of LongLive's architecture and stream, before anything is there and from the shapes of tensors."""
    told = entry_sizes(catalogue.find("longlive-1.3b"))
    read = plan_load(ModelConfig(name="random:wan2.1-1.3b"), torch.device("cpu")).sizes
    assert read == replace(told, spec=read.spec), "the decoder's sizes too"
    own = {name: getattr(read.spec, name) for name in ("name", "shift", "rope", "schedules")}
    assert read.spec == replace(told.spec, steps=(4, 2, 1), **own)


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
    (counted,) = Demand(sizes, Storage(2), ((0, 2),), "head", Workload(1, 1, 4, "clean", 1)).memory()
    assert 0.9 * counted.forward < taken < 1.1 * counted.forward


def test_offloaded_blocks_leave_two_of_them_on_the_device() -> None:
    sizes, load = entry_sizes(catalogue.find("wan2.1-t2v-14b")), Workload(1, 0, 4, "clean", 1)
    plain, copied = Storage(2), Storage(2, offload="blocks")
    whole, offloaded = (Demand(sizes, each, ((0, 40),), "head", load).memory()[0] for each in (plain, copied))
    assert whole.weights - offloaded.weights == 38 * 2 * sizes.block_values
    assert offloaded.weights < 2.4e9 < 28e9 < whole.weights
    assert copied.copied_bytes(sizes, 40) == 40 * 2 * sizes.block_values
    assert copied.copied_bytes(sizes, 2) == 0, "both have a buffer"


# ---- what fits -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded, and a GPU has 200 GB free."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(rank_process, "load_autoencoder", never)
    monkeypatch.setattr(rank_process, "load_text_encoder", never)
    monkeypatch.setattr(ModelLoader, "transformer", never)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200 * 10**9, 200 * 10**9))


def refused(config: ModelConfig, device: torch.device = GPU) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rank(plan_rank(plan_load(config, device)))
    assert caught.value.code == "memory"
    return str(caught.value)


def total_gb(config: ModelConfig, rank: int = 0) -> float:
    return plan_load(config, GPU).demand.frame_by_frame().totals[rank] / 1e9


def with_options(given: dict[str, Any], words: str) -> ModelConfig:
    """`given`, and options as they are typed."""
    typed = vars(parser.parse(["serve", *shlex.split(words)]))
    asked = {key.removeprefix("model."): value for key, value in typed.items() if key.startswith("model.")}
    changed = {key: value for key, value in asked.items() if value is not None}
    if "vae" in changed:  # the published one would be fetched
        changed["vae"] = f"random:{changed['vae']}"
    return ModelConfig(**{**given, **changed})


@pytest.mark.slow
@pytest.mark.parametrize("limit_gb", [13.0, 9.0])
def test_every_option_makes_it_fit_and_takes_what_it_says(limit_gb: float) -> None:
    text = refused(ModelConfig(**SMALL, device_memory_gb=limit_gb))
    assert text.startswith("random:wan2.1-1.3b does not fit: rank 0 needs 13.8 GB (weights 2.98, caches 3.98, ")
    assert f"libraries 0.6), and model.device_memory_gb has {limit_gb:.3g} GB. " in text
    options = re.findall(r"(--[^;]+) \(([\d.]+) GB\)", text.split("makes it fit", 1)[1])
    assert len(options) >= 1
    for words, figure in options:
        config = with_options(SMALL, words)
        assert f"{total_gb(config):.3g}" == figure and total_gb(config) <= limit_gb, words


@pytest.mark.parametrize(("limit_gb", "latents"), [(20.0, 3), (16.0, 1)])
def test_a_call_of_the_decoder_is_as_long_as_memory_allows(limit_gb: float, latents: int) -> None:
    plan = plan_rank(plan_load(ModelConfig(**SMALL, attention="sdpa", device_memory_gb=limit_gb), GPU))
    assert plan.decode_latents == latents and plan.demand.totals[0] < limit_gb * 1e9


@pytest.mark.slow
def test_options_that_help_only_together_are_told_together() -> None:
    text = refused(ModelConfig(**LARGE, device_memory_gb=24))
    words, figure = re.findall(r"these together do: (.*) \(([\d.]+) GB\)", text)[0]
    assert words.count("--") >= 2 and not ("--quantize" in words and "--offload" in words)
    assert total_gb(with_options(LARGE, words)) == pytest.approx(float(figure), rel=0.01)
    assert float(figure) <= 24


def test_a_gpu_is_asked_what_it_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11 * 10**9, 12 * 10**9))
    text = refused(ModelConfig(**SMALL))
    assert "libraries 0.6), and cuda:0, of 12 GB in all, still has 11 GB" in text
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (22 * 10**9, 24 * 10**9))
    with pytest.raises(AssertionError, match="loaded"):
        load_rank(plan_rank(plan_load(ModelConfig(**SMALL), GPU)))


def test_a_cpu_without_a_limit_refuses_nothing() -> None:
    with pytest.raises(AssertionError, match="loaded"):
        load_rank(plan_rank(plan_load(ModelConfig(**LARGE), CPU)))


def test_every_published_model_has_options() -> None:
    """With the sinks, windows and first chunks of all of them."""
    for entry in catalogue.listed():
        if entry.weights is None or entry.context is None:
            continue
        sizes, kv_context = entry_sizes(entry), entry.context.default
        load = Workload(1, 1, sizes.spec.steps[0], kv_context, 1)
        runs = split_evenly(sizes.blocks, 1)
        demand = Demand(sizes, Storage(2), runs, "head", load, entry.autoencoder)
        text = misfit(demand, 0, 6 * 10**9, "a card")
        assert text is not None and "--" in text, entry.name
