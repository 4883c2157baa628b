"""What is wrong with a checkpoint is said before anything is loaded, by name, with counts and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamdiff.errors import ConfigError
from streamdiff.models.transformer.weights import FILE
from tests.models.layouts import HEADS, State, fused, load, original, save, small_state
from tests.small import small_transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformer")
    small_transformer(3, layers=4).save_pretrained(folder)
    return folder


def test_a_tensor_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / FILE)
    del tensors["blocks.2.attn1.to_q.weight"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / FILE)
    load(tmp_path, config=None, blocks=(0, 2))  # not this rank's business
    with pytest.raises(ConfigError, match=r"1 tensor is missing, for example blocks\.2\.attn1\.to_q\.weight"):
        load(tmp_path, config=None, blocks=(2, 4))


def test_a_tensor_of_another_shape_is_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / FILE)
    tensors["blocks.3.ffn.net.2.bias"] = torch.zeros(7)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ConfigError, match=r"blocks\.3\.ffn\.net\.2\.bias has shape \[7\], but \[24\] is expected"):
        load(tmp_path, config=None, blocks=(2, 4))


def faulty(tmp_path: Path, changes: State, without: str = "nothing") -> Path:
    """An original file of four blocks with some tensors replaced, added, or left out."""
    state = {name: t for name, t in original(small_state(layers=4)).items() if without not in name}
    return save(tmp_path / "model.safetensors", state | changes)


def test_many_missing_tensors_are_counted_and_the_first_named(tmp_path: Path) -> None:
    path = faulty(tmp_path, {}, without="norm_k")
    with pytest.raises(ConfigError) as caught:
        load(path)
    told = str(caught.value)
    assert (
        "8 tensors are missing, for example blocks.0.self_attn.norm_k.weight, blocks.0.cross_attn.norm_k.weight, "
        in told
    )
    assert (
        "Expected is a Wan transformer of 4 blocks, 24 wide, feed-forward 32: 123 tensors in original Wan names" in told
    )
    assert str(path) in told and "Nothing was loaded" in told
    assert told.count("norm_k") == 3


def test_a_whole_block_that_is_missing_is_seen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"27 tensors are missing, for example blocks\.2\.modulation"):
        load(faulty(tmp_path, {}, without="blocks.2."))


def test_unexpected_tensors_are_named_on_every_stage(tmp_path: Path) -> None:
    strange = {"blocks.3.self_attn.q.scale_weight": torch.ones(1), "vace_blocks.0.before_proj.bias": torch.ones(1)}
    path = faulty(tmp_path, strange)
    for blocks in (None, (0, 2)):
        with pytest.raises(
            ConfigError, match=r"2 tensors are unexpected, for example blocks\.3\.self_attn\.q\.scale_weight, vace"
        ):
            load(path, blocks=blocks)


def test_more_blocks_than_the_configuration_has_are_unexpected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"27 tensors are unexpected, for example blocks\.3\."):
        load(faulty(tmp_path, {}), config=HEADS | {"num_layers": 3})


def test_tensors_of_an_image_model_are_unexpected_where_the_configuration_has_none(tmp_path: Path) -> None:
    path = faulty(tmp_path, {"img_emb.proj.0.weight": torch.ones(8)})
    with pytest.raises(ConfigError, match=r"1 tensor is unexpected, for example img_emb\.proj\.0\.weight"):
        load(path, config=HEADS | {"image_dim": None})


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    path = faulty(tmp_path, {"blocks.1.ffn.2.weight": torch.zeros(24, 31), "head.head.bias": torch.zeros(1)})
    with pytest.raises(ConfigError) as caught:
        load(path)
    told = str(caught.value)
    assert "2 tensors have another shape: " in told
    assert "blocks.1.ffn.2.weight has shape [24, 31], but [24, 32] is expected" in told
    load(path, blocks=(2, 3))  # not this rank's business


def test_a_fused_projection_of_a_wrong_height(tmp_path: Path) -> None:
    state = fused(small_state())
    state["blocks.1.self_attn.to_qkv.weight"] = torch.zeros(70, 24)
    with pytest.raises(ConfigError, match=r"to_qkv\.weight has shape \[70, 24\], but \[72, 24\] is expected"):
        load(save(tmp_path / "model.safetensors", state))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(value: float, tmp_path: Path) -> None:
    broken = small_state(layers=4)["blocks.2.attn1.to_k.weight"].clone()
    broken[3, 5] = value
    path = faulty(tmp_path, {"blocks.2.self_attn.k.weight": broken})
    with pytest.raises(
        ConfigError, match=r"1 tensor holds .* not finite in float32, .* blocks\.2\.self_attn\.k\.weight"
    ):
        load(path)
    load(path, blocks=(0, 2))


def test_values_that_are_too_large_for_the_dtype(tmp_path: Path) -> None:
    path = faulty(tmp_path, {"blocks.2.self_attn.k.bias": torch.full((24,), 1e5)})
    load(path)
    with pytest.raises(ConfigError, match=r"1 tensor holds values that are not finite in float16"):
        load(path, dtype=torch.float16)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    path = faulty(tmp_path, {"blocks.2.ffn.0.weight": torch.zeros(32, 24, dtype=torch.int8)})
    with pytest.raises(ConfigError, match=r"1 tensor is not floating point: blocks\.2\.ffn\.0\.weight is int8"):
        load(path)


def test_a_tensor_that_is_there_twice(tmp_path: Path) -> None:
    path = faulty(tmp_path, {"net.blocks.0.modulation": torch.zeros(1, 6, 24)})
    with pytest.raises(
        ConfigError, match=r"1 tensor is there twice, for example .* are both blocks\.0\.scale_shift_table"
    ):
        load(path)


def test_several_faults_are_told_at_once(tmp_path: Path) -> None:
    path = faulty(tmp_path, {"strange": torch.zeros(1), "head.head.bias": torch.zeros(1)}, without="ffn.2.bias")
    with pytest.raises(ConfigError, match=r"4 tensors are missing.*1 tensor is unexpected.*1 tensor has another shape"):
        load(path)


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "vae.safetensors", {"encoder.conv1.weight": torch.zeros(1), "conv1.bias": torch.zeros(1)})
    with pytest.raises(
        ConfigError, match=r"not a Wan transformer; expected names such as .*, found conv1\.bias, encoder"
    ):
        load(path)


@pytest.mark.parametrize("blocks", [(0, 5), (2, 2), (-1, 2)])
def test_blocks_that_are_not_there(blocks: tuple[int, int], folder: Path) -> None:
    with pytest.raises(ConfigError, match=rf"blocks {blocks[0]} to {blocks[1]} are asked for, but there are 4"):
        load(folder, blocks=blocks, config=None)
