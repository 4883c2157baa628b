"""The forward of one stage, from the tensors received to the tensors sent on.

`ModelRunner` calls it as it is; `compiled_stage` makes graphs of the same pieces of `WanDenoiser`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from streamdiff.models.transformer.wan import FoldedPatchEmbedding, KeyValue, SelfAttention, TokenStates, WanDenoiser
from streamdiff.pipeline.distributed.context_parallel import ContextGroup

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class StageForward:
    """The blocks of `denoiser`; on the `first` stage the embedding before them, on the `last` the output layer behind.
    `grid` is a chunk's (F, h, w) in latent units. Where `group` shares the stage, hidden states are this rank's tokens
    only; latents and flow are whole. `folded`: see `WanDenoiser.patches`."""

    denoiser: WanDenoiser
    grid: tuple[int, int, int]
    first: bool
    last: bool
    group: ContextGroup | None = None
    folded: FoldedPatchEmbedding | None = None

    def __call__(self, given: Tensors, text: Sequence[KeyValue], attention: SelfAttention) -> Tensors:
        """Run it. `text` holds one entry per block.

        Args:
            given: on the first stage latents `[R, C, F, h, w]` and the time embedding `[R, F, D]`, else `TokenStates`.

        Returns:
            On the last stage the flow `[R, C, F, h, w]` alone, and where ranks share it that on the first of them only;
            else `TokenStates`.
        """
        if self.group is not None:
            attention = partial(shared_attention, self.group, attention)
        return self.leave(self.denoiser.run_blocks(self.enter(given), text, attention))

    def enter(self, given: Tensors) -> TokenStates:
        """The stage's input as `TokenStates` for its first block."""
        first, time = given
        if not self.first:
            return TokenStates(first, time)
        hidden = self.denoiser.patches(first, self.folded)
        return TokenStates(hidden if self.group is None else self.group.own_tokens(hidden), time)

    def leave(self, tokens: TokenStates) -> Tensors:
        """The stage's output from its last block's `TokenStates`."""
        if not self.last:
            return tuple(tokens)
        if self.group is None:
            return (self.denoiser.output_layer(tokens, self.grid),)
        return self.unite(self.denoiser.output(tokens), self.group)

    def unite(self, output: Tensor, group: ContextGroup) -> Tensors:
        """The flow from the output layer's result for own tokens, and that of the other ranks of `group`; nothing on
        these, since the first sends it on."""
        whole = group.tokens_on_first(output)
        return () if whole is None else (self.denoiser.unpatch(whole, self.grid),)

    def zeros(self, rows: int, device: torch.device) -> Tensors:
        """Zeros in the shape of the stage's inputs, for `rows` rows."""
        denoiser, (frames, height, width) = self.denoiser, self.grid
        like = torch.empty(0, dtype=denoiser.dtype, device=device)  # weights may be quantised
        time = like.new_zeros(rows, frames, denoiser.width)
        if self.first:
            return like.new_zeros(rows, denoiser.latent_channels, frames, height, width), time
        tokens = denoiser.tokens(self.grid) // (1 if self.group is None else self.group.size)
        return like.new_zeros(rows, tokens, denoiser.width), time


def shared_attention(
    group: ContextGroup, attention: SelfAttention, layer: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """A `SelfAttention` over this rank's tokens: all-to-all, `attention` over all tokens of own heads, back."""
    return group.to_tokens(attention(layer, *group.to_heads(query, key, value)))
