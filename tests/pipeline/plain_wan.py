"""Streams in float64 from the published formulas alone: no class of the product, none of diffusers, no rolling cache.

`PlainWan` is Wan's transformer over a state dict with diffusers' names. `PlainStream` computes every (chunk, step) from
what the KV context says it sees; nothing is ever overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Layers = list[tuple[Tensor, Tensor]]
"""Keys, not rotated, and values of each block `[F, tokens of a latent frame, H, d]`."""
_EPS = 1e-6


class PlainWan:
    """Wan2.1's transformer with 1 x 2 x 2 patches, one latent chunk at a time."""

    def __init__(self, weights: Mapping[str, Tensor], heads: int) -> None:
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        self.heads = heads
        self.width = self.weights["patch_embedding.bias"].numel()
        self.blocks = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))

    def flow(self, latents: Tensor, timesteps: Tensor, text: Tensor, before: Sequence[Layers]) -> tuple[Tensor, Layers]:
        """The flow `[C, F, h, w]` for latents of that shape, `timesteps` `[F]` and `text` `[T, D]`; and keys and values
        of its latent frames. `before`: those that it sees, oldest first; all stand at positions 0, 1, 2, ..."""
        frames, height, width = latents.shape[1], latents.shape[2] // 2, latents.shape[3] // 2
        x = F.conv3d(latents.double()[None], self.weights["patch_embedding.weight"], stride=(1, 2, 2))[0]
        x = (x.flatten(2).movedim(0, -1) + self.weights["patch_embedding.bias"]).reshape(frames, -1, self.width)
        time = self._time(timesteps.double())
        shifts = self._linear("condition_embedder.time_proj", F.silu(time)).unflatten(-1, (6, -1))[:, :, None]
        text = self._linear("condition_embedder.text_embedder.linear_1", text.double())
        text = self._linear("condition_embedder.text_embedder.linear_2", F.gelu(text, approximate="tanh"))
        own: Layers = []
        for layer in range(self.blocks):
            name = f"blocks.{layer}"
            shift1, scale1, gate1, shift2, scale2, gate2 = (
                self.weights[f"{name}.scale_shift_table"][:, :, None] + shifts
            ).unbind(1)
            y = F.layer_norm(x, (self.width,), eps=_EPS) * (1 + scale1) + shift1
            query, key, value = (self._heads(f"{name}.attn1", y, part) for part in "qkv")
            own.append((key, value))
            keys = torch.cat([*(each[layer][0] for each in before), key])
            values = torch.cat([*(each[layer][1] for each in before), value])
            first = len(keys) - frames
            mixed = _attend(_rotate(query, first, height, width), _rotate(keys, 0, height, width), values).reshape_as(x)
            x = x + gate1 * self._linear(f"{name}.attn1.to_out.0", mixed)
            norm = self.weights[f"{name}.norm2.weight"], self.weights[f"{name}.norm2.bias"]
            y = F.layer_norm(x, (self.width,), *norm, _EPS)
            query = self._heads(f"{name}.attn2", y, "q")
            key, value = (self._heads(f"{name}.attn2", text[None], part) for part in "kv")
            x = x + self._linear(f"{name}.attn2.to_out.0", _attend(query, key, value).reshape_as(x))
            y = F.layer_norm(x, (self.width,), eps=_EPS) * (1 + scale2) + shift2
            y = F.gelu(self._linear(f"{name}.ffn.net.0.proj", y), approximate="tanh")
            x = x + gate2 * self._linear(f"{name}.ffn.net.2", y)
        shift, scale = (self.weights["scale_shift_table"] + time[:, None])[:, :, None].unbind(1)
        x = self._linear("proj_out", F.layer_norm(x, (self.width,), eps=_EPS) * (1 + scale) + shift)
        x = x.view(frames, height, width, 2, 2, -1).permute(5, 0, 1, 3, 2, 4)
        return x.reshape(-1, frames, 2 * height, 2 * width), own

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _heads(self, name: str, x: Tensor, part: str) -> Tensor:
        """Queries, keys or values `[F, L, H, d]`; the first two with a root mean square of one over all heads."""
        y = self._linear(f"{name}.to_{part}", x)
        if part != "v":
            y = y / (y.square().mean(-1, keepdim=True) + _EPS).sqrt() * self.weights[f"{name}.norm_{part}.weight"]
        return y.unflatten(-1, (self.heads, -1))

    def _time(self, timesteps: Tensor) -> Tensor:
        """Time embeddings `[F, D]`."""
        half = self.weights["condition_embedder.time_embedder.linear_1.weight"].shape[1] // 2
        angles = timesteps[:, None] * torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float64) / half)
        x = self._linear("condition_embedder.time_embedder.linear_1", torch.cat([angles.cos(), angles.sin()], -1))
        return self._linear("condition_embedder.time_embedder.linear_2", F.silu(x))


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Dense attention of all tokens `[F, L, H, d]` to all."""
    q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in (query, key, value))
    return ((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v).transpose(0, 1)


def _rotate(x: Tensor, first: int, height: int, width: int) -> Tensor:
    """Wan's three-axis rotary positions for `[F, height * width, H, d]`, frames from `first` on."""
    frames, size = len(x), x.shape[-1]
    side = 2 * (size // 6)
    grid = torch.meshgrid(torch.arange(first, first + frames), torch.arange(height), torch.arange(width), indexing="ij")
    angles = [
        place.flatten().double()[:, None] * 10_000 ** -(torch.arange(0, part, 2, dtype=torch.float64) / part)
        for place, part in zip(grid, (size - 2 * side, side, side), strict=True)
    ]
    turn = torch.polar(torch.ones((), dtype=torch.float64), torch.cat(angles, -1))[:, None]
    pairs = torch.view_as_complex(x.flatten(0, 1).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).unflatten(0, (frames, -1))


@dataclass
class PlainStream:
    """One stream; its relative window holds whole chunks: `window` latest ones, itself included, and before them the
    first `sink`. `levels(chunk, step)` are timesteps and noise levels `[F]` of a step; `start(chunk)` is what its first
    one receives, `renoise(chunk, step)` what is added before a later one. `given` are finished chunks. At the clean
    pass, number `steps`, the model is told `context` (timestep, noise level)."""

    model: PlainWan
    text: Tensor
    steps: int
    kv_context: str
    window: int
    sink: int
    levels: Mapping[tuple[int, int], tuple[Tensor, Tensor]]
    start: Mapping[int, Tensor]
    noise: Mapping[tuple[int, int], Tensor]
    given: Sequence[Tensor] = ()
    context: tuple[float, float] = (0.0, 0.0)
    _done: dict[tuple[int, int], tuple[Tensor, Layers]] = field(default_factory=dict)

    def latents(self, chunk: int) -> Tensor:
        """x0 `[C, F, h, w]`, float64."""
        return self.given[chunk].double() if chunk < len(self.given) else self._x0(chunk, self.steps - 1)

    def _x0(self, chunk: int, step: int) -> Tensor:
        """x0 as a step leaves it."""
        if chunk < len(self.given):
            return self.given[chunk].double()
        return self._input(chunk, step) - self._sigma(chunk, step) * self._row(chunk, step)[0]

    def _sigma(self, chunk: int, step: int) -> Tensor:
        return self.levels[chunk, step][1].double()[:, None, None]

    def _input(self, chunk: int, step: int) -> Tensor:
        if step == self.steps:
            level = 0.0 if chunk < len(self.given) else self.context[1]
            clean = self._x0(chunk, step - 1)
            return (1 - level) * clean + level * self.noise[chunk, step].double() if level else clean
        if step == 0 and chunk >= len(self.given):
            return self.start[chunk].double()
        sigma = self._sigma(chunk, step)
        return (1 - sigma) * self._x0(chunk, step - 1) + sigma * self.noise[chunk, step].double()

    def _row(self, chunk: int, step: int) -> tuple[Tensor, Layers]:
        """Flow, and keys and values, of one step."""
        if (chunk, step) not in self._done:
            frames = self.given[0].shape[1] if len(self.given) else next(iter(self.start.values())).shape[1]
            if step < self.steps:
                timesteps = self.levels[chunk, step][0]
            else:
                timesteps = torch.full((frames,), 0.0 if chunk < len(self.given) else self.context[0])
            seen = [self._row(other, self._seen_at(chunk, step, other))[1] for other in self._visible(chunk)]
            self._done[chunk, step] = self.model.flow(self._input(chunk, step), timesteps, self.text, seen)
        return self._done[chunk, step]

    def _visible(self, chunk: int) -> list[int]:
        """Earlier chunks that a chunk sees."""
        first = max(self.sink, chunk - self.window + 1)
        return [*range(min(self.sink, chunk)), *range(first, chunk)]

    def _seen_at(self, chunk: int, step: int, other: int) -> int:
        """The step at which an earlier chunk is seen."""
        if self.kv_context == "matched":
            return step
        if self.kv_context == "clean" or other < len(self.given):
            return self.steps
        return min(step + chunk - other, self.steps)
