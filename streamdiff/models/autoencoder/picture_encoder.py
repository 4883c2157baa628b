"""The stream's own encoder, for pictures that streams begin with: finished latents of the first chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamdiff.models.autoencoder.autoencoder import VideoEncoder
from streamdiff.models.spec import ModelSpec


@dataclass(frozen=True)
class PictureEncoder:
    """`load` reads the encoder, when the first picture or video comes: most streams have none. For any thread."""

    load: Callable[[], VideoEncoder]
    spec: ModelSpec
    _loading: threading.Lock = field(default_factory=threading.Lock)

    @property
    def encoder(self) -> VideoEncoder:
        """The encoder, loaded at the first use. Raises the exceptions of `load`."""
        with self._loading:
            return self._loaded

    @cached_property
    def _loaded(self) -> VideoEncoder:
        return self.load()

    @torch.inference_mode()
    def encode(self, picture: NDArray[np.uint8]) -> Tensor:
        """Latents float32 `[n, C, F, h, w]` in host memory, of the n chunks that a stream begins with together (mostly
        1), for RGB `picture` `[H, W, 3]` of the model's size.

        The picture stands still in them: it is repeated over all their frames, 9 for a chunk of 3 latent frames of
        Wan's, as in Krea's server (`release_server.py` of github.com/krea-ai/realtime-video). Waits for the device,
        whose other streams go on.

        Raises:
            ConfigError: an autoencoder without an encoder, or files that cannot be read.
        """
        encoder, spec = self.encoder, self.spec
        count = spec.first_chunks * spec.chunk_latents
        still = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None, :, None]
        with beside_others(encoder.device):
            video = still.to(encoder.device, torch.float32) / 127.5 - 1
            frames = encoder.first_frames + (count - 1) * encoder.temporal
            latents = encoder.encode(video.expand(-1, -1, frames, -1, -1), encoder.new_memory())[0].float().cpu()
        return torch.stack(latents.split(spec.chunk_latents, 1))


def beside_others(device: torch.device) -> AbstractContextManager[object]:
    """Context of a separate CUDA stream, so that no forward of a live stream waits for the picture; none on a CPU."""
    if device.type != "cuda":
        return nullcontext()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # which has copied the weights
    return torch.cuda.stream(side)
