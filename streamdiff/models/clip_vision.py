"""CLIP's features of a start picture, for models that take these in a prompt's place: the vision tower of open-clip's
ViT-H/14, by transformers' modules, from the file of original Wan
(`models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth`).
"""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers.models.clip.configuration_clip import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPVisionModel

from streamdiff.errors import ConfigError, RequestError
from streamdiff.models import hub
from streamdiff.models.catalogue import Files
from streamdiff.models.checkpoint import Checkpoint, load_module, open_checkpoint
from streamdiff.models.spec import ParsedPrompt, TextEncoder

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HEAD_DIM = 80
_TOP = {
    "cls_embedding": "embeddings.class_embedding", "patch_embedding.weight": "embeddings.patch_embedding.weight",
    "pos_embedding": "embeddings.position_embedding.weight", "pre_norm": "pre_layrnorm", "post_norm": "post_layernorm",
}  # fmt: skip
_LAYER = {"norm1": "layer_norm1", "norm2": "layer_norm2", "attn.proj": "self_attn.out_proj", "mlp.0": "mlp.fc1",
          "mlp.2": "mlp.fc2"}  # fmt: skip
_VISUAL, _LAYERS = "visual.", "transformer."
_NEEDED = "pos_embedding", "patch_embedding.weight", "cls_embedding", "transformer.1.mlp.0.weight"


class ClipVision(TextEncoder):
    """In a text encoder's place. Words do nothing; the tower runs on the CPU, which takes a few seconds a picture, and
    its weights come with the first one. `image_features` may be called from any thread."""

    examples = ("a picture and keys steer this world; words do nothing",)
    vocabulary = "No words: it begins with a picture, and keys steer it."

    def __init__(self, place: Path | Files, shape: tuple[int, int], device: torch.device) -> None:
        self._place, self._shape, self._device, self._loading = place, shape, device, threading.Lock()

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        if previous is not None:
            raise RequestError("prompt", "this model reads no words: steer it by its keys, or reset it with a picture")
        return ParsedPrompt(prompt, "This model reads no words: its picture and its keys steer it.")

    def encode(self, text: str) -> Tensor:
        """What stands for a picture that is not there: zeros `[T, D]`."""
        return torch.zeros(self._shape, device=self._device)

    @cached_property
    def _tower(self) -> CLIPVisionModel:
        path = self._place if isinstance(self._place, Path) else hub.fetch(self._place)[0]
        check_tower(path, self._shape)
        return load_tower(path)

    @torch.inference_mode()
    def image_features(self, picture: NDArray[np.uint8]) -> Tensor:
        """Features `[T, D]` of an RGB picture `[H, W, 3]`, on the device. ConfigError as `load_tower`."""
        with self._loading:
            tower = self._tower
        side = tower.config.image_size
        shown = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 127.5 - 1
        shown = F.interpolate(shown, (side, side), mode="bicubic", align_corners=False) * 0.5 + 0.5
        mean, std = (torch.tensor(each)[:, None, None] for each in (_MEAN, _STD))
        features: Tensor = tower(pixel_values=(shown - mean) / std).last_hidden_state[0]
        return features.to(self._device)


def check_tower(path: Path, shape: tuple[int, int] | None = None) -> Checkpoint:
    """The opened file of a tower, of which no weights are read.

    Raises:
        ConfigError: a file that is not of that kind, or whose features are not of the `shape` (T, D) of a model.
    """
    file = open_checkpoint(path)
    if not file.entries.keys() >= {_VISUAL + name for name in _NEEDED}:
        raise ConfigError(
            f"{path}: not CLIP's vision tower as Wan stores it; expected names such as {_VISUAL}{_NEEDED[0]}"
        )
    seen = tuple(file.entries[_VISUAL + _NEEDED[0]].shape[-2:])
    if shape is not None and seen != shape:
        raise ConfigError(
            f"{path}: it sees {seen[0]} features of width {seen[1]}; the model takes {shape[0]} of {shape[1]}"
        )
    return file


def load_tower(path: Path) -> CLIPVisionModel:
    """The tower without its last block, in float32 on the CPU; sizes are read from the tensors.

    Raises:
        ConfigError: as `check_tower`, or tensors that do not fit.
    """
    file = check_tower(path)
    found = {name.removeprefix(_VISUAL): file.read(name) for name in file.names if name.startswith(_VISUAL)}
    count = len({name.split(".")[1] for name in found if name.startswith(_LAYERS)})
    fc1 = found[_NEEDED[-1]]
    patches, patch = found["pos_embedding"].shape[-2] - 1, found["patch_embedding.weight"].shape[-1]
    config = CLIPVisionConfig(
        hidden_size=fc1.shape[1], intermediate_size=fc1.shape[0], num_hidden_layers=count - 1, patch_size=patch,
        num_attention_heads=fc1.shape[1] // _HEAD_DIM, image_size=round(patches**0.5) * patch, hidden_act="gelu",
        layer_norm_eps=1e-5,
    )  # fmt: skip
    named: dict[str, Tensor] = {}
    for name, each in found.items():
        named |= _renamed(name, each, count - 1)
    with torch.device("meta"):
        model = CLIPVisionModel(config)
    own = getattr(model, "vision_model", model)
    load_module(own, path, named, torch.device("cpu"), torch.float32)
    own.embeddings.position_ids = torch.arange(patches + 1)[None]
    return model


def _renamed(name: str, tensor: Tensor, layers: int) -> dict[str, Tensor]:
    """A stored tensor by transformers' names; none of what is not used."""
    if name in _TOP:
        return {
            _TOP[name]: tensor.flatten() if name == "cls_embedding" else tensor.squeeze(0) if "pos" in name else tensor
        }
    module, _, leaf = name.rpartition(".")
    if module in _TOP:
        return {f"{_TOP[module]}.{leaf}": tensor}
    if not name.startswith(_LAYERS) or int(name.split(".")[1]) >= layers:
        return {}
    _, number, part = module.split(".", 2)
    at = f"encoder.layers.{number}."
    if part == "attn.to_qkv":
        return {f"{at}self_attn.{each}_proj.{leaf}": one for each, one in zip("qkv", tensor.chunk(3), strict=True)}
    return {f"{at}{_LAYER.get(part, part)}.{leaf}": tensor}
