"""Tensor names of Wan transformers: every spelling met in published files (`tensor_names.yaml`), to that of diffusers.
Text only, no torch.

A name is looked up whole, block by block. Replacing parts of names goes wrong: `norm3` becomes `norm2`, `cross_attn.k`
begins `cross_attn.k_img`, and `modulation` ends `head.modulation`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class NameLayout(Enum):
    """Whose names a file uses; the value is for messages."""

    WAN = "original Wan"
    DIFFUSERS = "diffusers"


# Left by wrappers of a module (FSDP, activation checkpoints, torch.compile): dropped wherever they stand.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
# What the transformer was called in the program that saved it: dropped from the front, as often as it comes.
_OWNERS = frozenset(
    {"model", "net", "module", "generator", "generator_ema", "diffusion_model", "transformer", "base_model"}
)

_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# Tables that anybody computes again, and norms that are stored and not used: one of diffusers', those of actions.
_SKIPPED = re.compile(
    r"(^|\.)freqs(_cos|_sin)?$|(^|\.)norm_added_q\.weight$|\.action_model\.(img|key)_attn_[qk]_norm\.weight$"
)
_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def _tables(modules: Mapping[str, str]) -> dict[NameLayout, dict[str, str]]:
    """diffusers' name of each tensor, by the name in a layout."""
    spelled = {original + leaf: name + leaf for original, name in modules.items() for leaf in _leaves(name)}
    return {NameLayout.WAN: spelled, NameLayout.DIFFUSERS: {name: name for name in spelled.values()}}


def _leaves(name: str) -> tuple[str, ...]:
    """Endings of a module's tensors; some names are tensors themselves."""
    if name.endswith(("scale_shift_table", "pos_embed")):
        return ("",)
    return (".weight",) if name.endswith(("norm_q", "norm_k", "norm_added_k")) else (".weight", ".bias")


_TOP_NAMES, _BLOCK_NAMES = _tables(_TABLE["top"]), _tables(_TABLE["block"])
_TOP_ORIGINAL = {new: old for old, new in _TOP_NAMES[NameLayout.WAN].items()}
_BLOCK_ORIGINAL = {new: old for old, new in _BLOCK_NAMES[NameLayout.WAN].items()}


_MODULES = [part for names in (_TABLE["top"], _TABLE["block"]) for pair in names.items() for part in pair]
_MODULES += [name for fused in _TABLE["fused"].values() for name in fused]
_JOINED = {name.replace(".", "_"): name for name in _MODULES}
_IN_LORA = re.compile(r"(?:lora_(?:unet|transformer)[._]+)?(.+?)(\.(?:lora_(?:A|B|down|up)\b.*|alpha|diff(?:_[bm])?))")
_JOINED_BLOCK = re.compile(r"(?:diffusion_model_|transformer_)?blocks_(\d+)(?:_(.+))?")


class TensorLocation(NamedTuple):
    """Where a tensor is stored: in `name`, of whose rows it is the `part`-th of `parts` equal runs."""

    name: str
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Names:
    """Mapping of a file's tensor names. `sources` leads from diffusers' names to stored ones; `unmatched` are stored
    names without a meaning, and `clashes` (diffusers' name, stored name, other stored name) tensors stored twice."""

    layout: NameLayout
    sources: dict[str, TensorLocation] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    clashes: list[tuple[str, str, str]] = field(default_factory=list)

    def spell(self, name: str) -> str:
        """diffusers' name `name` as this file's layout would write it; one that the layout has not stays as it is."""
        if self.layout is NameLayout.DIFFUSERS:
            return name
        if match := _IN_BLOCK.fullmatch(name):
            return f"blocks.{match[1]}.{_BLOCK_ORIGINAL.get(match[2], match[2])}"
        return _TOP_ORIGINAL.get(name, name)


def bare(name: str) -> str:
    """`name` without wrappers anywhere and owners in front: `model.net._orig_mod.blocks.0.x` is `blocks.0.x`."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] in _OWNERS:
        del parts[0]
    return ".".join(parts)


def dotted(name: str) -> str:
    """The bare name of a LoRA's tensor, with the dots of its module, which kohya's programs write as underscores, all
    or some of them: `lora_unet_blocks_0_self_attn_q.alpha` is `blocks.0.self_attn.q.alpha`."""
    match = _IN_LORA.fullmatch(name := bare(name))
    if match is None:
        return name
    block = _JOINED_BLOCK.fullmatch(joined := re.sub(r"[._]+", "_", match[1]))
    if block is None:
        module = _JOINED.get(joined)
    elif block[2] is None:
        module = f"blocks.{int(block[1])}"
    else:
        inside = _JOINED.get(block[2])
        module = inside and f"blocks.{int(block[1])}.{inside}"
    return name if module is None else module + match[2]


def block_count(names: Iterable[str]) -> int:
    """How many blocks (bare) names speak of: one more than the highest number."""
    return max((int(match[1]) + 1 for name in names if (match := _IN_BLOCK.fullmatch(name))), default=0)


def recognise(stored: Iterable[str]) -> NameLayout | None:
    """The layout that more of the names fit; None where none fits, as in a file of something else."""
    found: Counter[NameLayout] = Counter()
    for name in map(bare, stored):
        # `patch_embedding` is called the same in both, and in other models too: it tells nothing.
        found.update(
            layout for layout in NameLayout if not name.startswith("patch_embedding") and _targets(name, layout)
        )
    return max(found, key=lambda layout: found[layout]) if found else None


def translate(stored: Iterable[str], layout: NameLayout) -> Names:
    """Map stored names to diffusers' names. Names of the other layout are unmatched."""
    names = Names(layout)
    for name in stored:
        plain = bare(name)
        if _SKIPPED.search(plain):
            continue
        targets = _targets(plain, layout)
        if not targets:
            names.unmatched.append(name)
        for part, target in enumerate(targets):
            if target in names.sources:
                names.clashes.append((target, names.sources[target].name, name))
            names.sources[target] = TensorLocation(name, part, len(targets))
    return names


def _targets(plain: str, layout: NameLayout) -> list[str]:
    """diffusers' names for a bare name: none if it is unknown, several for a fused tensor."""
    match = _IN_BLOCK.fullmatch(plain)
    if match is None:
        found = _TOP_NAMES[layout].get(plain)
        return [found] if found else []
    block, rest = f"blocks.{int(match[1])}.", match[2]
    if found := _BLOCK_NAMES[layout].get(rest):
        return [block + found]
    module, dot, leaf = rest.rpartition(".")
    inside = _TABLE["fused"][layout.value].get(module, ()) if dot + leaf in (".weight", ".bias") else ()
    return [f"{block}{target}.{leaf}" for target in inside]
