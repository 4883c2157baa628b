"""Sizes of catalogue models, found without weights: those of diffusers' own model, and the published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel

from streamdiff.config import ModelConfig
from streamdiff.models.catalogue import entries
from streamdiff.pipeline.planner.memory import stage_memory
from streamdiff.pipeline.planner.model_sizes import known_facts, read_facts
from streamdiff.pipeline.rank_loader import RankLoader


@pytest.mark.parametrize(("name", "count"), [("wan2.1-t2v-1.3b", 1.419e9), ("wan2.1-t2v-14b", 14.288e9)])
def test_weights_are_counted_as_diffusers_has_them(name: str, count: float) -> None:
    facts = known_facts(entries.find(name))
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=facts.heads,
            attention_head_dim=facts.head_dim,
            in_channels=facts.in_channels,
            out_channels=facts.out_channels,
            text_dim=facts.text_dim,
            freq_dim=facts.freq_dim,
            ffn_dim=facts.ffn_dim,
            num_layers=facts.blocks,
        )
    theirs = sum(parameter.numel() for parameter in model.parameters())
    assert theirs == pytest.approx(count, rel=5e-4)
    (stage,) = stage_memory(entries.find(name), 1)
    assert stage.weights == 2 * theirs


@pytest.mark.parametrize(("name", "per_latent"), [("self-forcing", 0.288e9), ("krea-realtime-14b", 1.28e9)])
def test_a_latent_frame_of_cache_has_the_published_size(name: str, per_latent: float) -> None:
    """bfloat16, 480x832; the text's keys and values apart."""
    entry = entries.find(name)
    facts = known_facts(entry)
    (stage,) = stage_memory(entry, 1)
    assert entry.stream
    text = 2 * 2 * facts.blocks * facts.width * facts.text_tokens
    assert (stage.caches - text) / entry.stream.window_latents == pytest.approx(per_latent, rel=2e-3)
    assert facts.tokens == 1560 * entry.stream.chunk_latents


def test_matched_keeps_a_cache_per_step() -> None:
    entry = entries.find("streamdiffusionv2-1.3b")
    (stage,) = stage_memory(entry, 1)
    facts = known_facts(entry)
    text = 2 * 2 * facts.blocks * facts.width * facts.text_tokens
    assert stage.caches - text == pytest.approx(4 * 6 * 0.288e9, rel=2e-3)


def test_stages_share_weights_and_caches() -> None:
    entry = entries.find("longlive-1.3b")
    whole = stage_memory(entry, 1)[0]
    parts = stage_memory(entry, 4)
    assert len(parts) == 4
    assert sum(stage.caches for stage in parts) == whole.caches
    assert whole.weights / 4 < max(stage.weights for stage in parts) < whole.weights / 3


def test_a_model_of_whole_clips_has_no_caches() -> None:
    assert [stage.caches for stage in stage_memory(entries.find("wan2.1-t2v-14b"), 2)] == [0, 0]


def test_the_embedded_models_facts_are_its_folders() -> None:
    assert known_facts(entries.find("tiny")) == read_facts("tiny")


def test_a_checkpoint_says_what_the_catalogue_says() -> None:
    """Of LongLive's architecture and stream, before anything is there and from the shapes of tensors."""
    told = known_facts(entries.find("longlive-1.3b"))
    read = RankLoader(ModelConfig(name="random:wan2.1-1.3b"), torch.device("cpu")).sizes
    assert read == replace(told, spec=read.spec, decoder_memory_values=0)
    own = {name: getattr(read.spec, name) for name in ("name", "shift", "rope", "schedules")}
    assert read.spec == replace(told.spec, steps=(4, 2, 1), **own)


def test_another_picture_has_other_tokens() -> None:
    entry = entries.find("self-forcing")
    assert known_facts(entry, height=512, width=512).tokens == 3 * 1024
