"""Wan's transformer in float64, written out from its weights: no module, no cache, no kernel of the product."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Self-attention of a layer: queries, keys and values `[tokens, H, d]`, not rotated, to what is mixed, likewise."""


class PlainWan:
    """Wan2.1's transformer with patches of 1 x 2 x 2, for one run of latent frames at a time."""

    def __init__(self, weights: Mapping[str, Tensor], heads: int) -> None:
        """`weights` have diffusers' names."""
        self.weights = {name: weight.double() for name, weight in weights.items()}
        self.heads = heads
        self.head_dim = self.weights["patch_embedding.bias"].numel() // heads
        self.layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
        self.waves = self.weights["condition_embedder.time_embedder.linear_1.weight"].shape[1] // 2

    def flow(self, latents: Tensor, timestep: float | Tensor, text: Tensor, attention: Attention) -> Tensor:
        """The flow `[C, F, h, w]` of latents of that shape, which may have position planes as more channels; text is
        `[T, text_dim]`. `timestep` is one number, or one of each latent frame `[F]`."""
        channels, frames, height, width = latents.shape
        patches = latents.double().view(channels, frames, height // 2, 2, width // 2, 2)
        patches = patches.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * 4)
        kernel = self.weights["patch_embedding.weight"]
        hidden = patches @ kernel.flatten(1).T + self.weights["patch_embedding.bias"]
        told = torch.as_tensor(timestep, dtype=torch.float64).expand(frames)
        angles = told[:, None] * 10000.0 ** (-torch.arange(self.waves, dtype=torch.float64) / self.waves)
        time = self.two_layers("condition_embedder.time_embedder", torch.cat([angles.cos(), angles.sin()], 1), F.silu)
        time = time.repeat_interleave(len(hidden) // frames, 0)
        shared = self.linear("condition_embedder.time_proj", F.silu(time)).unflatten(1, (6, -1)).transpose(0, 1)
        context = self.context(text.double())
        for layer in range(self.layers):
            hidden = self.block(layer, hidden, shared, context, attention)
        shift, scale = self.weights["scale_shift_table"][0][:, None] + time
        made = self.linear("proj_out", norm(hidden) * (1 + scale) + shift)
        made = made.view(frames, height // 2, width // 2, 2, 2, -1)
        return made.permute(5, 0, 1, 3, 2, 4).reshape(-1, frames, height, width)

    def block(self, layer: int, hidden: Tensor, shared: Tensor, context: Tensor, attention: Attention) -> Tensor:
        """One block over tokens `[tokens, D]`; `shared` is the modulation of all blocks `[6, tokens, D]`."""
        at = f"blocks.{layer}."
        table = self.weights[at + "scale_shift_table"][0][:, None]
        shift, scale, gate, ff_shift, ff_scale, ff_gate = table + shared
        normal = norm(hidden) * (1 + scale) + shift
        mixed = attention(layer, *self.heads_of(at + "attn1", normal, normal))
        hidden = self.steered(at, hidden + gate * self.linear(at + "attn1.to_out.0", mixed.flatten(1)))
        normal = norm(hidden) * self.weights[at + "norm2.weight"] + self.weights[at + "norm2.bias"]
        mixed = attend(*self.heads_of(at + "attn2", normal, context))
        hidden = hidden + self.linear(at + "attn2.to_out.0", mixed.flatten(1))
        hidden = self.act(layer, hidden)
        wide = gelu(self.linear(at + "ffn.net.0.proj", norm(hidden) * (1 + ff_scale) + ff_shift))
        return hidden + ff_gate * self.linear(at + "ffn.net.2", wide)

    def steered(self, at: str, hidden: Tensor) -> Tensor:
        """What a world's controls make of a block's hidden states behind its self-attention; `at` begins its names."""
        return hidden

    def context(self, text: Tensor) -> Tensor:
        """What cross-attention sees `[T, D]`."""
        return self.two_layers("condition_embedder.text_embedder", text, gelu)

    def act(self, layer: int, hidden: Tensor) -> Tensor:
        """What stands between cross-attention and feed-forward: here nothing."""
        return hidden

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
