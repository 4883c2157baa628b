"""The embedded model as one object: reads and writes its folder, in diffusers layout.

model_index.json   transformer/   text_encoder/   tokenizer/   vae/{config.json, diffusion_pytorch_model.safetensors}
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from streamdiff.models.autoencoder.autoencoder import load_decoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.model import Model
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.tiny.folder import read_folder
from streamdiff.models.tiny.text_encoder import TinyText
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import FILE, load_transformer, open_transformer

WEIGHTS = EMBEDDED_WEIGHTS


def load_model(
    folder: Path, device: torch.device, name: str = "tiny", decoder_dtype: torch.dtype = torch.float32
) -> Model:
    """All of the model under `folder`, in float32, but the decoder in `decoder_dtype`: a server's is in
    `device.embedded_autoencoder_dtype`.

    Raises:
        ConfigError: the folder or one of its parts is missing, or the weights do not fit the configuration.
    """
    spec = read_folder(folder, name).spec
    weights = load_transformer(open_transformer(folder / "transformer"), device=device, dtype=torch.float32)
    decoder = PictureDecoder(load_decoder(folder / "vae", device, decoder_dtype))
    return Model(spec, WanDenoiser(weights, len(spec.controls)), TinyText.load(folder, device), decoder)


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
