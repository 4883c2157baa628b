"""The sampler on rank 0: owns the latents, makes a micro-step's model input, turns its flow into the next latents.

Only rank 0 knows noise levels and x_t; stages see hidden states, and what comes back is the flow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamdiff.core import PER_STEP, PROMPT_POLICIES, RECACHES, MicroStep
from streamdiff.device import upload
from streamdiff.errors import RequestError
from streamdiff.models import camera, sampling
from streamdiff.models.autoencoder.autoencoder import reencode_first_frame
from streamdiff.models.camera import Heading
from streamdiff.models.model import Model
from streamdiff.models.sampling import Schedule
from streamdiff.pipeline.kv_cache.geometry import CacheGeometry, cache_geometry
from streamdiff.pipeline.runner.controls import HeldControls, action_rows
from streamdiff.pipeline.runner.init_latents import ChunkLevels, GivenVideo, InitLatents, LiveLatents, levels_of
from streamdiff.session_state.fields import DERIVED, KEPT, STATE, session_state


@dataclass(frozen=True)
class StepLevels:
    """What the first `steps` denoise steps of every chunk have instead of the schedule's levels; later steps and the
    clean pass have the schedule's. Chunks beyond n have the last one's. F latent frames of a chunk.

    timesteps: what the model is given, 0 to 1000, float32 `[n, steps, F]`.
    sigmas: noise levels that x0 and x_t are made with, 0 to 1, float32 `[n, steps, F]`.
    """

    timesteps: Tensor
    sigmas: Tensor

    @classmethod
    def of_first_step(cls, source: InitLatents, schedule: Schedule) -> StepLevels:
        """Those of the first step of chunks that start from `source`: its timesteps, and x0 at the noise levels that
        the schedule has for these, see `levels_of`."""
        both = source.timestep, levels_of(source.timestep, schedule)
        return cls(*(each[:, None, None].expand(-1, 1, source.latents.shape[2]) for each in both))

    def to(self, device: torch.device) -> StepLevels:
        return StepLevels(self.timesteps.to(device), self.sigmas.to(device))

    def timestep(self, chunk: int, step: int) -> Tensor | None:
        """Of each latent frame `[F]`; None: the schedule's."""
        return self._at(self.timesteps, chunk, step)

    def sigma(self, chunk: int, step: int) -> Tensor | None:
        """Of each latent frame `[F, 1, 1]`, which goes with latents `[C, F, h, w]`; None: the schedule's."""
        found = self._at(self.sigmas, chunk, step)
        return None if found is None else found[:, None, None]

    @staticmethod
    def _at(values: Tensor, chunk: int, step: int) -> Tensor | None:
        return values[min(chunk, len(values) - 1), step] if step < values.shape[1] else None


@dataclass(frozen=True)
class Noise:
    """Standard normal noise of one session, on the CPU, so that it is the same for every device: drawn from `seed`;
    `shape` `[C, F, h, w]` is that of a chunk. A reference run may give that of the first n chunks: `initial` `[n, C, F,
    h, w]` for step 0, `renoise` `[n, steps - 1, C, F, h, w]` for the later ones, of which chunk c has
    `schedule.of(c).steps - 1`."""

    shape: tuple[int, int, int, int]
    seed: int
    initial: Tensor | None = None
    renoise: Tensor | None = None
    schedule: Schedule | None = None

    def draw(self, chunk: int, step: int) -> Tensor:
        """Float32 `[C, F, h, w]`, a pure function of (chunk, step): what step 0 receives, what is added
        before a later step, or, for `step` = number of steps, what the clean pass adds where it adds any."""
        if step == 0 and self.initial is not None and self.is_unscaled(chunk):
            return self.initial[chunk]
        given = self.schedule.of(chunk).steps if self.schedule is not None else 0
        if self.renoise is not None and chunk < len(self.renoise) and 0 < step < given:
            return self.renoise[chunk, step - 1]
        return sampling.noise(self.shape, seed=self.seed, chunk=chunk, step=step)

    def is_unscaled(self, chunk: int) -> bool:
        """True if step 0's noise of `chunk` is given and must not be multiplied by the schedule's `noise_scale`."""
        return self.initial is not None and chunk < len(self.initial)


class PrefetchedNoise:
    """Noise on the device without blocking the host: while a stage computes, a thread draws what is needed next,
    for a GPU into pinned memory, from where it is copied asynchronously.

    torch lends pinned memory again once the copy out of it is through, so there are no buffers here to take turns.
    """

    def __init__(self, noise: Noise, device: torch.device, draws: int, thread: ThreadPoolExecutor) -> None:
        """`draws` per chunk, of steps 0, 1, 2, ...; `thread` is lent."""
        self._noise, self._device, self._draws, self._thread = noise, device, draws, thread
        self._drawn: dict[tuple[int, int], tuple[Future[list[Tensor]], int]] = {}

    def prefetch(self, chunk: int, first: int, end: int | None = None) -> None:
        """Have the noise of steps `first` to `end` (exclusive; None: the chunk's last) drawn by the thread in one task:
        submitting steps one by one costs the host more than drawing them. Does nothing if step `first` is submitted
        already; leaves out steps that do not exist. Mutates: self."""
        steps = range(first, self._draws if end is None else min(end, self._draws))
        if steps and (chunk, first) not in self._drawn:
            drawn = self._thread.submit(lambda: [self._pinned(chunk, step) for step in steps])
            self._drawn |= {(chunk, step): (drawn, place) for place, step in enumerate(steps)}

    def draw(self, chunk: int, step: int) -> Tensor:
        """As `Noise`, on the device. Mutates: self."""
        drawn = self._drawn.pop((chunk, step), None)
        noise = self._pinned(chunk, step) if drawn is None else drawn[0].result()[drawn[1]]
        return noise.to(self._device, non_blocking=True)

    def _pinned(self, chunk: int, step: int) -> Tensor:
        noise = self._noise.draw(chunk, step)
        return noise.pin_memory() if self._device.type == "cuda" else noise


class Finished(NamedTuple):
    """A chunk whose latents `[C, F, h, w]` are done."""

    row: MicroStep
    latents: Tensor


@session_state("pending-steps")
class PendingSteps(NamedTuple):
    """A change of step count that is applied once nothing of the session is in flight."""

    epoch: int
    steps: int


@dataclass(frozen=True)
class StreamInputs:
    """What a reference run gives a stream.

    noise: in place of the seed's.
    source: encoded input that its chunks start from.
    levels: timesteps and noise levels that go before the schedule's.
    condition: see `SamplerState.condition`.
    controls: what steers the first n chunks `[n, *ModelSpec.steering_shape]`, in place of what is held;
        of a model without known keys the last stays.
    """

    noise: Noise | None = None
    source: InitLatents | None = None
    levels: StepLevels | None = None
    condition: Tensor | None = None
    controls: Tensor | None = None


@session_state("head")
@dataclass
class SamplerState:
    """What rank 0 keeps of one stream. What is DERIVED follows from what the session is opened with."""

    given: Noise = field(metadata=DERIVED)
    """Noise as it was supplied."""
    noise: PrefetchedNoise = field(metadata=DERIVED)
    """The same, drawn ahead and on the device."""
    schedule: Schedule = field(metadata=DERIVED)
    kv_context: str = field(metadata=DERIVED)
    geometry: CacheGeometry = field(metadata=DERIVED)
    times: tuple[Tensor, Tensor] = field(metadata=DERIVED)
    """Time embeddings `[steps + 1, F, D]`, the clean pass last: of the first chunk, and of the others."""
    latents: dict[tuple[int, int], Tensor] = field(default_factory=dict, metadata=STATE)
    """By (chunk, epoch) in flight: x_t, or x0 for the clean pass, `[C, F, h, w]`. A result without an entry belongs to
    a stream that was reset or closed."""
    kept: dict[int, tuple[Tensor, int]] = field(default_factory=dict, metadata=STATE)
    """By chunk that a later one may see: finished latents, and the number of steps. For the clean pass and its reruns;
    empty in KV contexts without one."""
    visible_from_chunk: int = field(default=0, metadata=STATE)
    """The first chunk outside the sink that chunks admitted from now on see."""
    source: InitLatents | None = field(default=None, metadata=DERIVED)
    """Encoded input that first steps start from; None: noise alone."""
    levels: StepLevels | None = field(default=None, metadata=DERIVED)
    """Timesteps and noise levels that go before those of the schedule."""
    given_latents: dict[int, Tensor] = field(default_factory=dict, metadata=STATE)
    """By chunk: finished latents `[C, F, h, w]` that the stream continues from. With a clean pass they leave when that
    has been entered; in `same_step` every step has them as its x0."""
    condition: Tensor | None = field(default=None, metadata=KEPT)
    """What the picture that the stream begins with is to a model with condition channels: `[channels, n, h, w]`; later
    latent frames have the last one's. None: zeros."""
    live: LiveLatents | None = field(default=None, metadata=DERIVED)
    """Video that comes in while the stream runs. A resumed session is fed again."""
    video: GivenVideo | None = field(default=None, metadata=DERIVED)
    """Encoded video that it was opened with. A snapshot has it among its tensors."""
    video_levels: dict[int, ChunkLevels] = field(default_factory=dict, metadata=STATE)
    """By chunk in flight that started from one of both."""
    begin_times: dict[int, Tensor] = field(default_factory=dict, metadata=DERIVED)
    """By chunk that begins next: the time embedding `[F, D]` of its first step, where that is not the schedule's."""
    controls: dict[int, Tensor] = field(default_factory=dict, metadata=STATE)
    """By chunk in flight, or `kept`, and the one before them: what steers it, see `ModelSpec.steering_shape`; empty
    where nothing does."""
    given_controls: Tensor | None = field(default=None, metadata=KEPT)
    """By chunk, in place of what is held, see `StreamInputs.controls`."""
    heading: Heading = field(default=Heading(), metadata=STATE)
    """Of a model with a camera: where that looks since the latest chunk was admitted."""
    held: HeldControls = field(default_factory=HeldControls, metadata=DERIVED)
    """The controls that the next chunk gets. A resumed session begins with none."""
    loras: dict[int, dict[int, float]] = field(default_factory=dict, metadata=STATE)
    """Scales of LoRAs by id: those that hold from an epoch on, back to the oldest in flight."""
    pictures: Any = field(default=None, metadata=STATE)
    """Memory of the model's `first_frame_reencoder`."""

    @property
    def clean_pass(self) -> bool:
        """Whether all chunks have a clean pass."""
        return self.kv_context not in PER_STEP

    @property
    def latest_loras(self) -> dict[int, float]:
        """Scales of LoRAs, by id, of chunks that are admitted now."""
        return self.loras[max(self.loras)] if self.loras else {}

    def set_loras(self, epoch: int, loras: Mapping[int, float], oldest: int) -> None:
        """Chunks from `epoch` on have these; `oldest` is the oldest in flight. Mutates: self."""
        kept = self.loras_from(oldest) if any(self.loras.values()) else {}
        self.loras = {**kept, epoch: dict(loras)} if kept or loras else {}

    def loras_from(self, oldest: int) -> dict[int, dict[int, float]]:
        """Those of the chunks of epoch `oldest` and later."""
        first = max((each for each in self.loras if each <= oldest), default=oldest)
        return {each: own for each, own in self.loras.items() if each >= first}

    def keep(self, row: MicroStep, latents: Tensor) -> None:
        """Remember a finished chunk for as long as a later one may see it. Mutates: self."""
        chunk = row.chunk
        self.kept[chunk] = latents, row.steps
        if (gone := chunk - self.geometry.slots) >= self.geometry.pinned:
            self.kept.pop(gone, None)
            self.controls.pop(gone, None)


class LatentSampler:
    """Rank 0's sampler: latents, noise and schedule of every open session."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.dtype, self.spec, self.device = model.denoiser.dtype, model.spec, device
        self.reencoder = model.first_frame_reencoder
        self.sessions: dict[int, SamplerState] = {}
        self._embed = model.denoiser.time_embedding
        self._zeros = torch.zeros(model.spec.chunk_latents, device=device)
        spec, shape = model.spec, model.spec.steering_shape
        self._at_rest = None if shape is None else torch.zeros(shape, device=device)
        if spec.has_camera:
            self._at_rest = camera.still_cameras(spec.chunk_latents, spec.width, spec.height).to(device)
        self._thread = ThreadPoolExecutor(1, "noise")

    def prepare(
        self, seed: int, schedule: Schedule, kv_context: str, start: Tensor | None = None,
        video: GivenVideo | None = None, given: StreamInputs | None = None,
    ) -> SamplerState:  # fmt: skip
        """State of a new stream, which starts once it is put into `sessions`; `start` are finished latents
        `[n, C, F, h, w]` of its first n chunks, of all that are made together, the rest as in `Ring.open`."""
        given = given or StreamInputs()
        geometry = cache_geometry(self.spec, kv_context, steps=schedule.steps)
        noise = given.noise or Noise(self.spec.chunk_shape, seed)
        times, drawn = self._times(schedule), self._prefetched(noise, schedule)
        state = SamplerState(noise, drawn, schedule, kv_context, geometry, times, video=video)
        levels = given.levels
        if given.condition is not None:
            state.condition = given.condition.to(self.device, torch.float32)
        if given.controls is not None:
            state.given_controls = given.controls.to(self.device, torch.float32)
        if given.source is not None:
            state.source = given.source.on(self.device)
            levels = levels or StepLevels.of_first_step(given.source, schedule)
        if levels is not None:
            state.levels = levels.to(self.device)
        if start is not None:
            state.given_latents = dict(enumerate(start.to(self.device, torch.float32)))
        self._prepare_begin(state, 0)
        return state

    def set_steps(self, session: int, schedule: Schedule) -> None:
        """Chunks from now on have this schedule; none may be in flight. Mutates: self."""
        state = self.sessions[session]
        state.schedule, state.times = schedule, self._times(schedule)
        state.noise = self._prefetched(state.given, schedule)

    def switch(self, session: int, chunk: int, policy: str) -> tuple[int, list[int]]:
        """Apply the prompt policy of a prompt in force from `chunk` on. Returns the first chunk outside the sink that
        stays visible, and the chunks whose clean pass has to run again (`recache`: in one forward), oldest first.
        Mutates: self.

        Raises:
            RequestError: unknown policy, or one that the session's KV context cannot have.
        """
        self.check_switch(session, policy)
        state = self.sessions[session]
        rerun: list[int] = []
        if policy == "flush":
            state.visible_from_chunk = chunk
        elif policy == "recache" and chunk > 0:
            rerun = state.geometry.recached(chunk - 1, state.visible_from_chunk)
        elif policy == "recache-causal":
            rerun = state.geometry.visible(chunk, state.visible_from_chunk)[:-1]
            state.visible_from_chunk = next((each for each in rerun if each >= state.geometry.pinned), chunk)
        return state.visible_from_chunk, rerun

    def check_switch(self, session: int, policy: str) -> None:
        """Raises what `switch` would."""
        known = [each for each in PROMPT_POLICIES if each != "reset"]  # which is `Ring.reset`
        if policy not in known:
            raise RequestError("switch", f"prompt switch is {policy!r}; it can be {', '.join(known)}")
        if policy in RECACHES and not self.sessions[session].clean_pass:
            raise RequestError(
                "switch", f"prompt switch {policy} needs a KV context with a clean pass: clean or staircase"
            )

    @torch.inference_mode()
    def inputs(self, rows: Sequence[MicroStep]) -> tuple[Tensor, ...]:
        """Model inputs for `rows`: latents `[R, C, F, h, w]`, with their condition behind them, time embeddings
        `[R, F, D]` in the model's dtype and, where the model has controls, their vectors `[R, F, K]` in that, or rows
        of actions `[R, rows, K]`, float32; a chunk's first step takes its noise, and the controls that are held.
        Mutates: self."""
        latents, times = [], []
        for row in rows:
            session = self.sessions[row.session]
            if row.step == 0:
                session.latents[row.chunk, row.epoch] = self._begin(row)
                if self._at_rest is not None:
                    session.controls[row.chunk] = self._steering(session, row.chunk)
            times.append(self._time(row))
            own = self._context(row) if row.clean else session.latents[row.chunk, row.epoch]
            latents.append(self._with_condition(own, row.chunk, session.condition))
        given = torch.stack(latents).to(self.dtype), torch.stack(times)
        if self._at_rest is None:
            return given
        controls = torch.stack([self.sessions[row.session].controls.get(row.chunk, self._at_rest) for row in rows])
        return *given, controls if self.spec.action_rows is not None else controls.to(self.dtype)

    def _steering(self, session: SamplerState, chunk: int) -> Tensor:
        """What steers a chunk that is admitted now, on the device. Mutates: session."""
        spec, given = self.spec, session.given_controls
        vectors, rows = session.held.take(spec.chunk_latents, spec.controls), spec.action_rows
        if given is not None and (chunk < len(given) or not spec.controls):  # where no key is known the last stays
            return given[min(chunk, len(given) - 1)]
        if spec.has_camera:
            size = spec.width, spec.height
            own, session.heading = camera.held_cameras(vectors, session.heading, chunk == 0, *size)
            return upload(own, self.device)
        vectors = upload(vectors, self.device)
        return vectors if rows is None else action_rows(vectors, session.controls.get(chunk - 1), rows)

    def _with_condition(self, latents: Tensor, chunk: int, condition: Tensor | None) -> Tensor:
        """Latents of a chunk `[C, F, h, w]` with the condition of its latent frames behind them, where there is one."""
        if not self.spec.condition_channels:
            return latents
        first, frames = chunk * self.spec.chunk_latents, range(self.spec.chunk_latents)
        if condition is None:
            own = latents.new_zeros(self.spec.condition_channels, *latents.shape[1:])
        else:  # frame by frame: a list of numbers would be uploaded
            last = condition.shape[1] - 1
            own = torch.stack([condition[:, min(first + frame, last)] for frame in frames], 1)
        return torch.cat([latents, own])

    def look_ahead(self, rows: Sequence[MicroStep]) -> None:
        """`rows` are about to enter: have prepared, while the stage computes, what their chunks' next steps need, and
        the chunks after them, which may begin before these end. Mutates: self."""
        begun = {(row.session, row.chunk) for row in rows if row.step == 0}
        for row in rows:
            state = self.sessions[row.session]
            state.noise.prefetch(row.chunk, row.step + 1, row.steps + state.clean_pass)
        for session, chunk in begun:
            if (session, chunk + 1) not in begun:
                self._prepare_begin(self.sessions[session], chunk + 1)

    @torch.inference_mode()
    def advance(self, row: MicroStep, flow: Tensor) -> Finished | None:
        """Apply the sampler to a row's flow `[C, F, h, w]` that came back; returns its chunk if that is finished. A row
        of a session that was closed or reset while it was on its way is ignored. Mutates: self."""
        session, key = self.sessions.get(row.session), (row.chunk, row.epoch)
        if session is None or key not in session.latents:
            return None
        x_t = session.latents.pop(key)
        if row.clean:
            return None
        x0 = sampling.clean_from_flow(x_t, flow.to(x_t.dtype), self._sigma(row, row.step))
        if row.chunk in session.given_latents:  # known already: the step was run for what it leaves in its cache
            x0 = session.given_latents[row.chunk]
        if not row.last:
            fresh = self._noise(row, row.step + 1)
            session.latents[key] = sampling.add_noise(x0, fresh, self._sigma(row, row.step + 1, renoise=True))
            return None
        session.video_levels.pop(row.chunk, None)
        if session.live is not None:
            session.live.forget(row.chunk)
        if session.clean_pass:
            session.keep(row, self._remembered(session, row.chunk, x0))
            session.latents[key] = x0
        else:
            session.controls.pop(row.chunk - 1, None)  # its own are the past of the next chunk's
        return Finished(row, x0)

    def _begin(self, row: MicroStep) -> Tensor:
        """Input of a chunk's first step: noise, or latents that are given with noise mixed in. Mutates: the session."""
        session, noise = self.sessions[row.session], self._noise(row)
        schedule = session.schedule.of(row.chunk)
        if row.chunk in session.given_latents:
            return sampling.add_noise(session.given_latents[row.chunk], noise, self._sigma(row, 0))
        for video in (session.live, session.video):
            if video is not None and (begins := video.take(row.chunk, schedule)) is not None:
                latents, levels = begins
                session.video_levels[row.chunk] = levels
                latents = latents.to(noise.device, noise.dtype, non_blocking=True)
                return sampling.add_noise(latents, noise, levels.sigmas[0])
        if session.source is not None:
            return session.source.begin(row.chunk, noise)
        scale = schedule.noise_scale
        return noise if scale == 1 or session.given.is_unscaled(row.chunk) else noise * scale

    def _time(self, row: MicroStep) -> Tensor:
        """The time embedding that the model is given for this row, `[F, D]`. Mutates: the session."""
        session = self.sessions[row.session]
        # Of chunks that are made together only the first has one that is ready.
        if row.step == 0 and (ready := session.begin_times.pop(row.chunk, None)) is not None:
            return ready
        if row.clean:
            own = self._zeros if row.chunk in session.given_latents else None
        else:
            own = self._own_timesteps(session, row.chunk, row.step)
        return session.times[row.chunk > 0][row.step] if own is None else self._embedded(own)

    def _own_timesteps(self, session: SamplerState, chunk: int, step: int) -> Tensor | None:
        """The timesteps `[F]` of a denoise step of a chunk, where they are not the schedule's."""
        if (video := session.video_levels.get(chunk)) is not None:
            return torch.full((self.spec.chunk_latents,), video.timesteps[step], device=self.device)
        return None if session.levels is None else session.levels.timestep(chunk, step)

    def _prepare_begin(self, session: SamplerState, chunk: int) -> None:
        """Have noise and time embedding of a chunk's first step ready before it may enter. Mutates: session."""
        session.noise.prefetch(chunk, 0, 1)
        # Given video says the timesteps when the chunk begins: the schedule may be another one by then.
        if session.video is None and (own := self._own_timesteps(session, chunk, 0)) is not None:
            session.begin_times[chunk] = self._embedded(own)

    @torch.inference_mode()
    def _embedded(self, timesteps: Tensor) -> Tensor:
        """Time embedding `[F, D]` of timesteps `[F]`."""
        return self._embed(timesteps[None])[0].to(self.dtype)

    def _sigma(self, row: MicroStep, step: int, renoise: bool = False) -> Tensor | float:
        """The noise level of the row's chunk at one of its steps, as `StepLevels.sigma`, or one for all its latent
        frames; at the first an input may have its own. `renoise`: that which its x_t is made with, not x0."""
        session = self.sessions[row.session]
        if (video := session.video_levels.get(row.chunk)) is not None:
            return video.sigmas[step]
        if session.levels is not None and (own := session.levels.sigma(row.chunk, step)) is not None:
            return own
        schedule = session.schedule.of(row.chunk)
        return schedule.renoise_sigma(step) if renoise else schedule.sigmas[step]

    def _prefetched(self, noise: Noise, schedule: Schedule) -> PrefetchedNoise:
        return PrefetchedNoise(noise, self.device, schedule.steps + (self.spec.context_sigma > 0), self._thread)

    @torch.inference_mode()
    def _times(self, schedule: Schedule) -> tuple[Tensor, Tensor]:
        """See `SamplerState.times`. One by one, so that a step has the same bits whatever the others are."""
        clean, frames = self.spec.context_sigma * sampling.TIMESTEPS, self.spec.chunk_latents
        both = ((*each.timesteps, clean) for each in (schedule.of(0), schedule))
        timesteps = (torch.tensor(each, device=self.device)[:, None].expand(-1, frames) for each in both)
        first, other = (torch.cat([self._embed(step[None]).to(self.dtype) for step in each]) for each in timesteps)
        return first, other

    def _remembered(self, session: SamplerState, chunk: int, x0: Tensor) -> Tensor:
        """The latents that the clean pass of a chunk gets, before noise is added. Mutates: session."""
        if self.reencoder is None:
            return x0
        session.pictures = self.reencoder.new_memory() if session.pictures is None else session.pictures
        return reencode_first_frame(self.reencoder, chunk, x0, session.pictures)

    def _context(self, row: MicroStep) -> Tensor:
        """Input of the clean pass of a finished chunk, or of its rerun. The first of a chunk that was given adds no
        noise, as in Self-Forcing's code. Mutates: its session."""
        session, sigma = self.sessions[row.session], self.spec.context_sigma
        if (given := session.given_latents.pop(row.chunk, None)) is not None:
            x0 = self._remembered(session, row.chunk, given)
            session.keep(row, x0)
            return x0
        x0, steps = session.kept[row.chunk]  # the same noise again, whatever steps the session has by now
        return sampling.add_noise(x0, self._noise(row, steps), sigma) if sigma > 0 else x0

    def _noise(self, row: MicroStep, step: int = 0) -> Tensor:
        return self.sessions[row.session].noise.draw(row.chunk, step)
