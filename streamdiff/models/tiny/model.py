"""The embedded model as one object: reads and writes its folder, in diffusers layout.

model_index.json   transformer/   text_encoder/   tokenizer/   vae/{config.json, diffusion_pytorch_model.safetensors}
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.base import Model, ModelSpec, Trunk
from streamdiff.models.taehv import TAEHV, Config, Memory
from streamdiff.models.tiny.text import TEXT_TOKENS, TinyText
from streamdiff.models.wan.transformer import WanDenoiser
from streamdiff.models.wan.weights import FILE, load_blocks

WEIGHTS = Path(__file__).parent / "weights"
PARTS = (
    "model_index.json",
    "transformer/config.json",
    f"transformer/{FILE}",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/tokenizer.json",
    "vae/config.json",
    f"vae/{FILE}",
)


class TinyDecoder:
    """The TAEHV decoder behind the `StreamDecoder` protocol: undoes the latents' normalisation, gives uint8 frames."""

    def __init__(self, autoencoder: TAEHV, mean: Tensor, std: Tensor) -> None:
        self.autoencoder = autoencoder
        self.mean, self.std = mean.view(1, 1, -1, 1, 1), std.view(1, 1, -1, 1, 1)

    def new_memory(self) -> Memory:
        return Memory()

    def decode(self, latents: Tensor, memory: Memory) -> Tensor:
        with torch.inference_mode():
            frames = self.decode_float(latents, memory)[0]
            return (frames.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    def decode_float(self, latents: Tensor, memory: Memory) -> Tensor:
        """Normalised latents `[B, C, F, h, w]` to frames `[B, n, 3, H, W]`, about [0, 1]. Mutates: memory."""
        return self.autoencoder.decode(latents.transpose(1, 2) * self.std + self.mean, memory)


def load(
    folder: Path,
    device: torch.device,
    name: str = "tiny",
    blocks: tuple[int, int] | None = None,
    decodes: bool = True,
) -> Model:
    """Load the model under `folder` in float32; of the transformer only `blocks` (first, last exclusive) if given, and
    no decoder unless this rank `decodes`.

    Raises:
        ConfigError: the folder or one of its parts is missing, or the weights do not fit the configuration.
    """
    trunk = load_trunk(folder, device, name, blocks)
    text = TinyText.load(folder)
    torch.nn.Module.to(text.encoder, device)
    decoder = load_autoencoder(folder, device)[1] if decodes else None
    return Model(trunk.spec, trunk.denoiser, text, decoder)


def load_trunk(folder: Path, device: torch.device, name: str = "tiny", blocks: tuple[int, int] | None = None) -> Trunk:
    """What one stage needs of the model under `folder`, in float32: reads and keeps nothing else.

    Raises:
        ConfigError: as `load`.
    """
    spec = read_spec(folder, name)
    return Trunk(spec, WanDenoiser(load_blocks(folder / "transformer", device, blocks)))


def read_spec(folder: Path, name: str = "tiny") -> ModelSpec:
    """The facts of the model under `folder`, without any weights.

    Raises:
        ConfigError: the folder or one of its parts is missing.
    """
    for part in PARTS:
        if not (folder / part).exists():
            raise ConfigError(
                f"model folder {folder} has no {part}; a model is a folder with model_index.json, transformer, "
                "text_encoder, tokenizer and vae. Use the embedded model with `--model tiny`, or train one with "
                "`python -m streamdiff.models.tiny.train`"
            )
    autoencoder = _autoencoder_config(_read(folder / "vae" / "config.json"))
    index = _read(folder / "model_index.json")["stream"]
    return ModelSpec(
        name=name,
        latent_channels=autoencoder.latent_channels,
        frames_per_latent=autoencoder.temporal,
        width=index["latent_width"] * autoencoder.spatial,
        height=index["latent_height"] * autoencoder.spatial,
        steps=tuple(index.pop("steps")),
        text_shape=(TEXT_TOKENS, _read(folder / "transformer" / "config.json")["text_dim"]),
        **index,
    )


def load_autoencoder(folder: Path, device: torch.device) -> tuple[TAEHV, TinyDecoder]:
    """The autoencoder and its decoder half ready for streaming."""
    stored = _read(folder / "vae" / "config.json")
    autoencoder = TAEHV(_autoencoder_config(stored))
    autoencoder.load_state_dict(_weights(folder / "vae"))
    autoencoder.eval().to(device).channels_last()
    mean, std = (torch.tensor(stored[key], device=device) for key in ("latents_mean", "latents_std"))
    return autoencoder, TinyDecoder(autoencoder, mean, std)


def _autoencoder_config(stored: dict[str, Any]) -> Config:
    known = {field.name for field in fields(Config)}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known}
    return Config(**values)


def _read(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(path.read_text())
    return tree


def _weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / FILE).items()}


def save(
    folder: Path,
    autoencoder: TAEHV,
    mean: Tensor,
    std: Tensor,
    parts: tuple[TinyText, WanTransformer3DModel] | None,
    stream: dict[str, object],
) -> None:
    """Write the model in half precision (it is loaded in float32); without `parts` only the autoencoder.

    Mutates: the parts, which become half precision.
    """
    (folder / "vae").mkdir(parents=True, exist_ok=True)
    config = {**asdict(autoencoder.config), "latents_mean": mean.tolist(), "latents_std": std.tolist()}
    (folder / "vae" / "config.json").write_text(json.dumps({"_class_name": "TAEHV", **config}, indent=2) + "\n")
    weights = {name: tensor.half().contiguous() for name, tensor in autoencoder.state_dict().items()}
    save_file(weights, folder / "vae" / FILE)
    if parts is None:
        return
    text, transformer = parts
    torch.nn.Module.half(text.encoder)
    text.save(folder)
    torch.nn.Module.half(transformer)
    transformer.save_pretrained(folder / "transformer")
    classes = {
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "vae": ["streamdiff", "TAEHV"],
    }
    index = {"_class_name": "StreamdiffTiny", **classes, "stream": stream}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
