"""Loads an autoencoder of any kind from a path or name; and the encoder of pictures that streams begin with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from numpy.typing import NDArray
from torch import Tensor, nn

from streamdiff.config import EMBEDDED
from streamdiff.device import side_stream
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue, hub, sampling
from streamdiff.models.autoencoder import taehv, wan
from streamdiff.models.autoencoder.picture_decoder import Normalisation, VideoAutoencoder
from streamdiff.models.autoencoder.wan import Half, WanAutoencoder
from streamdiff.models.catalogue import Files
from streamdiff.models.checkpoint import check_fit, draw, load_module, read_tensors
from streamdiff.models.resolve import EMBEDDED_WEIGHTS
from streamdiff.models.spec import ModelSpec
from streamdiff.models.transformer.weights import FILE
from streamdiff.models.weight_files import read_object

WAN_FPS = 16.0
_CONDITION_LATENTS = 30
"""With grey after a picture, Wan's encoder sees the picture in the first 29 latent frames; the next ones are alike."""
Location = str | Path | Files
"""Where an autoencoder is: a path, a name, or published files; see `load_autoencoder`."""
_RANDOM: dict[str, Callable[[], nn.Module]] = {
    f"{catalogue.RANDOM}wan2.1": lambda: AutoencoderKLWan.from_config({}),
    f"{catalogue.RANDOM}wan2.2": lambda: AutoencoderKLWan.from_config(catalogue.parts().autoencoders["wan2.2"].config),
    f"{catalogue.RANDOM}taew2_1": lambda: taehv.TAEHV(taehv.TaehvConfig()),
    f"{catalogue.RANDOM}taew2_2": lambda: taehv.TAEHV(taehv.TaehvConfig(latent_channels=48, patch_size=2)),
}


def load_autoencoder(
    path: Location,
    half: Half,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    latent_space: str | None = None,
) -> VideoAutoencoder:
    """The autoencoder at `path`, with weights for this `half`.

    Args:
        path: `tiny`, the embedded model's; `random:wan2.1`, `random:taew2_1` or their like, which is drawn; a published
            one's name (`catalogue.autoencoders`) or files, which are fetched if they are not there; a folder with
            `config.json` and weights, or one that has it in `vae/`; or a .safetensors or .pth file: `Wan2.1_VAE.pth`,
            `taew2_1.pth` and their like.
        latent_space: for TAEHV files, `normalised` or `raw`; None: by the file's published name.

    Raises:
        ConfigError: nothing there, nothing known, or weights that do not fit (listed).
    """
    place = locate(path)
    if str(path) in _RANDOM:
        with torch.device("meta"):
            module = _RANDOM[str(path)]()
        needed = ("",) if isinstance(module, taehv.TAEHV) else wan.WAN_PREFIXES[half]
        return build(place, draw(module, needed, device, dtype), None, half, "normalised", device, dtype)
    config, tensors = _opened(place, latent_space)
    return build(place, tensors, config, half, latent_space, device, dtype)


def check_autoencoder(path: Location, half: Half, latent_space: str | None, spec: ModelSpec) -> None:
    """Open the autoencoder at `path` as `load_autoencoder` does, without reading weights, for pictures of `spec`. One
    that is drawn or published is known to fit.

    Raises:
        ConfigError: as `load_autoencoder`, but for values; or one for other latents than the model's.
    """
    if isinstance(path, Files) or catalogue.is_random(str(path)):
        return
    if not Path(path).exists() and str(path) in catalogue.autoencoders():
        return
    place = locate(path)
    config, tensors = _opened(place, latent_space)
    network = build(place, tensors, config, half, latent_space, torch.device("cpu"), None)
    side = spec.width // spec.latent_width
    if (network.latent_channels, network.spatial) != (spec.latent_channels, side):
        raise ConfigError(
            f"{place} is for latents of {network.latent_channels} channels, of {network.spatial} x {network.spatial} "
            f"pixels each; {spec.name} makes latents of {spec.latent_channels} channels, of {side} x {side} pixels. "
            "Give one for these as --vae"
        )


def _opened(place: Path, latent_space: str | None) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Configuration and tensors, which lie in their file. Raises ConfigError for a latent space that cannot be said."""
    config, tensors = _read_config(place), read_tensors(place / FILE if place.is_dir() else place)
    if place.is_file() and taehv.is_taehv(tensors):
        config = None
    elif latent_space is not None:
        raise ConfigError(f"--latent-space is for TAEHV files; {place} says itself which latents it takes")
    return config, tensors


@torch.inference_mode()
def reencode_first_frame(network: VideoAutoencoder, chunk: int, latents: Tensor, memory: Any) -> Tensor:
    """Krea's way against a past that wears down (github.com/krea-ai/realtime-video): what goes into the cache of a
    finished chunk has its first latent frame encoded again. `network`, with both halves, decodes every chunk, beside
    the decoder for viewers.

    Returns `latents` `[C, F, h, w]` of a stream's next chunk, number `chunk`, normalised, with the first latent frame
    encoded by itself from the last of its pictures; those of chunk 0 as they are, since they begin with one picture
    anyway. Nothing is read back to the host. Mutates: memory."""
    video = network.decode_video(latents[None], memory)
    if chunk == 0:
        return latents
    last = video.shape[2] - (latents.shape[1] - 1) * network.temporal - 1
    own = network.new_encode_memory()
    first = network.encode(video[:, :, last : last + 1], own)
    rest = network.finish(own) if first.shape[2] == 0 else None
    first = first if rest is None else rest
    return torch.cat([first[0, :, :1].to(latents), latents[:, 1:]], 1)


def normalisation(network: VideoAutoencoder, path: str | Path) -> Normalisation:
    """Normalisation of latents (mean and deviation) of an autoencoder that was loaded from `path`.

    Raises:
        ConfigError: it takes and makes normalised latents only.
    """
    if network.normalisation is None:
        raise ConfigError(
            f"{path} knows normalised latents alone, so it neither makes nor takes raw ones; use Wan's own autoencoder"
        )
    return network.normalisation


def native_fps(path: str | Path) -> float:
    """Frames per second at which a video of this autoencoder's model moves as intended; Wan's where nothing says."""
    index = locate(path).parent / "model_index.json"
    tree = read_object(index) if index.is_file() else {}
    return float(tree.get("stream", {}).get("native_fps", WAN_FPS))


def locate(path: Location) -> Path:
    """The folder that has the autoencoder's config.json, or its file, which is fetched if it is published; need not be
    there.

    Raises:
        ConfigError: a published one that cannot be fetched, or random weights that there are not.
    """
    if isinstance(path, Files):
        return hub.fetch(path)[0]
    if str(path).startswith(catalogue.RANDOM) and str(path) not in _RANDOM:
        raise ConfigError(f"there is no autoencoder {path}; it can be {' or '.join(_RANDOM)}")
    given = EMBEDDED_WEIGHTS if str(path) == EMBEDDED else Path(path)
    if not given.exists() and (files := catalogue.autoencoders().get(str(path))) is not None:
        return hub.fetch(files)[0]
    if given.is_dir() and not (given / "config.json").is_file() and (given / "vae").is_dir():
        return given / "vae"
    return given


def build(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] | None,
    half: Half,
    latent_space: str | None,
    device: torch.device,
    dtype: torch.dtype | None,
) -> VideoAutoencoder:
    """The network of these tensors: TAEHV, or Wan's with weights for this `half`, the other one on the meta device.

    Args:
        path: for messages, and see `taehv.space_of`.
        config: its `config.json`; None: read from names and shapes.
        latent_space: of a TAEHV without `config`, see `taehv.space_of`.
        dtype: of the weights; None: all but values is checked, and nothing is loaded.

    Raises:
        ConfigError: tensors missing, unexpected, misshapen or not finite, which are listed; or sizes, or a latent
            space, that nothing tells.
    """
    normalisation = None
    small = taehv.is_taehv(tensors) if config is None else config.get("_class_name") == taehv.TAEHV_CLASS
    if small:
        shape, normalisation = taehv.read_taehv(path, tensors, config, latent_space, device)
        if half != "decoder" and not shape.has_encoder:
            raise ConfigError(f"{path} has a decoder alone, so it cannot encode; use a file with both halves")
    else:
        tensors, config = wan.read_wan(path, tensors, config)
    with torch.device("meta"):
        network: Any = taehv.TAEHV(shape) if small else AutoencoderKLWan.from_config(config)
    if dtype is None:
        check_fit(path, tensors, {name: tensor.shape for name, tensor in network.state_dict().items()})
    else:
        load_module(network, path, tensors, device, dtype, ("",) if small else wan.WAN_PREFIXES[half])
        if small:
            network.to(memory_format=torch.channels_last)
    return taehv.TaehvAutoencoder(network, normalisation) if small else WanAutoencoder(network)


def _read_config(place: Path) -> dict[str, Any] | None:
    """The configuration in a folder, or beside a file. None where that is another model's: the original repositories
    keep the transformer's beside the autoencoder."""
    if not place.exists():
        names = ", ".join([EMBEDDED, *catalogue.autoencoders()])
        raise ConfigError(
            f"there is no autoencoder at {place}; it can be {names}, a folder with config.json and "
            f"{FILE}, or a .safetensors or .pth file"
        )
    path = (place if place.is_dir() else place.parent) / "config.json"
    stored = read_object(path) if path.is_file() else {}
    kind = stored.get("_class_name")
    if kind in (wan.WAN_CLASS, taehv.TAEHV_CLASS):
        return stored
    if place.is_dir():
        held = f"_class_name {kind!r}" if stored else "nothing"
        raise ConfigError(f"{path} says {held}; an autoencoder's says {wan.WAN_CLASS} or {taehv.TAEHV_CLASS}")
    return None


@dataclass(frozen=True)
class ImageEncoder:
    """`load` reads the encoder, when the first picture or video comes: most streams have none. For any thread."""

    load: Callable[[], VideoAutoencoder]
    spec: ModelSpec
    _loading: threading.Lock = field(default_factory=threading.Lock)

    @property
    def encoder(self) -> VideoAutoencoder:
        """The encoder, loaded at the first use. Raises the exceptions of `load`."""
        with self._loading:
            return self._loaded

    @cached_property
    def _loaded(self) -> VideoAutoencoder:
        return self.load()

    @torch.inference_mode()
    def encode(self, picture: NDArray[np.uint8]) -> Tensor:
        """Latents float32 `[n, C, F, h, w]` in host memory, of the n chunks that a stream begins with together (mostly
        1), for RGB `picture` `[H, W, 3]` of the model's size.

        The picture stands still in them: it is repeated over all their frames, 9 for a chunk of 3 latent frames of
        Wan's, as in Krea's server (`release_server.py` of github.com/krea-ai/realtime-video). For a model with
        condition channels grey follows it, until latents stay as they are, and the result is `[channels, n, h, w]`, see
        `sampling.condition`. Waits for the device, whose other streams go on.

        Raises:
            ConfigError: an autoencoder without an encoder, or files that cannot be read.
        """
        encoder, spec = self.encoder, self.spec
        is_condition = spec.condition_channels > 0
        count = _CONDITION_LATENTS if is_condition else spec.first_chunks * spec.chunk_latents
        still = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None, :, None]
        with side_stream(encoder.device, after_current=True):
            video = still.to(encoder.device, torch.float32) / 127.5 - 1
            frames = encoder.first_frames + (count - 1) * encoder.temporal
            video = video.expand(-1, -1, frames, -1, -1)
            if is_condition:
                video = torch.cat([video[:, :, :1], torch.zeros_like(video[:, :, 1:])], 2)
            latents = encoder.encode(video, encoder.new_encode_memory())[0].float().cpu()
        if is_condition:
            return sampling.condition(latents, spec.condition_channels - spec.latent_channels)
        return torch.stack(latents.split(spec.chunk_latents, 1))
