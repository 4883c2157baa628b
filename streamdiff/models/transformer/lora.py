"""LoRA files: low-rank changes that are added to weights while these are read, W + scale * B @ A.

Known are PEFT's names (`base_model.model.blocks.0.self_attn.q.lora_A.weight`, with or without an adapter's name), those
of diffusers (`transformer.blocks.0.attn1.to_q.lora_A.weight`), and `lora_down`/`lora_up` in place of `lora_A`/`lora_B`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.checkpoint import LORA_CONTAINERS, Checkpoint, open_checkpoint
from streamdiff.models.checkpoint.json_file import read_object, some
from streamdiff.models.transformer.tensor_names import TensorLocation, bare, recognise, translate

_FACTOR = re.compile(r"(.+)\.(?:lora_(A|down)|lora_(B|up))(?:\.\w+)??\.weight")
_ALPHA = ".alpha"
_PEFT = "adapter_model"


@dataclass(frozen=True)
class Lora:
    """A LoRA file (or PEFT's folder) and how strongly it counts; 1 is as it was trained."""

    path: Path
    scale: float = 1.0


def parse_lora(text: str) -> Lora:
    """`FILE` or `FILE:SCALE`; the scale is 1 where it is left out, and may be negative.

    Raises:
        ConfigError: no file is named, or the scale is not a finite number.
    """
    name, colon, number = text.rpartition(":")
    if not colon or Path(text).exists():
        name, number = text, "1"
    try:
        scale = float(number)
    except ValueError:
        scale = math.nan
    if not name or not math.isfinite(scale):
        raise ConfigError(f"--lora is {text!r}; it must be FILE or FILE:SCALE with a finite number as SCALE")
    return Lora(Path(name), scale)


@dataclass
class _Pair:
    """Stored names of the two factors of one change, and of its alpha."""

    down: str = ""
    up: str = ""
    alpha: str = ""

    @property
    def any(self) -> str:
        """One of the names, for messages."""
        return self.down or self.up or self.alpha


@dataclass(frozen=True)
class Adapter:
    """An opened LoRA file, fitted to a model. `changes` are by diffusers' names of the weights: each is
    the run of rows that a location tells, of the product of a pair."""

    checkpoint: Checkpoint
    scale: float
    changes: Mapping[str, tuple[_Pair, TensorLocation]]
    alpha: float | None
    rank_stabilised: bool

    def change(self, name: str, device: torch.device) -> Tensor | None:
        """The adapter's addend for the weight `name`, float32 `[rows, columns]`; None if it has none.

        Raises:
            ConfigError: the change is not finite.
        """
        if name not in self.changes:
            return None
        pair, (_, part, parts) = self.changes[name]
        down, up = (
            self.checkpoint.read(factor).to(device, torch.float32).flatten(1) for factor in (pair.down, pair.up)
        )
        rank = down.shape[0]
        alpha = float(self.checkpoint.read(pair.alpha)) if pair.alpha else self.alpha
        strength = 1.0 if alpha is None else alpha / (math.sqrt(rank) if self.rank_stabilised else rank)
        result = up.chunk(parts)[part] @ down * (self.scale * strength)
        if not bool(result.isfinite().all()):
            raise ConfigError(f"{self.checkpoint}: the change of {name} is not finite ({pair.down}, {pair.up})")
        return result


def open_lora(lora: Lora, shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    """Open a LoRA and check that it fits; reads no weights.

    Args:
        shapes: of all the model's tensors, by diffusers' names.

    Raises:
        ConfigError: not a LoRA, names that match nothing in the model, half a pair, factors that do not fit, or a
            variant of LoRA that is not plain.
    """
    checkpoint = open_checkpoint(lora.path, order=LORA_CONTAINERS, names=(_PEFT, "pytorch_lora_weights"))
    pairs, strange, twice = _pairs(checkpoint.names)
    layout = recognise(f"{module}.weight" for module in pairs)
    if layout is None:
        raise ConfigError(
            f"{checkpoint}: not a LoRA of a Wan transformer; expected names such as blocks.0.self_attn.q.lora_A.weight "
            f"or transformer.blocks.0.attn1.to_q.lora_A.weight, found {some(checkpoint.names)}"
        )
    names = translate((f"{module}.weight" for module in pairs), layout)
    problems = []
    lost = [*names.unmatched, *(source.name for target, source in names.sources.items() if target not in shapes)]
    if nothing := [*strange, *(pairs[name.removesuffix(".weight")].any for name in lost)]:
        problems.append(f"names that match nothing in the model ({len(nothing)}): {some(nothing)}")
    if twice:
        problems.append(f"names of a second adapter ({len(twice)}): {some(twice)}; a file must hold one")
    if halves := [pair.any for pair in pairs.values() if not (pair.down and pair.up)]:
        problems.append(f"factors without their other half ({len(halves)}): {some(halves)}")
    changes = {target: (pairs[source.name.removesuffix(".weight")], source) for target, source in names.sources.items()}
    if not problems:
        problems += _misfits(checkpoint, changes, shapes)
    if problems:
        raise ConfigError(f"{checkpoint}: {'; '.join(problems)}. Nothing was loaded")
    alpha, stabilised = _settings(checkpoint)
    return Adapter(checkpoint, lora.scale, changes, alpha, stabilised)


def _pairs(stored: tuple[str, ...]) -> tuple[dict[str, _Pair], list[str], list[str]]:
    """Factors by the (bare) name of the module they change, names that are no factors, and factors that come again."""
    pairs: dict[str, _Pair] = {}
    strange, twice = [], []
    for name in stored:
        plain = bare(name)
        if match := _FACTOR.fullmatch(plain):
            pair, half = pairs.setdefault(match[1], _Pair()), "down" if match[2] else "up"
            if getattr(pair, half):
                twice.append(name)
            else:
                setattr(pair, half, name)
        elif plain.endswith(_ALPHA):
            pairs.setdefault(plain.removesuffix(_ALPHA), _Pair()).alpha = name
        else:
            strange.append(name)
    return pairs, strange, twice


def _misfits(
    checkpoint: Checkpoint,
    changes: Mapping[str, tuple[_Pair, TensorLocation]],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:
    found = []
    for target, (pair, source) in changes.items():
        down, up = (checkpoint.entries[name].shape for name in (pair.down, pair.up))
        rows, columns = shapes[target][0] * source.parts, prod(shapes[target][1:])
        fits = len(down) > 1 and len(up) > 1 and down[0] == prod(up[1:]) > 0
        if pair.alpha and prod(checkpoint.entries[pair.alpha].shape) != 1:
            found.append(f"{pair.alpha} is not a single number")
        if not fits or (up[0], prod(down[1:])) != (rows, columns):
            found.append(f"{target} is {rows} x {columns}, but {list(up)} x {list(down)} is to be added")
    return [f"changes that do not fit ({len(found)}): {'; '.join(found[:3])}"] if found else []


def _settings(checkpoint: Checkpoint) -> tuple[float | None, bool]:
    """alpha for all pairs (None: equal to the rank) and whether it counts by the root of the rank: from the file's own
    header, as diffusers writes it, or from PEFT's configuration beside it."""
    beside = checkpoint.path.parent / "adapter_config.json"
    settings: dict[str, Any] = {}
    if text := checkpoint.metadata.get("lora_adapter_metadata"):
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{checkpoint}: its lora_adapter_metadata is not valid JSON: {error}") from None
        settings = {bare(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}
    elif checkpoint.path.stem == _PEFT and beside.is_file():
        settings = read_object(beside)
    for key in ("alpha_pattern", "use_dora"):
        if settings.get(key):
            raise ConfigError(
                f"{checkpoint}: {key} is {settings[key]!r}, which is not supported; merge it by PEFT first"
            )
    alpha = settings.get("lora_alpha")
    if alpha is not None and (type(alpha) not in (int, float) or not math.isfinite(alpha)):
        raise ConfigError(f"{checkpoint}: lora_alpha is {alpha!r}, but must be a number")
    return alpha, bool(settings.get("use_rslora"))
