"""Plans what a rank loads, before it loads anything: finds the model, resolves settings, counts memory, tries kernels.

`plan_load` is the same on all ranks; `plan_rank` adds what one rank makes of it. `rank_process` then only loads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from streamdiff.config import ModelConfig, ServedModel
from streamdiff.core import in_flight_limit
from streamdiff.errors import ConfigError
from streamdiff.models import resolve
from streamdiff.models.loader import PARTS, Kernels, ModelLoader
from streamdiff.models.spec import ModelSpec
from streamdiff.models.transformer import attention_backend, quantization
from streamdiff.models.transformer.attention_backend import AttentionShape
from streamdiff.pipeline.distributed import rendezvous
from streamdiff.pipeline.planner import partition
from streamdiff.pipeline.planner.costs import BY_DEVICE, estimate
from streamdiff.pipeline.planner.forecast import offload_note
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches, free_bytes, host_bytes
from streamdiff.pipeline.planner.memory import LIBRARIES_BYTES, Demand, Limits, Storage, check_fit
from streamdiff.pipeline.planner.model_sizes import ModelSizes, decoder_sizes, folder_sizes, sizes_from
from streamdiff.pipeline.planner.partition import Blocks, Workload
from streamdiff.pipeline.runner.graphs import compile_fault, one_graph
from streamdiff.session_state.swap_store import SwapStore
from streamdiff.version import __version__
from streamdiff.video.pixel_format import PictureKind

logger = logging.getLogger(__name__)

_OWN_AFFAIR = {"lora_dir", "max_loras", "host_memory_gb", "state_dir", "keep_s", "warm_standby"}
"""Settings in which ranks may differ."""

_TOLD = ("device", "dtype", "steps", "attention", "compile", "lora")
"""Settings that are said at every start; of the others `streamdiff doctor` tells."""

_GRAPH_SESSIONS = 8
"""Sessions of a server whose caches have graphs of CUDA, where half of the memory for caches has room for them."""


@dataclass(frozen=True)
class LoadPlan:
    """What all ranks agree on. `config` has no defaults left open but for what is tried out (`models.resolve`),
    `models` says where each part lies, `sizes` has the model's facts with what the configuration changes, `steps` are
    the denoise steps of a session that does not name its own, `choices` says why settings are as they are, `notes` what
    a user should know, `channels_last` as of `Defaults`, `decode_latents` how many latent frames one call decodes, and
    `runs` first and last block (exclusive) of each stage.
    With `reference` embeddings come in and latents out, so there is neither text encoder nor decoder, and the
    autoencoder is in float32.

    The last three are one rank's own, see `plan_rank`: it loads its run of `runs`, to compute with `kernels` (None on a
    rank that only decodes); `limits` are its device's, from before anything was loaded."""

    config: ModelConfig
    models: ModelLoader
    sizes: ModelSizes
    steps: int
    choices: tuple[resolve.Choice, ...]
    notes: tuple[str, ...]
    cudnn_benchmark: bool
    channels_last: bool | None
    decode_latents: int
    runs: Blocks
    reference: bool = False
    rank: int = 0
    limits: Limits = ()
    kernels: Kernels | None = None

    @property
    def device(self) -> torch.device:
        return self.models.device

    @property
    def spec(self) -> ModelSpec:
        return self.sizes.spec

    @property
    def max_rows(self) -> int:
        """How many rows may share a forward."""
        return partition.max_rows_of(self.config, self.sizes)

    @property
    def pixel_format(self) -> PictureKind:
        """What the decoder hands out: RGB, or on a GPU what a server's encoders take, which has even sides."""
        wanted = self.config.pictures if isinstance(self.config, ServedModel) else "rgb"
        if wanted != "auto":
            return wanted
        odd = self.spec.height % 2 or self.spec.width % 2
        return "rgb" if odd or self.device.type == "cpu" else "yuv420"

    @property
    def preallocated(self) -> PreallocatedCaches | None:
        """Sessions whose caches are there from the start, since graphs of CUDA are bound to them; None without
        graphs. A stage whose blocks are offloaded has none: a replay has no host that starts copies."""
        if self.config.compile == "off" or self.config.offload != "none":
            return None
        context = self.config.kv_context
        stages = self.config.stages
        filling = -(-stages // in_flight_limit(context, steps=self.steps, stages=stages))  # that keep all stages busy
        if self.device.type != "cuda":
            return PreallocatedCaches(1, self.steps, context)
        served = _GRAPH_SESSIONS if isinstance(self.config, ServedModel) else 0
        return PreallocatedCaches(filling, self.steps, context, served)

    def rank_facts(self) -> dict[str, str]:
        """What must be the same on all ranks: the program, torch, the configuration, and the weights' shapes and
        names."""
        return {
            "streamdiff": __version__,
            "torch": torch.__version__,
            # Where a rank keeps what is swapped out is its own affair.
            **{f"model.{name}": str(value) for name, value in self.config.model_dump(exclude=_OWN_AFFAIR).items()},
            "weights": self.models.digest(),
            # A server has it in its configuration, its other ranks leave it out where it is off.
            "model.batching": str(self.max_rows),
            "model.steps": str(self.steps),
            "spec": str(self.spec),
            "model.pictures": self.pixel_format if self.config.decode_rank_number else "rgb",
        }

    def join(self) -> rendezvous.RankContext | None:
        """Meet the other ranks; None where there is one.

        Raises:
            ConfigError: another number of ranks than stages, or ranks that are not alike.
        """
        check_world(self.config)
        return rendezvous.join(self.rank_facts()) if self.config.ranks > 1 else None

    @cached_property
    def demand(self) -> Demand:
        """What the ring takes of its devices, one session included."""
        config, models = self.config, self.models
        on_cuda = self.device.type == "cuda"
        storage = Storage(
            models.dtype.itemsize,
            "none" if config.quantize == "auto" else config.quantize,  # not known before it is tried
            config.offload,
            decode_latents=self.decode_latents,
            decoder_bytes=models.decoder_dtype.itemsize,
        )
        rows = partition.rows_carried(self.spec, self.max_rows)
        return Demand(
            self.sizes,
            storage,
            self.runs,
            config.decode_rank,
            Workload(config.stages, 1, self.steps, config.kv_context, rows, shares=config.shares),
            models.model.autoencoder(self.spec.latent_channels),
            config.vae,
            changeable=not models.model.embedded,
            libraries=LIBRARIES_BYTES if on_cuda else 0,
        )

    def kept_cameras(self, free: int) -> int:
        """Bytes that a session takes on this rank, of `free` ones, for what cameras do to its blocks; 0: that is made
        step by step, as there is no camera, or no room beside caches and graphs' own copies, or several chunks are in
        flight, or blocks come and go."""
        config, stage = self.config, self.rank // self.config.shares
        if config.kv_context != "clean" or config.offload != "none" or stage >= config.stages:
            return 0
        first, end = self.runs[stage]
        nbytes = self.sizes.camera_values(end - first, config.shares) * self.models.dtype.itemsize
        return nbytes if free >= self.demand.memory()[self.rank].caches + nbytes * (1 + self.graph_rows) else 0

    @property
    def graph_rows(self) -> int:
        """Rows of which CUDA graphs keep a copy of what their blocks are given."""
        return self.max_rows if self.device.type == "cuda" and self.preallocated is not None else 0

    @cached_property
    def swap_bytes(self) -> int:
        """Host memory of this rank for sessions that are swapped out."""
        return host_bytes(self.config, _ranks_here())

    def swap_store(self) -> SwapStore:
        """Where this rank keeps them.

        Raises:
            ConfigError: nothing can be written to `state_dir`.
        """
        config = self.config
        folder = config.state_dir if isinstance(config, ServedModel) else None
        return SwapStore(self.device, self.swap_bytes, None if folder is None else Path(folder))

    def session_bytes(self) -> int:
        """Bytes for sessions on this rank, now that the weights are loaded."""
        config, own = self.config, self.demand.memory()[self.rank]
        free = free_bytes(config, self.device, _ranks_here(), own.work, self.swap_bytes)
        if config.device_memory_gb is None:
            return free
        return max(0, min(free, round(config.device_memory_gb * 1e9) - own.total + own.sessions))


def _ranks_here() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def plan_load(config: ModelConfig, device: torch.device) -> LoadPlan:
    """The plan of `config` on `device`. Fetches published files that are not there, and reads no weights.

    Raises:
        ConfigError: a model or part that is not there, or of which too little is known to run it live; settings that do
            not go together; or more stages than blocks.
    """
    models = ModelLoader(config, device)
    spec = models.live_spec()
    models.check_files(*PARTS)
    settled = resolve.settle(config, device.type, spec.steps, lambda: compile_fault(device))
    merged = (resolve.Choice("lora", f"{each.path}:{each.scale:g}", "merged") for each in models.model.loras)
    if (facts := models.folder_facts) is not None:
        sizes = folder_sizes(facts, spec)
    else:
        small = config.latent_space is not None  # only small ones have one
        decoder = decoder_sizes(spec, models.model.autoencoder(spec.latent_channels), config.vae, small=small)
        sizes = sizes_from(models.checkpoint.architecture, spec, decoder)
    partition.check_ranks(config, sizes)
    steps = settled.config.step_count or spec.steps[0]
    runs = stage_blocks(config, sizes, steps, device.type, models.dtype.itemsize)
    decode_latents = 1 if device.type == "cpu" else spec.chunk_latents
    return LoadPlan(
        settled.config, models, sizes, steps, (*settled.choices, *merged), (models.model.note,),
        settled.cudnn_benchmark, settled.channels_last, decode_latents, runs,
    )  # fmt: skip


def stage_blocks(config: ModelConfig, sizes: ModelSizes, steps: int, device: str, value_bytes: int) -> Blocks:
    """First and last block (exclusive) of each stage, by estimated costs on devices of this type, for sessions of so
    many `steps`: who does more besides has fewer."""
    costs = estimate(
        sizes, BY_DEVICE[device], kv_context=config.kv_context, max_rows=1, value_bytes=value_bytes,
        shares=config.shares,
    )  # fmt: skip
    # Decoding on a thread of the head costs it nothing if there is a core that no rank needs.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(config.ranks)))
    spare_core = config.decode_rank == "head" and (os.cpu_count() or 1) > here
    load = Workload(config.stages, 1, steps, config.kv_context, 1, config.shares)
    return partition.choose_layout(costs, load, "own-stream" if spare_core else config.decode_rank).blocks


def plan_rank(plan: LoadPlan, context: rendezvous.RankContext | None = None) -> LoadPlan:
    """The plan of the rank of `context`; of the only one without. Says what it will run with, and why. Takes seconds
    where kernels are tried out. Mutates: torch's number of threads, on a stage.

    Raises:
        ConfigError: more than the device has memory for.
    """
    config, device, rank = plan.config, plan.device, 0 if context is None else context.rank
    kernels = None
    if context is not None:
        # Machines may differ in cores, by which it is decided.
        plan = replace(plan, runs=tuple((first, end) for first, end in context.of_head("blocks", plan.runs)))
    if limits := _device_limits(config, device):
        check_fit(plan.demand, rank, limits)
        if any(plan.demand.totals[rank] > limit for limit, _ in limits):
            plan = replace(plan, decode_latents=1)
            _tell(["decoder's call: a latent frame (a chunk takes more memory than there is)"], f"rank {rank}: ")
    if rank == 0:
        told = ", ".join(f"{each.setting} {each.value}" for each in plan.choices if each.setting in _TOLD)
        logger.info("%s (all settings, with reasons: streamdiff doctor)", told)
    if rank < config.stage_ranks:
        torch.set_num_threads(config.threads)
        kernels, tried = try_kernels(config, plan.sizes, device, plan.models.dtype)
        _tell(map(str, tried), "" if context is None else f"rank {rank}: ")
    if rank == 0:
        notes = list(plan.notes)
        if config.offload != "none":
            card = torch.cuda.get_device_name(device) if device.type == "cuda" else None
            notes.append(offload_note(plan.demand, card, graphs=config.compile != "off"))
        _tell(filter(None, notes), "note: ", logging.WARNING)
    return replace(plan, rank=rank, limits=limits, kernels=kernels)


def check_world(config: ModelConfig) -> None:
    """Raises ConfigError unless as many ranks were launched as `config` needs."""
    world, ranks = int(os.environ.get("WORLD_SIZE", "1")), config.ranks
    if world == ranks:
        return
    wanted = f"stages is {config.stages}" if config.shares == 1 else f"parallel is {config.parallel}"
    wanted += " and decoding has a rank of its own" if ranks > config.stage_ranks else ""
    if world == 1:
        raise ConfigError(
            f"{wanted}, but this is one process. `streamdiff serve` and `streamdiff generate` start their ranks by "
            f"themselves; a program of your own needs torchrun --nproc-per-node {ranks}: examples/torchrun_stream.py"
        )
    raise ConfigError(f"{wanted}, but torchrun started {world} ranks; start {ranks}, or change the configuration")


def try_kernels(
    config: ModelConfig, sizes: ModelSizes, device: torch.device, dtype: torch.dtype
) -> tuple[Kernels, tuple[resolve.Choice, ...]]:
    """What the transformer computes with, and what was found where `config` leaves that to a trial on the device, at
    the model's sizes and with a full window. Takes seconds then."""
    kernels, choices = Kernels(config.attention, config.quantize), list[resolve.Choice]()
    if kernels.attention == "auto":
        shape = AttentionShape(sizes.heads, sizes.head_dim, sizes.tokens, sizes.window_tokens(config.kv_context))
        attention, reason = attention_backend.try_attention(shape, device, dtype)
        choices.append(resolve.Choice("attention", attention, reason))
        kernels = kernels._replace(attention=attention)
    if kernels.quantize == "auto":
        width, ffn = sizes.width, sizes.ffn_dim
        matrices = {(width, width): 6, (ffn, width): 1, (width, ffn): 1}  # text's are used once per prompt
        compiled = one_graph if config.compile == "on" else None
        quantize, reason = quantization.try_fp8(matrices, sizes.tokens, device, dtype, compiled)
        choices.append(resolve.Choice("quantize", quantize, reason))
        kernels = kernels._replace(quantize=quantize)
    if choices and device.type == "cuda":
        torch.cuda.empty_cache()  # what is free is counted later
    return kernels, tuple(choices)


def _device_limits(config: ModelConfig, device: torch.device) -> Limits:
    """None on a CPU, unless one is set."""
    found = []
    if config.device_memory_gb is not None:
        found.append((round(config.device_memory_gb * 1e9), "model.device_memory_gb"))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found.append((free, f"{device}, of {total / 1e9:.3g} GB in all, still"))
    return tuple(found)


def _tell(texts: Iterable[str], before: str, level: int = logging.INFO) -> None:
    for text in texts:
        logger.log(level, "%s%s", before, text)
