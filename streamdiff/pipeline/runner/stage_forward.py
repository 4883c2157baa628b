"""The forward of one stage, from the tensors received to the tensors sent on.

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
            given: on the first stage latents `[R, C, F, h, w]` and the time embedding `[R, F, D]`, else `Tokens`.

        Returns:
            On the last stage the flow `[R, C, F, h, w]` alone, else `Tokens`.
        """
        return self.leave(self.denoiser.run_blocks(self.enter(given), text, attention))

    def enter(self, given: Tensors) -> Tokens:
        """What the first block gets of what the stage is given."""
        first, time = given
        return Tokens(self.denoiser.patches(first) if self.first else first, time)

    def leave(self, tokens: Tokens) -> Tensors:
        """What the stage sends of what the last block returns."""
        return (self.denoiser.head(tokens, self.grid),) if self.last else tuple(tokens)

    def zeros(self, rows: int, device: torch.device) -> Tensors:
        """Zeros in the shape of the stage's inputs, for `rows` rows."""
        denoiser, (frames, height, width) = self.denoiser, self.grid
        like = torch.empty(0, dtype=denoiser.dtype, device=device)  # weights may be quantised
        time = like.new_zeros(rows, frames, denoiser.width)
        if self.first:
            return like.new_zeros(rows, denoiser.latent_channels, frames, height, width), time
        return like.new_zeros(rows, denoiser.tokens(self.grid), denoiser.width), time
