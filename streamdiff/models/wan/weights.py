"""Reads a Wan transformer's weights: the blocks that are wanted, and what goes with them. Nothing else is read.

The file is memory-mapped, and the module is built without memory (on the meta device), so a stage of a large model
never holds more than its own part, and never twice.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors import safe_open
from torch import Tensor

from streamdiff.errors import ConfigError

FILE = "diffusion_pytorch_model.safetensors"
_FIRST_ONLY = ("patch_embedding.", "condition_embedder.time_embedder.")
_LAST_ONLY = ("proj_out.", "scale_shift_table")
_BLOCK = "blocks."


def load_blocks(folder: Path, device: torch.device, blocks: tuple[int, int] | None = None) -> WanTransformer3DModel:
    """The transformer in a diffusers folder with blocks `blocks` (first, last exclusive; all when None), float32.

    With the first block come patch and time embedding, with the last one the output layer; the projections of text and
    modulation come always. What does not come stays on the meta device, and using it is an error.

    Raises:
        ConfigError: tensors that are missing or have another shape than the configuration says.
    """
    config = json.loads((folder / "config.json").read_text())
    count = config["num_layers"]
    first, last = blocks or (0, count)
    with torch.device("meta"):
        model: WanTransformer3DModel = WanTransformer3DModel.from_config({**config, "num_layers": last - first})
    left_out = (*(() if first == 0 else _FIRST_ONLY), *(() if last == count else _LAST_ONLY))
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items() if not name.startswith(left_out)}
    found: dict[str, Tensor] = {}
    with safe_open(folder / FILE, "pt", device=str(device)) as file:
        stored = set(file.keys())
        for name in wanted:
            if (source := _renumbered(name, first)) in stored:
                found[name] = file.get_tensor(source).float()
    _check(folder / FILE, wanted, found, first)
    model.load_state_dict(found, strict=False, assign=True)
    model.eval()
    return model


def _renumbered(name: str, shift: int) -> str:
    """The name of a tensor whose block has number `shift` more."""
    if not name.startswith(_BLOCK):
        return name
    number, rest = name.removeprefix(_BLOCK).split(".", 1)
    return f"{_BLOCK}{int(number) + shift}.{rest}"


def _check(path: Path, wanted: dict[str, torch.Size], found: dict[str, Tensor], first: int) -> None:
    missing = [_renumbered(name, first) for name in wanted if name not in found]
    if missing:
        raise ConfigError(f"{path}: {len(missing)} tensors are missing, for example {', '.join(missing[:3])}")
    for name, tensor in found.items():
        if tensor.shape != wanted[name]:
            raise ConfigError(
                f"{path}: {_renumbered(name, first)} has shape {list(tensor.shape)}, but config.json asks for "
                f"{list(wanted[name])}"
            )
