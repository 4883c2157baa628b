"""Reads a Wan transformer's weights: the blocks that are wanted, and what goes with them. Nothing else is read.

The file is memory-mapped, and the module is built without memory (on the meta device), so a stage of a large model
never holds more than its own part, and never twice. On a CPU, weights that are stored as they are needed stay in the
file's pages: the file must not be changed in place while the model is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor
from tqdm import tqdm

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.checkpoint import Checkpoint, open_checkpoint
from streamdiff.models.checkpoint.json_file import some
from streamdiff.models.transformer import quantization
from streamdiff.models.transformer.architecture import read_architecture, stored_shape
from streamdiff.models.transformer.lora import Adapter, Lora, open_lora
from streamdiff.models.transformer.tensor_names import Names, block_count, recognise, translate

FILE = "diffusion_pytorch_model.safetensors"
LARGE = 256 * 2**20
"""Bytes from which on reading is worth a progress bar."""
_SELDOM_S = 10.0  # in a log; a supervisor takes it for a sign of life
_FIRST_ONLY = ("patch_embedding.", "condition_embedder.time_embedder.")
_LAST_ONLY = ("proj_out.", "scale_shift_table")
_BLOCK = "blocks."
_LOW = (torch.bfloat16, torch.float16)


Blocks = tuple[int, int]
Shapes = dict[str, tuple[int, ...]]


class WanCheckpoint(NamedTuple):
    """A Wan transformer's checkpoint: what its names mean, and arguments of diffusers' `WanTransformer3DModel`."""

    checkpoint: Checkpoint
    names: Names
    architecture: dict[str, Any]


def open_transformer(
    source: Path | Checkpoint, container: str | None = None, config: Mapping[str, Any] | None = None
) -> WanCheckpoint:
    """Open a checkpoint and read headers, no weights.

    Args:
        source: a file or folder (see `open_checkpoint`), in original Wan's or diffusers' names.
        container: which set of tensors to take from a file with several; None for the usual one.
        config: of diffusers or original Wan; goes before the folder's own `config.json`. What neither says is read from
            the tensors' shapes.

    Raises:
        ConfigError: no such file, or one that cannot be used; no Wan transformer, or one whose sizes nothing tells.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, container)
    layout = recognise(checkpoint.names)
    if layout is None:
        raise ConfigError(
            f"{checkpoint}: not a Wan transformer; expected names such as blocks.0.self_attn.q.weight (original Wan) "
            f"or blocks.0.attn1.to_q.weight (diffusers), found {some(checkpoint.names) or 'no tensors'}"
        )
    names = translate(checkpoint.names, layout)
    shape = partial(stored_shape, checkpoint, names)
    try:
        architecture = read_architecture(shape, block_count(names.sources), config, checkpoint.config)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint}: {error}") from None
    return WanCheckpoint(checkpoint, names, architecture)


def load_transformer(
    file: WanCheckpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    blocks: Blocks | None = None,
    loras: Sequence[Lora] = (),
    quantize: str = "none",
) -> WanTransformer3DModel:
    """The transformer in a checkpoint, with blocks `blocks` (first, last exclusive; all when None).

    With the first block come patch and time embedding, with the last one the output layer; the projections of text and
    modulation come always. What does not come stays on the meta device, and using it is an error.

    Args:
        dtype: of the weights; with bfloat16 or float16, those that diffusers keeps in float32 are float32 here too.
        loras: merged into the weights, in float32, block by block.
        quantize: of the blocks' linear layers, see `models.transformer.quantization`; each weight as it is read.

    Raises:
        ConfigError: tensors that are missing, unexpected (also those of other blocks), misshapen, not floating point or
            not finite; a LoRA that does not fit; a way to quantise that cannot be had here. Nothing is loaded then.
    """
    if quantize != "none":
        quantization.check(quantize, device, dtype)
    checkpoint, names, architecture = file
    count = architecture["num_layers"]
    first, last = blocks or (0, count)
    if not 0 <= first < last <= count:
        raise ConfigError(f"{checkpoint}: blocks {first} to {last} are asked for, but there are {count}")
    with torch.device("meta"):
        model: WanTransformer3DModel = WanTransformer3DModel.from_config({**architecture, "num_layers": last - first})
    shapes = {_renumbered(name, first): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    left_out = (*(() if first == 0 else _FIRST_ONLY), *(() if last == count else _LAST_ONLY))
    wanted = {name: shape for name, shape in shapes.items() if not name.startswith(left_out)}
    whole = _full_shapes(shapes, first, count)
    stored = {name: checkpoint.entries[names.sources[name].name] for name in wanted if name in names.sources}
    _check(file, stored, wanted, whole)
    adapters = [open_lora(lora, whole) for lora in loras]
    places = {_renumbered(name, -first): name for name in wanted}
    sizes = {name: tensor.nbytes // names.sources[name].parts for name, tensor in stored.items()}
    found = _read(file, sizes, wanted, adapters, device, dtype, quantize)
    model.load_state_dict({place: found.pop(name) for place, name in places.items()}, strict=False, assign=True)
    model.eval()
    return model


def _full_shapes(shapes: Shapes, first: int, count: int) -> Shapes:
    """Shapes of all `count` blocks and the tensors outside of them, from those of some blocks, `first` the first."""
    own = f"{_BLOCK}{first}."
    block = {name.removeprefix(own): shape for name, shape in shapes.items() if name.startswith(own)}
    outside = {name: shape for name, shape in shapes.items() if not name.startswith(_BLOCK)}
    return outside | {f"{_BLOCK}{i}.{rest}": shape for i in range(count) for rest, shape in block.items()}


# ---- what is wrong with a file -------------------------------------------------------------------------------------
def _check(file: WanCheckpoint, stored: Mapping[str, Tensor], wanted: Shapes, whole: Shapes) -> None:
    """Check names, shapes and dtypes, which needs no weights. Of `stored` only wanted tensors are checked. Raises
    ConfigError that lists all problems."""
    (checkpoint, names, architecture), problems = file, []
    if missing := [names.spell(name) for name in wanted if name not in names.sources]:
        problems.append(f"{_count(missing, 'is', 'are')} missing, for example {some(missing)}")
    strange = names.unmatched + [source.name for name, source in names.sources.items() if name not in whole]
    if strange:
        problems.append(f"{_count(strange, 'is', 'are')} unexpected, for example {some(strange)}")
    if names.clashes:
        twice = [f"{one} and {other} are both {name}" for name, one, other in names.clashes]
        problems.append(f"{_count(twice, 'is', 'are')} there twice, for example {some(twice, 1)}")
    shapes, kinds = [], []
    for name, tensor in stored.items():
        source, expected = names.sources[name], wanted[name]
        if not tensor.is_floating_point():
            kinds.append(f"{source.name} is {str(tensor.dtype).removeprefix('torch.')}")
        if not _fits(name, tensor.shape, source.parts, expected):
            rows = [expected[0] * source.parts, *expected[1:]]
            shapes.append(f"{source.name} has shape {list(tensor.shape)}, but {rows} is expected")
    if shapes:
        problems.append(f"{_count(shapes, 'has', 'have')} another shape: {some(shapes)}")
    if kinds:
        problems.append(f"{_count(kinds, 'is', 'are')} not floating point: {some(kinds)}")
    if problems:
        raise ConfigError(f"{checkpoint}: {'; '.join(problems)}. Expected is {_expected(names, whole, architecture)}")


def _fits(name: str, shape: tuple[int, ...], parts: int, expected: tuple[int, ...]) -> bool:
    """Whether a stored shape is the one expected, times `parts` rows; rCM stores the patch embedding as a matrix."""
    if name == "patch_embedding.weight" and len(shape) == 2:
        return shape == (expected[0], prod(expected[1:]))
    return shape == (expected[0] * parts, *expected[1:])


def _expected(names: Names, whole: Shapes, architecture: Mapping[str, Any]) -> str:
    width = architecture["num_attention_heads"] * architecture["attention_head_dim"]
    return (
        f"a Wan transformer of {architecture['num_layers']} blocks, {width} wide, feed-forward "
        f"{architecture['ffn_dim']}: {len(whole)} tensors in {names.layout.value} names. Nothing was loaded"
    )


def _count(things: Sequence[str], one: str, many: str) -> str:
    return f"{len(things)} tensor {one}" if len(things) == 1 else f"{len(things)} tensors {many}"


# ---- reading -------------------------------------------------------------------------------------------------------
def _read(
    file: WanCheckpoint,
    sizes: Mapping[str, int],
    wanted: Shapes,
    adapters: Sequence[Adapter],
    device: torch.device,
    dtype: torch.dtype,
    quantize: str,
) -> dict[str, Tensor]:
    """The wanted tensors, of `sizes` in bytes, each brought to its place and form before the next is read."""
    checkpoint, names, _ = file
    total = sum(sizes.values())
    often_s = 0.1 if sys.stderr.isatty() else _SELDOM_S
    found, broken = {}, []
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=checkpoint.path.name,
        disable=total < LARGE,
        mininterval=often_s,
        delay=0 if sys.stderr.isatty() else _SELDOM_S,
        leave=False,
    ) as bar:
        for name, shape in wanted.items():
            source = names.sources[name]
            tensor = checkpoint.read(source.name).chunk(source.parts)[source.part].reshape(shape)
            for adapter in adapters:
                if (change := adapter.change(name, device)) is not None:
                    # Never in place: the tensor is the file.
                    tensor = tensor.to(device, torch.float32) + change.reshape(shape)
            tensor = tensor.to(device, kept_dtype(name, dtype))
            if not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
                broken.append(source.name)
            elif quantize != "none" and quantization.is_quantized(name, shape):
                tensor = quantization.quantize(tensor, quantize, source.name)
            found[name] = tensor
            bar.update(sizes[name])
    if broken:
        raise ConfigError(
            f"{checkpoint}: {_count(broken, 'holds', 'hold')} values that are not finite in "
            f"{str(dtype).removeprefix('torch.')}, for example {some(broken)}. Nothing was loaded"
        )
    return found


def kept_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the tensor `name` of a model in `dtype`: diffusers keeps some in float32."""
    kept = dtype in _LOW and not set(WanTransformer3DModel._keep_in_fp32_modules).isdisjoint(name.split("."))
    return torch.float32 if kept else dtype


def _renumbered(name: str, shift: int) -> str:
    """The name of a tensor whose block has number `shift` more."""
    if not name.startswith(_BLOCK):
        return name
    number, rest = name.removeprefix(_BLOCK).split(".", 1)
    return f"{_BLOCK}{int(number) + shift}.{rest}"
