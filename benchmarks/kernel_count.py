"""Operations and bytes of a transformer block, counted without a device.

A micro-step of a full window runs on tensors that have shapes and a device but no memory, at Wan 1.3B's true sizes, so
torch takes the operations that it takes on CUDA. Counted per block (a model of two blocks less one of one):

    operations   that start a kernel: views and allocations do not
    activations  bytes that element-wise operations read and write (all but matrix products and attention), in units
                 of one activation: a chunk's hidden states in bfloat16
    copied       bytes of the KV cache that anything but attention reads; not the sink's own keys, of which a rotated
                 copy is made where it moves: with each chunk, of each cache

Beside ours stands diffusers' own `WanTransformer3DModel` for a clip of one chunk, which has no cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from benchmarks import report
from benchmarks.operation_counter import Count, Counter
from streamdiff.core import MicroStep
from streamdiff.models import catalogue
from streamdiff.models.model import StageModel
from streamdiff.models.spec import ActionModules, ModelSpec
from streamdiff.models.transformer.actions import attach
from streamdiff.models.transformer.wan import Fused, WanDenoiser
from streamdiff.models.transformer.weights import kept_dtype
from streamdiff.pipeline.planner.model_sizes import entry_sizes
from streamdiff.pipeline.runner.model_runner import ModelRunner

WAN_1_3B: dict[str, Any] = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "text_dim": 4096,
    "freq_dim": 256,
    "cross_attn_norm": True,
}
MODELS = {"self-forcing": {"window": 21, "sink": 0}, "longlive-1.3b": {"window": 12, "sink": 3}}
CONTEXTS = ("clean", "staircase", "same_step")
CUDA, DTYPE = torch.device("cuda", 0), torch.bfloat16
STEPS, TEXT_TOKENS = 4, 512
_LATE = 20
"""Chunks after which every window has long been full."""


class WithoutDevice(TorchFunctionMode):
    """Lets tensors that are said to be on CUDA be indexed where torch was built without it, and asks for no page-locked
    memory: the rest of torch does with shapes alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _indexed(*args)
        if func is Tensor.__setitem__:
            return torch.ops.aten.copy_.default(_indexed(*args[:2]), args[2])
        if func is Tensor.pin_memory:
            args[0].constant = None  # torch would copy small values for real
            return args[0]
        if func is Tensor.contiguous:
            return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)
        if func is Tensor.copy_:
            return torch.ops.aten.copy_.default(*args[:2])
        if func is torch._fused_sdp_choice:
            return SDPBackend.FLASH_ATTENTION.value
        if func is F.scaled_dot_product_attention:  # the kernel that it is on CUDA, with its layout of the result
            given = args or [kwargs[name] for name in ("query", "key", "value")]
            return torch.ops.aten._scaled_dot_product_flash_attention(*given[:3])[0]
        return func(*args, **(kwargs or {}))


def _indexed(tensor: Tensor, places: Any) -> Tensor:
    """`tensor[places]` for integers, slices and None."""
    places = list(places) if isinstance(places, tuple) else [places]
    if Ellipsis in places:
        at = places.index(Ellipsis)
        missing = tensor.ndim - sum(place is not None for place in places) + 1
        places[at : at + 1] = [slice(None)] * missing
    dim = 0
    for place in places:
        if place is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(place, slice):
            start, stop, step = place.indices(tensor.shape[dim])
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, start, stop, step)
        else:
            tensor, dim = tensor.select(dim, place), dim - 1
        dim += 1
    return tensor


def transformer(blocks: int, actions: ActionModules | None = None) -> WanTransformer3DModel:
    """Wan 1.3B with so many blocks, each with an action module where there are `actions`, in the dtypes that it runs
    in. To be called where tensors have no memory."""
    model: WanTransformer3DModel = WanTransformer3DModel(**WAN_1_3B, num_layers=blocks)
    if actions is not None:
        width = WAN_1_3B["num_attention_heads"] * WAN_1_3B["attention_head_dim"]
        attach(model.blocks, replace(actions, blocks=tuple(range(blocks))), width)
    model.eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        owner, _, last = name.rpartition(".")
        moved = nn.Parameter(weight.to(CUDA, kept_dtype(name, DTYPE)), requires_grad=False)
        setattr(model.get_submodule(owner), last, moved)
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer.to(CUDA))
    return model


def denoiser(blocks: int, actions: ActionModules | None = None) -> WanDenoiser:
    """Ours, with query, key and value as one product (`fuse` takes weights without memory for quantised ones)."""
    parts = WanDenoiser(transformer(blocks, actions)).fuse()
    for block in parts.blocks:
        layers = block.attn1.to_q, block.attn1.to_k, block.attn1.to_v
        weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        parts.fused.append(Fused(weight, bias))
    return parts


def spec_of(model: str) -> ModelSpec:
    """A model of `MODELS`, at 832x480."""
    sizes = MODELS[model]
    return ModelSpec(
        name=model,
        latent_channels=16,
        latent_height=60,
        latent_width=104,
        chunk_latents=3,
        window_latents=sizes["window"],
        sink_latents=sizes["sink"],
        frames_per_latent=4,
        width=832,
        height=480,
        native_fps=16.0,
        shift=5.0,
        steps=(STEPS,),
        text_shape=(TEXT_TOKENS, WAN_1_3B["text_dim"]),
    )


def world_spec(actions: bool) -> ModelSpec:
    """Matrix-Game 2, without its picture's channels; with its action modules, or as if it had none."""
    spec = replace(entry_sizes(catalogue.find("matrix-game-2")).spec, condition_channels=0, steps=(STEPS,))
    spec = replace(spec, text_shape=(spec.text_shape[0], WAN_1_3B["text_dim"]), schedules=())
    return spec if actions else replace(spec, actions=None, action_rows=None, controls=())


def micro_step(spec: ModelSpec, kv_context: str, blocks: int, step: int = 2) -> Count:
    """One micro-step of ours in the steady state: the chunk's steps before it have run."""
    with FakeTensorMode(), WithoutDevice(), torch.inference_mode():
        stage = ModelRunner(StageModel(spec, denoiser(blocks, spec.actions)), CUDA)
        counter = Counter()
        stage.open(0, steps=STEPS, kv_context=kv_context)
        stage.set_text(0, 0, torch.zeros(spec.text_shape), 0)
        latents = torch.zeros(1, *spec.chunk_shape, dtype=DTYPE, device=CUDA)
        time = torch.zeros(1, spec.chunk_latents, stage.denoiser.width, dtype=DTYPE, device=CUDA)
        given: tuple[Tensor, ...] = (latents, time)
        if spec.steering_shape is not None:
            given = *given, torch.zeros(1, *spec.steering_shape, device=CUDA)
        state, geometry = stage.sessions[0].state, stage.sessions[0].geometry
        # The first in its round of the slots: what it sees lies at the end of the others, where any is left over.
        chunk = next(chunk for chunk in range(_LATE, 2 * _LATE) if geometry.slot(chunk) == geometry.pinned)
        for before in range(step):
            stage.forward([MicroStep(0, chunk, before, STEPS, 0)], given)
        acting = stage.sessions[0].actions
        counter.watch((state.key, state.value, *(() if acting is None else vars(acting).values())))
        with counter:
            stage.forward([MicroStep(0, chunk, step, STEPS, 0)], given)
    counted: Count = counter.count
    return counted


def clip(spec: ModelSpec, blocks: int) -> Count:
    """A forward of diffusers' model, of a clip as long as a chunk."""
    with FakeTensorMode(), WithoutDevice(), torch.inference_mode():
        model = transformer(blocks)
        latents = torch.zeros(1, *spec.chunk_shape, dtype=DTYPE, device=CUDA)
        text = torch.zeros(1, *spec.text_shape, dtype=DTYPE, device=CUDA)
        with Counter() as counter:
            model(latents, torch.zeros(1, device=CUDA), text, return_dict=False)
    counted: Count = counter.count
    return counted


def per_block(count: Callable[[int], Count]) -> Count:
    """From the counts of forwards with so many blocks, that of one block."""
    return count(2) - count(1)


def row(name: str, kv_context: str, block: Count, spec: ModelSpec) -> dict[str, report.Value]:
    """A line of the table."""
    tokens = spec.chunk_latents * spec.latent_height * spec.latent_width // 4
    width = WAN_1_3B["num_attention_heads"] * WAN_1_3B["attention_head_dim"]
    return {
        "model": name,
        "kv_context": kv_context,
        "operations": block.operations,
        "matrix": block.matrix,
        "attention": block.attention,
        "activations": round(block.moved_bytes / (tokens * width * DTYPE.itemsize), 1),
        "copied_bytes": block.copied_bytes,
    }


def measure() -> list[dict[str, report.Value]]:
    """All lines."""
    rows = []
    for name in MODELS:
        spec = spec_of(name)
        for kv_context in CONTEXTS:
            rows.append(row(name, kv_context, per_block(partial(micro_step, spec, kv_context)), spec))
    for actions in (False, True):
        spec, name = world_spec(actions), "matrix-game-2" if actions else "the same without actions"
        rows.append(row(name, "clean", per_block(partial(micro_step, spec, "clean")), spec))
    spec = spec_of("self-forcing")
    rows.append(row("diffusers", "none", per_block(lambda blocks: clip(spec, blocks)), spec))
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        "benchmarks.kernel_count", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    head = report.header(argv, warm_up="none: nothing is timed; the chunk's earlier steps are not counted")
    rows = measure()
    print(report.table(rows))
    if options.out is not None:
        report.write_json(options.out, head, {"per_block": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
