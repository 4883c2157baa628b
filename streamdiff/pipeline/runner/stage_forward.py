"""What a stage computes in a micro-step, from what the link before brings to what the link behind takes.

`ModelRunner` calls it as it is; `compiled_stage` makes graphs of the same pieces of `WanDenoiser`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamdiff.models.transformer.wan import KeyValue, SelfAttention, Tokens, WanDenoiser

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class StageForward:
    """The blocks of `denoiser`; on the `first` stage the embedding before them, on the `last` the output layer behind.
    `grid` is a chunk's (F, h, w) in latent units."""

    denoiser: WanDenoiser
    grid: tuple[int, int, int]
    first: bool
    last: bool

    def __call__(self, given: Tensors, text: Sequence[KeyValue], attention: SelfAttention) -> Tensors:
        """Run it. `text` holds one entry per block.

        Args:
            given: on the first stage latents `[R, C, F, h, w]` and timesteps in [0, 1000] `[R, F]`, else `Tokens`.

        Returns:
            On the last stage the flow `[R, C, F, h, w]` alone, else `Tokens`.
        """
        tokens = self.denoiser.embed(*given) if self.first else Tokens(*given)
        tokens = self.denoiser.run_blocks(tokens, text, attention)
        return (self.denoiser.head(tokens, self.grid),) if self.last else tuple(tokens)

    def zeros(self, rows: int, device: torch.device) -> Tensors:
        """Something of the kind that it is given, for so many rows."""
        denoiser, (frames, height, width) = self.denoiser, self.grid
        like = torch.empty(0, dtype=denoiser.dtype, device=device)  # weights may be quantised
        if self.first:
            timesteps = torch.zeros(rows, frames, device=device)
            return like.new_zeros(rows, denoiser.latent_channels, frames, height, width), timesteps
        hidden = like.new_zeros(rows, denoiser.tokens(self.grid), denoiser.width)
        return hidden, like.new_zeros(rows, frames, denoiser.width)
