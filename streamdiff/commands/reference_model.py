"""The model of a reference run: found and its spec overridden by the job, then loaded from its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from streamdiff.config import ModelConfig
from streamdiff.device import own_device, pick_device
from streamdiff.errors import ConfigError
from streamdiff.models import sampling, tensor_file
from streamdiff.models.autoencoder.autoencoder import FirstFrameReencoder
from streamdiff.models.headers import MOTION, parse_header
from streamdiff.models.loader import ModelLoader, load_text_encoder
from streamdiff.models.model import Model
from streamdiff.models.resolve import ResolvedModel
from streamdiff.models.sampling import Schedule
from streamdiff.models.spec import ModelSpec, TextEncoder, choose_steps, with_window
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.weight_files import read_object
from streamdiff.pipeline.planner.model_sizes import sizes_from
from streamdiff.pipeline.planner.partition import check_ranks
from streamdiff.pipeline.runner import block_offload


@dataclass(frozen=True)
class ReferenceJob:
    """Options of a reference run: `model` selects the model and how it runs, the other fields are those of
    `cli.reference_options`. None: the model's own value, or nothing. `window`, `sink` and `rope` override those of
    `model`; a window of 0 is the whole stream."""

    model: ModelConfig
    prompt: str = ""
    seed: int = 0
    output: Path | None = None
    overwrite: bool = False
    fps: float | None = None
    chunks: int | None = None
    latents_out: Path | None = None
    prompt_embeds: Path | None = None
    noise: Path | None = None
    video_latents: Path | None = None
    given_latents: Path | None = None
    first_steps: Path | None = None
    strength: float | None = None
    motion_noise: bool = False
    container: str | None = None
    model_config: Path | None = None
    shift: float | None = None
    warp: bool = False
    nearest: bool = False
    sigmas: tuple[float, ...] | None = None
    first_chunk_steps: tuple[float, ...] | None = None
    window: int | None = None
    sink: int | None = None
    rope: str | None = None
    chunk_latents: int | None = None
    first_chunk_latents: int | None = None
    context_noise: float | None = None
    context_alone: bool | None = None
    context_pictures: bool | None = None
    adaptive_sink: float | None = None
    averaged_sink: float | None = None
    prompt_switch: tuple[str, ...] = ()
    prompt_mix: int | None = None
    no_decode: bool = False
    processes: bool = False


@dataclass(frozen=True)
class Found:
    """A resolved model: configurations and headers have been read, weights have not."""

    job: ReferenceJob
    spec: ModelSpec
    schedule: Schedule
    loader: ModelLoader

    @property
    def device(self) -> torch.device:
        return self.loader.device

    @property
    def blocks(self) -> int:
        """Of its transformer."""
        return int(self.loader.checkpoint.architecture["num_layers"])

    @property
    def raw_files(self) -> list[Path]:
        """Files whose latents are not normalised."""
        given = (self.job.video_latents, self.job.given_latents)
        return [path for path in given if path is not None and path.exists() and tensor_file.is_raw(path)]

    def notes(self) -> list[str]:
        """What a user should know before the run."""
        notes = [f"{path}: its latents are not normalised, and are used as they are" for path in self.raw_files]
        video = self.job.video_latents
        if self.job.motion_noise and video is not None and MOTION not in parse_header(video).metadata:
            notes.append(
                f"{video} does not say how its pixels move, as files of `streamdiff encode` do; the motion of its "
                "latents counts"
            )
        if video is None and self.job.noise is None:
            notes += filter(None, [self.loader.model.noise_note])
        return notes

    def denoiser(self, blocks: tuple[int, int] | None = None) -> WanDenoiser:
        """Its transformer with the blocks `blocks` (first, last exclusive; all when None).

        Raises:
            ConfigError: as `ModelLoader.transformer`.
        """
        if self.job.model.offload == "none":
            return self.loader.transformer(blocks)
        return block_offload.offload(self.loader.transformer(blocks, weights_on=torch.device("cpu")), self.device)

    def load(self, blocks: tuple[int, int] | None = None) -> Model:
        """Load it, with its blocks `blocks` (first, last exclusive; all when None). There is no decoder: latents need
        none.

        Raises:
            ConfigError: parts that are missing or do not fit.
        """
        job, spec, loader = self.job, self.spec, self.loader
        text: TextEncoder = NoText()
        if job.prompt_embeds is None:
            text = load_text_encoder(loader.model, job.model, spec.text_shape, self.device)
        seen_again = spec.context_pictures and job.model.kv_context != "same_step"
        past = FirstFrameReencoder.load(loader.model.found_vae, self.device) if seen_again else None
        return Model(spec, self.denoiser(blocks), text, None, past)


def find(job: ReferenceJob) -> Found:
    """Resolve the model of `job` and apply the job's overrides to its spec and schedule.

    Raises:
        ConfigError: no such model, files that cannot be read, invalid sizes, more stages than blocks.
    """
    config = job.model
    architecture = None if job.model_config is None else read_object(job.model_config)
    device = own_device(config.device) if job.processes else pick_device(config.device)
    loader = ModelLoader(config, device, job.container, architecture)
    spec = _overridden(loader.spec, job)
    schedule = _schedule(job, loader.model, spec)
    if schedule.first is not None and spec.first_chunks > 1:
        raise ConfigError(
            f"the first chunk has {schedule.first.steps} steps, and it is longer than the others; a model with both is "
            "not built. Leave --first-chunk-steps out, or say --first-chunk-frames "
            f"{spec.chunk_latents}"
        )
    found = Found(job, spec, schedule, loader)
    for path in found.raw_files:
        _check_raw(loader.model, path)
    check_ranks(config, sizes_from(loader.checkpoint.architecture, spec))
    return found


class NoText(TextEncoder):
    """The text encoder of a run whose embeddings are given: raises when used."""

    def read(self, prompt: str, previous: str | None) -> NoReturn:
        raise ConfigError("there is no text encoder here; give embeddings")

    def encode(self, text: str) -> NoReturn:
        raise ConfigError("there is no text encoder here; give embeddings")


def encode(model: Model, prompt: str) -> Tensor:
    """Embeddings of a prompt by the model's own text encoder."""
    reading = model.text.read(prompt, None)
    if reading.notice:
        print(reading.notice)
    return model.text.encode(reading.text)


def _check_raw(resolved: ResolvedModel, path: Path) -> None:
    """Raises ConfigError for unnormalised latents in `path`, unless the model's authors use such, or the catalogue does
    not have the model."""
    if resolved.entry is not None and resolved.entry.encode_normalised is not False:
        raise ConfigError(
            f"{path}: its latents are not normalised, and {resolved.name} knows normalised ones; encode it without "
            "--raw"
        )


def _schedule(job: ReferenceJob, resolved: ResolvedModel, spec: ModelSpec) -> Schedule:
    """The denoise steps: those given, else the model's own."""
    if job.model.timesteps is not None:
        schedule = _given(job, job.model.timesteps, job.sigmas)
        if job.first_chunk_steps is None:
            return schedule
        return replace(schedule, first=_given(job, job.first_chunk_steps, None))
    listed = job.sigmas is not None or job.first_chunk_steps is not None
    if listed or job.warp or job.nearest or job.shift is not None:
        raise ConfigError(
            "--sigmas, --shift, --warp, --nearest and --first-chunk-steps go with a list: --steps 1000,750,500,250"
        )
    if not spec.steps:
        raise ConfigError("--steps is missing: the timesteps the model is told, for example 1000,937.5,833.33,625")
    return spec.schedule(choose_steps(job.model.step_count, spec.steps, resolved.name))


def _given(job: ReferenceJob, steps: tuple[float, ...], sigmas: tuple[float, ...] | None) -> Schedule:
    """The schedule of a list that was given."""
    if job.sigmas is not None:
        if job.warp or job.nearest or job.shift is not None:
            raise ConfigError("--sigmas says the noise levels, so leave --shift, --warp and --nearest out")
        return sampling.from_timesteps(steps, sigmas)
    if not (job.warp or job.nearest) and job.shift is not None:
        raise ConfigError(
            "--shift is for lists that are meant before it: add --warp, or --nearest if noise levels are looked up, or "
            "leave it out"
        )
    return sampling.published(steps, shift=1.0 if job.shift is None else job.shift, warp=job.warp, nearest=job.nearest)


def _overridden(spec: ModelSpec, job: ReferenceJob) -> ModelSpec:
    """`spec` with the sizes, window, sink, positions and context noise that were asked for."""
    assert job.chunks is not None
    chunk, height, width = spec.chunk_latents, spec.latent_height, spec.latent_width
    given = [(job.noise, "initial"), (job.video_latents, "latents"), (job.given_latents, "latents")]
    shapes = [(path, _shape(path, name)) for path, name in given if path is not None]
    chunk = next((shape[2] for _, shape in shapes if len(shape) == 5), chunk)
    for path, shape in shapes[::-1]:  # the first one says the size; that the others agree is checked as they are read
        if len(shape) in (4, 5):
            if job.model.size is not None and shape[-2:] != (spec.latent_height, spec.latent_width):
                raise ConfigError(f"--size is {job.model.size}, but {path} is for another; leave --size out")
            height, width = shape[-2:]
    chunk = job.chunk_latents or chunk
    first = job.first_chunk_latents or (spec.first_chunks * chunk if chunk == spec.chunk_latents else chunk)
    if not (spec.sink_latents if job.sink is None else job.sink):  # nothing is done with a sink that is not there
        spec = replace(spec, adaptive_sink=None, averaged_sink=None)
    spec = replace(
        spec,
        chunk_latents=chunk,
        latent_height=height,
        latent_width=width,
        height=height * spec.height // spec.latent_height,
        width=width * spec.width // spec.latent_width,
        adaptive_sink=spec.adaptive_sink if job.adaptive_sink is None else job.adaptive_sink,
        averaged_sink=spec.averaged_sink if job.averaged_sink is None else job.averaged_sink,
        first_chunks=_first_chunks(first, chunk, job.chunks),
        context_sigma=spec.context_sigma if job.context_noise is None else job.context_noise / sampling.TIMESTEPS,
        context_alone=spec.context_alone if job.context_alone is None else job.context_alone,
        context_pictures=spec.context_pictures if job.context_pictures is None else job.context_pictures,
        text_shape=_text_shape(spec, job),
    )
    window = job.window
    if not (spec.window_latents if window is None else window):  # all of it
        window = chunk * job.chunks
    return with_window(spec, window, job.sink, job.rope)


def _first_chunks(first: int, chunk: int, chunks: int) -> int:
    """Chunks that a stream's first one is made of, `first` latent frames."""
    if chunk < 1:
        raise ConfigError(f"--chunk-frames is {chunk}; at least 1 is needed")
    if first < 1 or first % chunk:
        raise ConfigError(
            f"--first-chunk-frames is {first}; a first chunk is made of chunks, so it must be a multiple of "
            f"the others' {chunk} latent frames"
        )
    if first > chunk * chunks:
        raise ConfigError(
            f"--chunks is {chunks}, but the first chunk, of {first} latent frames, is made of {first // chunk}; "
            "make at least as many"
        )
    return first // chunk


def _shape(path: Path, name: str) -> tuple[int, ...]:
    """Shape of a tensor in a file; empty where it is not there, which is reported later."""
    entry = parse_header(path).entries.get(name) if path.exists() else None
    return () if entry is None else tuple(entry.shape)


def _text_shape(spec: ModelSpec, job: ReferenceJob) -> tuple[int, int]:
    """(text tokens, text width): as many rows as the embeddings have."""
    if job.prompt_embeds is not None:
        shape = _shape(job.prompt_embeds, "prompt_embeds")
        if len(shape) in (2, 3):
            return shape[-2], spec.text_shape[1]
    return spec.text_shape
