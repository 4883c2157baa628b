"""Infers a Wan transformer's configuration from the shapes of its tensors; a config file adds what these lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.checkpoint import Checkpoint
from streamdiff.models.transformer.tensor_names import Names

HEAD_DIM = 128
"""Channels per head of every published Wan model."""
PATCH = (1, 2, 2)
_QUERY, _PATCHES = "blocks.0.attn1.to_q.weight", "patch_embedding.weight"
_NUMBERS = (
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "text_dim",
    "freq_dim",
    "ffn_dim",
    "num_layers",
    "rope_max_seq_len",
)
_OPTIONAL = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")

Shape = Callable[[str], tuple[int, ...] | None]
"""The shape of the tensor that diffusers calls so, None if it is not there."""


def read_architecture(shape: Shape, blocks: int, *configs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of diffusers' `WanTransformer3DModel`. What `configs` say holds; only the rest is taken from shapes.

    Args:
        shape: looks up a tensor; it is asked only for those that `configs` leave open.
        blocks: how many there are.
        configs: of diffusers or of original Wan, whole or in parts, the first to be heard first. Keys beyond these
            arguments are ignored.

    Raises:
        ConfigError: a tensor that is needed is missing, the number of heads cannot be told, or a value in a config is
            of the wrong kind.
    """
    known: dict[str, Any] = {}
    for config in reversed(configs):
        known |= _checked(_from_original(config or {}))
    sizes = _Sizes(shape)
    patch = known.get("patch_size") or sizes.patch()
    image = "condition_embedder.image_embedder"
    found: dict[str, Callable[[], object]] = {
        "patch_size": lambda: patch,
        "in_channels": lambda: sizes.in_channels(prod(patch)),
        "out_channels": lambda: sizes.size("proj_out.weight", 0) // prod(patch),
        "text_dim": lambda: sizes.size("condition_embedder.text_embedder.linear_1.weight", 1),
        "freq_dim": lambda: sizes.size("condition_embedder.time_embedder.linear_1.weight", 1),
        "ffn_dim": lambda: sizes.size("blocks.0.ffn.net.0.proj.weight", 0),
        "num_layers": lambda: blocks,
        "cross_attn_norm": lambda: shape("blocks.0.norm2.weight") is not None,
        "image_dim": lambda: sizes.size_if_there(f"{image}.norm1.weight", 0),
        "added_kv_proj_dim": lambda: sizes.size_if_there("blocks.0.attn2.add_k_proj.weight", 1),
        "pos_embed_seq_len": lambda: sizes.size_if_there(f"{image}.pos_embed", 1),
    }
    values: dict[str, Any] = {key: known[key] for key in ("rope_max_seq_len", "eps") if key in known}
    values |= {key: known[key] if key in known else find() for key, find in found.items()}
    heads, head_dim = known.get("num_attention_heads"), known.get("attention_head_dim")
    if heads is None or head_dim is None:
        heads, head_dim = sizes.heads(heads, head_dim)
    return values | {"num_attention_heads": heads, "attention_head_dim": head_dim}


def stored_shape(checkpoint: Checkpoint, names: Names, name: str) -> tuple[int, ...] | None:
    """The `Shape` of what is stored in a checkpoint under these names."""
    if (source := names.sources.get(name)) is None:
        return None
    rows, *rest = checkpoint.entries[source.name].shape or (1,)
    return (rows // source.parts, *rest)


class _Sizes:
    """Sizes of single tensors, by diffusers' names."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def size(self, name: str, axis: int) -> int:
        if (found := self.shape(name)) is None or len(found) <= axis:
            raise ConfigError(f"the model's sizes cannot be told, as {name} is missing; say them in a model config")
        return found[axis]

    def size_if_there(self, name: str, axis: int) -> int | None:
        return None if self.shape(name) is None else self.size(name, axis)

    def patch(self) -> tuple[int, ...]:
        found = self.shape(_PATCHES)
        return found[2:] if found is not None and len(found) == 5 else PATCH

    def in_channels(self, patch: int) -> int:
        flat = len(self.shape(_PATCHES) or ()) == 2
        return self.size(_PATCHES, 1) // (patch if flat else 1)

    def heads(self, heads: int | None, head_dim: int | None) -> tuple[int, int]:
        """(heads, head_dim), from the one that is given, else from the usual number of channels per head."""
        width = self.size(_QUERY, 0)
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


def _from_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Original Wan's keys under diffusers' names; other keys as they are."""
    renamed = {"num_heads": "num_attention_heads", "in_dim": "in_channels", "out_dim": "out_channels"}
    result = {renamed.get(key, key): value for key, value in config.items()}
    width, heads = config.get("dim"), config.get("num_heads")
    if type(width) is int and type(heads) is int and heads > 0:
        result.setdefault("attention_head_dim", width // heads)
    return result


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    for key in (*_NUMBERS, *_OPTIONAL):
        value = config.get(key, 1)
        if not (type(value) is int and value > 0) and not (value is None and key in _OPTIONAL):
            raise ConfigError(f"model config: {key} is {value!r}, but must be a whole number above 0")
    patch = config.get("patch_size", PATCH)
    if not (isinstance(patch, list | tuple) and len(patch) == 3 and all(type(n) is int and n > 0 for n in patch)):
        raise ConfigError(f"model config: patch_size is {patch!r}, but must be three whole numbers above 0")
    eps = config.get("eps", 1e-6)
    if type(eps) not in (int, float) or not 0 < eps < 1:
        raise ConfigError(f"model config: eps is {eps!r}, but must be a number between 0 and 1")
    if type(config.get("cross_attn_norm", True)) is not bool:
        raise ConfigError(f"model config: cross_attn_norm is {config['cross_attn_norm']!r}, but must be true or false")
    if config.get("attention_head_dim", 2) % 2:
        raise ConfigError(f"model config: attention_head_dim is {config['attention_head_dim']}, but must be even")
    return {**config, "patch_size": tuple(patch)} if "patch_size" in config else config
