"""The model of `exact`: found by name or path, loaded from its parts, its facts overridden by what was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models import autoencoders, catalogue, hub, sampling
from streamdiff.models.base import Model, ModelSpec, StreamDecoder, TextEncoder
from streamdiff.models.catalogue import Entry
from streamdiff.models.files import read_object
from streamdiff.models.headers import parse_header
from streamdiff.models.sampling import Schedule
from streamdiff.models.tiny import model as tiny
from streamdiff.models.tiny.text import TinyText
from streamdiff.models.wan.lora import Lora, parse_lora
from streamdiff.models.wan.model import SPATIAL, TEMPORAL, TransformerSource, load_denoiser
from streamdiff.models.wan.text import TEXT_TOKENS, WanText
from streamdiff.models.wan.transformer import WanDenoiser
from streamdiff.pipeline.plan import check_stages

if TYPE_CHECKING:
    from streamdiff.exact import Job

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CHUNK_LATENTS = 3
_SIZE = (832, 480)
_FPS = 16.0


@dataclass(frozen=True)
class Found:
    """A loaded model. `decoder` loads what decodes, which is not needed for latents."""

    model: Model
    schedule: Schedule
    device: torch.device
    decoder: Callable[[], StreamDecoder]


@dataclass(frozen=True)
class _Place:
    """Where a model's parts lie: a folder in diffusers' layout, files, or both."""

    weights: Path
    folder: Path | None = None
    vae: str | None = None
    container: str | None = None
    loras: tuple[Lora, ...] = ()
    entry: Entry | None = None

    @property
    def embedded(self) -> bool:
        """Whether it is a folder of the embedded model's kind, which says everything about itself."""
        return self.folder is not None and "stream" in _index(self.folder)


def load(job: Job) -> Found:
    """Find and load what `job` asks for.

    Raises:
        ConfigError: no such model, parts that are missing or do not fit, sizes that cannot be.
    """
    place = _place(job)
    device, dtype = _device(job)
    config = None if job.model_config is None else read_object(job.model_config)
    loras = (*place.loras, *(parse_lora(text) for text in job.lora))
    source = TransformerSource(place.weights, place.container, config, loras)
    denoiser = load_denoiser(source, device, dtype)
    check_stages(job.stages, len(denoiser.blocks))
    schedule = _schedule(job, place)
    spec = _overridden(_spec(job, place, denoiser), job)
    if denoiser.extra_channels and not place.embedded:
        raise ConfigError(
            f"{place.weights} takes {denoiser.extra_channels} channels beside the latents', which nothing gives it; "
            "only text to video is supported"
        )
    vae = job.vae or place.vae
    return Found(Model(spec, denoiser, _text(job, place, spec), None), schedule, device, lambda: _decoder(vae, device))


def encode(model: Model, prompt: str) -> Tensor:
    """Embeddings of a prompt by the model's own text encoder."""
    reading = model.text.read(prompt, None)
    if reading.notice:
        print(reading.notice)
    return model.text.encode(reading.text)


# ---- where the parts are ------------------------------------------------------------------------------------------


def _place(job: Job) -> _Place:
    place = _model_place(job.model)
    if job.weights is not None:
        place = replace(place, weights=job.weights, container=None, loras=())
    return replace(place, container=job.container or place.container)


def _model_place(name: str) -> _Place:
    path = tiny.WEIGHTS if name == "tiny" else Path(name)
    if path.is_dir():
        weights = path / "transformer" if (path / "transformer").is_dir() else path
        vae = str(path / "vae") if (path / "vae").is_dir() else None
        return _Place(weights, path, vae)
    if path.is_file():
        return _Place(path)
    if "/" in name or path.suffix:
        raise ConfigError(f"--model is {name}: there is no such file or folder; `streamdiff models` lists names")
    entry = catalogue.find(name)
    assert entry.weights is not None, "the embedded model is a folder"
    loras = []
    if entry.lora is not None:
        loras = [Lora(path, entry.lora.scale) for path in hub.fetch(entry.lora)]
    parts = catalogue.parts().autoencoders[entry.autoencoder].weights
    vae = str(hub.fetch(parts)[0]) if parts is not None else None
    return _Place(hub.fetch(entry.weights)[0], None, vae, entry.weights.container, tuple(loras), entry)


def _index(folder: Path) -> dict[str, Any]:
    path = folder / "model_index.json"
    return read_object(path) if path.is_file() else {}


def _device(job: Job) -> tuple[torch.device, torch.dtype]:
    there = "cuda" if torch.cuda.is_available() else "cpu"
    if job.device not in ("auto", "cpu", "cuda") or (job.device == "cuda" and there == "cpu"):
        raise ConfigError(f"--device is {job.device}, but must be auto, cpu or cuda, and torch sees {there} here")
    device = torch.device(there if job.device == "auto" else job.device)
    if job.dtype is not None and job.dtype not in _DTYPES:
        raise ConfigError(f"--dtype is {job.dtype}, but must be {' or '.join(_DTYPES)}")
    return device, _DTYPES[job.dtype or ("float32" if device.type == "cpu" else "bfloat16")]


def _text(job: Job, place: _Place, spec: ModelSpec) -> TextEncoder:
    if place.folder is not None and place.embedded:
        return TinyText.load(place.folder)
    if job.prompt_embeds is not None:
        return NoText()
    if place.folder is None or not (place.folder / "text_encoder").is_dir():
        raise ConfigError(
            f"{job.model} comes without a text encoder; give --prompt-embeds FILE, or as --model a folder in "
            "diffusers' layout with text_encoder and tokenizer"
        )
    return WanText(place.folder, length=spec.text_shape[0], width=spec.text_shape[1])


class NoText:
    """Stands where embeddings are given."""

    examples: tuple[str, ...] = ()
    vocabulary: str = ""

    def read(self, prompt: str, previous: str | None) -> NoReturn:
        raise ConfigError("there is no text encoder here; give embeddings")

    def encode(self, text: str) -> NoReturn:
        raise ConfigError("there is no text encoder here; give embeddings")


def _decoder(vae: str | None, device: torch.device) -> StreamDecoder:
    if vae is None:
        raise ConfigError("there is no autoencoder to decode with; give --vae PATH, or --no-decode")
    return autoencoders.load_decoder(vae, device)


# ---- facts --------------------------------------------------------------------------------------------------------


def _schedule(job: Job, place: _Place) -> Schedule:
    """The denoise steps: those given, else the model's own."""
    if isinstance(job.steps, tuple):
        if job.sigmas is not None:
            if job.warp or job.shift is not None:
                raise ConfigError(
                    "--sigmas says the noise levels, so --shift and --warp have nothing to do; leave them out"
                )
            return sampling.told(job.steps, job.sigmas)
        if not job.warp and job.shift is not None:
            raise ConfigError("--shift is for lists that are meant before it: add --warp, or leave it out")
        return sampling.published(job.steps, shift=job.shift or 1.0, warp=job.warp)
    if job.sigmas is not None or job.warp or job.shift is not None:
        raise ConfigError("--sigmas, --shift and --warp go with a list: --steps 1000,750,500,250")
    if place.embedded and place.folder is not None:
        spec = tiny.read_spec(place.folder)
        steps = spec.steps[0] if job.steps is None else job.steps
        if steps not in spec.steps:
            raise ConfigError(f"--steps is {steps}; the model has {', '.join(map(str, spec.steps))}, or give timesteps")
        return sampling.own(steps, spec.shift)
    if place.entry is not None and place.entry.sampling is not None and job.steps is None:
        return place.entry.sampling.schedule()
    raise ConfigError("--steps is missing: the timesteps the model is told, for example 1000,937.5,833.33,625")


def _spec(job: Job, place: _Place, denoiser: WanDenoiser) -> ModelSpec:
    """The model's own facts; of a checkpoint without any, what is usual."""
    if place.folder is not None and place.embedded:
        return tiny.read_spec(place.folder, job.model)
    stream = None if place.entry is None else place.entry.stream
    chunk = _CHUNK_LATENTS if stream is None else stream.chunk_latents
    width, height = _SIZE if place.entry is None else (place.entry.width, place.entry.height)
    return ModelSpec(
        name=job.model,
        latent_channels=denoiser.latent_channels,
        latent_height=height // SPATIAL,
        latent_width=width // SPATIAL,
        chunk_latents=chunk,
        window_latents=0 if stream is None else stream.window_latents or 0,
        sink_latents=0 if stream is None else stream.sink_latents or 0,
        frames_per_latent=TEMPORAL,
        width=width,
        height=height,
        native_fps=(place.entry.native_fps if place.entry is not None else None) or _FPS,
        shift=1.0,
        steps=(),
        text_shape=(TEXT_TOKENS, denoiser.text_width),
    )


def _overridden(spec: ModelSpec, job: Job) -> ModelSpec:
    """`spec` with the sizes, window, sink, positions and context noise that were asked for."""
    assert job.chunks is not None
    chunk, height, width = spec.chunk_latents, spec.latent_height, spec.latent_width
    if job.noise is not None:
        chunk, height, width = _noise_sizes(job.noise) or (chunk, height, width)
    chunk = job.chunk_frames or chunk
    if job.size is not None:
        width, height = _size(job.size, spec.width // spec.latent_width)
    window = spec.window_latents if job.window is None else job.window
    spec = replace(
        spec,
        chunk_latents=chunk,
        latent_height=height,
        latent_width=width,
        height=height * spec.height // spec.latent_height,
        width=width * spec.width // spec.latent_width,
        window_latents=window or chunk * job.chunks,
        clean_window_latents=spec.clean_window_latents if job.window is None else None,
        sink_latents=spec.sink_latents if job.sink is None else job.sink,
        rope=job.rope or spec.rope,
        context_sigma=spec.context_sigma if job.context_noise is None else job.context_noise / sampling.TIMESTEPS,
        text_shape=_text_shape(spec, job),
    )
    _check(spec)
    return spec


def _check(spec: ModelSpec) -> None:
    chunk = spec.chunk_latents
    if chunk < 1:
        raise ConfigError(f"--chunk-frames is {chunk}; at least 1 is needed")
    for name, value in (("--window", spec.window_latents), ("--sink", spec.sink_latents)):
        if value < 0 or value % chunk:
            raise ConfigError(f"{name} is {value}; it must be a multiple of the chunk's {chunk} latent frames")
    if spec.sink_latents >= spec.window_latents:
        raise ConfigError(
            f"--sink is {spec.sink_latents} and --window {spec.window_latents} latent frames; the window counts the "
            "sink and must leave room for the chunk itself"
        )
    if spec.rope not in ("absolute", "relative"):
        raise ConfigError(f"--rope is {spec.rope}, but must be absolute or relative")
    if not 0 <= spec.context_sigma <= 1:
        raise ConfigError(f"--context-noise is {spec.context_sigma * sampling.TIMESTEPS:g}, but must be from 0 to 1000")


def _noise_sizes(path: Path) -> tuple[int, int, int] | None:
    """Latent frames, height and width of the chunks in a noise file; None where it does not say (told later)."""
    entry = parse_header(path).entries.get("initial")
    if entry is None or len(entry.shape) != 5:
        return None
    return entry.shape[2], entry.shape[3], entry.shape[4]


def _text_shape(spec: ModelSpec, job: Job) -> tuple[int, int]:
    """(text tokens, text width): as many rows as the embeddings have."""
    if job.prompt_embeds is not None:
        entry = parse_header(job.prompt_embeds).entries.get("prompt_embeds")
        if entry is not None and len(entry.shape) in (2, 3):
            return entry.shape[-2], spec.text_shape[1]
    return spec.text_shape


def _size(text: str, spatial: int) -> tuple[int, int]:
    """Latent width and height of a picture `WxH`."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or any(int(side) % (2 * spatial) or int(side) < 2 * spatial for side in match.groups()):
        raise ConfigError(f"--size is {text!r}; it must be WIDTHxHEIGHT, multiples of {2 * spatial}, such as 832x480")
    width, height = (int(side) // spatial for side in match.groups())
    return width, height
