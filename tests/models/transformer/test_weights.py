"""A rank reads its own blocks and what goes with them, from any layout, and says what is wrong with a file."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import psutil
import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import save_file

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint import open_checkpoint
from streamdiff.models.loader import ModelLoader
from streamdiff.models.transformer.weights import load_transformer, open_transformer, read_architecture
from tests.models.layouts import (
    HEADS,
    SIZES,
    Counting,
    assert_same,
    fused,
    load,
    original,
    original_name,
    prefixed,
    published,
    rcm,
    save,
    small_state,
    wrapped,
    write_shards,
    write_zeros,
)
from tests.small import CPU, small_transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformer")
    small_transformer(3, layers=4).save_pretrained(folder)
    return folder


def test_parts_together_are_the_whole(folder: Path) -> None:
    whole = small_transformer(3, layers=4).state_dict()
    seen = set()
    for first, last in ((0, 1), (1, 3), (3, 4)):
        for name, tensor in load(folder, config=None, blocks=(first, last)).state_dict().items():
            if tensor.is_meta:
                continue
            if name.startswith("blocks."):
                number, rest = name.removeprefix("blocks.").split(".", 1)
                name = f"blocks.{int(number) + first}.{rest}"
            assert torch.equal(tensor, whole[name]), name
            seen.add(name)
    assert seen == set(whole)


LAYOUTS = {
    "diffusers": lambda state: state,
    "diffusers under transformer.": lambda state: prefixed(state, "transformer."),
    "original": original,
    "original under model.": lambda state: prefixed(original(state), "model."),
    "original under net.": lambda state: prefixed(original(state), "net."),
    "original under module.": lambda state: prefixed(original(state), "module."),
    "ComfyUI": lambda state: prefixed(original(state), "model.diffusion_model."),
    "wrapped": lambda state: wrapped(original(state)),
    "rCM": rcm,
    "fused": fused,
    "fused under model.": lambda state: prefixed(fused(state, one="self_attn.qkv."), "model."),
    "with a table of rotary factors": lambda state: original(state) | {"freqs": torch.ones(4, dtype=torch.complex64)},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_in_any_layout_is_the_same_model(layout: str, tmp_path: Path) -> None:
    torch.save({"generator_ema": LAYOUTS[layout](small_state())}, tmp_path / "model.pt")
    assert_same(load(tmp_path / "model.pt"), small_transformer(3, planes=0))
    if "table" not in layout:  # safetensors has no complex numbers
        path = save(tmp_path / "model.safetensors", LAYOUTS[layout](small_state()))
        assert_same(load(path), small_transformer(3, planes=0))


@pytest.mark.parametrize("names", [original, dict], ids=["original", "diffusers"])
def test_shards(names: object, tmp_path: Path) -> None:
    state = names(small_state())  # type: ignore[operator]
    spelled = sorted(state)
    write_shards(tmp_path, state, [spelled[:20], spelled[20:45], spelled[45:]])
    assert_same(load(tmp_path), small_transformer(3, planes=0))


def test_image_conditioned_models(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        source = WanTransformer3DModel(
            num_attention_heads=1, in_channels=36, text_dim=16, ffn_dim=32, num_layers=2,
            image_dim=24, added_kv_proj_dim=128, pos_embed_seq_len=6,
        )  # fmt: skip
    path = save(tmp_path / "model.safetensors", original(dict(source.state_dict())))
    model = load(path, config=None)
    assert {name for name in model.state_dict() if "image_embedder" in name or "add" in name}
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.config.in_channels == 36 and model.config.out_channels == 16
    with pytest.raises(ConfigError):
        ModelLoader(ModelConfig(name=str(path)), torch.device("cpu")).transformer()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("blocks", [(0, 1), (1, 3), (3, 4), None])
def test_a_stage_reads_its_own_tensors_and_each_once(kind: str, blocks: tuple[int, int] | None, tmp_path: Path) -> None:
    state, path = original(small_state(layers=4)), tmp_path / f"model.{kind}"
    (save_file if kind == "safetensors" else torch.save)(state, path)
    checkpoint = Counting(open_checkpoint(path))
    load_transformer(open_transformer(checkpoint, config=HEADS), device=CPU, dtype=torch.bfloat16, blocks=blocks)
    first, last = blocks or (0, 4)
    own = re.compile(
        rf"blocks\.[{first}-{last - 1}]\.|text_embedding|time_projection"
        + ("|patch_embedding|time_embedding" if first == 0 else "")
        + ("|head" if last == 4 else "")
    )
    assert sorted(checkpoint.reads) == sorted(name for name in state if own.match(name))


def test_weights_stored_as_they_are_needed_are_not_copied(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    name = "blocks.1.ffn.net.2.weight"
    model = load_transformer(open_transformer(checkpoint), device=CPU, dtype=torch.float32)
    assert model.get_parameter(name).data_ptr() == checkpoint.read(name).data_ptr()
    half = load_transformer(open_transformer(checkpoint), device=CPU, dtype=torch.bfloat16)
    assert half.get_parameter(name).data_ptr() != checkpoint.read(name).data_ptr()


@pytest.mark.slow
def test_a_stage_of_a_model_of_published_size_holds_its_own_part_only(tmp_path: Path) -> None:
    """The 1.3B architecture as it is published, in a file that is nearly a hole: 825 tensors of zeros, 2.8 GB."""
    path = tmp_path / "model.safetensors"
    write_zeros(path, {original_name(name): [*each.shape] for name, each in published("1.3B").items()})
    before = psutil.Process().memory_info().rss
    model = load_transformer(open_transformer(path), device=CPU, dtype=torch.bfloat16, blocks=(7, 8))
    grown = psutil.Process().memory_info().rss - before
    own = sum(tensor.nbytes for tensor in model.state_dict().values() if not tensor.is_meta)
    assert (model.config.num_attention_heads, model.config.attention_head_dim, model.config.ffn_dim) == (12, 128, 8960)
    assert path.stat().st_size > 2.8e9 and own < 150e6
    assert grown < 3 * own, "its own part, and once more while it is checked"


def as_diffusers_loads(source: WanTransformer3DModel, dtype: torch.dtype) -> WanTransformer3DModel:
    """What `from_pretrained(torch_dtype=dtype)` gives where accelerate is there, which it needs for this."""
    assert {"time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"} < {*source._keep_in_fp32_modules}
    result = copy.deepcopy(source)
    for name, parameter in result.named_parameters():
        if not re.search(r"(^|\.)(time_embedder|scale_shift_table|norm[123])($|\.)", name):
            parameter.data = parameter.data.to(dtype)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_diffusers(dtype: torch.dtype, folder: Path) -> None:
    expected = as_diffusers_loads(small_transformer(3, layers=4), dtype)
    model = load(folder, dtype=dtype, config=None)
    for name, tensor in expected.state_dict().items():
        assert model.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(model.state_dict()[name], tensor), name
    kinds = {tensor.dtype for tensor in model.state_dict().values()}
    assert kinds == {dtype, torch.float32}


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
