"""The shape of a model is read from its tensors; a configuration says what these cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from streamdiff.errors import ConfigError
from streamdiff.models.transformer.weights import read_architecture
from tests.models.layouts import SIZES, assert_same, load, original, published, save, small_state
from tests.small import small_transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformer")
    small_transformer(3, layers=4).save_pretrained(folder)
    return folder


def test_the_architecture_is_read_from_the_shapes(tmp_path: Path) -> None:
    source = small_transformer(3, layers=3, heads=2, head_dim=128, planes=3)
    path = save(tmp_path / "model.safetensors", original(dict(source.state_dict())))
    config = load(path, config=None).config
    for key in source.config:
        if key != "rope_max_seq_len" and not key.startswith("_"):
            assert getattr(config, key) == source.config[key], key


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_published_architectures_are_read_from_their_shapes(size: str) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in published(size).items()}
    found = read_architecture(shapes.get, SIZES[size][0]["num_layers"])
    with torch.device("meta"):
        expected = WanTransformer3DModel(**SIZES[size][0]).config
    assert found == {key: expected[key] for key in found}
    assert {*SIZES[size][0], "attention_head_dim", "patch_size", "text_dim"} <= set(found)


def test_what_is_needed_and_not_there_is_named() -> None:
    with pytest.raises(ConfigError):
        read_architecture({"patch_embedding.weight": (128, 16, 1, 2, 2)}.get, 1)


def test_the_number_of_heads_of_a_narrow_model_has_to_be_said(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", original(small_state()))
    with pytest.raises(ConfigError):
        load(path, config=None)
    for config in ({"attention_head_dim": 12}, {"num_attention_heads": 2}):
        assert_same(load(path, config=config), small_transformer(3, planes=0))
    with pytest.raises(ConfigError):
        load(path, config={"num_attention_heads": 5})


def test_what_the_caller_says_goes_before_the_folders_configuration(folder: Path) -> None:
    given = {"num_attention_heads": 1, "attention_head_dim": 24}
    assert load(folder, config=None).config.num_attention_heads == 2
    model = load(folder, config=given)
    assert model.config.num_attention_heads == 1 and model.config.text_dim == 64


@pytest.mark.parametrize(
    "config",
    [
        {"ffn_dim": "32"},
        {"num_layers": 0},
        {"patch_size": [1, 2]},
        {"eps": "small"},
        {"cross_attn_norm": 1},
        {"attention_head_dim": 3},
    ],
)
def test_a_configuration_that_cannot_be(config: dict[str, object], folder: Path) -> None:
    with pytest.raises(ConfigError):
        load(folder, config=config)
