"""The embedded model as one object: reads and writes its folder, in diffusers layout.

model_index.json   transformer/   text_encoder/   tokenizer/   vae/{config.json, diffusion_pytorch_model.safetensors}
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.autoencoder.taehv_codec import TaehvDecoder, config_from, load_folder
from streamdiff.models.model import Model, StageModel
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.spec import ModelSpec
from streamdiff.models.tiny.text_encoder import TinyText
from streamdiff.models.tiny.world256.text_encoder import LANGUAGE, WorldText
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import FILE, load_blocks

WEIGHTS = EMBEDDED_WEIGHTS
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
    text = load_text(folder, device)
    decoder = load_decoder(folder, device) if decodes else None
    return Model(trunk.spec, trunk.denoiser, text, decoder)


def load_text(folder: Path, device: torch.device) -> TinyText:
    """The text encoder of the model under `folder`, in float32, with the language that its `model_index.json` names."""
    language = _read(folder / "model_index.json").get("language")
    text = (WorldText if language == LANGUAGE else TinyText).load(folder)
    torch.nn.Module.to(text.encoder, device)
    return text


def load_trunk(
    folder: Path, device: torch.device, name: str = "tiny", blocks: tuple[int, int] | None = None
) -> StageModel:
    """What one stage needs of the model under `folder`, in float32: reads and keeps nothing else.

    Raises:
        ConfigError: as `load`.
    """
    spec = read_spec(folder, name)
    return StageModel(spec, WanDenoiser(load_blocks(folder / "transformer", device, blocks)))


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
                "`python -m streamdiff.models.tiny.training`"
            )
    autoencoder = config_from(_read(folder / "vae" / "config.json"))
    index = _read(folder / "model_index.json")["stream"]
    return ModelSpec(
        name=name,
        latent_channels=autoencoder.latent_channels,
        frames_per_latent=autoencoder.temporal,
        width=index["latent_width"] * autoencoder.spatial,
        height=index["latent_height"] * autoencoder.spatial,
        steps=tuple(index.pop("steps")),
        text_shape=(_text_tokens(folder), _read(folder / "transformer" / "config.json")["text_dim"]),
        **index,
    )


def load_decoder(folder: Path, device: torch.device) -> TaehvDecoder:
    """The decoder of the model under `folder`, in float32; the whole autoencoder is in it.

    Raises:
        ConfigError: see `load_folder`.
    """
    return TaehvDecoder(load_folder(folder / "vae", device))


def _text_tokens(folder: Path) -> int:
    """To how many tokens the tokenizer pads."""
    tokens: int = _read(folder / "tokenizer" / "tokenizer.json")["padding"]["strategy"]["Fixed"]
    return tokens


def _read(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(path.read_text())
    return tree


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
    if isinstance(text, WorldText):
        index["language"] = LANGUAGE
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
