"""Names of tensors: original Wan's, those of diffusers, and what wrappers and repackers made of them."""

from __future__ import annotations

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

from streamdiff.models.transformer.tensor_names import (
    NameLayout,
    TensorLocation,
    block_count,
    recognise,
    translate,
)
from tests.models.layouts import SIZES, original_name, published


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_every_tensor_of_the_published_sizes_is_known_in_both_layouts(size: str) -> None:
    tensors = published(size)
    assert len(tensors) == SIZES[size][1]
    stored = {original_name(name): name for name in tensors}
    assert len(stored) == len(tensors)
    assert recognise(stored) is NameLayout.WAN
    assert recognise(tensors) is NameLayout.DIFFUSERS
    for names, layout in ((stored, NameLayout.WAN), (dict(zip(tensors, tensors, strict=True)), NameLayout.DIFFUSERS)):
        found = translate(names, layout)
        assert not found.unmatched and not found.clashes
        assert found.sources == {name: TensorLocation(spelled) for spelled, name in names.items()}
        assert {found.spell(name) for name in tensors} == set(names)
        assert block_count(found.sources) == SIZES[size][0]["num_layers"]


def test_diffusers_own_conversion_agrees() -> None:
    stored = {original_name(name): name for name in published("14B image") if not name.endswith("pos_embed")}
    tensors = {spelled: torch.tensor(number) for number, spelled in enumerate(stored)}
    converted = convert_wan_transformer_to_diffusers(dict(tensors))
    assert converted == {name: tensors[spelled] for spelled, name in stored.items()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("blocks.0.norm3.weight", NameLayout.DIFFUSERS),
        ("blocks.0.norm2.weight", NameLayout.WAN),
        ("blocks.0.attn1.to_q.weight", NameLayout.WAN),
        ("blocks.0.modulation", NameLayout.DIFFUSERS),
        ("vace_blocks.0.self_attn.q.weight", NameLayout.WAN),
        ("blocks.0.self_attn.q.scale_weight", NameLayout.WAN),
        ("blocks.0.self_attn.norm_q.bias", NameLayout.WAN),
        ("critic.blocks.0.self_attn.q.weight", NameLayout.WAN),
        ("head.modulation.weight", NameLayout.WAN),
    ],
)
def test_what_is_not_known_is_reported(name: str, layout: NameLayout) -> None:
    found = translate([name], layout)
    assert found.unmatched == [name]
    assert not found.sources


@pytest.mark.parametrize("name", ["freqs", "model.freqs", "rope.freqs_cos", "blocks.0.attn2.norm_added_q.weight"])
def test_tables_that_anybody_can_compute_are_passed_over(name: str) -> None:
    found = translate([name], NameLayout.DIFFUSERS)
    assert not found.unmatched and not found.sources


@pytest.mark.parametrize(
    ("name", "layout", "inside"),
    [
        ("blocks.1.self_attn.qkv.weight", NameLayout.WAN, ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
        ("blocks.1.self_attn.to_qkv.weight", NameLayout.WAN, ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
        ("blocks.1.attn1.to_qkv.weight", NameLayout.DIFFUSERS, ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
        ("blocks.1.attn2.to_kv.weight", NameLayout.DIFFUSERS, ("attn2.to_k", "attn2.to_v")),
    ],
)
def test_fused_projections_are_known_by_their_parts(name: str, layout: NameLayout, inside: tuple[str, ...]) -> None:
    found = translate([name], layout)
    expected = {f"blocks.1.{part}.weight": TensorLocation(name, i, len(inside)) for i, part in enumerate(inside)}
    assert found.sources == expected
    assert recognise([name]) is layout


@pytest.mark.parametrize(
    "names",
    [
        ["encoder.conv1.weight", "decoder.middle.0.residual.0.gamma", "conv1.bias"],
        ["blocks.0.attn.q.weight", "blocks.0.norm1.weight", "token_embedding.weight"],
        ["patch_embedding.weight"],
        [],
    ],
    ids=["autoencoder", "text encoder", "any transformer", "nothing"],
)
def test_other_models_are_not_recognised(names: list[str]) -> None:
    assert recognise(names) is None
