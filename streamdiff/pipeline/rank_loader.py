"""From a configuration to this rank's part of the model: resolved once, then loaded part by part."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from streamdiff.config import ModelConfig, ServedModel
from streamdiff.device import bind, compile_fault
from streamdiff.errors import ConfigError
from streamdiff.models import defaults, sampling
from streamdiff.models.autoencoder.autoencoder import FirstFrameReencoder, load_decoder
from streamdiff.models.autoencoder.memory_size import DecoderSizes
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, rgb24, yuv420p
from streamdiff.models.model import Model, StageModel
from streamdiff.models.model_loader import Kernels, ModelLoader
from streamdiff.models.spec import ModelSpec, choose_steps, with_anchors, with_window
from streamdiff.models.text_loader import awaited_bytes, expected_bytes, load_text_encoder
from streamdiff.models.transformer import attention_trial, quantization
from streamdiff.models.transformer.attention_backend import AttentionShape
from streamdiff.pipeline import balance
from streamdiff.pipeline.decode.captured_step import capture_on
from streamdiff.pipeline.distributed import rendezvous
from streamdiff.pipeline.distributed.start_progress import StartProgress
from streamdiff.pipeline.executor import rows_carried
from streamdiff.pipeline.planner import fit, gpus
from streamdiff.pipeline.planner.fit import Demand
from streamdiff.pipeline.planner.forecast import offload_words
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches, RankMemory, free_bytes
from streamdiff.pipeline.planner.memory import LIBRARIES_BYTES, Storage
from streamdiff.pipeline.planner.model_sizes import SMALL, ModelSizes, decoder_sizes, read_sizes, sizes_from
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.planner.stage_layout import Blocks, Workload
from streamdiff.pipeline.runner import block_offload
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.runner.torch_compile import keep_compiled_code, one_graph
from streamdiff.pipeline.scheduler.kv_context import sessions_to_fill
from streamdiff.version import __version__
from streamdiff.video.pixel_format import PictureKind


@dataclass(frozen=True)
class LoadedRank:
    """What one rank runs. `model` is None on a rank that only decodes, a `Model` on rank 0; `decoder` is None where
    another rank decodes. `runs` are first and last block (exclusive) of each stage. `memory` is what there is for
    sessions, now that the weights are loaded."""

    model: StageModel | None
    decoder: PictureDecoder | None
    runs: tuple[tuple[int, int], ...]
    memory: RankMemory


class RankLoader:
    """Loads what one rank runs, on `device`. `config` has no defaults left open (`models.defaults`), `spec` are the
    model's facts with what the configuration changes, `steps` the denoise steps of a session that does not name its
    own."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Fetches published files that are not there.

        Raises:
            ConfigError: a model or part that is not there, or of which too little is known to run it live; or as
                `_live_spec`.
        """
        block_offload.check(config)
        self.device = device
        self.models = ModelLoader(defaults.with_small_autoencoder(config), device)
        self.spec = _live_spec(config, self.models)
        self.defaults = defaults.settle(config, device.type, self.spec.steps, lambda: compile_fault(device))
        self.config = self.defaults.config
        self.steps = choose_steps(self.config.steps, self.spec.steps, self.spec.name)

    @cached_property
    def sizes(self) -> ModelSizes:
        """The model's sizes, from configurations and headers."""
        if self.models.model.embedded:
            return read_sizes(self.config.name)
        return sizes_from(self.models.architecture, self.spec, self._decoder_of(self.spec))

    def demand(self, runs: Blocks) -> Demand:
        """What the ring takes of its devices, one session included, when its stages have these blocks."""
        config, models = self.config, self.models
        decoder = torch.float32 if models.model.embedded else models.decoder_dtype
        on_cuda = self.device.type == "cuda"
        storage = Storage(
            models.dtype.itemsize,
            "none" if config.quantize == "auto" else config.quantize,  # not known before it is tried
            config.offload,
            text_bytes=expected_bytes(models.model) if on_cuda and config.text_device == "cuda" else 0,
            decode_latents=self.decode_latents,
            decoder_bytes=decoder.itemsize,
        )
        rows = rows_carried(self.spec, 1, config.clean_with_next)
        return Demand(
            self.sizes,
            storage,
            runs,
            config.decode,
            Workload(config.stages, 1, self.steps, config.kv_context, rows, shares=config.shares),
            self._decoder_of,
            changeable=not models.model.embedded,
            libraries=LIBRARIES_BYTES if on_cuda else 0,
        )

    def _decoder_of(self, spec: ModelSpec, small: bool = False) -> DecoderSizes:
        """Sizes of the decoder, or of the small one in its place, for pictures of `spec`."""
        found = self.models.model
        if found.embedded:
            return self.sizes.decoder
        own = found.entry.autoencoder if found.entry is not None else "wan2.1"
        return decoder_sizes(spec, own, SMALL if small else found.vae)

    def _check_fit(self, rank: int, runs: Blocks) -> None:
        """Raises ConfigError where the rank's part will not fit into what its device had free at first, or may have."""
        for limit, where in self._limits:
            fit.check(self.demand(runs), rank, limit, where)

    @cached_property
    def _limits(self) -> list[tuple[int, str]]:
        """Bytes that may be taken, and of what; none on a CPU, unless a limit is set."""
        found = []
        if self.config.device_memory_gb is not None:
            found.append((round(self.config.device_memory_gb * 1e9), "model.device_memory_gb"))
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            found.append((free, f"{self.device}, of {total / 1e9:.3g} GB in all, still"))
        return found

    def _room(self, rank: int, runs: Blocks) -> int:
        """Bytes for sessions, now that the weights are loaded."""
        config, demand = self.config, self.demand(runs)
        work = demand.memory()[rank].work + demand.libraries
        room = free_bytes(self.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), config.memory_gb, work)
        if config.device_memory_gb is None:
            return room
        return max(0, min(room, round(config.device_memory_gb * 1e9) - demand.without_sessions(rank)))

    def join(self) -> rendezvous.RankContext:
        """Meet the other ranks.

        Raises:
            ConfigError: more stages than blocks, another number of ranks than stages, or ranks that are not alike.
        """
        fit.check_ranks(self.config, self.sizes)
        rendezvous.check_world(self.config.stage_ranks, self.config.ranks)
        return rendezvous.join(self.rank_facts())

    def rank_facts(self) -> dict[str, str]:
        """See the function of that name; with the steps that are taken, and what pictures are."""
        return {
            **rank_facts(self.config, self.models),
            "model.steps": str(self.steps),
            "model.pictures": self.config.pictures if isinstance(self.config, ServedModel) else "rgb",
        }

    # ---- parts -----------------------------------------------------------------------------------------------------

    def load(self, context: rendezvous.RankContext | None = None) -> LoadedRank:
        """What the rank of `context` needs; all of the model where there is one rank.

        Without a profile each stage loads an even share and measures it; where its share then turns out to be another,
        that one is loaded instead. Says what it runs with, and why. Mutates: torch's number of threads, on a stage; its
        flag for cuDNN.

        Raises:
            ConfigError: parts that are missing or do not fit, more than the device has memory for (before anything is
                loaded); or as `pixel_format`.
        """
        config = self.config
        rank = 0 if context is None else context.rank
        stage = rank // config.shares
        runs = split_evenly(self.sizes.blocks, config.stages)
        if context is not None and config.profile is not None:
            runs = balance.share_out(config, self.sizes, context, None)
        self._check_fit(rank, runs)
        if rank == 0:
            _tell(self.defaults.choices, "")
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = self.defaults.cudnn_benchmark
        decoder = model = reencoder = text = None
        if rank == config.decode_rank:
            # The embedded model's is small, and gains nothing from bfloat16.
            dtype = torch.float32 if self.models.model.embedded else self.models.decoder_dtype
            network = load_decoder(self.models.model.fetch_autoencoder(), self.device, dtype)
            # On one busy core, in turns: TAEHV's decoder 1.06 to 1.17 times as fast with channels last, Wan's 0.9.
            if config.decode_layout != "auto":
                network.lay_out(config.decode_layout == "channels-last")
            decoder = PictureDecoder(network, {"rgb": rgb24, "yuv420": yuv420p}[self.pixel_format])
        if rank < config.stage_ranks:
            torch.set_num_threads(config.threads)
            kernels, tried = try_kernels(config, self.sizes, self.device, self.models.dtype)
            _tell(tried, "" if context is None else f"rank {rank}: ")
            model = StageModel(self.spec, block_offload.load_denoiser(self.models, runs[stage], kernels))
        if model is not None and rank == 0:
            if remark := self.models.model.remark(config.kv_context):
                print(f"streamdiff: note: {remark}", file=sys.stderr)
            text = load_text_encoder(self.models.model, config, self.spec.text_shape, self.device)
            if self.spec.context_pictures:
                dtype = self.models.decoder_dtype
                reencoder = FirstFrameReencoder.load(self.models.model.fetch_autoencoder(), self.device, dtype)
            model = Model(self.spec, model.denoiser, text, decoder, reencoder)
        if model is not None and context is not None and config.profile is None:
            measured = balance.measure(model, decoder, self.device, (stage, config.stages), config.kv_context)
            even, runs = runs, balance.share_out(config, self.sizes, context, measured)
            if runs[stage] != even[stage]:
                self._check_fit(rank, runs)
                model = replace(model, denoiser=block_offload.load_denoiser(self.models, runs[stage], kernels))
        if rank == 0:
            self._tell_offload(runs)
        remembering = [each for each in (decoder, reencoder) if each is not None]
        remembered = sum(each.stream_bytes(self.spec.latent_height, self.spec.latent_width) for each in remembering)
        free = self._room(rank, runs)
        if text is not None and self.device.type == "cuda" and config.memory_gb is None:
            free = max(0, free - awaited_bytes(text, self.device))
        return LoadedRank(model, decoder, runs, RankMemory(free, remembered))

    def _tell_offload(self, runs: Blocks) -> None:
        """Print what offloaded blocks cost, an estimate, and what is off with them."""
        if self.config.offload == "none":
            return
        gpu = gpus.recognise(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        demand = self.demand(runs)
        words = offload_words(demand.sizes, demand.storage, demand.load, gpu)
        if self.device.type == "cpu":
            words = "offload: on a CPU the blocks are in host memory anyway, so it costs time and saves nothing"
        off = "; no graphs of the transformer are made" if self.config.compile != "off" else ""
        print(f"streamdiff: note: {words}{off}", file=sys.stderr)

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

    # ---- graphs ----------------------------------------------------------------------------------------------------

    def compile_stage(self, stage: ModelRunner, memory: RankMemory, progress: StartProgress) -> None:
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
        graphs. A stage whose blocks are offloaded has none: a replay has no host that starts copies."""
        if self.config.compile == "off" or self.config.offload != "none":
            return None
        context = self.config.kv_context
        filling = sessions_to_fill(context, steps=self.steps, stages=self.config.stages)
        return PreallocatedCaches(filling if self.device.type == "cuda" else 1, self.steps, context)

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
                alike.submit(decoder.compile, latents, self.decode_latents, one_graph, capture_on(self.device)).result()

    @property
    def decode_latents(self) -> int:
        """Latent frames that one call decodes."""
        chunk = self.spec.chunk_latents
        return min(chunk, self.config.decode_at_once or (1 if self.device.type == "cpu" else chunk))


def rank_facts(config: ModelConfig, models: ModelLoader) -> dict[str, str]:
    """What must be the same on all ranks: the program, torch, the configuration, and the weights' shapes and names."""
    return {
        "streamdiff": __version__,
        "torch": torch.__version__,
        **{f"model.{name}": str(value) for name, value in config.model_dump().items()},
        "weights": models.digest(),
    }


def try_kernels(
    config: ModelConfig, sizes: ModelSizes, device: torch.device, dtype: torch.dtype
) -> tuple[Kernels, tuple[defaults.Choice, ...]]:
    """What the transformer computes with, and what was found where `config` leaves that to a trial on the device, at
    the model's sizes and with a full window. Takes seconds then."""
    kernels, told = Kernels(config.attention, config.quantize), list[defaults.Choice]()
    if kernels.attention == "auto":
        window = sizes.tokens // sizes.spec.chunk_latents * sizes.spec.window(config.kv_context)
        shape = AttentionShape(sizes.heads, sizes.head_dim, sizes.tokens, window)
        trial = attention_trial.try_attention(shape, device, dtype)
        told.append(defaults.Choice("attention", trial.fastest, trial.told))
        kernels = kernels._replace(attention=trial.fastest)
    if kernels.quantize == "auto":
        width, ffn = sizes.width, sizes.ffn_dim
        matrices = {(width, width): 6, (ffn, width): 1, (width, ffn): 1}  # text's are used once per prompt
        compiled = one_graph if config.compile == "on" else None
        quantize, reason = quantization.try_fp8(matrices, sizes.tokens, device, dtype, compiled)
        told.append(defaults.Choice("quantize", quantize, reason))
        kernels = kernels._replace(quantize=quantize)
    if told and device.type == "cuda":
        torch.cuda.empty_cache()  # what is free is counted later
    return kernels, tuple(told)


def _tell(choices: Sequence[defaults.Choice], before: str) -> None:
    for choice in choices:
        print(f"streamdiff: {before}{choice}", file=sys.stderr)


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
        schedule = sampling.published(config.timesteps)
        spec = replace(spec, steps=(schedule.steps,), schedules=(schedule,), chunk_latents=config.chunk_latents)
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
    spec = with_anchors(spec, config)
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
