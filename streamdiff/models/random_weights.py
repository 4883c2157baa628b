"""Models of real size without a file: weights are drawn where they are used. For measuring speed and memory before
anything is downloaded; the picture is noise.

`random:wan2.1-1.3b` is a transformer of that architecture (any of the catalogue's but the embedded model's) with
LongLive's stream: chunks of 3 latent frames, window 12, sink 3; in 4, 2 or 1 steps. `random:wan2.1` is Wan's
autoencoder, `random:taew2_1` the small one. They go through the loaders that files go through. A tensor's values depend
on its name and on the kind of device alone, so ranks that hold other blocks hold parts of the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from streamdiff.models.checkpoint.checkpoint import Checkpoint
from streamdiff.models.interfaces import ParsedPrompt


def transformer(name: str, architecture: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """The weights of the transformer called `name` of this architecture (arguments of diffusers'
    `WanTransformer3DModel`), drawn on `device`, each when it is asked for."""
    with torch.device("meta"):
        module = WanTransformer3DModel.from_config(architecture)
    entries = {key: each.to(dtype) for key, each in module.state_dict().items()}

    def read(key: str) -> Tensor:
        return _drawn(key, entries[key].shape, device, dtype)

    return Checkpoint(Path(name), entries, read, tuple(entries), config=architecture)


def draw(module: nn.Module, wanted: tuple[str, ...], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights for `module`, drawn on `device` where their names begin with one of `wanted`; the others as they are in
    it."""
    return {
        name: _drawn(name, each.shape, device, dtype) if name.startswith(wanted) else each
        for name, each in module.state_dict().items()
    }


def _drawn(name: str, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
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


class RandomText:
    """A `TextEncoder` (models/interfaces.py) without an encoder: every text has embeddings of its own, drawn."""

    examples: tuple[str, ...] = ("anything: weights are random, and the picture is noise",)
    suggestions: tuple[tuple[str, ...], ...] = ()
    vocabulary: str = "Any words. The weights are random, so the picture is noise; only speed and memory are real."
    slow: bool = False

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._shape, self._device = shape, device

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        return ParsedPrompt(prompt, "The weights are random: the picture is noise, only speed and memory are real.")

    def encode(self, text: str) -> Tensor:
        """Embeddings `[T, text_dim]`, float32, on the device."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(text.encode()))
        return torch.randn(self._shape, generator=generator, device=self._device)
