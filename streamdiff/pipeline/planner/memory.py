"""Memory of every rank, counted from shapes before anything is loaded: weights, text encoder, caches, what a forward
and a call of the decoder take, what the decoder remembers; whether a model fits into a device's memory, and options
that would make it fit. Pure: sizes and a limit in, bytes or a message out.

`streamdiff plan` and `models` ask here, and the check before loading. The budget of running sessions (`kv_budget`)
counts caches by the same `ModelSizes.cache_values`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from streamdiff.errors import ConfigError
from streamdiff.models.catalogue import CatalogueEntry
from streamdiff.models.spec import with_size, with_window
from streamdiff.pipeline.planner.model_sizes import BFLOAT16, ModelSizes, decoder_sizes, entry_sizes, small_of
from streamdiff.pipeline.planner.partition import Blocks, Workload, split_evenly

OFFLOAD_BUFFERS = 2
"""Blocks that lie on the device where blocks are offloaded: one computes, one is copied."""
LIBRARIES_BYTES = 600_000_000
"""What cuBLAS and cuDNN take to work in, and what torch's allocator cannot hand out: an assumption, not measured."""
# Tensors that are alive at a block's widest moment, of width D, by the norms in float32, or D and the feed-forward's.
# Measured without compilation (tests/pipeline/planner/test_memory.py).
_NORM_WIDTHS, _FFN_WIDTHS, _FFN = 16, 7, 2
_EXCHANGED = 12
"""Tensors of a rank's tokens that `distributed.context_parallel` has as buffers, three for each that is exchanged."""
_UNIT = 32
"""Sides of proposed pictures are multiples of it."""
Limits = tuple[tuple[int, str], ...]
"""Bytes that may be taken, and of what."""


@dataclass(frozen=True)
class Storage:
    """How a model is kept: bytes of a number, of the decoder's (None: the same), `quantize` and `offload` as in the
    configuration, and latent frames per call of the decoder (None: a chunk)."""

    value_bytes: int
    quantize: str = "none"
    offload: str = "none"
    decode_latents: int | None = None
    decoder_bytes: int | None = None

    def block_bytes(self, sizes: ModelSizes) -> int:
        """Bytes of one block's weights."""
        saved = 0
        if self.quantize != "none":  # a number of a matrix takes one byte, every row five for its scale and zero
            saved = (self.value_bytes - 1) * sizes.linear_values - 5 * sizes.linear_rows
        return self.value_bytes * sizes.block_values - saved

    def copied_bytes(self, sizes: ModelSizes, blocks: int) -> int:
        """What every forward of `blocks` blocks copies from host memory to the device; 0 where they all have a buffer,
        and without offload."""
        copies = self.offload != "none" and blocks > OFFLOAD_BUFFERS
        return blocks * self.block_bytes(sizes) if copies else 0


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank's device, the text encoder apart: the transformer's part and the decoder as `weights`; caches
    of all sessions; `forward` is the link's slots and the widest moment of a block; `decoder_state` is what the decoder
    remembers of all sessions, and `decoder_call` what a call of it takes beside that; `libraries` CUDA's own."""

    rank: int
    role: str
    weights: int = 0
    caches: int = 0
    forward: int = 0
    decoder_state: int = 0
    decoder_call: int = 0
    libraries: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name: all fields but the first two."""
        return {each.name: getattr(self, each.name) for each in fields(self)[2:]}

    @property
    def work(self) -> int:
        """What computing takes beside weights and sessions."""
        return self.forward + self.decoder_call + self.libraries

    @property
    def sessions(self) -> int:
        """What the sessions take."""
        return self.caches + self.decoder_state


@dataclass(frozen=True)
class Demand:
    """What is asked of the devices: a model, how it is kept, its blocks by stage, where it is decoded, and the sessions
    there shall be room for. The decoder is `vae`, None: the catalogue's autoencoder `own`. `changeable` is False where
    picture, window and decoder belong to the model."""

    sizes: ModelSizes
    storage: Storage
    blocks: Blocks
    decode: str
    load: Workload
    own: str = ""
    vae: str | None = None
    changeable: bool = True
    libraries: int = LIBRARIES_BYTES

    def memory(self) -> tuple[Memory, ...]:
        """Of every rank.

        The text encoder is on rank 0; so is the decoder, unless it is on the last rank or one of its own.
        Caches, and what the decoder remembers, are of all sessions. A link has two slots at each of its ends, for the
        rows of a full forward. The ranks that share a stage follow one another; the first of them has what one rank has
        alone.
        """
        ranks, shares = self.load.stages * self.load.shares, self.load.shares
        home = {"last": ranks - shares, "dedicated": ranks}.get(self.decode, 0)
        found = [self._stage_rank(rank) for rank in range(ranks)]
        found += [Memory(ranks, "", libraries=self.libraries)] if home == ranks else []
        sizes, values = self.sizes, self.storage.decoder_bytes or self.storage.value_bytes
        latents = min(sizes.spec.chunk_latents, self.storage.decode_latents or sizes.spec.chunk_latents)
        found[home] = replace(
            found[home],
            role=f"{found[home].role} decode".strip(),
            weights=found[home].weights + values * sizes.decoder.weights,
            decoder_state=values * self.load.sessions * sizes.decoder.remembered,
            decoder_call=values * sizes.decoder.work(latents) if sizes.decoder.work_per_latent else 0,
        )
        return tuple(found)

    def _stage_rank(self, rank: int) -> Memory:
        """Of a rank that computes."""
        sizes, load, storage = self.sizes, self.load, self.storage
        stage, last = rank // load.shares, load.stages - 1
        first, end = self.blocks[stage]
        weights = sizes.shared_values
        weights += sizes.embed_values + sizes.text_values if stage == 0 else 0
        weights += sizes.output_values if stage == last else 0
        on_device = end - first if storage.offload == "none" else min(end - first, OFFLOAD_BUFFERS)
        weights += sizes.action_values(first, first + on_device)
        caches = sizes.cache_values(end - first, steps=load.steps, kv_context=load.kv_context, shares=load.shares)
        return Memory(
            rank,
            " ".join(word for word, here in (("head", rank == 0), ("output", stage == last)) if here),
            storage.value_bytes * weights + on_device * storage.block_bytes(sizes),
            storage.value_bytes * load.sessions * caches,
            storage.value_bytes * load.max_rows * _activations(sizes, stage, load),
            libraries=self.libraries,
        )

    def frame_by_frame(self) -> Demand:
        """The same, with one latent frame by each call of the decoder, as a rank decodes where a chunk does not fit."""
        return replace(self, storage=replace(self.storage, decode_latents=1))

    @property
    def totals(self) -> list[int]:
        """Bytes that the device of each rank needs."""
        return [row.total for row in self.memory()]


def _activations(sizes: ModelSizes, stage: int, load: Workload) -> int:
    """Numbers of one row: the link's slots, and the widest moment of a block; where ranks share the stage, also the
    buffers of their exchanges, queries, keys and values before and after, and the result likewise."""
    hidden = sizes.hidden_values // load.shares
    received = sizes.flow_values if stage == 0 else hidden
    sent = sizes.flow_values if stage == load.stages - 1 else hidden
    slots = 2 * (received + sent) if load.stages > 1 else 0
    tokens = sizes.tokens // load.shares
    exchanged = tokens * sizes.width * _EXCHANGED if load.shares > 1 else 0
    widest = tokens * max(_NORM_WIDTHS * sizes.width, _FFN_WIDTHS * sizes.width + _FFN * sizes.ffn_dim)
    camera = 0 if sizes.camera_channels is None else tokens * sizes.width  # its embedding
    return slots + exchanged + widest + camera


def stage_memory(entry: CatalogueEntry, stages: int, quantize: str = "none", vae: str = "") -> tuple[Memory, ...]:
    """Memory of every stage's GPU in bfloat16, the transformer's blocks in 8 bits where `quantize` says so
    (`models.transformer.quantization`), with one session at the model's own picture, window and KV context, and with
    the decoder called `vae` (empty: its own) on the first one.

    Blocks are spread evenly. A model that cannot stream has no caches.

    Raises:
        ConfigError: more stages than blocks.
    """
    sizes = entry_sizes(entry, vae=vae or None)
    kv_context = entry.context.default if entry.context else "clean"
    steps = sizes.spec.steps[0] if sizes.spec.steps else 1
    load = Workload(stages, 0 if entry.stream is None else 1, steps, kv_context, 1)
    return Demand(sizes, Storage(BFLOAT16, quantize), split_evenly(sizes.blocks, stages), "head", load).memory()


# ---- what fits -------------------------------------------------------------------------------------------------

Remedy = tuple[str, Demand]
"""An option that saves memory, and the demand with it."""


def check_fit(demand: Demand, rank: int, limits: Limits) -> None:
    """Raises ConfigError where the rank's part will not fit into what its device had free at first, or may have."""
    for limit, where in limits:
        if (text := misfit(demand, rank, limit, where)) is not None:
            raise ConfigError(text, field="model", code="memory")


def misfit(demand: Demand, rank: int, free: int, where: str) -> str | None:
    """Why the rank's demand is above `free` bytes, which are what `where` has, even if it decodes `frame_by_frame`:
    what takes how much, which options by themselves make it fit, or else which do together. None where it fits."""
    demand = demand.frame_by_frame()
    if (needed := demand.totals[rank]) <= free:
        return None
    parts = [f"{name.replace('_', ' ')} {in_gb(count)}" for name, count in demand.memory()[rank].parts.items() if count]
    return (
        f"{demand.sizes.spec.name} does not fit: rank {rank} needs {in_gb(needed)} GB ({', '.join(parts)}), and "
        f"{where} has {in_gb(free)} GB. {_ways_out(demand, rank, free)}"
    )


def _ways_out(demand: Demand, rank: int, free: int) -> str:
    found = [(option, changed.totals[rank]) for option, changed in _remedies(demand, rank, free)]
    if enough := [f"{option} ({in_gb(total)} GB)" for option, total in found if total <= free]:
        return f"Any of these makes it fit: {'; '.join(enough)}"
    options, total = _together(demand, rank, free)
    least = f"{' '.join(options)} ({in_gb(total)} GB)"
    if total <= free:
        return f"No option alone makes it fit, these together do: {least}"
    return f"No option makes it fit; the least is {least}. Take a smaller model, a larger device, or more --stages"


def _together(demand: Demand, rank: int, free: int) -> tuple[list[str], int]:
    """Options one after the other until it fits, and what is needed then; those that gain nothing are left out."""
    options, used = list[str](), set[str]()
    while (total := demand.totals[rank]) > free:
        left = [each for each in _remedies(demand, rank, free) if each[0].split()[0] not in used]
        chosen = next((each for each in left if each[1].totals[rank] < total), None)
        if chosen is None:
            break
        option, demand = chosen
        options.append(option)
        used.add(option.split()[0])
    return options, total


def _remedies(demand: Demand, rank: int, free: int) -> Iterator[Remedy]:
    """Options that take less memory of the rank, those that change pictures least first. A window or a picture is the
    largest with which it fits, or the smallest there is."""
    storage, has_blocks = demand.storage, rank < demand.load.stages * demand.load.shares
    in_full = has_blocks and storage.quantize == "none" and storage.offload == "none"
    if in_full:
        yield "--quantize int8", replace(demand, storage=replace(storage, quantize="int8"))
    if demand.changeable:
        name = small_of(demand.own)
        small = decoder_sizes(demand.sizes.spec, demand.own, name)
        if demand.memory()[rank].decoder_call and small != demand.sizes.decoder:
            yield f"--vae {name}", replace(demand, sizes=replace(demand.sizes, decoder=small), vae=name)
        if has_blocks:
            yield from _largest(_windows(demand), rank, free)
        yield from _largest(_pictures(demand), rank, free)
    if in_full:
        yield "--offload blocks", replace(demand, storage=replace(storage, offload="blocks"))


def _largest(choices: Iterator[Remedy], rank: int, free: int) -> Iterator[Remedy]:
    """The first of the choices, which grow smaller, that fits; else the last one; none where there is none."""
    chosen: Remedy | None = None
    for chosen in choices:
        if chosen[1].totals[rank] <= free:
            break
    if chosen is not None:
        yield chosen


def _windows(demand: Demand) -> Iterator[Remedy]:
    """Shorter windows, chunk by chunk, down to the sink and two chunks: what a chunk sees of the past is one then."""
    sizes, spec = demand.sizes, demand.sizes.spec
    longest = spec.window(demand.load.kv_context) - spec.chunk_latents
    least = max(spec.sink_latents + 2 * spec.chunk_latents, spec.first_chunks * spec.chunk_latents)
    for window in range(longest, least - 1, -spec.chunk_latents):
        shorter = with_window(spec, window, None, None)
        yield f"--window {window}", replace(demand, sizes=replace(sizes, spec=shorter))


def _pictures(demand: Demand) -> Iterator[Remedy]:
    """Smaller pictures of about the same shape."""
    spec = demand.sizes.spec
    for share in (0.85, 0.75, 0.625, 0.5, 0.375):
        width, height = (max(_UNIT, round(side * share / _UNIT) * _UNIT) for side in (spec.width, spec.height))
        if (width, height) == (spec.width, spec.height):
            continue
        smaller = with_size(spec, width, height)
        sizes = replace(demand.sizes, spec=smaller, decoder=decoder_sizes(smaller, demand.own, demand.vae))
        yield f"--size {width}x{height}", replace(demand, sizes=sizes)


def in_gb(count: int) -> str:
    """10^9 bytes, for people."""
    return f"{count / 1e9:.3g}"
