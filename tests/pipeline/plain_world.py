"""Worlds in float64 from the published equations alone: a picture as condition and as features, keys and a mouse. No
class of the product, no rolling cache: what a chunk sees is cut from all that was made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.pipeline.float64_wan import PlainWan, attend, gelu, rotated

WINDOW, PER_LATENT = 12, 4
"""Frames of the video whose actions a latent frame sees, and that it decodes to."""
EMBEDDER, ACTION = "condition_embedder.image_embedder", "blocks.{}.action_model."
Seen = list[dict[str, tuple[Tensor, Tensor]]]
"""By layer, of self-attention, mouse and keyboard: keys (the first's not rotated) and values, frame by frame."""


class Inputs(NamedTuple):
    """`condition` `[channels, F, h, w]` and `track` `[frames, keyboard + mouse]` of all latent frames and frames."""

    context: Tensor
    condition: Tensor
    track: Tensor | None = None


class PlainWorld(PlainWan):
    """Matrix-Game 2's transformer; without its tensors one that has a condition alone. `window` is in latent frames."""

    action_heads, rope_dim, theta, keyboard = 2, 4, 256.0, 4
    window = 6

    def context(self, text: Tensor) -> Tensor:
        """Layer norm, linear, exact GELU, linear, layer norm."""
        if EMBEDDER + ".norm1.weight" not in self.weights:
            return super().context(text)
        wide = F.gelu(self.linear(EMBEDDER + ".ff.net.0.proj", self.norm(EMBEDDER + ".norm1", text)))
        return self.norm(EMBEDDER + ".norm2", self.linear(EMBEDDER + ".ff.net.2", wide))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[name + ".weight"], self.weights[name + ".bias"], 1e-5)

    def forward(
        self, latents: Tensor, timestep: float, first: int, inputs: Inputs, past: Sequence[Seen]
    ) -> tuple[Tensor, Seen]:
        """The flow of latent frames from number `first` on, and what later ones may see of them."""
        frames, height, width = latents.shape[1:]
        self.first, self.past, self.own = first, past, [dict[str, tuple[Tensor, Tensor]]() for _ in range(self.layers)]
        if inputs.track is not None:
            places = torch.arange(first, first + frames)[:, None] * PER_LATENT - WINDOW + torch.arange(WINDOW)
            self.seen_actions = inputs.track.double()[places.clamp(min=0)]

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.visible(layer, "self", key.unflatten(0, (frames, -1)), value.unflatten(0, (frames, -1)))
            query = rotated(query, len(keys) - frames, height // 2, width // 2)
            return attend(query, rotated(keys.flatten(0, 1), 0, height // 2, width // 2), values.flatten(0, 1))

        given = torch.cat([latents, inputs.condition[:, first : first + frames].double()])
        return self.flow(given, timestep, inputs.context, attention), self.own

    def visible(self, layer: int, what: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the window's latent frames, own ones last."""
        self.own[layer][what] = key, value
        every = [each[layer][what] for each in (*self.past, self.own)]
        keys, values = (torch.cat([each[i] for each in every])[-self.window :] for i in (0, 1))
        return keys, values

    def act(self, layer: int, hidden: Tensor) -> Tensor:
        at, weights = ACTION.format(layer), self.weights
        if at + "t_qkv.weight" not in weights and at + "proj_keyboard.weight" not in weights:
            return hidden
        keyboard, mouse = self.seen_actions.split((self.keyboard, self.seen_actions.shape[2] - self.keyboard), 2)
        x = hidden.unflatten(0, (len(keyboard), -1))
        if at + "t_qkv.weight" in weights:
            told = mouse.flatten(1)[:, None].expand(-1, x.shape[1], -1)
            wide = gelu(self.linear(at + "mouse_mlp.0", torch.cat([x, told], 2)))
            mixed = (
                self.norm(at + "mouse_mlp.3", self.linear(at + "mouse_mlp.2", wide)) @ weights[at + "t_qkv.weight"].T
            )
            query, key, value = (self.split(each) for each in mixed.chunk(3, 2))
            x = x + self.over_time(layer, "mouse", query, key, value) @ weights[at + "proj_mouse.weight"].T
        rows = self.linear(at + "keyboard_embed.2", F.silu(self.linear(at + "keyboard_embed.0", keyboard)))
        key, value = (
            self.split(each) for each in (rows.flatten(1) @ weights[at + "keyboard_attn_kv.weight"].T).chunk(2, 1)
        )
        query = self.split(x @ weights[at + "mouse_attn_q.weight"].T)
        mixed = self.over_time(layer, "keyboard", query, key[:, None], value[:, None])
        return (x + mixed @ weights[at + "proj_keyboard.weight"].T).flatten(0, 1)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.action_heads, -1))

    def over_time(self, layer: int, what: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention `[F, S, H, d]` of each token over the latent frames that are seen, to `[F, S, H * d]`."""
        query, key = (self.turned(x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()) for x in (query, key))
        keys, values = (each.expand(-1, query.shape[1], -1, -1) for each in self.visible(layer, what, key, value))
        scores = torch.einsum("fshd,tshd->shft", query, keys) / query.shape[-1] ** 0.5
        return torch.einsum("shft,tshd->fshd", scores.softmax(-1), values).flatten(2)

    def turned(self, x: Tensor) -> Tensor:
        """Rotated in the first channels by the latent frame's number in the stream."""
        at = torch.arange(self.first, self.first + len(x), dtype=torch.float64)[:, None]
        angles = at * self.theta ** (-torch.arange(0, self.rope_dim, 2, dtype=torch.float64) / self.rope_dim)
        factors = torch.polar(torch.ones_like(angles), angles)[:, None, None]
        own = torch.view_as_complex(x[..., : self.rope_dim].unflatten(-1, (-1, 2)).contiguous()) * factors
        return torch.cat([torch.view_as_real(own).flatten(-2), x[..., self.rope_dim :]], -1)

    def stream(self, initial: Tensor, renoise: Tensor, timesteps: Sequence[float], inputs: Inputs) -> Tensor:
        """Latents `[n, C, F, h, w]` in KV context clean; the noise level of a timestep is a thousandth of it."""
        past, made = list[Seen](), []
        for chunk, x in enumerate(initial.double()):
            first = chunk * x.shape[1]
            for step, timestep in enumerate(timesteps):
                clean = x - timestep / 1000 * self.forward(x, timestep, first, inputs, past)[0]
                if step + 1 < len(timesteps):
                    level = timesteps[step + 1] / 1000
                    x = (1 - level) * clean + level * renoise[chunk, step].double()
            made.append(clean)
            past.append(self.forward(clean, 0.0, first, inputs, past)[1])
        return torch.stack(made)
