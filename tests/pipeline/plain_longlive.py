"""LongLive's stream as its authors' code makes it, in plain float64: no slots, no chunks in flight, no stages.

Written from what LongLive v1.0 does (`interactive_causal_inference.py`, `causal_model.py`, and for relative positions
`causal_model_infinity.py`); of the product it uses the weights, and the numbers that noise and schedule are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.model import Model
from streamdiff.models.transformer.wan import position_planes
from tests.pipeline.float64_wan import PlainWan, attend, rotated

Cached = dict[int, tuple[Tensor, Tensor]]
"""By latent frame, a layer's keys, not rotated, and values `[tokens, H, d]`."""


class CachedWan:
    """Wan's transformer with the keys and values of every latent frame that it wrote, by layer."""

    def __init__(self, model: Model) -> None:
        self.wan = PlainWan(model.denoiser.model.state_dict(), model.denoiser.heads)
        self.planes = model.denoiser.extra_channels
        self.cache: list[Cached] = [{} for _ in range(self.wan.layers)]

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
        height, width = latents.shape[-2:]
        planes = position_planes(self.planes, height, width)[:, None].expand(-1, len(run), -1, -1).double()
        # Places in the window: of a query the place in what runs, of a key the place in what is seen.
        places = list(run) if absolute else list(range(len(seen) - len(run), len(seen)))
        key_places = list(seen) if absolute else list(range(len(seen)))

        def turned(frames: Sequence[Tensor], at: Sequence[int]) -> Tensor:
            turns = zip(frames, at, strict=True)
            return torch.cat([rotated(x, place, height // 2, width // 2) for x, place in turns])

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cached, frames = self.cache[layer], len(run)
            for frame, k, v in zip(run, key.chunk(frames), value.chunk(frames), strict=True):
                if frame in written:
                    cached[frame] = k, v
            keys = turned([cached[frame][0] for frame in seen], key_places)
            return attend(turned(query.chunk(frames), places), keys, torch.cat([cached[frame][1] for frame in seen]))

        return self.wan.flow(torch.cat([latents, planes]), timestep, text, attention)


@torch.inference_mode()
def plain_stream(model: Model, text: str, switches: Mapping[int, str], chunks: int, seed: int, steps: int) -> Tensor:
    """Latents `[chunks, C, F, h, w]` of a stream that begins with `text`; `switches`: new prompts, by the first chunk
    that has one, each of which has the window cached again."""
    spec, wan = model.spec, CachedWan(model)
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
