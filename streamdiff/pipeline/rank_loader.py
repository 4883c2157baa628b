"""From a configuration to this rank's place, device and weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import torch

from streamdiff.config import ModelConfig, ServedModel
from streamdiff.device import bind, pick_device
from streamdiff.errors import ConfigError
from streamdiff.models import model_loader, resolve
from streamdiff.models import spec as windows
from streamdiff.models.autoencoder.stepped_decoder import rgb24, yuv420p
from streamdiff.models.interfaces import Model, Past, StageModel, StreamDecoder, TextEncoder
from streamdiff.models.resolve import ResolvedModel
from streamdiff.models.spec import ModelSpec, choose_steps
from streamdiff.models.transformer.lora import parse_lora
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.pipeline import balance
from streamdiff.pipeline.decode.compiled_decoder import PictureDecoder
from streamdiff.pipeline.distributed import rendezvous
from streamdiff.pipeline.distributed.compile_progress import Progress
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches, RankMemory, free_bytes
from streamdiff.pipeline.planner.model_sizes import ModelSizes, facts_from, read_facts
from streamdiff.pipeline.planner.partition import check_stages, split_evenly
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.runner.torch_compile import keep_compiled_code
from streamdiff.pipeline.scheduler.kv_context import sessions_to_fill
from streamdiff.version import __version__
from streamdiff.video.pixel_format import PictureKind

Run = tuple[int, int]
"""First and last block (exclusive) of a stage."""
T = TypeVar("T", bound=StageModel)


@lru_cache(maxsize=4)
def place_of(config: ModelConfig) -> ResolvedModel:
    """Where the model's parts are; fetches published ones that are not there.

    Raises:
        ConfigError: a model or part that is not there, or of which too little is known to run it live.
    """
    loras = () if config.lora is None else (parse_lora(config.lora),)
    place = model_loader.find(config.name, replace(resolve.parts_of(config), loras=loras))
    if place.entry is not None and place.entry.stream is None:
        raise ConfigError(
            f"{config.name} makes whole clips, so it cannot run live; name a model that `streamdiff models` lists"
        )
    if not place.embedded and place.entry is None:
        _check_told(config)
    return place


def _check_told(config: ModelConfig) -> None:
    """Raises ConfigError unless everything is said of a model that the catalogue does not know."""
    told = (
        ("--steps 1000,937.5,833.33,625 (the timesteps that it is told)", config.timesteps),
        ("--chunk-frames N (latent frames of a chunk)", config.chunk_latents),
        ("--window N", config.window),
        ("--sink N (0: none)", config.sink),
        ("--rope absolute, or relative", config.rope),
    )
    if missing := [option for option, value in told if value is None]:
        raise ConfigError(
            f"how {config.name} streams is not in the catalogue, and not guessed: say {'; '.join(missing)}. Where it "
            "is of the kind of a model that `streamdiff models` lists, give its files as parts of that one instead: "
            "--model NAME --weights FILE"
        )


def dtype_of(config: ModelConfig, device: torch.device) -> torch.dtype:
    """Of the transformer's weights and of everything that travels between stages."""
    wanted = {"auto": "float32" if device.type == "cpu" else "bfloat16"}.get(config.dtype, config.dtype)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]


def own_device(wanted: str) -> torch.device:
    """`pick_device`; of several CUDA devices a rank takes that of its number on this machine, and is bound to it. To be
    called before anything else that may touch a device. Mutates: the thread's current device.

    Raises:
        ConfigError: as `pick_device`.
    """
    found = pick_device(wanted, "model.device")
    if found.type == "cuda" and "LOCAL_RANK" in os.environ:
        found = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    bind(found)
    return found


def join(config: ModelConfig) -> rendezvous.RankContext:
    """Meet the other ranks.

    Raises:
        ConfigError: more stages than blocks, another number of ranks than stages, or ranks that are not alike.
    """
    check_stages(config.stages, facts_of(config).blocks)
    rendezvous.check_world(config.stages, config.ranks)
    return rendezvous.join(_facts(config))


def load_share(
    config: ModelConfig,
    member: rendezvous.RankContext,
    device: torch.device,
    load: Callable[[Run], T],
    decoder: StreamDecoder | None,
) -> tuple[T, tuple[Run, ...]]:
    """This stage's part of the model, and the blocks of all stages. `load` reads a part.

    Without a profile an even share is loaded and measured first; on a rank whose share then turns out to be another,
    that one is loaded instead.
    """
    facts = facts_of(config)
    even = split_evenly(facts.blocks, config.stages)[member.rank]
    if config.profile is not None:
        runs = balance.share_out(config, facts, member, None)
        return load(runs[member.rank]), runs
    trunk = load(even)
    own = balance.measure(trunk, decoder, device, (member.rank, config.stages), config.kv_context)
    runs = balance.share_out(config, facts, member, own)
    return (trunk if runs[member.rank] == even else load(runs[member.rank])), runs


def own_room(
    config: ModelConfig,
    device: torch.device,
    decoder: StreamDecoder | None,
    past: Past | None = None,
    text: TextEncoder | None = None,
) -> RankMemory:
    """What this rank has for sessions, once its weights are loaded; `decoder`, `past` and `text` are those that work
    here, if any. What a text encoder's weights will take of a GPU is theirs."""
    spec = read_spec(config)
    there = [each for each in (decoder, past) if each is not None]
    remembered = sum(each.stream_bytes(spec.latent_height, spec.latent_width) for each in there)
    free = free_bytes(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), config.memory_gb)
    if text is not None and device.type == "cuda" and config.memory_gb is None:
        free = max(0, free - model_loader.awaited_bytes(text, device))
    return RankMemory(free, remembered)


def load_model(config: ModelConfig, device: torch.device, blocks: Run | None = None) -> Model:
    """What the head needs, with `blocks` only; without the decoder. Mutates: torch's number of threads."""
    torch.set_num_threads(config.threads)
    place, spec = place_of(config), read_spec(config)
    if remark := model_loader.remark(place, config.kv_context):
        print(f"streamdiff: note: {remark}", file=sys.stderr)
    denoiser, text = _denoiser(config, device, blocks), _text(config, place, spec, device)
    return Model(spec, denoiser, text, None, model_loader.load_past(place, spec, device, _decoder_dtype(device)))


def load_trunk(config: ModelConfig, device: torch.device, blocks: Run) -> StageModel:
    """What any other stage needs. Mutates: torch's number of threads."""
    torch.set_num_threads(config.threads)
    return StageModel(read_spec(config), _denoiser(config, device, blocks))


def _text(config: ModelConfig, place: ResolvedModel, spec: ModelSpec, device: torch.device) -> TextEncoder:
    keep, where = config.keep_text_encoder, config.text_device
    return model_loader.load_text(place, spec, device, keep, where, config.keep_embeddings)


def _denoiser(config: ModelConfig, device: torch.device, blocks: Run | None) -> WanDenoiser:
    dtype = dtype_of(config, device)
    return model_loader.load_transformer(place_of(config), device, dtype, blocks, config.attention, config.quantize)


def compile_stage(config: ModelConfig, stage: ModelRunner, room: RankMemory, progress: Progress) -> None:
    """Make the stage's graphs, if the configuration wants them, for as many sessions as keep the ring busy and have
    room. Takes minutes, and talks to no other rank: so all ranks do it at the same time, and `RankContext.meet`
    afterwards. Mutates: stage, progress."""
    if (kept := waiting(config, stage.device)) is not None:
        keep_compiled_code()
        stage.compile(
            steps=kept.steps,
            kv_context=kept.kv_context,
            clean_with_next=config.clean_with_next,
            sessions=kept.sessions,
            room=room,
            told=progress.told,
        )


def waiting(config: ModelConfig, device: torch.device) -> PreallocatedCaches | None:
    """Sessions whose caches are there from the start, since graphs of CUDA are bound to them; None without graphs."""
    if config.compile == "off":
        return None
    steps, context = steps_of(config), config.kv_context
    filling = sessions_to_fill(context, steps=steps, stages=config.stages)
    return PreallocatedCaches(filling if device.type == "cuda" else 1, steps, context)


def load_decoder(config: ModelConfig, device: torch.device) -> PictureDecoder:
    """What the rank needs that decodes.

    Raises:
        ConfigError: there is none; or as `pictures_of`.
    """
    layout = {"rgb": rgb24, "yuv420": yuv420p}[pictures_of(config, device)]
    decoder = model_loader.load_decoder(place_of(config), device, _decoder_dtype(device))
    # On one busy core, in turns: TAEHV's decoder 1.06 to 1.17 times as fast with channels last, Wan's 0.9 times.
    if config.decode_layout != "auto" or device.type == "cuda":
        decoder.lay_out(config.decode_layout != "contiguous")
    return PictureDecoder(decoder, layout)


def _decoder_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def pictures_of(config: ModelConfig, device: torch.device) -> PictureKind:
    """What the decoder hands out: RGB, or what a server's encoders take.

    Raises:
        ConfigError: the server wants YUV420 of a size that has none.
    """
    wanted = config.pictures if isinstance(config, ServedModel) else "rgb"
    if wanted == "rgb" or (wanted == "auto" and device.type == "cpu"):
        return "rgb"
    spec = read_spec(config)
    if spec.height % 2 == 0 and spec.width % 2 == 0:
        return "yuv420"
    if wanted == "auto":
        return "rgb"
    raise ConfigError(
        f"serve.pictures is yuv420, but pictures of {spec.width} x {spec.height} have none, as both sides must be "
        "even; use rgb, or leave it out"
    )


def compile_decoder(config: ModelConfig, decoder: PictureDecoder | None, device: torch.device, threads: int) -> None:
    """Make the decoder's graphs, if there is one and the configuration wants them, for a thread that decodes with so
    many CPU threads. Takes from seconds to minutes. Mutates: decoder."""
    if decoder is not None and config.compile == "on":
        keep_compiled_code()
        latents = torch.zeros(read_spec(config).chunk_shape, device=device)

        def enter() -> None:
            torch.set_num_threads(threads)
            bind(device)

        with ThreadPoolExecutor(1, "compile", enter) as alike:
            alike.submit(decoder.compile, latents, at_once(config, device)).result()


def at_once(config: ModelConfig, device: torch.device) -> int:
    """Latent frames that one call decodes."""
    chunk = read_spec(config).chunk_latents
    return min(chunk, config.decode_at_once or (1 if device.type == "cpu" else chunk))


def read_spec(config: ModelConfig) -> ModelSpec:
    """The model's facts.

    Raises:
        ConfigError: no such model, one that does not have as many steps as are asked for, a window that cannot be, or
            a way of the clean pass that its KV context does not have.
    """
    size = None if config.size is None else model_loader.parse_size(config.size)
    place = place_of(config)
    spec = model_loader.spec_of(place, size)
    if place.entry is None and not place.embedded:
        assert config.timesteps is not None and config.chunk_latents is not None
        spec = windows.told(spec, config.timesteps, config.chunk_latents)
    elif config.timesteps is not None or config.chunk_latents is not None:
        raise ConfigError(
            f"the timesteps and the chunk of {config.name} are known; leave lists of --steps, and --chunk-frames, out"
        )
    asked = config.window, config.sink, config.rope
    if asked != (None, None, None):
        if place.embedded:
            raise ConfigError(
                f"{config.name} knows no past but that of the window it was trained with; leave --window, --sink and "
                "--rope out"
            )
        spec = windows.with_window(spec, *asked)
    if config.clean_with_next and config.kv_context != "clean":
        raise ConfigError(
            f"clean_pass is with-next and kv_context is {config.kv_context}, where chunks wait for no clean pass; "
            "use kv_context clean, or clean_pass alone"
        )
    choose_steps(config.steps, spec.steps, spec.name)
    return spec


def steps_of(config: ModelConfig) -> int:
    """Denoise steps of a session that does not name its own. Raises ConfigError as `read_spec`."""
    spec = read_spec(config)
    return choose_steps(config.steps, spec.steps, spec.name)


def facts_of(config: ModelConfig) -> ModelSizes:
    """The model's sizes, from configurations and headers."""
    place = place_of(config)
    return (
        read_facts(config.name) if place.embedded else facts_from(model_loader.architecture(place), read_spec(config))
    )


def _facts(config: ModelConfig) -> dict[str, str]:
    """What must be the same on all ranks: the program, torch, the configuration, and the weights' shapes and names."""
    return {
        "streamdiff": __version__,
        "torch": torch.__version__,
        **{f"model.{name}": str(value) for name, value in config.model_dump().items()},
        "model.steps": str(steps_of(config)),
        "model.pictures": config.pictures if isinstance(config, ServedModel) else "rgb",
        "weights": model_loader.digest(place_of(config)),
    }
