"""Models of real size without a file: weights are drawn where they are used. For measuring speed and memory before
anything is downloaded; the picture is noise.

`random:wan2.1-1.3b` is a transformer of that architecture (any of the catalogue's but the embedded model's) with
LongLive's stream: chunks of 3 latent frames, window 12, sink 3; in 4, 2 or 1 steps. `random:wan2.1` is Wan's
autoencoder, `random:taew2_1` the small one. They go through the loaders that files go through. A tensor's values depend
on its name and on the kind of device alone, so ranks that hold other blocks hold parts of the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder import wan_weights
from streamdiff.models.autoencoder.stepped_decoder import VideoDecoder
from streamdiff.models.autoencoder.taehv import TAEHV, Config
from streamdiff.models.autoencoder.taehv_codec import TaehvDecoder, from_tensors
from streamdiff.models.autoencoder.wan import WanDecoder
from streamdiff.models.catalogue import entries
from streamdiff.models.catalogue.entries import RANDOM
from streamdiff.models.checkpoint.checkpoint import Checkpoint
from streamdiff.models.checkpoint.tensor_store import Entry as Stored
from streamdiff.models.interfaces import Reading

WAN_VAE, SMALL_VAE = f"{RANDOM}wan2.1", f"{RANDOM}taew2_1"
_CPU = torch.device("cpu")


def transformer(name: str, device: torch.device = _CPU, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """The weights of the transformer called `name`, drawn on `device`, each when it is asked for.

    Raises:
        ConfigError: no such architecture; known ones are told.
    """
    config = entries.transformer_arguments(entries.find(name))
    with torch.device("meta"):
        shapes = WanTransformer3DModel.from_config(config).state_dict()
    store = Drawn({key: tuple(tensor.shape) for key, tensor in shapes.items()}, device, dtype)
    return Checkpoint(Path(name), store, config=config)


def decoder(name: str, device: torch.device, dtype: torch.dtype) -> VideoDecoder:
    """The decoder half of `random:wan2.1` or `random:taew2_1`.

    Raises:
        ConfigError: another name.
    """
    if name not in (WAN_VAE, SMALL_VAE):
        raise ConfigError(f"there is no autoencoder {name}; it can be {WAN_VAE} or {SMALL_VAE}")
    with torch.device("meta"):
        module = TAEHV(Config()) if name == SMALL_VAE else AutoencoderKLWan.from_config({})
    shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    drawn = Drawn(shapes, device, dtype)
    if name == SMALL_VAE:
        tensors = {key: drawn.read(key) for key in shapes}
        return TaehvDecoder(from_tensors(Path(name), tensors, "normalised", device, dtype))
    # Of the encoder nobody reads more than the shapes.
    encoder = {key for key in shapes if key.startswith(("encoder.", "quant_conv."))}
    tensors = {key: torch.empty(shapes[key], device="meta") if key in encoder else drawn.read(key) for key in shapes}
    return WanDecoder(wan_weights.load(Path(name), "decoder", device, dtype, tensors))


class Drawn:
    """A `Store` (models/checkpoint/tensor_store.py) whose tensors are drawn: matrices and convolutions so that what
    comes out is as large as what went in, norms are 1, biases 0."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> None:
        self._shapes, self._device, self._dtype = shapes, device, dtype

    def names(self) -> Sequence[str]:
        return tuple(self._shapes)

    def entry(self, name: str) -> Stored:
        return Stored(self._shapes[name], self._dtype)

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype)
        if name.endswith("bias"):
            return tensor.zero_()
        if len(shape) < 2 or name.endswith("gamma"):
            return tensor.fill_(1)
        fan_in = shape[-1] if name.endswith("scale_shift_table") else prod(shape[1:])
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return tensor.normal_(0.0, fan_in**-0.5, generator=generator)

    def metadata(self) -> dict[str, str]:
        return {}


class DrawnText:
    """A `TextEncoder` (models/interfaces.py) without an encoder: every text has embeddings of its own, drawn."""

    examples: tuple[str, ...] = ("anything: weights are random, and the picture is noise",)
    vocabulary: str = "Any words. The weights are random, so the picture is noise; only speed and memory are real."
    slow: bool = False

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._shape, self._device = shape, device

    def read(self, prompt: str, previous: str | None) -> Reading:
        return Reading(prompt, "The weights are random: the picture is noise, only speed and memory are real.")

    def encode(self, text: str) -> Tensor:
        """Embeddings `[T, text_dim]`, float32, on the device."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(text.encode()))
        return torch.randn(self._shape, generator=generator, device=self._device)
