"""LongLive's stream as its authors' code makes it, in plain float64: no slots, no chunks in flight, no stages.

Written from what LongLive v1.0 does (`interactive_causal_inference.py`, `causal_model.py`, and for relative positions
`causal_model_infinity.py`); of the product it uses the weights, and the numbers that noise and schedule are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.model import Model
from streamdiff.models.transformer.wan import position_planes

Cached = dict[int, tuple[Tensor, Tensor]]
"""By latent frame, a layer's keys, not rotated, and values `[tokens, H, d]`."""


class PlainWan:
    """Wan's transformer in float64 from its weights, for one row; patches are 2 x 2."""

    def __init__(self, model: Model) -> None:
        self.weights = {name: weight.double() for name, weight in model.denoiser.model.state_dict().items()}
        self.layers, self.heads = len(model.denoiser.blocks), model.denoiser.heads
        self.planes, self.spec = model.denoiser.extra_channels, model.spec
        self.size = (self.spec.latent_height // 2, self.spec.latent_width // 2)
        self.cache: list[Cached] = [{} for _ in range(self.layers)]

    def forward(
        self,
        latents: Tensor,
        timestep: float,
        text: Tensor,
        run: Sequence[int],
        seen: Sequence[int],
        written: Sequence[int],
        absolute: bool,
    ) -> Tensor:
        """The flow of latents `[C, F, h, w]`, frames `run`, which all attend to the frames `seen`; those `written` put
        their keys and values into the cache, and are seen so. Mutates: self."""
        planes = position_planes(self.planes, *latents.shape[-2:])[:, None].expand(-1, len(run), -1, -1).double()
        patches = F.conv3d(torch.cat([latents, planes])[None], *self._pair("patch_embedding"), stride=(1, 2, 2))
        hidden = patches[0].flatten(2).permute(1, 2, 0)  # [F, tokens, D]
        waves = self._of("condition_embedder.time_embedder.linear_1.weight").shape[1] // 2
        angle = timestep * 10000.0 ** (-torch.arange(waves).double() / waves)
        time = self._mlp("condition_embedder.time_embedder", torch.cat([angle.cos(), angle.sin()]), F.silu)
        modulation = self._linear("condition_embedder.time_proj", F.silu(time)).view(6, -1)
        context = self._mlp("condition_embedder.text_embedder", text.double(), _gelu)
        for layer in range(self.layers):
            hidden = self._block(layer, hidden, modulation, context, run, seen, written, absolute)
        shift, scale = self._of("scale_shift_table")[0] + time
        flow = self._linear("proj_out", _normal(hidden) * (1 + scale) + shift)
        pixels = flow.view(len(run), *self.size, 2, 2, -1).permute(5, 0, 1, 3, 2, 4)
        return pixels.reshape(latents.shape)

    def _block(
        self,
        layer: int,
        hidden: Tensor,
        modulation: Tensor,
        context: Tensor,
        run: Sequence[int],
        seen: Sequence[int],
        written: Sequence[int],
        absolute: bool,
    ) -> Tensor:
        name, cached = f"blocks.{layer}.", self.cache[layer]
        shift, scale, gate, ff_shift, ff_scale, ff_gate = self._of(name + "scale_shift_table")[0] + modulation
        query, key, value = self._heads(name + "attn1", _normal(hidden) * (1 + scale) + shift)
        for index, frame in enumerate(run):
            if frame in written:
                cached[frame] = key[index], value[index]
        # Places in the window: of a query the place in what runs, of a key the place in what is seen.
        first = len(seen) - len(run)
        places = list(run) if absolute else list(range(first, len(seen)))
        key_places = list(seen) if absolute else list(range(len(seen)))
        turned = torch.cat([self._rotate(x, place) for x, place in zip(query, places, strict=True)])
        keys = torch.cat([self._rotate(cached[f][0], place) for f, place in zip(seen, key_places, strict=True)])
        mixed = _attend(turned, keys, torch.cat([cached[f][1] for f in seen])).reshape(hidden.shape)
        hidden = hidden + self._linear(name + "attn1.to_out.0", mixed) * gate
        inner = F.layer_norm(hidden, hidden.shape[-1:], *self._pair(name + "norm2"), 1e-6)
        query, key, value = self._heads(name + "attn2", inner, context)
        cross = _attend(query.flatten(0, 1), key, value).reshape(hidden.shape)
        hidden = hidden + self._linear(name + "attn2.to_out.0", cross)
        wide = _gelu(self._linear(name + "ffn.net.0.proj", _normal(hidden) * (1 + ff_scale) + ff_shift))
        return hidden + self._linear(name + "ffn.net.2", wide) * ff_gate

    def _heads(self, name: str, x: Tensor, other: Tensor | None = None) -> list[Tensor]:
        """Queries of `x`, keys and values of `other` (or of `x`), `[..., H, d]`."""
        other = x if other is None else other
        query, key = (
            _rms(self._linear(f"{name}.to_{part}", given)) * self._of(f"{name}.norm_{part}.weight")
            for part, given in (("q", x), ("k", other))
        )
        return [each.unflatten(-1, (self.heads, -1)) for each in (query, key, self._linear(f"{name}.to_v", other))]

    def _rotate(self, x: Tensor, place: int) -> Tensor:
        """Keys or queries of a frame `[tokens, H, d]` at a place in time, channels in pairs: the first ones turn by
        time, then as many by row and by column."""
        dim, (height, width) = x.shape[-1], self.size
        side = 2 * (dim // 6)
        wave = lambda n: 10000.0 ** (-torch.arange(0, n, 2).double() / n)  # noqa: E731
        rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
        angles = [place * wave(dim - 2 * side).expand(height * width, -1)]
        angles += [each.double()[:, None] * wave(side) for each in (rows, columns)]
        angle = torch.cat(angles, 1)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack(
            [even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1
        ).flatten(-2)

    def _mlp(self, name: str, x: Tensor, act: object) -> Tensor:
        assert callable(act)
        return self._linear(f"{name}.linear_2", act(self._linear(f"{name}.linear_1", x)))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, *self._pair(name))

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self._of(f"{name}.weight"), self._of(f"{name}.bias")

    def _of(self, name: str) -> Tensor:
        return self.weights[name]


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _normal(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def _rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention of queries `[n, H, d]` to keys and values `[m, H, d]`."""
    scores = torch.einsum("nhd,mhd->hnm", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value)


@torch.inference_mode()
def plain_stream(model: Model, text: str, switches: Mapping[int, str], chunks: int, seed: int, steps: int) -> Tensor:
    """Latents `[chunks, C, F, h, w]` of a stream that begins with `text`; `switches`: new prompts, by the first chunk
    that has one, each of which has the window cached again."""
    spec, wan = model.spec, PlainWan(model)
    absolute, per, window, sink = spec.rope == "absolute", spec.chunk_latents, spec.window("clean"), spec.sink_latents
    embeddings = model.text.encode(text)
    done: list[Tensor] = []
    for chunk in range(chunks):
        begin, end = chunk * per, (chunk + 1) * per
        if chunk in switches:
            embeddings = model.text.encode(switches[chunk])
            run = list(range(max(0, begin - window), begin))
            # Once the window has moved on, the places of the sink are not written: they hold its old keys.
            behind = run if begin <= window else run[sink:]
            seen = run if begin <= window else [*range(sink), *behind]
            clean = torch.cat(done, 1)[:, run[0] :]
            wan.forward(clean, 0.0, embeddings, run, seen, behind, absolute)
        own = list(range(begin, end))
        kept = min(sink, end)
        seen = [*range(kept), *range(max(kept, end - (window - sink)), end)]
        x0 = torch.zeros(())
        for step, sigma in enumerate(sampling.schedule(steps, spec.shift)):
            fresh = sampling.noise(spec.chunk_shape, seed=seed, chunk=chunk, step=step).double()
            x_t = fresh if step == 0 else (1 - sigma) * x0 + sigma * fresh
            x0 = x_t - sigma * wan.forward(x_t, 1000 * sigma, embeddings, own, seen, own, absolute)
        wan.forward(x0, 0.0, embeddings, own, seen, own, absolute)
        done.append(x0)
    return torch.stack(done)
