"""A model that does not fit is refused before anything is loaded, with options that make it fit, and true figures."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import torch

from streamdiff.cli import main, parser
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue
from streamdiff.models.loader import ModelLoader
from streamdiff.pipeline import load_plan, rank_loader
from streamdiff.pipeline.load_plan import plan_load, plan_rank
from streamdiff.pipeline.planner import fit
from streamdiff.pipeline.planner.memory import Storage
from streamdiff.pipeline.planner.model_sizes import entry_sizes
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.planner.stage_layout import Workload
from streamdiff.pipeline.rank_loader import load_rank
from tests.small import CPU

SMALL: dict[str, Any] = {"name": "random:wan2.1-1.3b", "vae": "random:wan2.1", "dtype": "bfloat16", "preset": "plain"}
GPU = torch.device("cuda", 0)
LARGE = {**SMALL, "name": "random:wan2.1-14b"}


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(rank_loader, "load_decoder", never)
    monkeypatch.setattr(rank_loader, "load_text_encoder", never)
    monkeypatch.setattr(ModelLoader, "transformer", never)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200 * 10**9, 200 * 10**9))


def refused(config: ModelConfig, device: torch.device = GPU) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rank(plan_rank(plan_load(config, device)))
    return str(caught.value)


def total_gb(config: ModelConfig, rank: int = 0) -> float:
    loader = plan_load(config, GPU)
    return loader.demand(split_evenly(loader.sizes.blocks, config.stages)).frame_by_frame().total(rank) / 1e9


def with_options(given: dict[str, Any], words: str) -> ModelConfig:
    """`given`, and options as they are typed."""
    typed = vars(parser.parse(["serve", *shlex.split(words)]))
    asked = {key.removeprefix("model."): value for key, value in typed.items() if key.startswith("model.")}
    changed = {key: value for key, value in asked.items() if value is not None}
    if "vae" in changed:  # the published one would be fetched
        changed["vae"] = f"random:{changed['vae']}"
    return ModelConfig(**{**given, **changed})


@pytest.mark.slow
@pytest.mark.parametrize("limit_gb", [13.0, 12.0, 9.0])
def test_every_option_makes_it_fit_and_takes_what_it_says(limit_gb: float) -> None:
    text = refused(ModelConfig(**SMALL, device_memory_gb=limit_gb))
    assert text.startswith("random:wan2.1-1.3b does not fit: rank 0 needs 13.8 GB (weights 2.98, KV caches 3.98, ")
    assert f"libraries 0.6), and model.device_memory_gb has {limit_gb:.3g} GB. " in text
    options = re.findall(r"(--[^;]+) \(([\d.]+) GB\)", text.split("makes it fit", 1)[1])
    assert len(options) >= 1
    for words, figure in options:
        config = with_options(SMALL, words)
        assert f"{total_gb(config):.3g}" == figure and total_gb(config) <= limit_gb, words


@pytest.mark.parametrize(("limit_gb", "latents"), [(20.0, 3), (16.0, 1)])
def test_a_call_of_the_decoder_is_as_long_as_memory_allows(limit_gb: float, latents: int) -> None:
    plan = plan_rank(plan_load(ModelConfig(**SMALL, attention="sdpa", device_memory_gb=limit_gb), GPU))
    assert plan.decode_latents == latents and plan.demand(plan.runs).total(0) < limit_gb * 1e9


def test_a_window_and_a_picture_are_no_smaller_than_they_must() -> None:
    text = refused(ModelConfig(**SMALL, device_memory_gb=13))
    assert "--window 9 (13 GB)" in text and "--size 704x416 (11.1 GB)" in text


@pytest.mark.slow
def test_options_that_help_only_together_are_told_together() -> None:
    text = refused(ModelConfig(**LARGE, device_memory_gb=24))
    words, figure = re.findall(r"these together do: (.*) \(([\d.]+) GB\)", text)[0]
    assert words.count("--") >= 2 and not ("--quantize" in words and "--offload" in words)
    assert total_gb(with_options(LARGE, words)) == pytest.approx(float(figure), rel=0.01)
    assert float(figure) <= 24


def test_what_can_never_fit_is_told_with_the_least_there_is() -> None:
    text = refused(ModelConfig(**LARGE, device_memory_gb=3))
    assert "No option makes it fit; the least is " in text and "or more --stages" in text


def test_offload_makes_14b_fit_where_8_bits_do_not() -> None:
    text = refused(ModelConfig(**{**LARGE, "vae": "random:taew2_1"}, window=6, sink=0, device_memory_gb=16))
    assert "--offload blocks (" in text and "--quantize" not in text


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "fits"), [(0, False), (1, True), (2, False)])
def test_each_rank_of_a_ring_is_asked_for_its_own(rank: int, fits: bool) -> None:
    """Two stages of 14B, and a rank that decodes with Wan's large decoder, under the same limit."""
    config = ModelConfig(**LARGE, stages=2, decode_rank="dedicated", device_memory_gb={0: 20.0, 1: 40.0, 2: 5.0}[rank])
    loader = plan_load(config, GPU)
    runs = split_evenly(loader.sizes.blocks, 2)
    if fits:
        fit.check(loader.demand(runs), rank, load_plan._device_limits(config, GPU))
        return
    with pytest.raises(ConfigError, match=rf"rank {rank} needs [\d.]+ GB"):
        fit.check(loader.demand(runs), rank, load_plan._device_limits(config, GPU))


def test_a_gpu_is_asked_what_it_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11 * 10**9, 12 * 10**9))
    text = refused(ModelConfig(**SMALL))
    assert "libraries 0.6), and cuda:0, of 12 GB in all, still has 11 GB" in text
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (22 * 10**9, 24 * 10**9))
    with pytest.raises(AssertionError, match="loaded"):
        load_rank(plan_rank(plan_load(ModelConfig(**SMALL), GPU)))


def test_the_embedded_model_is_not_offered_what_it_cannot_have() -> None:
    text = refused(ModelConfig(device_memory_gb=0.01))
    assert "tiny does not fit" in text
    assert not any(option in text for option in ("--window", "--size", "--vae"))


def test_a_cpu_without_a_limit_refuses_nothing() -> None:
    with pytest.raises(AssertionError, match="loaded"):
        load_rank(plan_rank(plan_load(ModelConfig(**LARGE), CPU)))


def test_the_command_line_says_it_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    (tmp_path / "small.yaml").write_text("model: {device_memory_gb: 0.01}")
    words = [
        "generate",
        "--config",
        str(tmp_path / "small.yaml"),
        "--seconds",
        "1",
        "--output",
        str(tmp_path / "v.mp4"),
    ]
    assert main.main(words) == main.USER_ERROR
    assert capsys.readouterr().err.startswith("streamdiff: error: tiny does not fit: rank 0 needs ")


@pytest.mark.parametrize("limit", [10**9, 6 * 10**9, 12 * 10**9])
def test_every_published_model_has_options(limit: int) -> None:
    """With the sinks, windows and first chunks of all of them."""
    for entry in catalogue.listed():
        if entry.weights is None or entry.context is None:
            continue
        sizes, kv_context = entry_sizes(entry), entry.context.default
        load = Workload(1, 1, sizes.spec.steps[0], kv_context, 1)
        runs = split_evenly(sizes.blocks, 1)
        demand = fit.Demand(sizes, Storage(2), runs, "head", load, entry.autoencoder)
        text = fit.misfit(demand, 0, limit, "a card")
        assert text is not None and "--" in text, entry.name
