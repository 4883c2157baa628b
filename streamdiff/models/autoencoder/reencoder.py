"""The past seen again from its pictures: a first latent frame that stands for one picture, as a stream's own first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamdiff.models.autoencoder.autoencoder import VideoEncoder
from streamdiff.models.autoencoder.stepped_decoder import VideoDecoder


@dataclass(frozen=True)
class FirstFrameReencoder:
    """Krea's way against a past that wears down (github.com/krea-ai/realtime-video): what goes into the cache of a
    finished chunk has its first latent frame encoded again. Holds weights only; a stream's memory is an argument.

    It decodes every chunk, beside whoever decodes for viewers.
    """

    decoder: VideoDecoder
    encoder: VideoEncoder

    def new_memory(self) -> Any:
        """The memory of a stream that has not begun."""
        return self.decoder.new_memory()

    def stream_bytes(self, height: int, width: int) -> int:
        """Bytes that the memory of a running stream has, for latents of `height` x `width`."""
        return self.decoder.stream_bytes(height, width)

    @torch.inference_mode()
    def reencode(self, chunk: int, latents: Tensor, memory: Any) -> Tensor:
        """`latents` `[C, F, h, w]` of a stream's next chunk, number `chunk`, normalised, with the first latent frame
        encoded by itself from the last of its pictures; those of chunk 0 as they are, since they begin with one picture
        anyway. Nothing is read back to the host. Mutates: memory."""
        video = self.decoder.decode_video(latents[None], memory)
        if chunk == 0:
            return latents
        last = video.shape[2] - (latents.shape[1] - 1) * self.decoder.temporal - 1
        own = self.encoder.new_memory()
        first = self.encoder.encode(video[:, :, last : last + 1], own)
        rest = self.encoder.finish(own) if first.shape[2] == 0 else None
        first = first if rest is None else rest
        return torch.cat([first[0, :, :1].to(latents), latents[:, 1:]], 1)
