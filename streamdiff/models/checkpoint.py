"""Opens model checkpoints in any layout (safetensors, whole or in shards, torch files, GGUF): shapes and dtypes, and
single tensors on demand, memory-mapped; and loads tensors into modules. Files of inputs and results are read by
`tensor_file`.

A returned tensor is a view of the mapped file until it is copied or cast, so it must not be written to, and the file
must not be changed in place while it is in use (replacing it by another is fine). A torch file is a pickle, which can
run code when it is opened; it is opened with torch's `weights_only`, and one that needs more than that is refused.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from streamdiff.errors import ConfigError
from streamdiff.models import weight_files
from streamdiff.models.headers import DAMAGED
from streamdiff.models.weight_files import ENDINGS, GGUF, INDEX, PICKLES, SAFETENSORS, USUAL_STEMS, fault_list, some

logger = logging.getLogger(__name__)
CONTAINERS = ("generator_ema", "generator", "model", "state_dict", "module")
"""Names of what holds the tensors in a file, the preferred first. Which one is right is a fact of the file that its
catalogue entry states; this order is for files without one."""
LORA_CONTAINERS = ("generator_lora", *CONTAINERS)
_ALSO_PREFIXES = ("model", "module")
_AUTOENCODER_PREFIXES = ("first_stage_model.", "vae.", "model.")
_PACKED = (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
"""Dtypes that are several numbers at once, or a scale of others."""
_SAY = "say which with --container NAME"


@dataclass
class Checkpoint:
    """The tensors of one container, under the names they are stored by.

    `entries` tell shape and dtype of each; asking reads no weights. `read` gives a tensor on the CPU, memory-mapped:
    not to be written to. Both raise ConfigError where the file that should hold it is missing or damaged. `names` are
    those that count. `path` and `container`, empty if the file has none, are for messages; `config` lies beside the
    weights, if there is one, and `metadata` is what a safetensors file's header says about it.
    """

    path: Path
    entries: Mapping[str, Tensor]
    read: Callable[[str], Tensor]
    names: tuple[str, ...]
    container: str = ""
    config: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.path} ({self.container})" if self.container else str(self.path)


def open_checkpoint(
    path: Path,
    container: str | None = None,
    *,
    usual: str | None = None,
    order: Sequence[str] = CONTAINERS,
    names: Sequence[str] = USUAL_STEMS,
) -> Checkpoint:
    """Open a checkpoint: a file (`.safetensors`, `.pt`, `.pth`, `.bin`, `.gguf`), the index of several
    (`.safetensors.index.json`), or a folder with one of these, possibly in `transformer`. A folder's `config.json`
    comes along.

    Args:
        container: the one to take from a file with containers. A file without any holds one set of tensors, and is
            taken as it is.
        usual: the one that a published file has, to take where `container` is None; without it the only known one that
            holds a transformer's blocks is taken, and a note says so.
        order: which container to take when `container` is None.
        names: stems of the usual file in a folder, which is taken before others.

    Raises:
        ConfigError: nothing there, several files that could be meant, a damaged file, a pickle that `weights_only`
            refuses, no such container, or several and none of them known.
    """
    in_folder = path.is_dir()
    path = weight_files.weights_file(path, names) if in_folder else path
    weight_files.check_file(path)
    way, metadata = list[str](), dict[str, str]()
    entries: Mapping[str, Tensor]
    read: Callable[[str], Tensor] | None = None
    wanted = container or usual
    if path.suffix in PICKLES:
        way, entries, found = _choose(path, unpickle(path), wanted, order, by_hand=container is not None)
        wanted = None if found else wanted
    elif path.suffix == SAFETENSORS:
        entries, metadata = _mapped(path)
    elif path.name.endswith(INDEX):
        entries = _Shards(path)
    elif path.suffix == GGUF:
        entries, read = _outlines(path)
    else:
        raise ConfigError(f"{path}: a checkpoint ends in {', '.join(ENDINGS)}")
    prefix, counting = _narrow(path, tuple(entries), wanted, order, by_hand=container is not None)
    config = path.parent / "config.json"
    own = weight_files.read_object(config) if in_folder and config.is_file() else None
    way += prefix
    read = read or entries.__getitem__
    return _scaled(Checkpoint(path, entries, read, tuple(counting), ".".join(way), own, metadata))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of an autoencoder's file, by name, without what a program that holds it put before the names, and
    without other parts of the model in the same file: it is so small that all of it is wanted.

    Raises:
        ConfigError: as `open_checkpoint`.
    """
    checkpoint, prefix = open_checkpoint(path), ""
    names: Iterable[str] = checkpoint.names
    for each in _AUTOENCODER_PREFIXES:
        if any(name.startswith(f"{each}decoder.") for name in checkpoint.entries):
            names, prefix = [name for name in checkpoint.entries if name.startswith(each)], each
            break
    return {name.removeprefix(prefix): checkpoint.read(name) for name in names}


# ---- safetensors ---------------------------------------------------------------------------------------------------


def _mapped(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file by name, memory-mapped, and its metadata."""
    try:
        # Not closed by hand: the mapping lives as long as a tensor of it.
        file: Any = safe_open(path, framework="pt", device="cpu")
        tensors, metadata = {name: file.get_tensor(name) for name in sorted(file.keys())}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file: {error}") from None
    for name, tensor in tensors.items():
        if tensor.dtype in _PACKED and not name.endswith("scale"):
            raise _foreign(path, f"{tensor.dtype}, as NVFP4 and MXFP files are", name)
    return tensors, metadata


class _Shards(Mapping[str, Tensor]):
    """The tensors of several safetensors files, by the index that says which tensor is in which. A file is opened when
    it is needed: a rank can do without those that hold nothing for it.

    Raises:
        ConfigError: the index is damaged, or leads out of its folder.
    """

    def __init__(self, index: Path) -> None:
        places = weight_files.read_object(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise ConfigError(f"{index}: weight_map must lead from tensors' names to files' names")
        for place in sorted(set(places.values())):
            if Path(place).name != place:
                raise ConfigError(f"{index}: {place!r} must be a file in the same folder")
        self._index, self._open = index, dict[Path, dict[str, Tensor]]()
        self._places = {name: index.parent / places[name] for name in sorted(places)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, name: str) -> Tensor:
        path = self._places[name]
        if path not in self._open:
            if not path.is_file():
                raise ConfigError(f"{path}: missing, but {self._index.name} says that it holds {name}")
            self._open[path], _ = _mapped(path)
        if name not in self._open[path]:
            raise ConfigError(f"{path}: has no tensor {name}, though its index says so")
        return self._open[path][name]


# ---- GGUF ------------------------------------------------------------------------------------------------------------

GGUF_INSTALL = "install it with: pip install 'streamdiff[gguf]'"
_FOLDED = "patch_embedding"
"""A convolution whose kernels have five axes, of which GGUF knows four: some programs leave it out, some fold two."""


def gguf_kinds() -> list[str]:
    """Names of the quant types that the installed package `gguf` dequantises, tried out on a block of zeros each."""
    import gguf

    kinds = []
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        with contextlib.suppress(NotImplementedError):
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
            kinds.append(str(kind.name))
    return kinds


def _outlines(path: Path) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """The tensors of a GGUF file by name, without memory, and what dequantises one of them to float32. Names and shapes
    are ComfyUI-GGUF's: the model's own.

    Raises:
        ConfigError: the package is missing, the file is damaged, or it has quant types that are not known.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"{path}: is a GGUF file, which takes the package gguf ({error}); {GGUF_INSTALL}") from None
    shapes = dict[str, tuple[int, ...]]()
    try:
        reader = gguf.GGUFReader(path)
        stored = {each.name: each for each in reader.tensors}
        for name, each in stored.items():
            whole = reader.get_field(f"comfy.gguf.orig_shape.{name}")  # of one that was stored in rows of 256
            shapes[name] = tuple(map(int, whole.contents() if whole else reversed(each.shape)))
            if prod(shapes[name]) != each.n_elements or min(shapes[name], default=1) < 1:
                raise ValueError(f"{name} has {each.n_elements} numbers, not {list(shapes[name])}")
    except Exception as error:  # of any kind, as the package uses a file before it looks whether it is whole
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: not a readable GGUF file, or cut off ({reason}); {DAMAGED}") from error
    if unknown := {each.tensor_type.name for each in stored.values()} - set(known := gguf_kinds()):
        raise ConfigError(f"{path}: quantised as {', '.join(sorted(unknown))}; read are {', '.join(known)}")
    for name in [name for name in shapes if name.endswith(f"{_FOLDED}.bias")]:
        weight = name.replace(".bias", ".weight")
        if weight not in shapes:
            raise ConfigError(
                f"{path}: {weight} was left out when it was quantised; fix_5d_tensors.py of ComfyUI-GGUF puts it back"
            )
        rows, folded = prod(shapes[name]), shapes[weight]
        if len(folded) == 4 and folded[0] % rows == 0:
            shapes[weight] = (rows, folded[0] // rows, *folded[1:])

    def read(name: str) -> Tensor:
        values = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        return torch.from_numpy(np.require(values, requirements="W")).reshape(shapes[name])

    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, read


# ---- weights in 8 bits with scales beside them -----------------------------------------------------------------------

_SCALE = re.compile(r"(.+\.)(?:scale_weight|weight_scale)")
_MARK = re.compile(r"(?:.+\.)?(?:scaled_fp8|comfy_quant|scale_input|input_scale|spiece_model)")
"""What is no weight: that a file is scaled, and how; scales of activations; a tokenizer."""
_FORMATS = {"float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "int8"}
_FOREIGN = re.compile(
    r".+\.(?:(weight_scale_2)|(absmax|quant_map|quant_state\..+|SCB)|(qweight|weight_packed)|(weight_s_(?:rel|channel)))"
)
_FOREIGN_KINDS = ("NVFP4", "bitsandbytes", "GPTQ, AWQ or their like", "W4A8")


def _scaled(found: Checkpoint) -> Checkpoint:
    """`found` with weights as they are meant: in 8 bits, they are multiplied by their scale, of the tensor or of each
    row, while they are read. Read names and what a file says of its format.

    Raises:
        ConfigError: a format with other scales, which is named; or weights whose scales are missing.
    """
    scales, names = dict[str, str](), list[str]()
    said = {key: text for key, text in found.metadata.items() if key == "_quantization_metadata"}
    for name in found.names:
        if match := _SCALE.fullmatch(name):
            scales[f"{match[1]}weight"] = name
        elif match := _FOREIGN.fullmatch(name):
            raise _foreign(found, _FOREIGN_KINDS[(match.lastindex or 1) - 1], name)
        elif name.endswith("comfy_quant"):
            said[name] = found.read(name).to(torch.uint8).numpy().tobytes().decode(errors="replace")
        elif not _MARK.fullmatch(name):
            names.append(name)
    for name, text in said.items():
        formats = set(re.findall(r'"format"\s*:\s*"(\w+)"', text))
        if not formats or not formats <= _FORMATS or re.search(r'"convrot"\s*:\s*true', text):
            raise _foreign(found, " or ".join(formats - _FORMATS) or text[:80], name)
    lost = [name for name in scales if name not in names]
    if lost or (not scales and any(name.endswith("scaled_fp8") for name in found.names)):
        raise ConfigError(f"{found}: 8-bit weights and their scales must both be there ({some(lost) or 'no scales'})")

    def read(name: str) -> Tensor:
        tensor = found.read(name)
        if name not in scales:
            return tensor
        return tensor.float() * found.read(scales[name]).float().reshape(-1, *[1] * (tensor.ndim - 1))

    if not scales:
        return replace(found, names=tuple(names))
    shown = dict(found.entries)
    for name, scale in scales.items():
        shape, rows = tuple(shown[scale].shape), tuple(shown[name].shape[:1])
        if prod(shape) != 1 and shape not in (rows, (*rows, 1)):
            raise _foreign(found, f"scales {list(shape)} for {list(shown[name].shape)}", scale)
        shown[name] = torch.empty(shown[name].shape, device="meta")
    return replace(found, entries=shown, read=read, names=tuple(names))


def _foreign(found: Checkpoint | Path, kind: str, name: str) -> ConfigError:
    return ConfigError(
        f"{found}: is quantised as {kind} ({name}), which is not read; take the file in bfloat16, or in fp8 with a "
        "scale for each tensor or row, and --quantize int8 or fp8 for memory"
    )


# ---- containers ----------------------------------------------------------------------------------------------------


def _choose(
    path: Path, tree: object, container: str | None, order: Sequence[str], *, by_hand: bool
) -> tuple[list[str], dict[str, Tensor], bool]:
    """Go down to the tensors. Returns the way there, the tensors, and whether `container`, or what is taken in its
    place, is on the way."""
    way: list[str] = []
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: holds a {type(tree).__name__} instead of tensors by name")
    while True:
        tensors = {str(key): value.detach() for key, value in tree.items() if isinstance(value, Tensor)}
        inner = {str(key): value for key, value in tree.items() if isinstance(value, Mapping) and _has_tensors(value)}
        wanted = container if container not in way else None
        if tensors and wanted not in inner:
            return way, tensors, container in way
        if wanted is not None and wanted not in inner and inner:
            full = [key for key in order if key in inner and _has_blocks(inner[key])]
            container = wanted = _in_place_of(path, wanted, full, sorted(inner), by_hand)
        key = next((key for key in (wanted, *order) if key in inner), None)
        if key is None:
            elsewhere = f" in any of {', '.join(order)}; there is {', '.join(sorted(inner))}; {_SAY}" if inner else ""
            raise ConfigError(f"{path}: no tensors by name{elsewhere}")
        way.append(key)
        tree = inner[key]


def _narrow(
    path: Path, everything: Sequence[str], container: str | None, order: Sequence[str], *, by_hand: bool
) -> tuple[list[str], Sequence[str]]:
    """In a flat file a container is the first part of names, as in `generator_ema.blocks.0...`. Returns what it is
    called, as a list of one or none, and the names that count. `model.` before all names is only a prefix."""
    inside = {key: [name for name in everything if name.startswith(f"{key}.")] for key in (container, *order) if key}
    full = [key for key, names in inside.items() if any("blocks." in name for name in names)]
    whole = bool(full) and len(inside[full[0]]) == len(everything)
    if not full or (whole and full[0] in _ALSO_PREFIXES):
        return [], everything
    taken = full[0]
    if container is not None and container not in full:
        taken = _in_place_of(path, container, full, full, by_hand)
    return [taken], inside[taken]


def _has_tensors(tree: Mapping[Any, object]) -> bool:
    return any(_has_tensors(v) if isinstance(v, Mapping) else isinstance(v, Tensor) for v in tree.values())


def _has_blocks(tree: Mapping[Any, object]) -> bool:
    """Whether there are a transformer's blocks below, under the names of containers or without."""
    return any(
        _has_blocks(value) if isinstance(value, Mapping) else "blocks." in str(key) for key, value in tree.items()
    )


def _in_place_of(path: Path, wanted: str, full: Sequence[str], there: Sequence[str], by_hand: bool) -> str:
    """The container to take where the usual one, `wanted`, is not there: the only one of `full`, which hold a
    transformer.

    Raises:
        ConfigError: it was asked for `by_hand`, or there is none, or several.
    """
    if by_hand or len(full) != 1:
        raise ConfigError(f"{path}: has no container {wanted!r}; there is {', '.join(there)}; {_SAY}")
    logger.warning("note: %s has no container %r; %r is taken, the only one with a transformer", path, wanted, full[0])
    return full[0]


def unpickle(path: Path) -> object:
    """What a torch file holds, its tensors mapped into memory.

    Raises:
        ConfigError: it cannot be read, or `weights_only` refuses it.
    """
    try:
        tree: object = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class|function)\s+([\w.]+\.[\w.]+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise ConfigError(
            f"{path}: holds more than tensors{what}. A pickle can run code when it is opened, so it is opened with "
            "weights_only=True, and torch refuses this one; take a safetensors file, or save the tensors alone"
        ) from None
    except Exception as error:  # of any kind, as torch uses a pickle before it looks whether it is whole
        if "_use_new_zipfile_serialization" in str(error):
            raise ConfigError(
                f"{path}: not a torch file, or one from before torch 1.6, which cannot be mapped into memory; load and "
                "save it again with torch.save, or take a safetensors file"
            ) from error
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")
        raise ConfigError(f"{path}: not a readable torch file: {reason}") from error
    return tree


def check_fit(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, torch.Size]) -> None:
    """Check that `found` has exactly the tensors `wanted`, in their shapes.

    Raises:
        ConfigError: lists how many are missing, unexpected and misshapen, the first few by name.
    """
    faults = fault_list(
        {
            "missing": [name for name in wanted if name not in found],
            "unexpected": [name for name in found if name not in wanted],
            "of another shape": [
                f"{name} {list(found[name].shape)} instead of {list(shape)}"
                for name, shape in wanted.items()
                if name in found and found[name].shape != shape
            ],
        }
    )
    if faults:
        raise ConfigError(f"{path}: of {len(wanted)} tensors expected, {len(found)} found: {faults}")


def load_module(
    module: nn.Module,
    path: Path,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    wanted: tuple[str, ...] = ("",),
) -> None:
    """Give a module on the meta device those of its `tensors` whose names begin with one of `wanted`, for inference.
    `path` is for messages. Mutates: module.

    Raises:
        ConfigError: lists tensors that are missing, unexpected or misshapen (`check_fit`); and those wanted that hold
            NaN or infinity, or are no floating-point numbers.
    """
    check_fit(path, tensors, {name: tensor.shape for name, tensor in module.state_dict().items()})
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(wanted)}
    moved = checked(path, found, device, dtype)
    module.load_state_dict(moved, strict=False, assign=True)
    module.eval().requires_grad_(False)


def checked(path: Path, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of the file at `path` as `dtype` on `device`.

    Raises:
        ConfigError: some hold NaN or infinity, are no floating-point numbers, or are matrices of zeros.
    """
    moved, bad, zero = {}, list[str](), list[str]()
    for name, tensor in tensors.items():
        moved[name] = tensor.to(device, dtype)
        if not (tensor.is_floating_point() and moved[name].isfinite().all()):
            bad.append(name)
        elif is_blank(tensor):
            zero.append(name)
    if bad:
        raise ConfigError(f"{path}: {len(bad)} tensors hold NaN, infinity or no floating-point numbers: {some(bad)}")
    if zero:
        raise ConfigError(blank_fault(path, zero))
    return moved


def is_blank(tensor: Tensor) -> bool:
    """Whether it is a matrix, or a convolution's kernels, of zeros alone, as no trained one is."""
    return tensor.ndim > 1 and not bool(tensor.to(torch.float32).any())


def blank_fault(what: object, names: Sequence[str]) -> str:
    """What to say of a file with matrices of zeros."""
    return (
        f"{what}: {len(names)} matrices are all zero ({some(names)}): not all of it was downloaded, only its place on "
        "the disk was kept; download it again"
    )


# ---- random weights ------------------------------------------------------------------------------------------------


def draw(module: nn.Module, wanted: tuple[str, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights for `module`, drawn on `device` where their names begin with one of `wanted`; the others as they are in
    it."""
    return {
        name: drawn(name, each.shape, device, dtype) if name.startswith(wanted) else each
        for name, each in module.state_dict().items()
    }


def drawn(name: str, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A random tensor in place of a checkpoint's: matrices and convolutions keep the scale of their input, norms are 1,
    biases 0."""
    tensor = torch.empty(shape, device=device, dtype=dtype)
    if name.endswith("bias"):
        return tensor.zero_()
    if len(shape) < 2 or name.endswith("gamma"):
        return tensor.fill_(1)
    fan_in = shape[-1] if name.endswith("scale_shift_table") else prod(shape[1:])
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return tensor.normal_(0.0, fan_in**-0.5, generator=generator)
