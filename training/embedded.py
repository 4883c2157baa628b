"""The embedded model as one object, as training, judges and tests take it: all parts in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.model import Model
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.tiny.folder import read_folder
from streamdiff.models.tiny.model import TinyText
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import load_transformer, open_transformer

TEXT_TOKENS = 32
WIDTH = 64
PAD, UNKNOWN = "<pad>", "<unk>"
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
    decoder = PictureDecoder(load_autoencoder(folder / "vae", "decoder", device, decoder_dtype))
    return Model(spec, WanDenoiser(weights, len(spec.controls)), TinyText.load(folder, device), decoder)
