"""Reads a Wan transformer's weights: the blocks that are wanted, and what goes with them. Nothing else is read.

The file is memory-mapped, and the module is built without memory (on the meta device), so a stage of a large model
never holds more than its own part, and never twice. On a CPU, weights that are stored as they are needed stay in the
file's pages: the file must not be changed in place while the model is used.

Low-rank changes (LoRA) are added to weights while these are read, W + scale * B @ A. Known are PEFT's names
(`base_model.model.blocks.0.self_attn.q.lora_A.weight`, with or without an adapter's name), those of diffusers
(`transformer.blocks.0.attn1.to_q.lora_A.weight`) and of kohya (`lora_unet_blocks_0_self_attn_q.lora_down.weight`), and
`lora_down`/`lora_up` in place of `lora_A`/`lora_B`; beside them addends of whole tensors: `diff` to a weight, `diff_b`
to a bias, `diff_m` to a modulation, and `lora_B.bias`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from pydantic import AliasChoices, BaseModel, Field
from torch import Tensor, nn
from tqdm import tqdm

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint import LORA_CONTAINERS, Checkpoint, blank_fault, drawn, is_blank, open_checkpoint
from streamdiff.models.spec import ActionModules, ActionRows, Lora
from streamdiff.models.transformer import quantization
from streamdiff.models.transformer.actions import attach
from streamdiff.models.transformer.lora import Factors
from streamdiff.models.transformer.tensor_names import Names, TensorLocation, block_count, dotted, recognise, translate
from streamdiff.models.transformer.wan import CAMERA_PATCHES, make_transformer
from streamdiff.models.weight_files import (
    Count,
    Positive,
    fault_list,
    read_object,
    some,
    validated,
    what_it_holds,
)

FILE = "diffusion_pytorch_model.safetensors"
LARGE = 256 * 2**20
"""Bytes from which on reading is worth a progress bar."""
_SELDOM_S = 10.0  # in a log; a supervisor takes it for a sign of life
_FIRST_ONLY = ("patch_embedding.", "condition_embedder.time_embedder.")
_LAST_ONLY = ("proj_out.", "scale_shift_table")
_TEXT = "condition_embedder.text_embedder."
_BLOCK = "blocks."
_LOW = (torch.bfloat16, torch.float16)


Blocks = tuple[int, int]
Shapes = dict[str, tuple[int, ...]]


class WanCheckpoint(NamedTuple):
    """A Wan transformer's checkpoint: what its names mean, arguments of diffusers' `WanTransformer3DModel`, and the
    action modules that it has."""

    checkpoint: Checkpoint
    names: Names
    architecture: dict[str, Any]
    actions: ActionModules | None = None


def open_transformer(
    source: Path | Checkpoint, container: str | None = None, config: Mapping[str, Any] | None = None,
    usual: str | None = None,
) -> WanCheckpoint:  # fmt: skip
    """Open a checkpoint and read headers, no weights.

    Args:
        source: a file or folder (see `open_checkpoint`), in original Wan's or diffusers' names.
        container: which set of tensors to take from a file with several; None for the `usual` one (see
            `open_checkpoint`).
        config: of diffusers, or original Wan's; goes before the folder's own `config.json`. What neither says is read
            from the tensors' shapes.

    Raises:
        ConfigError: no such file, or one that cannot be used; no Wan transformer, or one whose sizes nothing tells.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source, container, usual=usual)
    layout = recognise(checkpoint.names)
    if layout is None:
        if what := what_it_holds(checkpoint.names):
            raise ConfigError(f"{checkpoint}: not a Wan transformer: it holds {what}")
        raise ConfigError(
            f"{checkpoint}: not a Wan transformer; expected names such as blocks.0.self_attn.q.weight (original Wan) "
            f"or blocks.0.attn1.to_q.weight (diffusers), found {some(checkpoint.names) or 'no tensors'}"
        )
    names = translate(checkpoint.names, layout)

    def shape(name: str) -> tuple[int, ...] | None:
        if (source := names.sources.get(name)) is None:
            return None
        rows, *rest = checkpoint.entries[source.name].shape or (1,)
        return (rows // source.parts, *rest)

    try:
        count = block_count(names.sources)
        architecture = read_architecture(shape, count, config, checkpoint.config)
        actions = read_actions(shape, count, config or checkpoint.config)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint}: {error}") from None
    return WanCheckpoint(checkpoint, names, architecture, actions)


def drawn_transformer(
    name: str, architecture: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> Checkpoint:
    """The weights of the transformer called `name` of this architecture (arguments of diffusers'
    `WanTransformer3DModel`), drawn on `device`, each when it is asked for."""
    with torch.device("meta"):
        module = make_transformer(architecture)
    entries = {key: each.to(dtype) for key, each in module.state_dict().items()}

    def read(key: str) -> Tensor:
        return drawn(key, entries[key].shape, device, dtype)

    return Checkpoint(Path(name), entries, read, tuple(entries), config=architecture)


def load_transformer(
    file: WanCheckpoint, *, device: torch.device, dtype: torch.dtype, blocks: Blocks | None = None,
    loras: Sequence[Lora] = (), quantize: str = "none",
) -> WanTransformer3DModel:  # fmt: skip
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
    model, wanted, stored, adapters = plan_transformer(file, blocks, loras)
    names, (first, last) = file.names, blocks or (0, file.architecture["num_layers"])
    sizes = {name: tensor.nbytes // names.sources[name].parts for name, tensor in stored.items()}
    found = _read(file, sizes, wanted, adapters, device, dtype, quantize)
    model.load_state_dict(found, strict=False, assign=True)
    model.blocks = model.blocks[first:last]
    model.eval()
    return model


def plan_transformer(
    file: WanCheckpoint, blocks: Blocks | None = None, loras: Sequence[Lora] = ()
) -> tuple[WanTransformer3DModel, Shapes, dict[str, Tensor], list[Adapter]]:
    """What `load_transformer` does before it reads weights: the module without memory, the shapes that are wanted of
    `blocks`, the tensors stored for them, and the LoRAs, opened.

    Raises:
        ConfigError: as `load_transformer`, but for values.
    """
    checkpoint, names, architecture, actions = file
    count = architecture["num_layers"]
    first, last = blocks or (0, count)
    if not 0 <= first < last <= count:
        raise ConfigError(f"{checkpoint}: blocks {first} to {last} are asked for, but there are {count}")
    with torch.device("meta"):
        model = make_transformer(architecture)
        if actions is not None:
            attach(model.blocks, actions, architecture["num_attention_heads"] * architecture["attention_head_dim"])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    unused = (_TEXT,) if takes_picture_only(architecture) else ()
    left_out = (*unused, *(() if first == 0 else _FIRST_ONLY), *(() if last == count else _LAST_ONLY))
    own = tuple(f"{_BLOCK}{number}." for number in range(first, last))
    wanted = {
        name: shape
        for name, shape in shapes.items()
        if not name.startswith(left_out) and (name.startswith(own) or not name.startswith(_BLOCK))
    }
    stored = {name: checkpoint.entries[names.sources[name].name] for name in wanted if name in names.sources}
    _check(file, stored, wanted, shapes)
    return model, wanted, stored, [open_lora(lora, shapes) for lora in loras]


# ---- what is wrong with a file -------------------------------------------------------------------------------------
def _check(file: WanCheckpoint, stored: Mapping[str, Tensor], wanted: Shapes, whole: Shapes) -> None:
    """Check names, shapes and dtypes, which needs no weights. Of `stored` only wanted tensors are checked. Raises
    ConfigError that lists all problems."""
    checkpoint, names, architecture, _ = file
    shapes, kinds = [], []
    for name, tensor in stored.items():
        source, expected = names.sources[name], wanted[name]
        if not tensor.is_floating_point():
            kinds.append(f"{source.name} is {str(tensor.dtype).removeprefix('torch.')}")
        if not _fits(name, tensor.shape, source.parts, expected):
            rows = [expected[0] * source.parts, *expected[1:]]
            shapes.append(f"{source.name} {list(tensor.shape)} instead of {rows}")
    unexpected = [source.name for name, source in names.sources.items() if name not in whole]
    faults = fault_list(
        {
            "missing": [names.spell(name) for name in wanted if name not in names.sources],
            "unexpected": names.unmatched + unexpected,
            "there twice": [f"{one} and {other} are both {name}" for name, one, other in names.clashes],
            "of another shape": shapes,
            "not floating point": kinds,
        }
    )
    if faults:
        width = architecture["num_attention_heads"] * architecture["attention_head_dim"]
        raise ConfigError(
            f"{checkpoint}: of {len(whole)} tensors in {names.layout.value} names of a Wan transformer of "
            f"{architecture['num_layers']} blocks, {width} wide, feed-forward {architecture['ffn_dim']}: {faults}. "
            "Nothing was loaded"
        )


def _fits(name: str, shape: tuple[int, ...], parts: int, expected: tuple[int, ...]) -> bool:
    """Whether a stored shape is the one expected, times `parts` rows; rCM stores the patch embedding as a matrix."""
    if name == "patch_embedding.weight" and len(shape) == 2:
        return shape == (expected[0], prod(expected[1:]))
    return shape == (expected[0] * parts, *expected[1:])


# ---- reading -------------------------------------------------------------------------------------------------------
def _read(
    file: WanCheckpoint, sizes: Mapping[str, int], wanted: Shapes, adapters: Sequence[Adapter], device: torch.device,
    dtype: torch.dtype, quantize: str,
) -> dict[str, Tensor]:  # fmt: skip
    """The wanted tensors, of `sizes` in bytes, each brought to its place and form before the next is read."""
    checkpoint, names, *_ = file
    total = sum(sizes.values())
    often_s = 0.1 if sys.stderr.isatty() else _SELDOM_S
    found, broken, zero = {}, list[str](), list[str]()
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
            changes = [each for adapter in adapters if (each := adapter.change(name, device)) is not None]
            if changes and is_blank(tensor):
                zero.append(source.name)
            for change in changes:  # never in place: the tensor is the file
                tensor = tensor.to(device, torch.float32) + change.reshape(shape)
            tensor = tensor.to(device, kept_dtype(name, dtype))
            limits = torch.stack(torch.aminmax(tensor))
            if not bool(torch.isfinite(limits).all()):
                broken.append(source.name)
            elif len(shape) > 1 and name.endswith(".weight") and not changes and not bool(limits.any()):
                zero.append(source.name)
            elif quantize != "none" and quantization.is_quantized(name, shape):
                tensor = quantization.quantize(tensor, quantize, source.name)
            found[name] = tensor
            bar.update(sizes[name])
    if zero:
        raise ConfigError(blank_fault(checkpoint, zero))
    if broken:
        fault = f"with values that are not finite in {str(dtype).removeprefix('torch.')}"
        raise ConfigError(f"{checkpoint}: {fault_list({fault: broken})}. Nothing was loaded")
    return found


def kept_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the tensor `name` of a model in `dtype`: diffusers keeps some in float32."""
    kept = dtype in _LOW and not set(WanTransformer3DModel._keep_in_fp32_modules).isdisjoint(name.split("."))
    return torch.float32 if kept else dtype


HEAD_DIM = 128
"""Channels per head of every published Wan model."""
PATCH = (1, 2, 2)
_PATCHES = "patch_embedding.weight"


def _original(*names: str) -> Any:
    """A field that original Wan's configuration calls otherwise."""
    return Field(1, validation_alias=AliasChoices(*names))


class _Actions(BaseModel):
    """`action_config` of a `config.json` of Matrix-Game 2, as far as shapes do not tell it."""

    heads_num: Count = 16
    rope_dim_list: tuple[Count, Count, Count] = (8, 28, 28)
    rope_theta: Positive = 256.0
    vae_time_compression_ratio: Count = 4


class _Config(BaseModel):
    """A `config.json` of diffusers or original Wan, as far as it matters. What it does not say, not even as a default,
    shapes tell."""

    patch_size: tuple[Count, Count, Count] = PATCH
    num_attention_heads: Count = _original("num_attention_heads", "num_heads")
    attention_head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = HEAD_DIM
    in_channels: Count = _original("in_channels", "in_dim")
    out_channels: Count = _original("out_channels", "out_dim")
    text_dim: Count = 1
    freq_dim: Count = 1
    ffn_dim: Count = 1
    num_layers: Count = 1
    rope_max_seq_len: Count = 1
    image_dim: Count | None = None
    added_kv_proj_dim: Count | None = None
    pos_embed_seq_len: Count | None = None
    cross_attn_norm: bool = True
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6


Shape = Callable[[str], tuple[int, ...] | None]
"""The shape of the tensor that diffusers calls so, None if it is not there."""


def read_architecture(shape: Shape, blocks: int, *configs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of diffusers' `WanTransformer3DModel`. What `configs` say holds; only the rest is taken from shapes.

    Args:
        shape: looks up a tensor; it is asked only for those that `configs` leave open.
        blocks: how many there are.
        configs: of diffusers, whole or in parts, the first to be heard first. Keys beyond these arguments are ignored.

    Raises:
        ConfigError: a tensor that is needed is missing, the number of heads cannot be told, or a value in a config is
            of the wrong kind.
    """
    known: dict[str, Any] = {}
    for config in reversed(configs):
        known |= validated(Path("model config"), _Config, config or {}).model_dump(exclude_unset=True)

    def size(name: str, axis: int) -> int:
        if (found := shape(name)) is None or len(found) <= axis:
            raise ConfigError(f"the model's sizes cannot be told, as {name} is missing; say them in a model config")
        return found[axis]

    def size_if_there(name: str, axis: int) -> int | None:
        return None if shape(name) is None else size(name, axis)

    stored = shape(_PATCHES) or ()
    patch = known.get("patch_size") or (stored[2:] if len(stored) == 5 else PATCH)
    flat = prod(patch) if len(stored) == 2 else 1  # a matrix has the patch's pixels beside the channels
    image, has_text = "condition_embedder.image_embedder", shape(f"{_TEXT}linear_1.weight") is not None
    found: dict[str, Callable[[], object]] = {
        "patch_size": lambda: patch,
        "in_channels": lambda: size(_PATCHES, 1) // flat,
        "out_channels": lambda: size("proj_out.weight", 0) // prod(patch),
        "text_dim": lambda: size(*((f"{_TEXT}linear_1.weight", 1) if has_text else (f"{image}.norm1.weight", 0))),
        "freq_dim": lambda: size("condition_embedder.time_embedder.linear_1.weight", 1),
        "ffn_dim": lambda: size("blocks.0.ffn.net.0.proj.weight", 0),
        "num_layers": lambda: blocks,
        "cross_attn_norm": lambda: shape("blocks.0.norm2.weight") is not None,
        "image_dim": lambda: size_if_there(f"{image}.norm1.weight", 0),
        "added_kv_proj_dim": lambda: size_if_there("blocks.0.attn2.add_k_proj.weight", 1),
        "pos_embed_seq_len": lambda: size_if_there(f"{image}.pos_embed", 1),
    }
    values: dict[str, Any] = {key: known[key] for key in ("rope_max_seq_len", "eps") if key in known}
    values |= {key: known[key] if key in known else find() for key, find in found.items()}
    if (channels := size_if_there(f"{CAMERA_PATCHES}.weight", 1)) is not None:
        values["camera_channels"] = channels
    heads, head_dim = known.get("num_attention_heads"), known.get("attention_head_dim")
    if heads is None or head_dim is None:
        heads, head_dim = _heads(size("blocks.0.attn1.to_q.weight", 0), heads, head_dim)
    return values | {"num_attention_heads": heads, "attention_head_dim": head_dim}


def takes_picture_only(architecture: Mapping[str, Any]) -> bool:
    """Whether its cross-attention sees a picture's features in the text's place."""
    return architecture.get("image_dim") is not None and architecture.get("added_kv_proj_dim") is None


def read_actions(shape: Shape, blocks: int, config: Mapping[str, Any] | None) -> ActionModules | None:
    """Sizes of the action modules of a model of so many blocks; None: it has none. `config` as of `open_transformer`;
    what it does not say is as in published files.

    Raises:
        ConfigError: a tensor is missing, or sizes do not go together.
    """
    at = "blocks.{}.action_model."
    found = [number for number in range(blocks) if shape(at.format(number) + "proj_keyboard.weight") is not None]
    if not found:
        return None
    said = validated(Path("model config"), _Actions, (config or {}).get("action_config") or {})
    names = "keyboard_embed.0", "keyboard_attn_kv", "proj_keyboard", "mouse_mlp.0"
    embed, kv, out, mouse = (shape(f"{at.format(found[0])}{name}.weight") for name in names)
    if embed is None or kv is None or out is None:
        raise ConfigError(f"of {at.format(found[0])} tensors of the keyboard are missing")
    (hidden, keyboard), (width, inner), window = embed, out, kv[1] // embed[0]
    columns = 0 if mouse is None else (mouse[1] - width) // window
    if inner % said.heads_num or columns < 0:
        raise ConfigError(
            f"action modules of {inner} channels and {said.heads_num} heads; say heads_num in a model config"
        )
    rows = ActionRows(window, said.vae_time_compression_ratio, keyboard + columns)
    return ActionModules(
        tuple(found), said.heads_num, inner // said.heads_num, keyboard, columns, hidden, said.rope_dim_list[0],
        said.rope_theta, rows,
    )  # fmt: skip


def _heads(width: int, heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """(heads, head_dim), from the one that is given, else from the usual number of channels per head."""
    if heads is None:
        head_dim = head_dim or HEAD_DIM
        if width % head_dim:
            raise ConfigError(
                f"the number of heads cannot be told from the shapes: the model is {width} wide, no multiple of "
                f"{head_dim} channels per head; say num_attention_heads in a model config (diffusers' config.json)"
            )
        return width // head_dim, head_dim
    if width % (2 * heads):
        raise ConfigError(f"model config: num_attention_heads is {heads}, but the model is {width} wide")
    return heads, width // heads


_FACTOR = re.compile(r"(.+)\.(?:lora_(A|down)|lora_(B|up))(?:\.\w+)??\.(weight|bias)")
_ADDED = re.compile(r"(.+)\.diff(_[bm])?")
_LEAVES = {None: "weight", "_b": "bias", "_m": "modulation"}
_ALPHA = ".alpha"
_PEFT = "adapter_model"
_VARIANT = re.compile(r"\.(?:(dora_scale|lora_magnitude_vector)|(lokr_\w+)|(hada_\w+)|(oft_\w+)|(lora_mid))\b")
_VARIANTS = ("DoRA", "LoKr", "LoHa", "OFT", "LoRA with a core (Tucker)")


_Change = dict[str, str]
"""Stored names of what changes one tensor: two factors `down` and `up`, with `alpha` if there is one; an addend `diff`;
or the `bias` of a second factor, which counts as strongly as the pair, `down` and `alpha`, that it belongs to."""


@dataclass(frozen=True)
class Adapter:
    """An opened LoRA file, fitted to a model. `changes` are by diffusers' names of the weights: each is
    the run of rows that a location tells, of the product of a pair, or of an addend."""

    checkpoint: Checkpoint
    scale: float
    changes: Mapping[str, tuple[_Change, TensorLocation]]
    alpha: float | None
    rank_stabilised: bool

    def change(self, name: str, device: torch.device) -> Tensor | None:
        """The adapter's addend for the tensor `name`, float32, with as many numbers; None if it has none.

        Raises:
            ConfigError: the change is not finite.
        """
        if name not in self.changes:
            return None
        parts, (_, part, count) = self.changes[name]
        found = []
        if "down" in parts:
            down, rows, strength = self._pair(name, device)
            found.append((rows @ down if "up" in parts else rows) * (self.scale * strength))
        if "diff" in parts:
            found.append(self._read(parts["diff"], device).chunk(count)[part] * self.scale)
        result = found[0] if len(found) == 1 else found[0] + found[1].reshape(found[0].shape)
        self._check(name, result)
        return result

    def factors(self, name: str, device: torch.device, dtype: torch.dtype) -> Factors:
        """The two whose product is the addend for the weight `name`, at scale 1; raises as `change`."""
        down, up, strength = self._pair(name, device)
        self._check(name, down, rows := up * strength)
        return Factors(down.to(dtype).contiguous(), rows.to(dtype).contiguous())

    def _pair(self, name: str, device: torch.device) -> tuple[Tensor, Tensor, float]:
        """`down`, the rows of `up` (or of its bias) that are of the tensor `name`, and how strongly they count."""
        parts, (_, part, count) = self.changes[name]
        down, rank = self._read(parts["down"], device).flatten(1), len(self.checkpoint.entries[parts["down"]])
        alpha = float(self._read(parts["alpha"], device)) if "alpha" in parts else self.alpha
        strength = 1.0 if alpha is None else alpha / (math.sqrt(rank) if self.rank_stabilised else rank)
        half = self._read(parts["up"], device).flatten(1) if "up" in parts else self._read(parts["bias"], device)
        return down, half.chunk(count)[part], strength

    def _read(self, name: str, device: torch.device) -> Tensor:
        return self.checkpoint.read(name).to(device, torch.float32)

    def _check(self, name: str, *change: Tensor) -> None:
        if not all(bool(each.isfinite().all()) for each in change):
            stored = ", ".join(self.changes[name][0].values())
            raise ConfigError(f"{self.checkpoint}: the change of {name} is not finite ({stored})")


def open_lora(lora: Lora, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    """Open a LoRA and check that it fits; reads no weights.

    Args:
        shapes: of all the model's tensors, by diffusers' names.

    Raises:
        ConfigError: not a LoRA, names that match nothing in the model, half a pair, factors that do not fit, or a
            variant of LoRA that is not plain.
    """
    checkpoint = open_checkpoint(lora.path, order=LORA_CONTAINERS, names=(_PEFT, "pytorch_lora_weights"))
    for name in checkpoint.names:
        if match := _VARIANT.search(name):
            raise _not_plain(checkpoint, f"{_VARIANTS[(match.lastindex or 1) - 1]} ({name})")
    changed, strange, twice = _changes(checkpoint.names)
    layout = recognise(changed)
    if layout is None:
        raise ConfigError(
            f"{checkpoint}: not a LoRA of a Wan transformer; expected names such as blocks.0.self_attn.q.lora_A.weight "
            f"or transformer.blocks.0.attn1.to_q.lora_A.weight, found {some(checkpoint.names)}"
        )
    names = translate(changed, layout)
    lost = [*names.unmatched, *(source.name for target, source in names.sources.items() if target not in shapes)]
    faults = {
        "names that match nothing in the model": [*strange, *(_any(changed[name]) for name in lost)],
        "names of a second adapter, of which a file must hold one": twice,
        "factors without their other half": [
            _any(each)
            for each in changed.values()
            if ("down" in each) != bool({"up", "bias"} & each.keys()) or each.keys() <= {"alpha"}
        ],
    }
    changes = {target: (changed[source.name], source) for target, source in names.sources.items()}
    if not any(faults.values()):
        faults["changes that do not fit"] = _misfits(checkpoint, changes, shapes)
    if any(faults.values()):
        raise ConfigError(f"{checkpoint}: {fault_list(faults)}. Nothing was loaded")
    alpha, stabilised = _settings(checkpoint)
    return Adapter(checkpoint, lora.scale, changes, alpha, stabilised)


def _changes(stored: tuple[str, ...]) -> tuple[dict[str, _Change], list[str], list[str]]:
    """What changes each tensor, by its (bare) name; names that change nothing, and changes that come again."""
    found: dict[str, _Change] = {}
    strange, twice = [], []
    for name in stored:
        plain = dotted(name)
        if match := _FACTOR.fullmatch(plain):
            target, kind = f"{match[1]}.{match[4]}", "down" if match[2] else "up" if match[4] == "weight" else "bias"
        elif match := _ADDED.fullmatch(plain):
            target, kind = f"{match[1]}.{_LEAVES[match[2]]}", "diff"
        elif plain.endswith(_ALPHA):
            target, kind = f"{plain.removesuffix(_ALPHA)}.weight", "alpha"
        else:
            strange.append(name)
            continue
        if found.setdefault(target, {}).setdefault(kind, name) != name:
            twice.append(name)
    for target, each in found.items():
        if "bias" in each:
            pair = found.get(f"{target.removesuffix('.bias')}.weight", {})
            each.update({half: pair[half] for half in ("down", "alpha") if half in pair})
    return found, strange, twice


def _any(change: _Change) -> str:
    """One of the names, for messages."""
    return next(change[kind] for kind in ("bias", "down", "up", "diff", "alpha") if kind in change)


def _misfits(
    checkpoint: Checkpoint, changes: Mapping[str, tuple[_Change, TensorLocation]],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:  # fmt: skip
    found = []
    for target, (change, source) in changes.items():
        shape = {kind: checkpoint.entries[name].shape for kind, name in change.items()}
        rows, columns = shapes[target][0] * source.parts, prod(shapes[target][1:])
        if "alpha" in change and checkpoint.entries[change["alpha"]].numel() != 1:
            found.append(f"{change['alpha']} is not a single number")
        if "up" in change:
            down, up = shape["down"], shape["up"]
            fits = len(down) > 1 and len(up) > 1 and down[0] == prod(up[1:]) > 0
            if not fits or (up[0], prod(down[1:])) != (rows, columns):
                found.append(f"{target} is {rows} x {columns}, but {list(up)} x {list(down)} is to be added")
        for kind in {"diff", "bias"} & change.keys():
            if tuple(shape[kind]) != (rows, *shapes[target][1:]):
                wanted = [rows, *shapes[target][1:]]
                found.append(f"{target} is {wanted}, but {change[kind]} {list(shape[kind])} is to be added")
    return found


def _settings(checkpoint: Checkpoint) -> tuple[float | None, bool]:
    """alpha for all pairs (None: equal to the rank) and whether it counts by the root of the rank: from the file's own
    header, as diffusers writes it, or from PEFT's configuration beside it."""
    beside = (path := checkpoint.path).with_name("adapter_config.json")
    settings: dict[str, Any] = {}
    if text := checkpoint.metadata.get("lora_adapter_metadata"):
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{checkpoint}: its lora_adapter_metadata is not valid JSON: {error}") from None
        settings = {key.split(".")[-1]: value for key, value in tree.items()} if isinstance(tree, dict) else {}
    elif beside.is_file():
        stems = {each.stem for each in path.parent.iterdir() if each.suffix == path.suffix}
        if path.stem == _PEFT or len(stems) == 1:
            settings = read_object(beside)
        elif _PEFT not in stems:
            raise ConfigError(
                f"{checkpoint}: {beside.name} lies beside {len(stems)} files, and does not say to which of them it "
                "belongs; keep each LoRA with its configuration in a folder of its own"
            )
    for key in ("alpha_pattern", "use_dora"):
        if settings.get(key):
            raise _not_plain(checkpoint, f"{key} is {settings[key]!r}, which")
    if (kind := settings.get("peft_type", "LORA")) != "LORA":
        raise _not_plain(checkpoint, f"{kind}")
    alpha = settings.get("lora_alpha")
    if alpha is not None and (type(alpha) not in (int, float) or not math.isfinite(alpha)):
        raise ConfigError(f"{checkpoint}: lora_alpha is {alpha!r}, but must be a number")
    return alpha, bool(settings.get("use_rslora"))


def _not_plain(checkpoint: Checkpoint, what: str) -> ConfigError:
    return ConfigError(
        f"{checkpoint}: {what} is not supported, only plain LoRAs are; merge it into the model's weights with PEFT "
        "(merge_and_unload), and give these as --weights"
    )


_SAMPLES = 256  # values of each tensor: other training changes nearly all of them


@torch.inference_mode()
def weights_digest(block: nn.Module) -> str:
    """A digest of names, shapes and evenly spaced values of a block's weights; the same in any memory layout. For
    weights in 8 bits it is that of what they stand for. The host waits for the device."""
    digest = hashlib.sha256()
    for name, weight in sorted(block.state_dict().items()):
        whole = weight if type(weight) in (Tensor, nn.Parameter) else weight.dequantize()
        flat = whole.reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].float().cpu().contiguous()
        digest.update(f"{name} {list(whole.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
