"""Loads the parts of a model that `models.resolve` has found, and reads its facts."""

from __future__ import annotations

import hashlib
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from streamdiff.device import pick_device
from streamdiff.errors import ConfigError
from streamdiff.models import random_weights
from streamdiff.models.autoencoder import autoencoder
from streamdiff.models.autoencoder.reencoder import FirstFrameReencoder
from streamdiff.models.autoencoder.stepped_decoder import VideoDecoder
from streamdiff.models.catalogue import entries
from streamdiff.models.interfaces import TextEncoder
from streamdiff.models.resolve import ResolvedModel
from streamdiff.models.spec import ModelSpec
from streamdiff.models.text_encoder import wan_files
from streamdiff.models.text_encoder.embedding_cache import CachedText, EmbeddingCache
from streamdiff.models.text_encoder.embedding_store import EmbeddingFolder
from streamdiff.models.text_encoder.wan import WanText
from streamdiff.models.tiny import model as tiny
from streamdiff.models.transformer import attention_backend
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import SPATIAL, load_transformer, read_config

_FINGERPRINT_BYTES = 2**20  # of each file
_TEXT_SHARE = 3  # the rest of a GPU's free memory is for sessions
_CACHE_BYTES = 256 * 2**20  # some sixty prompts of 512 x 4096 in bfloat16


class ModelLoader:
    """Loads the parts of one model on `device`, each when it is asked for; `size` is `WIDTHxHEIGHT` of the pictures, by
    default the model's own."""

    def __init__(self, model: ResolvedModel, device: torch.device, size: str | None = None) -> None:
        self.model, self.device = model, device
        self._size = None if size is None else parse_size(size)

    # ---- facts: headers and configurations are read, no weights ----------------------------------------------------

    @cached_property
    def architecture(self) -> dict[str, Any]:
        """Arguments of diffusers' `WanTransformer3DModel`.

        Raises:
            ConfigError: no Wan transformer, or files that cannot be read.
        """
        if self.model.weights is None:
            return entries.transformer_arguments(entries.find(self.model.name))
        return read_config(self.model.weights, self.model.container, self.model.architecture)

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's own facts; of a checkpoint without any, what is usual.

        Raises:
            ConfigError: as `architecture`; or a size, where the model has one of its own.
        """
        if not self.model.embedded:
            return entries.make_spec(self.model.name, self.model.entry, self.architecture, self._size)
        assert self.model.folder is not None
        if self._size is not None:
            raise ConfigError(f"the size of {self.model.name} is fixed; leave --size out")
        return tiny.read_spec(self.model.folder, self.model.name)

    def digest(self) -> str:
        """Of all configuration files, and of the weights' names, sizes and beginnings."""
        found = hashlib.sha256()
        for path in sorted(self._files()):
            found.update(path.name.encode() + str(path.stat().st_size).encode())
            with path.open("rb") as file:
                found.update(file.read(_FINGERPRINT_BYTES))
        return found.hexdigest()[:16]

    def _files(self) -> set[Path]:
        """Every file that a part of the model is read from."""
        model = self.model
        vae = None if entries.is_random(model.vae) or model.vae is None else autoencoder.locate(model.vae)
        roots = [model.folder, model.weights, model.text_encoder, vae, *(lora.path for lora in model.loras)]
        found: set[Path] = set()
        for root in roots:
            if root is not None:
                found |= {path for path in root.rglob("*") if path.is_file()} if root.is_dir() else {root}
        return found

    # ---- parts -----------------------------------------------------------------------------------------------------

    def transformer(
        self,
        dtype: torch.dtype,
        blocks: tuple[int, int] | None = None,
        kernel: str = "auto",
        quantize: str = "none",
    ) -> WanDenoiser:
        """Blocks `blocks` (first, last exclusive; all when None) of the transformer, and what goes with them; `kernel`
        is the attention's (`models.transformer.attention_backend`), which is tried out first; `quantize` is that of the
        blocks' linear layers (`models.transformer.quantization`).

        Raises:
            ConfigError: weights that do not fit, a model that is told more than latents and text, a kernel that cannot
                run here or is wrong, or weights that cannot be quantised so here.
        """
        model, device, sizes = self.model, self.device, self.architecture
        attention_backend.probe(kernel, device, dtype, sizes["num_attention_heads"], sizes["attention_head_dim"])
        weights = load_transformer(
            model.weights or random_weights.transformer(model.name, device, dtype),
            device=device,
            dtype=dtype,
            blocks=blocks,
            container=model.container,
            config=model.architecture,
            loras=model.loras,
            quantize=quantize,
        )
        found: Any = weights.config
        if found.image_dim is not None or found.added_kv_proj_dim is not None:
            raise ConfigError(
                f"{model.weights}: this is an image-to-video model, which is not supported; use text to video"
            )
        denoiser = WanDenoiser(weights)
        if denoiser.extra_channels and not model.embedded:
            raise ConfigError(
                f"{model.weights} takes {denoiser.extra_channels} channels beside the latents', which nothing "
                "gives it; only text to video is supported"
            )
        denoiser.attention = kernel
        return denoiser.fuse()

    def text_encoder(self, keep: bool = True, where: str | None = None, on_disk: bool = True) -> TextEncoder:
        """The text encoder, which puts embeddings on `device`. That of a large model runs on the device that `where`
        says; else on `device` where it takes a third of the free memory or less, and on the CPU where it takes more.
        Its weights come with the first text; without `keep` they go after every text. `on_disk`: embeddings of a large
        one are kept in the user's cache folder too (`EmbeddingFolder`).

        Raises:
            ConfigError: there is none, or `where` is no device that there is, or the model is a small one.
        """
        name, device = self.model.name, self.device
        if self.model.embedded:
            if where is not None:
                raise ConfigError(f"the text encoder of {name} is small and runs beside it; leave --text-device out")
            assert self.model.folder is not None
            return tiny.load_text(self.model.folder, device)
        length, width = self.spec.text_shape
        path = self.model.fetch_text_encoder()
        if path is None and entries.is_random(name):
            return random_weights.DrawnText((length, width), device)
        if path is None:
            raise ConfigError(
                f"{name} comes without a text encoder; give a folder with encoder and tokenizer, in diffusers' or "
                "original Wan's layout, as --text-encoder, or embeddings as --prompt-embeds"
            )
        home = _text_device(path, device) if where is None else pick_device(where, "--text-device")
        encoder = WanText(path, length=length, width=width, device=home, output=device, keep=keep)
        return CachedText(
            encoder,
            EmbeddingCache(_CACHE_BYTES),
            identity=encoder.identity,
            revision=encoder.revision,
            length=length,
            kept=EmbeddingFolder() if on_disk else None,
            device=device,
        )

    def decoder(self, dtype: torch.dtype = torch.float32) -> VideoDecoder:
        """What turns latents into pictures, in `dtype` unless it is the embedded model's.

        Raises:
            ConfigError: there is none.
        """
        if self.model.embedded:
            dtype = torch.float32  # a small one gains nothing from less
        vae = self.model.fetch_autoencoder()
        if vae is None:
            raise ConfigError(f"{self.model.name} comes without an autoencoder; give --vae PATH, or make latents only")
        if entries.is_random(vae):
            return random_weights.decoder(vae, self.device, dtype)
        return autoencoder.load_decoder(vae, self.device, dtype)

    def reencoder(self, dtype: torch.dtype = torch.float32) -> FirstFrameReencoder:
        """What shows the clean pass the past, for a model whose past is seen again from its pictures
        (`ModelSpec.context_pictures`).

        Raises:
            ConfigError: there is no autoencoder with both halves.
        """
        vae = self.model.fetch_autoencoder()
        if vae is None or entries.is_random(vae):
            raise ConfigError(
                f"the past of {self.model.name} is seen again from its pictures, which takes an autoencoder with both "
                f"halves, but there is {'none' if vae is None else vae}; give one as --vae"
            )
        halves = autoencoder.load_decoder(vae, self.device, dtype), autoencoder.load_encoder(vae, self.device, dtype)
        return FirstFrameReencoder(*halves)


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of `WIDTHxHEIGHT`, which a latent and a patch have to fit into.

    Raises:
        ConfigError: anything else.
    """
    match, unit = re.fullmatch(r"(\d+)x(\d+)", text), 2 * SPATIAL
    if match is None or any(int(side) % unit or int(side) < unit for side in match.groups()):
        raise ConfigError(f"--size is {text!r}; it must be WIDTHxHEIGHT, multiples of {unit}, such as 832x480")
    return int(match[1]), int(match[2])


def _text_device(path: Path, device: torch.device) -> torch.device:
    """Where a large text encoder runs beside a transformer on `device`, whose weights are there already."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if wan_files.find(path).values() * torch.bfloat16.itemsize <= free // _TEXT_SHARE:
            return device
    return torch.device("cpu")


def awaited_bytes(text: TextEncoder, device: torch.device) -> int:
    """What a text encoder's weights will take on `device` once the first text loads them."""
    encoder = text.encoder if isinstance(text, CachedText) else text
    return encoder.awaited_bytes(device) if isinstance(encoder, WanText) else 0
