"""A rank reads its own blocks and what goes with them, from any layout and by any names, and says what is wrong with a
file: by name, with counts and what was expected."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import psutil
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import save_file

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint import open_checkpoint
from streamdiff.models.loader import ModelLoader
from streamdiff.models.transformer.tensor_names import (
    NameLayout,
    TensorLocation,
    block_count,
    recognise,
    translate,
)
from streamdiff.models.transformer.weights import load_transformer, open_transformer, read_architecture
from tests.models.layouts import (
    HEADS,
    SIZES,
    Counting,
    State,
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


LAYERS = 4


def faulty(tmp_path: Path, changes: State, without: str = "nothing") -> Path:
    """An original file of four blocks with some tensors replaced, added, or left out."""
    state = {name: t for name, t in original(small_state(LAYERS)).items() if without not in name}
    return save(tmp_path / "model.safetensors", state | changes)


def told(path: Path, **options: object) -> str:
    """What is said of a file that is not loaded."""
    with pytest.raises(ConfigError) as caught:
        load(path, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


QUERY = "blocks.2.self_attn.q.weight"
FAULTS: dict[str, tuple[State, str, str]] = {
    "one missing": ({}, QUERY, f"1 missing ({QUERY})"),
    "a block missing": ({}, "blocks.2.", "27 missing (blocks.2.modulation"),
    "unexpected": ({"blocks.2.self_attn.q.scale": torch.ones(1)}, "nothing", "blocks.2.self_attn.q.scale"),
    "of an image model": ({"img_emb.proj.0.weight": torch.ones(8)}, "nothing", "img_emb.proj.0.weight"),
    "misshapen": ({QUERY: torch.zeros(24, 31)}, "nothing", f"{QUERY} [24, 31] instead of [24, 24]"),
    "integers": ({QUERY: torch.zeros(24, 24, dtype=torch.int8)}, "nothing", f"1 not floating point ({QUERY} is int8)"),
    "infinite": ({QUERY: torch.full((24, 24), torch.inf)}, "nothing", QUERY),
    "not a number": ({QUERY: torch.full((24, 24), torch.nan)}, "nothing", QUERY),
    "twice": ({f"net.{QUERY}": torch.zeros(24, 24)}, "nothing", "are both blocks.2.attn1.to_q.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_does_not_fit_is_named(fault: str, tmp_path: Path) -> None:
    changes, without, expected = FAULTS[fault]
    path = faulty(tmp_path, changes, without)
    config = HEADS | {"image_dim": None}
    assert expected in told(path, config=config) and expected in told(path, config=config, blocks=(2, 4))
    if fault in ("one missing", "a block missing", "misshapen", "integers", "infinite", "not a number"):
        load(path, config=config | {"num_layers": LAYERS}, blocks=(0, 2))  # not this rank's business


def test_many_faults_are_counted_and_told_at_once(tmp_path: Path) -> None:
    strange = {"strange": torch.zeros(1), "head.head.bias": torch.zeros(1)}
    found = told(faulty(tmp_path, strange, without="norm_k"))
    assert "8 missing (blocks.0.self_attn.norm_k.weight, " in found
    assert "1 unexpected (" in found and "1 of another shape (" in found
    assert "123 tensors in original Wan names of a Wan transformer of 4 blocks, 24 wide, feed-forward 32" in found
    assert found.count("norm_k") == 3 and "Nothing was loaded" in found


def test_more_blocks_than_the_configuration_has_are_unexpected(tmp_path: Path) -> None:
    assert "27 unexpected" in told(faulty(tmp_path, {}), config=HEADS | {"num_layers": 3})


def test_a_fused_projection_of_a_wrong_height(tmp_path: Path) -> None:
    state = fused(small_state()) | {"blocks.1.self_attn.to_qkv.weight": torch.zeros(70, 24)}
    assert "[70, 24] instead of [72, 24]" in told(save(tmp_path / "model.safetensors", state))


def test_values_that_are_too_large_for_the_dtype(tmp_path: Path) -> None:
    path = faulty(tmp_path, {"blocks.2.self_attn.k.bias": torch.full((24,), 1e5)})
    load(path)
    assert "not finite in float16" in told(path, dtype=torch.float16)


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "vae.safetensors", {"encoder.conv1.weight": torch.zeros(1), "conv1.bias": torch.zeros(1)})
    assert "not a Wan transformer" in told(path)


@pytest.mark.parametrize("blocks", [(0, 5), (2, 2), (-1, 2)])
def test_blocks_that_are_not_there(blocks: tuple[int, int], tmp_path: Path) -> None:
    assert "there are 4" in told(faulty(tmp_path, {}), blocks=blocks)


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
