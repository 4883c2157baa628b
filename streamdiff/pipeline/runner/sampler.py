"""The sampler on rank 0: owns the latents, makes a micro-step's model input, turns its flow into the next latents.

Only rank 0 knows noise levels and x_t; stages see hidden states, and what comes back is the flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamdiff.models import sampling
from streamdiff.models.model import Model
from streamdiff.models.sampling import Schedule
from streamdiff.pipeline.kv_cache.geometry import CacheGeometry, cache_geometry
from streamdiff.pipeline.runner.init_latents import InitLatents
from streamdiff.pipeline.runner.noise import Noise, PrefetchedNoise
from streamdiff.pipeline.scheduler.step import MicroStep


class Finished(NamedTuple):
    """A chunk whose latents `[C, F, h, w]` are done."""

    row: MicroStep
    latents: Tensor


PROMPT_SWITCHES = ("keep", "flush", "recache")
"""What a new prompt may do to the past, see `RingExecutor.set_text`. To start afresh is `RingExecutor.reset`."""


@dataclass
class HeadSession:
    """What rank 0 keeps of one stream."""

    given: Noise
    """Noise as it was supplied."""
    noise: Noise
    """The same, prefetched to the device where that pays."""
    schedule: Schedule
    kv_context: str
    plan: CacheGeometry
    levels: tuple[Tensor, Tensor]
    """Timesteps `[steps + 1, F]` on the device, the clean pass last: of the first chunk, and of the others."""
    latents: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By (chunk, epoch) in flight: x_t, or x0 for the clean pass, `[C, F, h, w]`. A result without an entry belongs to
    a stream that was reset or closed."""
    kept: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """By chunk that a later one may see: finished latents, and the number of steps. For the clean pass and its reruns;
    empty in KV contexts without one."""
    visible_from_chunk: int = 0
    """The first chunk outside the sink that chunks admitted from now on see."""
    source: InitLatents | None = None
    """Encoded input that first steps start from; None: noise alone."""
    pictures: Any = None
    """Memory of the model's `past`."""

    @property
    def clean_pass(self) -> bool:
        return self.kv_context != "matched"

    def keep(self, row: MicroStep, latents: Tensor) -> None:
        """Remember a finished chunk as long as a later one may see it. Mutates: self."""
        chunk = row.chunk
        self.kept[chunk] = latents, row.steps
        if (gone := chunk - self.plan.slots) >= self.plan.pinned:
            self.kept.pop(gone, None)


class LatentSampler:
    """Latents, noise and sampler of every open session."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.dtype, self.spec, self.device, self.past = model.denoiser.dtype, model.spec, device, model.past
        self.sessions: dict[int, HeadSession] = {}
        # On a CPU a thread that draws would only take time from the one that computes.
        self._thread = ThreadPoolExecutor(1, "noise") if device.type == "cuda" else None

    def prepare(
        self, *, noise: Noise, schedule: Schedule, kv_context: str, source: InitLatents | None = None
    ) -> HeadSession:
        """A stream at its beginning; in `sessions` it starts."""
        plan = cache_geometry(self.spec, kv_context, steps=schedule.steps)
        levels, drawn = self._both_levels(schedule), self._drawn(noise, schedule)
        return HeadSession(noise, drawn, schedule, kv_context, plan, levels, source=source and source.on(self.device))

    def set_steps(self, session: int, schedule: Schedule) -> None:
        """Chunks from now on have this schedule; none may be in flight. Mutates: self."""
        state = self.sessions[session]
        state.schedule, state.levels = schedule, self._both_levels(schedule)
        state.noise = self._drawn(state.given, schedule)

    def close(self, session: int) -> None:
        self.sessions.pop(session, None)

    def switch(self, session: int, chunk: int, policy: str) -> tuple[int, list[int]]:
        """What `policy` means for a prompt in force from `chunk` on: the chunk before which nothing but the sink is
        seen, and the chunks whose clean pass has to run again, oldest first. Mutates: self.

        Raises:
            ValueError: unknown policy, or one that the session's KV context cannot have.
        """
        self.check_switch(session, policy)
        state = self.sessions[session]
        seen = state.plan.visible(chunk, state.visible_from_chunk)[:-1]
        if policy == "flush":
            state.visible_from_chunk = chunk
        elif policy == "recache":
            state.visible_from_chunk = next((each for each in seen if each >= state.plan.pinned), chunk)
        return state.visible_from_chunk, seen if policy == "recache" else []

    def check_switch(self, session: int, policy: str) -> None:
        """Raises what `switch` would."""
        if policy not in PROMPT_SWITCHES:
            raise ValueError(f"prompt switch is {policy!r}; it can be {', '.join(PROMPT_SWITCHES)}")
        if policy == "recache" and not self.sessions[session].clean_pass:
            raise ValueError("prompt switch recache needs a KV context with a clean pass: clean or staircase")

    @torch.inference_mode()
    def inputs(self, rows: Sequence[MicroStep]) -> tuple[Tensor, Tensor]:
        """What the first stage is given for `rows`: latents `[R, C, F, h, w]` in the model's dtype, timesteps `[R, F]`;
        a chunk's first step draws its noise. Mutates: self."""
        latents, levels = [], []
        for row in rows:
            session = self.sessions[row.session]
            if row.step == 0:
                session.latents[row.chunk, row.epoch] = self._begin(row)
            latents.append(self._context(row) if row.clean else session.latents[row.chunk, row.epoch])
            levels.append(self._level(row))
        return torch.stack(latents).to(self.dtype), torch.stack(levels)

    @torch.inference_mode()
    def advance(self, rows: Sequence[MicroStep], flows: Tensor) -> list[Finished]:
        """Apply the sampler to the flows `[R, C, F, h, w]` that came back. Mutates: self.

        Rows of sessions that were closed or reset while they were on their way are ignored.
        """
        finished = []
        for row, flow in zip(rows, flows, strict=True):
            session, key = self.sessions.get(row.session), (row.chunk, row.epoch)
            if session is None or key not in session.latents:
                continue
            x_t = session.latents.pop(key)
            if row.clean:
                continue
            x0 = sampling.clean_from_flow(x_t, flow.to(x_t.dtype), self._sigma(row, row.step))
            if row.last:
                finished.append(Finished(row, x0))
                if session.clean_pass:
                    session.keep(row, self._remembered(session, row.chunk, x0))
                    session.latents[key] = x0
            else:
                fresh = self._noise(row, row.step + 1)
                session.latents[key] = sampling.add_noise(x0, fresh, self._sigma(row, row.step + 1))
        return finished

    def _begin(self, row: MicroStep) -> Tensor:
        """What a chunk's first step receives: noise, or input with noise mixed in."""
        session, noise = self.sessions[row.session], self._noise(row)
        if session.source is not None:
            return session.source.begin(row.chunk, noise)
        scale = session.schedule.of(row.chunk).noise_scale
        return noise if scale == 1 or session.noise.is_unscaled(row.chunk) else noise * scale

    def _level(self, row: MicroStep) -> Tensor:
        """What the model is told, `[F]`."""
        session = self.sessions[row.session]
        if row.step == 0 and session.source is not None:
            return session.source.level(row.chunk).expand(self.spec.chunk_latents)
        return session.levels[row.chunk > 0][row.step]

    def _sigma(self, row: MicroStep, step: int) -> Tensor | float:
        """The noise level of the row's chunk at one of its steps; at the first an input may have its own."""
        session = self.sessions[row.session]
        if step == 0 and session.source is not None:
            return session.source.level(row.chunk) / sampling.TIMESTEPS
        return session.schedule.of(row.chunk).sigmas[step]

    def _drawn(self, noise: Noise, schedule: Schedule) -> Noise:
        """The noise on the device, drawn ahead where that pays."""
        if self._thread is None:
            return noise
        return PrefetchedNoise(noise, self.device, schedule.steps + (self.spec.context_sigma > 0), self._thread)

    def _both_levels(self, schedule: Schedule) -> tuple[Tensor, Tensor]:
        """What the model is told at each step of the first chunk and of the others, see `HeadSession`."""
        return self._levels(schedule.of(0)), self._levels(schedule)

    def _levels(self, schedule: Schedule) -> Tensor:
        """What the model is told at each step, and in the clean pass, `[steps + 1, F]`."""
        told = [*schedule.timesteps, self.spec.context_sigma * sampling.TIMESTEPS]
        return torch.tensor(told, device=self.device)[:, None].expand(-1, self.spec.chunk_latents)

    def _remembered(self, session: HeadSession, chunk: int, x0: Tensor) -> Tensor:
        """What the clean pass will be shown of a chunk, before noise. Mutates: session."""
        if self.past is None:
            return x0
        session.pictures = self.past.new_memory() if session.pictures is None else session.pictures
        return self.past.reencode(chunk, x0, session.pictures)

    def _context(self, row: MicroStep) -> Tensor:
        """What the clean pass shows of a finished chunk, the first time or again."""
        session, sigma = self.sessions[row.session], self.spec.context_sigma
        x0, steps = session.kept[row.chunk]  # the same noise again, whatever steps the session has by now
        return sampling.add_noise(x0, self._noise(row, steps), sigma) if sigma > 0 else x0

    def _noise(self, row: MicroStep, step: int = 0) -> Tensor:
        return self.sessions[row.session].noise.draw(row.chunk, step)
