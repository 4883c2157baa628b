"""From a configuration to this rank's part of the model: resolved once, then loaded part by part."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

import torch

from streamdiff.config import ModelConfig, ServedModel
from streamdiff.device import bind, pick_device, pick_dtype
from streamdiff.errors import ConfigError
from streamdiff.models import resolve
from streamdiff.models.autoencoder.reencoder import FirstFrameReencoder
from streamdiff.models.autoencoder.stepped_decoder import rgb24, yuv420p
from streamdiff.models.interfaces import StreamDecoder, TextEncoder
from streamdiff.models.model import Model, StageModel
from streamdiff.models.model_loader import ModelLoader, awaited_bytes
from streamdiff.models.spec import ModelSpec, choose_steps, with_schedule, with_window
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


class RankLoader:
    """Loads what one rank runs, on `device`. `spec` are the model's facts with what the configuration changes, `steps`
    the denoise steps of a session that does not name its own, `dtype` that of the transformer's weights and of
    everything that travels between stages."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Fetches published files that are not there.

        Raises:
            ConfigError: a model or part that is not there, or of which too little is known to run it live; or as
                `_live_spec`.
        """
        self.config, self.device = config, device
        self.models = ModelLoader(resolve.find(config), device, config.size)
        self.spec = _live_spec(config, self.models)
        self.steps = choose_steps(config.steps, self.spec.steps, self.spec.name)
        self.dtype, self._decoder_dtype = pick_dtype(config.dtype, device), pick_dtype("auto", device)

    @cached_property
    def sizes(self) -> ModelSizes:
        """The model's sizes, from configurations and headers."""
        if self.models.model.embedded:
            return read_facts(self.config.name)
        return facts_from(self.models.architecture, self.spec)

    def join(self) -> rendezvous.RankContext:
        """Meet the other ranks.

        Raises:
            ConfigError: more stages than blocks, another number of ranks than stages, or ranks that are not alike.
        """
        check_stages(self.config.stages, self.sizes.blocks)
        rendezvous.check_world(self.config.stages, self.config.ranks)
        return rendezvous.join(self.rank_facts())

    def rank_facts(self) -> dict[str, str]:
        """What must be the same on all ranks: the program, torch, the configuration, and the weights' shapes and
        names."""
        return {
            "streamdiff": __version__,
            "torch": torch.__version__,
            **{f"model.{name}": str(value) for name, value in self.config.model_dump().items()},
            "model.steps": str(self.steps),
            "model.pictures": self.config.pictures if isinstance(self.config, ServedModel) else "rgb",
            "weights": self.models.digest(),
        }

    # ---- the transformer, and what goes with it --------------------------------------------------------------------

    def load_model(self, blocks: Run | None = None) -> Model:
        """What the head needs, with `blocks` only; without the decoder. Mutates: torch's number of threads."""
        if remark := self.models.model.remark(self.config.kv_context):
            print(f"streamdiff: note: {remark}", file=sys.stderr)
        config, denoiser = self.config, self._denoiser(blocks)
        text = self.models.text_encoder(config.keep_text_encoder, config.text_device, config.keep_embeddings)
        past = self.models.reencoder(self._decoder_dtype) if self.spec.context_pictures else None
        return Model(self.spec, denoiser, text, None, past)

    def load_stage(self, blocks: Run) -> StageModel:
        """What any other stage needs. Mutates: torch's number of threads."""
        return StageModel(self.spec, self._denoiser(blocks))

    def _denoiser(self, blocks: Run | None) -> WanDenoiser:
        torch.set_num_threads(self.config.threads)
        return self.models.transformer(self.dtype, blocks, self.config.attention, self.config.quantize)

    def load_share(
        self, member: rendezvous.RankContext, load: Callable[[Run], T], decoder: StreamDecoder | None
    ) -> tuple[T, tuple[Run, ...]]:
        """This stage's part of the model, and the blocks of all stages. `load` reads a part.

        Without a profile an even share is loaded and measured first; on a rank whose share then turns out to be
        another, that one is loaded instead.
        """
        config, sizes = self.config, self.sizes
        even = split_evenly(sizes.blocks, config.stages)[member.rank]
        if config.profile is not None:
            runs = balance.share_out(config, sizes, member, None)
            return load(runs[member.rank]), runs
        trunk = load(even)
        own = balance.measure(trunk, decoder, self.device, (member.rank, config.stages), config.kv_context)
        runs = balance.share_out(config, sizes, member, own)
        return (trunk if runs[member.rank] == even else load(runs[member.rank])), runs

    def session_memory(
        self, decoder: StreamDecoder | None, past: FirstFrameReencoder | None = None, text: TextEncoder | None = None
    ) -> RankMemory:
        """What this rank has for sessions, once its weights are loaded; `decoder`, `past` and `text` are those that
        work here, if any. What a text encoder's weights will take of a GPU is theirs."""
        there = [each for each in (decoder, past) if each is not None]
        remembered = sum(each.stream_bytes(self.spec.latent_height, self.spec.latent_width) for each in there)
        free = free_bytes(self.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), self.config.memory_gb)
        if text is not None and self.device.type == "cuda" and self.config.memory_gb is None:
            free = max(0, free - awaited_bytes(text, self.device))
        return RankMemory(free, remembered)

    def compile_stage(self, stage: ModelRunner, memory: RankMemory, progress: Progress) -> None:
        """Make the stage's graphs, if the configuration wants them, for as many sessions as keep the ring busy and have
        room. Takes minutes, and talks to no other rank: so all ranks do it at the same time, and `RankContext.meet`
        afterwards. Mutates: stage, progress."""
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

    @property
    def preallocated(self) -> PreallocatedCaches | None:
        """Sessions whose caches are there from the start, since graphs of CUDA are bound to them; None without
        graphs."""
        if self.config.compile == "off":
            return None
        context = self.config.kv_context
        filling = sessions_to_fill(context, steps=self.steps, stages=self.config.stages)
        return PreallocatedCaches(filling if self.device.type == "cuda" else 1, self.steps, context)

    # ---- the decoder -----------------------------------------------------------------------------------------------

    def load_decoder(self) -> PictureDecoder:
        """What the rank needs that decodes.

        Raises:
            ConfigError: there is none; or as `pixel_format`.
        """
        layout = {"rgb": rgb24, "yuv420": yuv420p}[self.pixel_format]
        decoder = self.models.decoder(self._decoder_dtype)
        # On one busy core, in turns: TAEHV's decoder 1.06 to 1.17 times as fast with channels last, Wan's 0.9 times.
        if self.config.decode_layout != "auto" or self.device.type == "cuda":
            decoder.lay_out(self.config.decode_layout != "contiguous")
        return PictureDecoder(decoder, layout)

    @property
    def pixel_format(self) -> PictureKind:
        """What the decoder hands out: RGB, or what a server's encoders take.

        Raises:
            ConfigError: the server wants YUV420 of a size that has none.
        """
        wanted = self.config.pictures if isinstance(self.config, ServedModel) else "rgb"
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

    def compile_decoder(self, decoder: PictureDecoder | None, threads: int) -> None:
        """Make the decoder's graphs, if there is one and the configuration wants them, for a thread that decodes with
        so many CPU threads. Takes from seconds to minutes. Mutates: decoder."""
        if decoder is not None and self.config.compile == "on":
            keep_compiled_code()
            latents = torch.zeros(self.spec.chunk_shape, device=self.device)

            def enter() -> None:
                torch.set_num_threads(threads)
                bind(self.device)

            with ThreadPoolExecutor(1, "compile", enter) as alike:
                alike.submit(decoder.compile, latents, self.decode_latents).result()

    @property
    def decode_latents(self) -> int:
        """Latent frames that one call decodes."""
        chunk = self.spec.chunk_latents
        return min(chunk, self.config.decode_at_once or (1 if self.device.type == "cpu" else chunk))


def _live_spec(config: ModelConfig, models: ModelLoader) -> ModelSpec:
    """The model's facts, with what the configuration says instead.

    Raises:
        ConfigError: a model that makes whole clips, or of which too little is said; one that does not have as many
            steps as are asked for, a window that cannot be, or a clean pass that its KV context does not have.
    """
    model = models.model
    unknown = model.entry is None and not model.embedded
    if model.entry is not None and model.entry.stream is None:
        raise ConfigError(
            f"{config.name} makes whole clips, so it cannot run live; name a model that `streamdiff models` lists"
        )
    if unknown:
        _check_stream_given(config)
    spec = models.spec
    if unknown:
        assert config.timesteps is not None and config.chunk_latents is not None
        spec = with_schedule(spec, config.timesteps, config.chunk_latents)
    elif config.timesteps is not None or config.chunk_latents is not None:
        raise ConfigError(
            f"the timesteps and the chunk of {config.name} are known; leave lists of --steps, and --chunk-frames, out"
        )
    asked = config.window, config.sink, config.rope
    if asked != (None, None, None):
        if model.embedded:
            raise ConfigError(
                f"{config.name} knows no past but that of the window it was trained with; leave --window, --sink and "
                "--rope out"
            )
        spec = with_window(spec, *asked)
    if config.clean_with_next and config.kv_context != "clean":
        raise ConfigError(
            f"clean_pass is with-next and kv_context is {config.kv_context}, where chunks wait for no clean pass; "
            "use kv_context clean, or clean_pass alone"
        )
    return spec


def _check_stream_given(config: ModelConfig) -> None:
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
