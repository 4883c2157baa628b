"""The compiled parts of a stage: the pieces of `WanDenoiser` between its self-attentions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff.models.transformer import rope
from streamdiff.models.transformer.wan import BlockWeights, KeyValue, TokenStates, block_modulation
from streamdiff.pipeline.runner.stage_forward import StageForward, Tensors
from streamdiff.pipeline.runner.torch_compile import one_graph

Ropes = tuple[Tensor, ...]
"""Of each row the rotary factors of its queries and keys, as `rope.matrices` has them."""


class CompiledParts(NamedTuple):
    """A stage's forward as graphs around its self-attentions, compiled at first call: `begin` up to the first one,
    `between` from one to the next, `end` after the last. Queries, keys and values are `[R, L, H, d]`, queries and keys
    rotated; un-rotated keys follow if rows keep them. Where ranks share the stage: this rank's tokens, nothing rotated
    yet."""

    begin: Callable[[Ropes, BlockWeights, Tensors], tuple[Tensor, ...]]
    between: Callable[..., tuple[Tensor, ...]]
    end: Callable[..., Tensors]


def compiled(forward: StageForward, keeps_unrotated: bool) -> CompiledParts:
    """The stage for one number of rows. Weights of blocks are arguments, so one graph does for all of them."""
    denoiser, attend = forward.denoiser, forward.denoiser.attend

    def before(ropes: Ropes, weights: BlockWeights, hidden: Tensor, modulation: Tensor) -> tuple[Tensor, ...]:
        own = block_modulation(weights.block.scale_shift_table, modulation)
        query, key, value = denoiser.before_attention(weights, hidden, own)
        if forward.group is not None:  # positions are those of all tokens, which come with the exchange
            return query, key, value
        factors = ropes[0] if len(ropes) == 1 else torch.stack(ropes, 1)
        turned = rope.rotate(query, factors), rope.rotate(key, factors), value
        return (*turned, key) if keeps_unrotated else turned

    def after(
        weights: BlockWeights, hidden: Tensor, modulation: Tensor, texts: tuple[KeyValue, ...], mixed: Tensor
    ) -> Tensor:
        own = block_modulation(weights.block.scale_shift_table, modulation)
        return denoiser.after_attention(weights, hidden, own, concat_rows(texts), mixed, attend)

    def begin(ropes: Ropes, weights: BlockWeights, given: Tensors) -> tuple[Tensor, ...]:
        tokens = forward.enter(given)
        modulation = denoiser.modulation(tokens.time).float()
        made = (tokens.hidden,) if forward.first else ()  # what is given is not handed back
        return (*made, modulation, *before(ropes, weights, tokens.hidden, modulation))

    def between(
        ropes: Ropes,
        weights: BlockWeights,
        following: BlockWeights,
        hidden: Tensor,
        modulation: Tensor,
        texts: tuple[KeyValue, ...],
        mixed: Tensor,
    ) -> tuple[Tensor, ...]:
        hidden = after(weights, hidden, modulation, texts, mixed)
        return hidden, *before(ropes, following, hidden, modulation)

    def end(
        weights: BlockWeights,
        hidden: Tensor,
        time: Tensor,
        modulation: Tensor,
        texts: tuple[KeyValue, ...],
        mixed: Tensor,
    ) -> Tensors:
        hidden = after(weights, hidden, modulation, texts, mixed)
        if not forward.last:
            return (hidden,)
        tokens = TokenStates(hidden, time)
        return (denoiser.output_layer(tokens, forward.grid) if forward.group is None else denoiser.output(tokens),)

    return CompiledParts(one_graph(begin), one_graph(between), one_graph(end))


def concat_rows(texts: Sequence[KeyValue]) -> KeyValue:
    """Concatenate one layer's text keys and values of several rows; those of one row are returned without a copy."""
    return texts[0] if len(texts) == 1 else KeyValue(*(torch.cat(parts) for parts in zip(*texts, strict=True)))
