"""Blocks in 8 bits: close to the float model, a quarter of its memory, tensor by tensor, or refused with the reason."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.transformer import quantization
from streamdiff.models.transformer.weights import load_transformer, open_transformer
from streamdiff.pipeline.planner.memory import Storage
from streamdiff.pipeline.planner.model_sizes import ModelSizes, sizes_from
from tests.models.layouts import flow
from tests.small import CPU, small_model, small_transformer

HEADS, HEAD_DIM = 4, 16
LINEAR = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "ffn.net.0.proj", "ffn.net.2")
BLOCK = (*LINEAR, *(name.replace("attn1", "attn2") for name in LINEAR[:4]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformer")
    small_transformer(3, layers=3, heads=HEADS, head_dim=HEAD_DIM).save_pretrained(folder)
    return folder


def load(folder: Path, mode: str, dtype: torch.dtype = torch.float32, **more: object) -> WanTransformer3DModel:
    return load_transformer(open_transformer(folder), device=CPU, dtype=dtype, quantize=mode, **more)  # type: ignore[arg-type]


def stored(tensor: Tensor) -> int:
    """Bytes that a tensor really has; a quantised one is made of several."""
    if type(tensor.data) is Tensor:
        return tensor.nbytes
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return sum(part.nbytes for part in parts if part is not None)


def sizes_of(model: WanTransformer3DModel) -> ModelSizes:
    return sizes_from(dict(model.config), small_model().spec)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_near_the_float_model(folder: Path, dtype: torch.dtype) -> None:
    plain, small = flow(load(folder, "none", dtype)).float(), flow(load(folder, "int8", dtype)).float()
    error = float((small - plain).norm() / plain.norm())
    assert 1e-4 < error < 2e-2, "rounded, and no more than that"


def test_the_matrices_of_the_blocks_and_nothing_else(folder: Path) -> None:
    plain, small = load(folder, "none").state_dict(), load(folder, "int8").state_dict()
    changed = {name for name, tensor in small.items() if type(tensor) is not Tensor}
    assert changed == {f"blocks.{i}.{part}.weight" for i in range(3) for part in BLOCK}
    for name in set(small) - changed:
        assert torch.equal(small[name], plain[name]), name


def test_the_memory_is_what_is_planned_with(folder: Path) -> None:
    """A quarter of float32 and half of bfloat16, and a scale and a zero per row."""
    for dtype, part in ((torch.float32, 4), (torch.bfloat16, 2)):
        plain, small = load(folder, "none", dtype), load(folder, "int8", dtype)
        found = sizes_of(plain)
        sizes = [
            sum(
                stored(tensor)
                for name, tensor in model.named_parameters()
                if quantization.is_quantized(name, tensor.shape)
            )
            for model in (plain, small)
        ]
        scales = 5 * found.linear_rows * found.blocks
        assert sizes[0] == part * (sizes[1] - scales) == dtype.itemsize * found.linear_values * found.blocks
        whole, eight = (Storage(dtype.itemsize, mode).block_bytes(found) * found.blocks for mode in ("none", "int8"))
        assert whole - eight == sizes[0] - sizes[1]


@pytest.mark.parametrize("blocks", [(0, 3), (1, 2)])
def test_a_rank_quantises_its_own_blocks_one_weight_at_a_time(
    folder: Path, blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a weight is in 8 bits, the float one is gone: there is never a second copy of the model."""
    seen: list[weakref.ref[Tensor]] = []
    names: list[str] = []
    plain = quantization.quantize

    def watched(weight: Tensor, mode: str, name: str) -> Tensor:
        assert not [each for each in seen if each() is not None]
        seen.append(weakref.ref(weight))
        names.append(name)
        return plain(weight, mode, name)

    monkeypatch.setattr(quantization, "quantize", watched)
    load(folder, "int8", torch.bfloat16, blocks=blocks)
    assert set(names) == {f"blocks.{i}.{part}.weight" for i in range(*blocks) for part in BLOCK}


@torch.inference_mode()
def test_fp8_by_rows_is_near_the_bfloat16_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's own weights and products, which a CPU can compute too, slowly; nothing but the two checks for a GPU,
    ours and theirs, are out of the way."""
    plain = flow(load(folder, "none", torch.bfloat16)).float()
    monkeypatch.setattr(quantization, "_no_fp8", lambda device: None)
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda granularity: None)
    model = load(folder, "fp8", torch.bfloat16)
    weights = {name: weight for name, weight in model.state_dict().items() if type(weight) is not Tensor}
    assert set(weights) == {f"blocks.{i}.{part}.weight" for i in range(3) for part in BLOCK}
    for weight in weights.values():
        assert weight.qdata.dtype == torch.float8_e4m3fn and weight.scale.shape == (len(weight), 1)
    error = float((flow(model).float() - plain).norm() / plain.norm())
    assert 1e-3 < error < 0.1, "rounded, and no more than that"


def test_fp8_is_refused_on_an_older_gpu_and_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError):
        quantization.check("fp8", gpu, torch.bfloat16)
    quantization.check("int8", gpu, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError):
        quantization.check("fp8", gpu, torch.float32)
    quantization.check("fp8", gpu, torch.bfloat16)


def test_without_torchao_the_message_says_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError):
        load(folder, "int8")
    load(folder, "none")


SMALL = {(64, 64): 6, (128, 64): 1, (64, 128): 1}


def tried(monkeypatch: pytest.MonkeyPatch, own_s: float, fp8_s: float) -> tuple[str, str]:
    """A trial on a CPU, which computes both ways, with times by the kind of weight."""
    monkeypatch.setattr(quantization, "unsuited", lambda mode, device, dtype: None)
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda granularity: None)
    shapes: list[tuple[bool, tuple[int, ...]]] = []

    def stopwatch(call: Any) -> float:
        given, weight = call.args
        fp8 = type(weight) is not Tensor  # torchao's
        assert call().shape == (10, weight.shape[0]) and given.shape == (10, weight.shape[1])
        shapes.append((fp8, tuple(weight.shape)))
        return fp8_s if fp8 else own_s

    found = quantization.try_fp8(SMALL, 10, CPU, torch.bfloat16, None, stopwatch)
    assert shapes == [(fp8, shape) for fp8 in (False, True) for shape in SMALL], "every matrix, both ways"
    return found


@pytest.mark.parametrize(("own_s", "fp8_s", "mode"), [(0.002, 0.001, "fp8"), (0.001, 0.001, "none"), (1, 0.98, "none")])
def test_fp8_is_taken_only_where_a_block_is_faster_in_it(
    monkeypatch: pytest.MonkeyPatch, own_s: float, fp8_s: float, mode: str
) -> None:
    found, told = tried(monkeypatch, own_s, fp8_s)
    assert found == mode
    assert told == f"tried at a block's sizes and 10 tokens: fp8 {8000 * fp8_s:.3g} ms, without {8000 * own_s:.3g} ms"


def test_where_fp8_cannot_be_had_automatic_quantisation_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found, told = quantization.try_fp8(SMALL, 10, CPU, torch.bfloat16)
    assert found == "none" and told.startswith("fp8 takes an NVIDIA GPU of compute capability 8.9")
    monkeypatch.setattr(quantization, "unsuited", lambda mode, device, dtype: None)

    def refuses(weight: Tensor, mode: str, name: str) -> Tensor:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(quantization, "quantize", refuses)
    found, told = quantization.try_fp8(SMALL, 10, CPU, torch.bfloat16, None, lambda call: 1.0)
    assert (found, told) == ("none", "fp8 cannot be had here: no kernel")
