"""Reference runs whose latents are known from float64 (`plain_wan`), one for each thing that a file can say, in every
KV context; in this process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from streamdiff.commands.reference import ReferenceRun, run_reference
from streamdiff.models import sampling
from streamdiff.models.model import Model
from streamdiff.pipeline.runner.sampler import StepLevels
from tests.pipeline.float64_wan import PlainWan
from tests.pipeline.plain_wan import PlainStream
from tests.pipeline.playing import local_ring
from tests.small import CPU, small_model

CHUNKS, CHUNK, STEPS, GIVEN = 4, 2, 3, 2
TIMESTEPS = (900.0, 700.0, 300.0)
CONTEXT_NOISE = 100.0
CONTEXTS = ("clean", "staircase", "same_step")
BY_CHUNK, BY_FRAME, EVERY_STEP, CONTINUED, ALL = "by chunk", "by frame", "every step", "continued", "all"
NAMES = tuple(f"{kv_context}: {what}" for kv_context in CONTEXTS for what in (
    BY_CHUNK, BY_FRAME, EVERY_STEP, CONTINUED, ALL
))  # fmt: skip


def played(model: Model, run: ReferenceRun, stages: int = 1) -> Tensor:
    """Latents `[n, C, F, h, w]` of a run whose stages take turns in this process."""
    return torch.stack([latents for latents, _ in run_reference(local_ring(model, CPU, stages), run)])


class Case(NamedTuple):
    run: ReferenceRun
    plain: PlainStream

    @property
    def expected(self) -> Tensor:
        """Latents `[n, C, F, h, w]`, float64."""
        return torch.stack([self.plain.latents(chunk) for chunk in range(self.run.chunks)])


@cache
def case_model() -> Model:
    """Chunks of two latent frames, a window of three chunks of which one is the sink; remembers with noise."""
    model = small_model(3, layers=4, planes=0, chunk=CHUNK, window=3 * CHUNK, sink=CHUNK)
    return replace(model, spec=replace(model.spec, context_sigma=CONTEXT_NOISE / 1000))


def case(name: str) -> Case:
    """The case of this name of `NAMES`."""
    kv_context, what = name.split(": ")
    model, draw = case_model(), torch.Generator().manual_seed(7)
    shape, seed = model.spec.chunk_shape, 5
    initial, video = (torch.randn(CHUNKS, *shape, generator=draw) for _ in range(2))
    renoise = torch.randn(CHUNKS, STEPS - 1, *shape, generator=draw)
    text = torch.randn(model.spec.text_shape, generator=draw)
    told, sigmas, mixed = _levels(what, draw)
    given = torch.randn(GIVEN, *shape, generator=draw) if what in (CONTINUED, ALL) else None
    run = ReferenceRun(
        text,
        CHUNKS,
        sampling.from_timesteps(TIMESTEPS),
        kv_context,
        seed,
        initial,
        renoise,
        video=video if mixed is not None else None,
        noise_level=mixed,
        levels=None if told is None else StepLevels(told, sigmas),
        given_latents=given,
    )
    # What is not said by chunk is the schedule's.
    scheduled = torch.tensor(TIMESTEPS)[None, :, None].expand(CHUNKS, -1, CHUNK)
    every_told, every_sigma = scheduled.clone(), scheduled / 1000
    if told is not None:
        every_told[:, : told.shape[1]], every_sigma[:, : told.shape[1]] = told, sigmas
    start = dict(enumerate(initial))
    if mixed is not None:
        start = {c: (1 - at) * video[c] + at * initial[c] for c, at in enumerate(mixed[:, :, None, None].double())}
    noise = {(c, s): renoise[c, s - 1] if s else initial[c] for c in range(CHUNKS) for s in range(STEPS)}
    # Of the clean pass: numbers, like those above.
    noise |= {(c, STEPS): sampling.noise(shape, seed=seed, chunk=c, step=STEPS) for c in range(CHUNKS)}
    plain = PlainStream(
        PlainWan(model.denoiser.model.state_dict(), model.denoiser.heads),
        text,
        STEPS,
        kv_context,
        window=2,
        sink=1,
        levels={(c, s): (every_told[c, s], every_sigma[c, s]) for c in range(CHUNKS) for s in range(STEPS)},
        start=start,
        noise=noise,
        given=() if given is None else tuple(given),
        context=(CONTEXT_NOISE, CONTEXT_NOISE / 1000),
    )
    return Case(run, plain)


def _levels(what: str, draw: torch.Generator) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Timesteps and noise levels `[n, steps, F]`, and the level mixed into video `[n, F]`, as a case has them."""
    steps = {BY_CHUNK: 1, BY_FRAME: 1, EVERY_STEP: STEPS, ALL: STEPS}.get(what, 0)
    if not steps:
        return None, torch.empty(0), None
    # The model is told less noise than there is, as in StreamDiffusionV2.
    sigmas = 0.75 + 0.2 * torch.rand(CHUNKS, steps, 1 if what == BY_CHUNK else CHUNK, generator=draw)
    sigmas = (sigmas - 0.3 * torch.arange(steps)[:, None]).expand(-1, -1, CHUNK).clone()
    if what in (EVERY_STEP, ALL):
        sigmas[1, :, 0] = 0  # a frame that is clean from the start
    mixed = None if what == EVERY_STEP else sigmas[:, 0] + 0.04
    return sigmas * 990, sigmas, mixed
