"""Wan's transformer in float64, written out from its weights: no module, no cache, no kernel of the product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor
from torch.nn import functional as F

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Self-attention of a layer: queries, keys and values `[tokens, H, d]`, not rotated, to what is mixed, likewise."""


class PlainWan:
    """A `WanTransformer3DModel` without position planes, for one chunk at a time."""

    def __init__(self, model: WanTransformer3DModel) -> None:
        self.weights = {name: weight.double() for name, weight in model.state_dict().items()}
        self.heads, self.layers = model.config.num_attention_heads, model.config.num_layers
        self.head_dim, self.waves = model.config.attention_head_dim, model.config.freq_dim // 2

    def flow(self, latents: Tensor, timestep: float, text: Tensor, attention: Attention) -> Tensor:
        """The flow `[C, F, h, w]` of latents of that shape, with patches of 1 x 2 x 2; text is `[T, text_dim]`."""
        channels, frames, height, width = latents.shape
        patches = latents.double().view(channels, frames, height // 2, 2, width // 2, 2)
        patches = patches.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * 4)
        kernel = self.weights["patch_embedding.weight"]
        hidden = patches @ kernel.flatten(1).T + self.weights["patch_embedding.bias"]
        angles = timestep * 10000.0 ** (-torch.arange(self.waves, dtype=torch.float64) / self.waves)
        time = self.two_layers("condition_embedder.time_embedder", torch.cat([angles.cos(), angles.sin()]), F.silu)
        shared = self.linear("condition_embedder.time_proj", F.silu(time)).view(6, -1)
        context = self.two_layers("condition_embedder.text_embedder", text.double(), gelu)
        for layer in range(self.layers):
            hidden = self.block(layer, hidden, shared, context, attention)
        shift, scale = self.weights["scale_shift_table"][0] + time
        made = self.linear("proj_out", norm(hidden) * (1 + scale) + shift)
        made = made.view(frames, height // 2, width // 2, 2, 2, channels)
        return made.permute(5, 0, 1, 3, 2, 4).reshape(channels, frames, height, width)

    def block(self, layer: int, hidden: Tensor, shared: Tensor, context: Tensor, attention: Attention) -> Tensor:
        """One block over tokens `[tokens, D]`; `shared` is the modulation of all blocks `[6, D]`."""
        at = f"blocks.{layer}."
        shift, scale, gate, ff_shift, ff_scale, ff_gate = self.weights[at + "scale_shift_table"][0] + shared
        normal = norm(hidden) * (1 + scale) + shift
        mixed = attention(layer, *self.heads_of(at + "attn1", normal, normal))
        hidden = hidden + gate * self.linear(at + "attn1.to_out.0", mixed.flatten(1))
        normal = norm(hidden) * self.weights[at + "norm2.weight"] + self.weights[at + "norm2.bias"]
        mixed = attend(*self.heads_of(at + "attn2", normal, context))
        hidden = hidden + self.linear(at + "attn2.to_out.0", mixed.flatten(1))
        wide = gelu(self.linear(at + "ffn.net.0.proj", norm(hidden) * (1 + ff_scale) + ff_shift))
        return hidden + ff_gate * self.linear(at + "ffn.net.2", wide)

    def heads_of(self, name: str, asking: Tensor, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[tokens, H, d]` of an attention; the root mean square is over all heads."""
        query, key = self.linear(name + ".to_q", asking), self.linear(name + ".to_k", given)
        query, key = (
            x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weights[f"{name}.norm_{letter}.weight"]
            for x, letter in ((query, "q"), (key, "k"))
        )
        value = self.linear(name + ".to_v", given)
        return tuple(x.unflatten(-1, (self.heads, -1)) for x in (query, key, value))  # type: ignore[return-value]

    def two_layers(self, name: str, x: Tensor, between: Callable[[Tensor], Tensor]) -> Tensor:
        return self.linear(name + ".linear_2", between(self.linear(name + ".linear_1", x)))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]


def norm(x: Tensor) -> Tensor:
    """Layer norm without weights."""
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over `[tokens, H, d]`."""
    weights = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", weights.softmax(-1), value)


def rotated(x: Tensor, first: int, height: int, width: int) -> Tensor:
    """Tokens `[F * height * width, H, d]` rotated at positions `first`, `first` + 1, ... of their frames. Of the pairs
    of neighbouring channels a third, rounded down, turns with the row and as many with the column."""
    side = x.shape[-1] // 6
    counts = (x.shape[-1] // 2 - 2 * side, side, side)
    frames = x.shape[0] // (height * width)
    places = torch.cartesian_prod(torch.arange(first, first + frames), torch.arange(height), torch.arange(width))
    angles = torch.cat(
        [
            places[:, axis, None] * 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
            for axis, count in enumerate(counts)
        ],
        -1,
    )[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(turned, -1).flatten(-2)
