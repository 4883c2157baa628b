"""Loads what one rank needs of a configured model: weights, decoder, memory for sessions, compiled code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
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
_PIXEL_LAYOUTS = {"rgb": rgb24, "yuv420": yuv420p}


class RankLoader:
    """What one rank loads of the model that `config` names, onto `device`. The model is resolved once, when it is first
    asked about; every property and method raises ConfigError for what the configuration gets wrong."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    @cached_property
    def resolved(self) -> ResolvedModel:
        """Where the model's parts are; fetches published ones that are not there.

        Raises:
            ConfigError: a model or part that is not there, or of which too little is known to run it live.
        """
        config = self.config
        loras = () if config.lora is None else (parse_lora(config.lora),)
        found = model_loader.find(config.name, replace(resolve.parts_of(config), loras=loras))
        if found.entry is not None and found.entry.stream is None:
            raise ConfigError(
                f"{config.name} makes whole clips, so it cannot run live; name a model that `streamdiff models` lists"
            )
        if _is_unknown(found):
            _check_given(config)
        return found

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's facts, as configured.

        Raises:
            ConfigError: no such model, one that does not have as many steps as are asked for, a window that cannot be,
                or a way of the clean pass that its KV context does not have.
        """
        config, found = self.config, self.resolved
        size = None if config.size is None else model_loader.parse_size(config.size)
        spec = model_loader.spec_of(found, size)
        if _is_unknown(found):
            assert config.timesteps is not None and config.chunk_latents is not None
            spec = windows.told(spec, config.timesteps, config.chunk_latents)
        elif config.timesteps is not None or config.chunk_latents is not None:
            raise ConfigError(
                f"the timesteps and the chunk of {config.name} are known; leave lists of --steps, and --chunk-frames, "
                "out"
            )
        asked = config.window, config.sink, config.rope
        if asked != (None, None, None):
            if found.embedded:
                raise ConfigError(
                    f"{config.name} knows no past but that of the window it was trained with; leave --window, --sink "
                    "and --rope out"
                )
            spec = windows.with_window(spec, *asked)
        if config.clean_with_next and config.kv_context != "clean":
            raise ConfigError(
                f"clean_pass is with-next and kv_context is {config.kv_context}, where chunks wait for no clean pass; "
                "use kv_context clean, or clean_pass alone"
            )
        choose_steps(config.steps, spec.steps, spec.name)
        return spec

    @property
    def steps(self) -> int:
        """Denoise steps of a session that does not name its own."""
        return choose_steps(self.config.steps, self.spec.steps, self.spec.name)

    @cached_property
    def sizes(self) -> ModelSizes:
        """The model's sizes, from configurations and headers."""
        if self.resolved.embedded:
            return read_facts(self.config.name)
        return facts_from(model_loader.architecture(self.resolved), self.spec)

    @property
    def dtype(self) -> torch.dtype:
        """Of the transformer's weights and of everything that travels between stages."""
        wanted = self.config.dtype
        return self._decoder_dtype if wanted == "auto" else getattr(torch, wanted)

    @property
    def _decoder_dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    @property
    def decode_latents(self) -> int:
        """Latent frames that one call decodes."""
        chunk = self.spec.chunk_latents
        return min(chunk, self.config.decode_at_once or (1 if self.device.type == "cpu" else chunk))

    @property
    def pixel_format(self) -> PictureKind:
        """What the decoder hands out: RGB, or what a server's encoders take.

        Raises:
            ConfigError: the server wants YUV420 of a size that has none.
        """
        wanted = self._wanted_pixel_format
        if wanted == "rgb" or (wanted == "auto" and self.device.type == "cpu"):
            return "rgb"
        spec = self.spec
        if spec.height % 2 == 0 and spec.width % 2 == 0:
            return "yuv420"
        if wanted == "auto":
            return "rgb"
        raise ConfigError(
            f"serve.pictures is yuv420, but pictures of {spec.width} x {spec.height} have none, as both sides must be "
            "even; use rgb, or leave it out"
        )

    @property
    def _wanted_pixel_format(self) -> str:
        return self.config.pictures if isinstance(self.config, ServedModel) else "rgb"

    @property
    def preallocated(self) -> PreallocatedCaches | None:
        """Caches that are there from the start, since CUDA graphs are bound to them; None without graphs."""
        if self.config.compile == "off":
            return None
        steps, context = self.steps, self.config.kv_context
        filling = sessions_to_fill(context, steps=steps, stages=self.config.stages)
        return PreallocatedCaches(filling if self.device.type == "cuda" else 1, steps, context)

    # ---- ranks --------------------------------------------------------------------------------------------------

    def join(self) -> rendezvous.RankContext:
        """Meet the other ranks.

        Raises:
            ConfigError: more stages than blocks, another number of ranks than stages, or ranks that are not alike.
        """
        check_stages(self.config.stages, self.sizes.blocks)
        rendezvous.check_world(self.config.stages, self.config.ranks)
        return rendezvous.join(self.rank_facts())

    def rank_facts(self) -> dict[str, str]:
        """What must be the same on all ranks: the program, torch, the configuration, the weights' shapes and names."""
        return {
            "streamdiff": __version__,
            "torch": torch.__version__,
            **{f"model.{name}": str(value) for name, value in self.config.model_dump().items()},
            "model.steps": str(self.steps),
            "model.pictures": self._wanted_pixel_format,
            "weights": model_loader.digest(self.resolved),
        }

    def load_share(
        self, context: rendezvous.RankContext, load: Callable[[Run], T], decoder: StreamDecoder | None
    ) -> tuple[T, tuple[Run, ...]]:
        """This stage's part of the model, and the blocks of all stages. `load` reads a part.

        Without a profile an even share is loaded and measured first; on a rank whose share then turns out to be
        another, that one is loaded instead.
        """
        config, sizes = self.config, self.sizes
        if config.profile is not None:
            runs = balance.share_out(config, sizes, context, None)
            return load(runs[context.rank]), runs
        even = split_evenly(sizes.blocks, config.stages)[context.rank]
        model = load(even)
        measured = balance.measure(model, decoder, self.device, (context.rank, config.stages), config.kv_context)
        runs = balance.share_out(config, sizes, context, measured)
        return (model if runs[context.rank] == even else load(runs[context.rank])), runs

    def session_memory(
        self, decoder: StreamDecoder | None, past: Past | None = None, text: TextEncoder | None = None
    ) -> RankMemory:
        """What this rank has for sessions, once its weights are loaded; `decoder`, `past` and `text` are those that
        work here, if any. What a text encoder's weights will take of a GPU is theirs."""
        config, spec = self.config, self.spec
        decoders = [each for each in (decoder, past) if each is not None]
        remembered = sum(each.stream_bytes(spec.latent_height, spec.latent_width) for each in decoders)
        free = free_bytes(self.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), config.memory_gb)
        if text is not None and self.device.type == "cuda" and config.memory_gb is None:
            free = max(0, free - model_loader.awaited_bytes(text, self.device))
        return RankMemory(free, remembered)

    # ---- weights ------------------------------------------------------------------------------------------------

    def load_model(self, blocks: Run | None = None) -> Model:
        """What rank 0 needs, with `blocks` only; without the decoder. Mutates: torch's number of threads."""
        config, found, spec = self.config, self.resolved, self.spec
        if remark := model_loader.remark(found, config.kv_context):
            print(f"streamdiff: note: {remark}", file=sys.stderr)
        stage = self.load_stage(blocks)
        keep, where = config.keep_text_encoder, config.text_device
        text = model_loader.load_text(found, spec, self.device, keep, where, config.keep_embeddings)
        past = model_loader.load_past(found, spec, self.device, self._decoder_dtype)
        return Model(spec, stage.denoiser, text, None, past)

    def load_stage(self, blocks: Run | None) -> StageModel:
        """What any other stage needs. Mutates: torch's number of threads."""
        config = self.config
        torch.set_num_threads(config.threads)
        denoiser = model_loader.load_transformer(
            self.resolved, self.device, self.dtype, blocks, config.attention, config.quantize
        )
        return StageModel(self.spec, denoiser)

    def load_decoder(self) -> PictureDecoder:
        """What the rank needs that decodes.

        Raises:
            ConfigError: there is none; or as `pixel_format`.
        """
        layout = _PIXEL_LAYOUTS[self.pixel_format]
        decoder = model_loader.load_decoder(self.resolved, self.device, self._decoder_dtype)
        # On one busy core, in turns: TAEHV's decoder 1.06 to 1.17 times as fast with channels last, Wan's 0.9 times.
        if self.config.decode_layout != "auto" or self.device.type == "cuda":
            decoder.lay_out(self.config.decode_layout != "contiguous")
        return PictureDecoder(decoder, layout)

    # ---- compiled code ------------------------------------------------------------------------------------------

    def compile_stage(self, stage: ModelRunner, memory: RankMemory, progress: Progress) -> None:
        """Make the stage's graphs, if the configuration wants them, for as many sessions as keep the ring busy and fit
        into `memory`. Takes minutes, and talks to no other rank: so all ranks do it at the same time, and
        `RankContext.meet` afterwards. Mutates: stage, progress."""
        if (kept := self.preallocated) is not None:
            keep_compiled_code()
            stage.compile(
                steps=kept.steps,
                kv_context=kept.kv_context,
                clean_with_next=self.config.clean_with_next,
                sessions=kept.sessions,
                memory=memory,
                on_progress=progress.report,
            )

    def compile_decoder(self, decoder: PictureDecoder | None, threads: int) -> None:
        """Make the decoder's graphs, if there is one and the configuration wants them, for a thread that decodes with
        so many CPU threads. Takes from seconds to minutes. Mutates: decoder."""
        if decoder is None or self.config.compile == "off":
            return
        keep_compiled_code()
        latents = torch.zeros(self.spec.chunk_shape, device=self.device)

        def enter() -> None:
            torch.set_num_threads(threads)
            bind(self.device)

        with ThreadPoolExecutor(1, "compile", enter) as alike:
            alike.submit(decoder.compile, latents, self.decode_latents).result()


def _is_unknown(model: ResolvedModel) -> bool:
    """Whether neither the catalogue nor its own folder says how the model streams."""
    return model.entry is None and not model.embedded


def _check_given(config: ModelConfig) -> None:
    """Raises ConfigError unless everything is said of a model that the catalogue does not know."""
    given = (
        ("--steps 1000,937.5,833.33,625 (the timesteps that it is told)", config.timesteps),
        ("--chunk-frames N (latent frames of a chunk)", config.chunk_latents),
        ("--window N", config.window),
        ("--sink N (0: none)", config.sink),
        ("--rope absolute, or relative", config.rope),
    )
    if missing := [option for option, value in given if value is None]:
        raise ConfigError(
            f"how {config.name} streams is not in the catalogue, and not guessed: say {'; '.join(missing)}. Where it "
            "is of the kind of a model that `streamdiff models` lists, give its files as parts of that one instead: "
            "--model NAME --weights FILE"
        )


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
