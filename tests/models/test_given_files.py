"""Files that people have, given by hand: none gives a picture of another model without a word, each that cannot be used
is named for what it is, and 8-bit weights with scales are the weights that they stand for. Whose weights a file holds
is told by its name."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamdiff.api import model_config
from streamdiff.cli import main, parser
from streamdiff.config import ModelConfig
from streamdiff.config_file import load as load_config
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue, checkpoint, resolve, weight_files
from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.taehv import TAEHV, TaehvConfig
from streamdiff.models.checkpoint import open_checkpoint, read_tensors
from streamdiff.models.loader import PARTS, ModelLoader
from streamdiff.models.resolve import resolve_model
from streamdiff.models.spec import Lora
from streamdiff.models.text_encoder import find_text_files
from tests.hub_cache import lay
from tests.models.layouts import State, assert_same, load, original, prefixed, save, small_state, write_shards
from tests.models.text_encoder import umt5
from tests.small import CPU, LATENT_CHANNELS
from tests.small_vae import original_layout, small_wan_autoencoder
from training.embedded import WEIGHTS

SIZES = {"num_attention_heads": 1, "attention_head_dim": 128, "in_channels": 16, "out_channels": 16}
SIZES |= {"text_dim": umt5.WIDTH, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2}


def small(**sizes: int) -> State:
    """A narrow transformer in original names."""
    torch.manual_seed(4)
    return original(WanTransformer3DModel(**SIZES | sizes, cross_attn_norm=True).state_dict())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("plain") / "plain.safetensors", small())


def refused(path: Path, *words: str, name: str = "self-forcing") -> str:
    """What is said of `--weights path`, before anything is loaded, and the same by doctor."""
    with pytest.raises(ConfigError) as caught:
        ModelLoader(ModelConfig(name=name, weights=str(path)), CPU).check_files("weights")
    assert all(word in str(caught.value) for word in words), caught.value
    return str(caught.value)


# ---- another model's ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "name", "words"),
    [
        ({"num_layers": 40}, "self-forcing", ("40 blocks", "self-forcing is", "30 blocks")),
        ({"in_channels": 48, "out_channels": 48}, "self-forcing", ("48 channels", "16 channels")),
        ({"in_channels": 36}, "reward-forcing-1.3b", ("36 channels in, 16 out",)),
        ({"num_attention_heads": 12, "num_layers": 1}, "self-forcing", ("1 blocks, 1536 wide",)),
        ({"num_attention_heads": 12, "num_layers": 1}, "krea-realtime-14b", ("1536 wide", "5120 wide")),
    ],
)
def test_sizes_are_those_of_the_name(sizes: dict[str, int], name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    refused(save(tmp_path / "mine.safetensors", small(**sizes)), *words, name=name)


def test_two_experts_are_refused_however_they_are_given(plain: Path, tmp_path: Path) -> None:
    indexed, foldered = tmp_path / "indexed", tmp_path / "foldered"
    for folder in (indexed, foldered):
        (folder / "transformer").mkdir(parents=True)
        shutil.copy(plain, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    (indexed / "model_index.json").write_text('{"transformer_2": ["diffusers", "X"], "boundary_ratio": 0.875}')
    (foldered / "transformer_2").mkdir()
    high = shutil.copy(plain, tmp_path / "wan2.2_t2v_HIGH_noise_14B.safetensors")
    for path in (indexed, foldered, indexed / "transformer", foldered / "transformer", Path(high)):
        with pytest.raises(ConfigError, match="two experts"):
            resolve_model(ModelConfig(name="self-forcing", weights=str(path)))
    for name in (str(indexed), str(foldered), str(high)):
        with pytest.raises(ConfigError, match="two experts"):
            resolve_model(ModelConfig(name=name))
    (indexed / "model_index.json").write_text('{"transformer_2": [null, null], "boundary_ratio": null}')
    weight_files.check_one_expert(indexed)  # as Wan2.2-TI2V-5B says


def test_an_autoencoder_is_for_the_models_latents(plain: Path, tmp_path: Path) -> None:
    wide = tmp_path / "vae.safetensors"
    save_file(TAEHV(TaehvConfig(latent_channels=16, patch_size=2)).state_dict(), wide)
    loader = ModelLoader(
        ModelConfig(name="self-forcing", weights=str(plain), vae=str(wide), latent_space="normalised"), CPU
    )
    loader.check_files("weights")
    with pytest.raises(ConfigError, match="16 x 16"):
        loader.check_files("vae")


@pytest.mark.parametrize("name", ["taehv", "taecvx", "lighttaehy1_5", "taew2_1_hunyuan"])
def test_only_published_names_say_what_a_small_decoder_takes(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"{name}.safetensors", TAEHV(TaehvConfig()).state_dict())
    with pytest.raises(ConfigError, match="--latent-space"):
        load_autoencoder(path, "decoder", CPU)


def test_matrices_of_zeros_are_an_unfinished_download(plain: Path, tmp_path: Path) -> None:
    state = {name: torch.zeros_like(t) if "blocks.1." in name else t for name, t in load_file(plain).items()}
    with pytest.raises(ConfigError, match="10 matrices are all zero"):
        load(save(tmp_path / "half.safetensors", state))
    query = "blocks.1.self_attn.q"
    one = load_file(plain) | {f"{query}.weight": torch.zeros(128, 128)}
    lora = save(tmp_path / "lora.safetensors", {f"{query}.diff": torch.ones(128, 128)})
    with pytest.raises(ConfigError, match="1 matrices are all zero"):
        load(save(tmp_path / "one.safetensors", one), loras=[Lora(lora)])  # whatever is added to them
    vae = original_layout(small_wan_autoencoder())
    vae["decoder.conv1.weight"] = torch.zeros_like(vae["decoder.conv1.weight"])
    with pytest.raises(ConfigError, match="1 matrices are all zero"):
        load_autoencoder(save(tmp_path / "vae.safetensors", vae), "decoder", CPU)


# ---- LoRAs ----------------------------------------------------------------------------------------------------------


def test_options_count_once_or_are_refused(tmp_path: Path) -> None:
    typed = main._config(main.parser.parse(["serve", "--lora", "a", "--lora", "b:0.5"])).model
    assert typed.lora == ("a", "b:0.5") and ModelConfig(lora="a").lora == ("a",)
    for text, expected in (("[a, b:0.5]", ("a", "b:0.5")), ("a", ("a",)), ("", ())):
        (tmp_path / "c.yaml").write_text(f"model:\n  lora: {text}\n")
        assert load_config(tmp_path / "c.yaml").model.lora == expected
    for twice in ("--seed 1 --seed 1", "--size 64x32 --size 64x32", "--no-decode --no-decode", "--config a --config b"):
        with pytest.raises(ConfigError, match="given twice"):
            main.parser.parse(["generate", *twice.split()])
    with pytest.raises(ConfigError, match="given twice"):
        main.parser.parse(["serve", "--fast", "--fast"])


def test_a_models_own_lora_stays(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, style = tmp_path / "own.pt", tmp_path / "style.safetensors"
    torch.save({"generator_lora": {}}, own)
    style.write_bytes(b"style")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    given = {"name": "longlive-1.3b", "weights": str(plain)}
    with pytest.raises(ConfigError, match="--lora none --lora PATH"):
        resolve_model(ModelConfig(**given, lora=str(style)))
    lay(tmp_path, "Efficient-Large-Model/LongLive-1.3B", {"models/lora.pt": own})

    def used(*lora: str) -> list[tuple[str, float]]:
        return [(each.path.name, each.scale) for each in resolve_model(ModelConfig(**given, lora=lora)).loras]

    assert used() == [("lora.pt", 1.0)]
    assert used(f"{style}:0.5") == [("lora.pt", 1.0), ("style.safetensors", 0.5)]
    assert used("none", str(style)) == [("style.safetensors", 1.0)] and used("none") == []
    with pytest.raises(ConfigError, match="own LoRA"):
        used(str(shutil.copy(own, tmp_path / "copy.pt")))
    needed = [files.files for files in resolve.to_fetch(ModelConfig(**given, lora=(str(style),)))]
    assert ("models/lora.pt",) in needed


# ---- what a file is -------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "cut off": ("a.safetensors", lambda data: data[: len(data) // 2], "cut off: download it again"),
    "cut in the header": ("a.safetensors", lambda data: data[:300], "download it again"),
    "cut off, torch": ("a.pt", lambda data: b"PK\x03\x04" + data[:3000], "cut off"),
    "LFS": ("a.pt", lambda _: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "a web page": ("a.safetensors", lambda _: b"\n<!DOCTYPE html><html>", "web page"),
    "an answer": ("a.safetensors", lambda _: b"Entry not found", "'Entry not found'"),
    "GGUF by another name": ("a.safetensors", lambda _: b"GGUF\3\0\0\0" + bytes(64), "in .gguf"),
    "empty": ("a.pt", lambda _: b"", "empty"),
    "preallocated": ("a.pt", lambda _: bytes(9000), "only its place was kept"),
    "another ending": ("a.sft", lambda data: data, "rename it"),
    "a blob": ("3f2a", lambda data: data, "rename it"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_true_reason_comes_first(kind: str, plain: Path, tmp_path: Path) -> None:
    name, change, words = KINDS[kind]
    path = tmp_path / name
    path.write_bytes(change(plain.read_bytes()))
    refused(path, words)
    with pytest.raises(ConfigError) as caught:
        resolve.entry_of(path)
    assert words in str(caught.value) and "--model" not in str(caught.value)


def test_parts_of_something_are_named_with_the_remedy(plain: Path, tmp_path: Path) -> None:
    state, shards = load_file(plain), tmp_path / "shards"
    names = sorted(state)
    shards.mkdir()
    write_shards(shards, state, [names[:9], names[9:]])
    index = shards / "diffusion_pytorch_model.safetensors.index.json"
    one = shards / "diffusion_pytorch_model-00001-of-00002.safetensors"
    refused(one, "one of 2 shards", str(index))
    index.unlink()
    refused(one, "index is missing")
    refused(shards, "index is missing")
    (dcp := tmp_path / "dcp").mkdir()
    (dcp / "__0_0.distcp").write_bytes(b"x")
    refused(dcp, "dcp_to_torch")
    lora = {"blocks.0.self_attn.q.lora_A.weight": torch.ones(2, 2)}
    vae = original_layout(small_wan_autoencoder())
    for held, option in ((lora, "--lora"), (vae, "--vae"), ({"shared.weight": torch.ones(2, 2)}, "--text-encoder")):
        path = save(tmp_path / "x.safetensors", held)
        refused(path, option)
        with pytest.raises(ConfigError, match=option):
            resolve.entry_of(path)
    with pytest.raises(ConfigError, match="--weights"):
        load_autoencoder(plain, "decoder", CPU)
    umt5.write(tmp_path / "text")
    with pytest.raises(ConfigError, match=f"give the folder .*: {tmp_path / 'text'}$"):
        find_text_files(tmp_path / "text" / "text_encoder")
    for path, words in ((dcp, "has no text encoder"), (plain, "--weights"), (tmp_path / "none.pth", "no such file")):
        with pytest.raises(ConfigError, match=words):
            find_text_files(path)


def test_doctor_says_what_serve_would(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_wan_autoencoder(num_res_blocks=1).save_pretrained(tmp_path / "vae")
    umt5.write(tmp_path / "text")
    asked = ["doctor", "--port", "0", "--device", "cpu", "--model", "self-forcing", "--vae", str(tmp_path / "vae")]
    assert main.main([*asked, "--weights", str(plain), "--text-encoder", str(tmp_path / "text")]) == 0
    for model, words in (("matrix-game-2", "will be fetched"), ("longlive-1.3b", "none.safetensors: no such file")):
        main.main([*asked[:6], model, *(("--lora", "none.safetensors") if model == "longlive-1.3b" else ())])
        out = capsys.readouterr().out
        assert words in out and "random:" not in out, "nothing is on disk"
    (cut := tmp_path / "cut.safetensors").write_bytes(plain.read_bytes()[:-9])
    other = save(tmp_path / "other.safetensors", small(text_dim=64))
    for weights, text, words in (
        (cut, "text", "cut off"),
        (plain, "vae", "no text encoder"),
        (other, "text", "d_model is 32"),
    ):
        capsys.readouterr()
        assert main.main([*asked, "--weights", str(weights), "--text-encoder", str(tmp_path / text)]) == main.FAILED
        out = capsys.readouterr().out
        assert words in out and "Missing: model." in out


# ---- containers and formats -----------------------------------------------------------------------------------------


def test_the_only_known_container_with_a_transformer_is_taken(plain: Path, tmp_path: Path) -> None:
    state = load_file(plain)
    torch.save({"generator": prefixed(state, "model."), "critic": state, "step": 1}, tmp_path / "a.pt")
    everything = prefixed(state, "model.diffusion_model.") | prefixed(original_layout(small_wan_autoencoder()), "vae.")
    save(tmp_path / "a.safetensors", everything)
    for name, taken in (("a.pt", "generator"), ("a.safetensors", "model")):
        assert open_checkpoint(tmp_path / name, usual="generator_ema").container == taken
        with pytest.raises(ConfigError, match="--container"):
            open_checkpoint(tmp_path / name, "generator_ema")
    torch.save({"generator": state, "model": state}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match="--container"):
        open_checkpoint(tmp_path / "a.pt", usual="generator_ema")
    config = ModelConfig(name="self-forcing", weights=str(tmp_path / "a.pt"), container="model")
    ModelLoader(config, CPU).check_files(*PARTS[:1])
    assert read_tensors(tmp_path / "a.safetensors").keys() == original_layout(small_wan_autoencoder()).keys()


def scaled(state: State, dtype: torch.dtype, name: str, rows: bool) -> tuple[State, State]:
    """The blocks' matrices in 8 bits with their scales; and what they stand for."""
    stored, meant = dict(state), dict(state)
    for key in [key for key in state if "blocks." in key and key.endswith(".weight") and state[key].ndim == 2]:
        scale = state[key].abs().amax(1, keepdim=True) if rows else state[key].abs().max()
        low = state[key] / scale * 100
        stored[key] = (low.round() if dtype == torch.int8 else low).to(dtype)
        meant[key] = stored[key].float() * (scale / 100)
        stored[key.removesuffix("weight") + name] = scale / 100
    return stored, meant


FP8 = torch.float8_e4m3fn
SCALED: list[tuple[torch.dtype, str, bool, State]] = [
    (FP8, "scale_weight", False, {"scaled_fp8": torch.empty(2, dtype=FP8)}),
    (FP8, "scale_weight", True, {"scaled_fp8": torch.empty(0, dtype=FP8), "blocks.0.ffn.0.scale_input": torch.ones(1)}),
    (torch.float8_e5m2, "weight_scale", False, {}),
    (torch.int8, "weight_scale", True, {"blocks.0.ffn.0.input_scale": torch.ones(1)}),
]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("case", range(len(SCALED)))
def test_scaled_weights_are_those_that_they_stand_for(case: int, prefix: str, tmp_path: Path) -> None:
    dtype, name, rows, marks = SCALED[case]
    stored, meant = scaled(original(small_state()), dtype, name, rows)
    path = save(tmp_path / "scaled.safetensors", prefixed(stored | marks, prefix))
    assert_same(load(path), load(save(tmp_path / "meant.safetensors", meant)))


def said(**format_: object) -> Tensor:
    return torch.tensor(list(json.dumps(format_).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"blocks.0.ffn.0.weight_scale_2": torch.ones(())}, "NVFP4"),
        ({"blocks.0.ffn.0.comfy_quant": said(format="convrot_w4a8")}, "convrot_w4a8"),
        ({"blocks.0.ffn.0.weight_s_rel": torch.ones(3)}, "W4A8"),
        ({"blocks.0.ffn.0.comfy_quant": said(format="int8_tensorwise", convrot=True)}, "convrot"),
        ({"blocks.0.ffn.0.comfy_quant": torch.ones(3, dtype=torch.uint8)}, "comfy_quant"),
        ({"blocks.0.ffn.0.weight.absmax": torch.ones(3)}, "bitsandbytes"),
        ({"scaled_fp8": torch.ones(1)}, "scales"),
        ({"blocks.9.ffn.0.scale_weight": torch.ones(1)}, "scales"),
    ],
)
def test_other_ways_to_quantise_are_refused_by_name(extra: State, words: str, plain: Path, tmp_path: Path) -> None:
    refused(save(tmp_path / "a.safetensors", load_file(plain) | extra), words)


def test_scales_of_blocks_are_refused(plain: Path, tmp_path: Path) -> None:
    state = load_file(plain) | {"blocks.0.ffn.0.weight_scale": torch.ones(2, 2)}
    refused(save(tmp_path / "a.safetensors", state), "scales [2, 2]")
    header = {"_quantization_metadata": json.dumps({"layers": {"blocks.0.ffn.0": {"format": "mxfp8"}}})}
    save_file(load_file(plain), tmp_path / "a.safetensors", header)
    refused(tmp_path / "a.safetensors", "mxfp8")


def write_gguf(path: Path, state: State, patches: str = "whole", prefix: str = "") -> State:
    """`state` as ComfyUI-GGUF writes it, in three quant types; returns what it stands for, dequantised here."""
    gguf, meant = pytest.importorskip("gguf"), dict(state)
    kinds = gguf.GGMLQuantizationType
    writer, generator = gguf.GGUFWriter(str(path), "wan"), np.random.default_rng(3)
    for name, tensor in state.items():
        values, kind = tensor.numpy(), kinds.F32
        if name == "patch_embedding.weight":
            values = values.reshape(-1, *values.shape[2:]) if patches == "folded" else values
            if patches == "left out":
                continue
        elif name.endswith("ffn.0.weight"):  # 66 bytes a block, no multiple of which a row is: stored in rows of 256
            writer.add_array(f"comfy.gguf.orig_shape.{prefix}{name}", list(tensor.shape))
            values, kind = generator.integers(0, 60, (tensor.numel() // 256, 66), np.uint8), kinds.IQ2_XXS
            meant[name] = torch.from_numpy(gguf.dequantize(values, kind)).reshape(tensor.shape)
        elif name.endswith("self_attn.q.weight"):
            scales = (tensor.abs().unflatten(1, (-1, 32)).amax(2, keepdim=True) / 127).half()
            low = (tensor.unflatten(1, (-1, 32)) / scales).round().clamp(-127, 127).to(torch.int8)
            meant[name] = (low * scales.float()).flatten(1)
            both = torch.cat([scales.view(torch.uint8), low.view(torch.uint8)], 2)
            values, kind = both.flatten(1).numpy(), kinds.Q8_0
        elif tensor.ndim == 2 and "modulation" not in name:
            values, kind = tensor.half().numpy(), kinds.F16
            meant[name] = tensor.half().float()
        writer.add_tensor(prefix + name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


@pytest.mark.parametrize(("patches", "prefix"), [("whole", ""), ("folded", "model.diffusion_model.")])
def test_gguf_is_the_weights_that_it_stands_for(patches: str, prefix: str, tmp_path: Path) -> None:
    state = small(in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS)
    meant = write_gguf(tmp_path / "a.gguf", state, patches, prefix)
    assert_same(load(tmp_path / "a.gguf"), load(save(tmp_path / "meant.safetensors", meant)))


def test_gguf_that_cannot_be_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, small())
    ModelLoader(ModelConfig(name="self-forcing", weights=str(path)), CPU).check_files("weights")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(path, "cut off", "download it again")
    write_gguf(path, small(), "left out")
    refused(path, "fix_5d_tensors.py")
    write_gguf(path, {"token_embd.weight": torch.ones(4, 4)})
    refused(path, "--text-encoder")
    with pytest.raises(ConfigError, match="fp8 with scales"):
        find_text_files(path)
    monkeypatch.setattr(checkpoint, "gguf_kinds", lambda: ["Q8_0"])
    refused(path, "quantised as F16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, "pip install 'streamdiff[gguf]'")


@pytest.mark.parametrize("prefix", ["model.", "first_stage_model.", "vae."])
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_an_autoencoder_may_have_a_prefix_and_8_bits(prefix: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: tensor.to(dtype) for name, tensor in original_layout(small_wan_autoencoder()).items()}
    one, other = (save(tmp_path / f"a{n}.safetensors", prefixed(state, n)) for n in (prefix, ""))
    made = [load_autoencoder(path, "decoder", CPU).autoencoder.state_dict() for path in (one, other)]  # type: ignore[attr-defined]
    names = [name for name in made[0] if name.startswith("decoder.")]
    assert names and all(torch.equal(made[0][name], made[1][name]) for name in names)


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"never read")
    return path


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("self_forcing_dmd.pt", "self-forcing"),
        ("self_forcing_sid.pt", "self-forcing"),
        ("chunkwise/causal_forcing.pt", "causal-forcing-chunkwise"),
        ("framewise/causal_forcing.pt", "causal-forcing-framewise"),
        ("wan_causal_dmd_v2v/model.pt", "streamdiffusionv2-1.3b"),
        ("krea-realtime-video-14b.safetensors", "krea-realtime-14b"),
        ("self_forcing_dmd.safetensors", "self-forcing"),  # somebody wrote it anew
        ("longlive_base.pt", "longlive-1.3b"),
    ],
)
def test_a_published_file_is_known(tmp_path: Path, file: str, name: str) -> None:
    assert resolve.entry_of(write(tmp_path / file)).name == name
    assert resolve.entry_of((tmp_path / file).parent).name == name, "the only file of a folder"


def test_the_embedded_models_own_folder_is_known() -> None:
    assert resolve.entry_of(WEIGHTS).name == "tiny"


@pytest.mark.parametrize("file", ["causal_forcing.pt", "model.pt", "mine.safetensors", "a.gguf"])
def test_a_file_that_could_be_several_is_asked_about(tmp_path: Path, file: str) -> None:
    with pytest.raises(ConfigError):
        resolve.entry_of(write(tmp_path / file))
    (folder := tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError):
        resolve.entry_of(folder)


@pytest.mark.parametrize(
    ("acting", "keyboard", "blocks", "names"),
    [
        (15, 4, 30, ["matrix-game-2"]),
        (15, 2, 30, ["matrix-game-2-gta"]),
        (15, 7, 30, ["matrix-game-2-templerun"]),
        (30, 4, 30, []),  # the undistilled one, which cannot stream
        (0, None, 30, ["lingbot-world-v2-1.3b"]),
        (0, None, 40, ["lingbot-world-fast", "lingbot-world-v2-14b"]),
    ],
)
def test_a_world_is_known_by_its_tensors(
    tmp_path: Path, acting: int, keyboard: int | None, blocks: int, names: list[str]
) -> None:
    """Shards have an index, which says no shapes."""
    found = {f"model.blocks.{n}.self_attn.q.weight": torch.ones(2, 2) for n in range(blocks)}
    keys = (f"model.blocks.{n}.action_model.keyboard_embed.0.weight" for n in range(acting))
    found |= {name: torch.ones(3, keyboard or 1) for name in keys}
    found |= {} if keyboard else {"patch_embedding_wancamctrl.weight": torch.ones(2, 2)}
    index = tmp_path / "mine.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(found, "a.safetensors")}))
    for path in [save(tmp_path / "mine.safetensors", found), *([] if keyboard else [index])]:
        if len(names) == 1:
            assert resolve.entry_of(path).name == names[0]
            continue
        with pytest.raises(ConfigError) as caught:
            resolve.entry_of(path)
        listed = [each.name for each in catalogue.listed() if each.name in str(caught.value)]
        assert listed == names or (not names and len(listed) > 5)


def test_weights_alone_mean_their_own_model(tmp_path: Path) -> None:
    """Not the embedded one with foreign weights: also its rate, and the KV context that it was made for."""
    path = str(write(tmp_path / "wan_causal_dmd_v2v" / "model.pt"))
    config = main._at_native_rate(main._config(parser.parse(["serve", "--weights", path])))
    assert (config.model.name, config.model.kv_context) == ("streamdiffusionv2-1.3b", "same_step")
    assert (config.playback.fps, config.serve.upscale) == (16.0, 1)
    assert model_config({"weights": path}).name == "streamdiffusionv2-1.3b"
    (tmp_path / "c.yaml").write_text(f"model: {{weights: {path}}}")
    read = main._config(parser.parse(["serve", "--config", str(tmp_path / "c.yaml")]))
    assert read.model.name == "streamdiffusionv2-1.3b"
    named = main._config(parser.parse(["serve", "--weights", path, "--model", "self-forcing"]))
    assert named.model.name == "self-forcing"
    with pytest.raises(ConfigError, match="no such file"):
        resolve.completed(ModelConfig(weights=str(tmp_path / "nowhere.pt")))


def test_a_base_is_known_by_its_folder_and_offered_to_nobody(plain: Path, tmp_path: Path) -> None:
    name = "diffusion_pytorch_model.safetensors"
    for folder in ("Wan2.1-T2V-1.3B", "Wan2.1-T2V-1.3B-Diffusers/transformer", "models--Wan-AI--Wan2.1-T2V-1.3B/x/y"):
        assert resolve.entry_of(write(tmp_path / folder / name)).name == "wan2.1-t2v-1.3b"
    for file in (f"fine_tune/{name}", "wan2.1_t2v_1.3B_bf16.safetensors", "Wan2.2-TI2V-5B-Q8_0.gguf"):
        path = write(tmp_path / file)
        path.write_bytes(b"GGUF\3" if path.suffix == ".gguf" else plain.read_bytes())
        with pytest.raises(ConfigError, match=r"Wan's own base.* bidirectional.*--model NAME: .*self-forcing"):
            resolve.entry_of(path)
