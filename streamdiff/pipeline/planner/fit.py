"""Checks before loading whether a model fits into a device's memory, and finds options that would make it fit.

Pure: sizes and a limit in, a message out. Every option's figure is counted as the model's own is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from streamdiff.errors import ConfigError
from streamdiff.models.spec import with_size, with_window
from streamdiff.pipeline.planner.memory import LIBRARIES_BYTES, Memory, Storage, memory
from streamdiff.pipeline.planner.model_sizes import SMALL, ModelSizes, decoder_sizes
from streamdiff.pipeline.planner.stage_layout import Blocks, Layout, Workload

Limits = tuple[tuple[int, str], ...]
"""Bytes that may be taken, and of what."""
_UNIT = 32
"""Sides of proposed pictures are multiples of it."""
_GB = 1e9
_WORDS = {
    "weights": "weights",
    "text_encoder": "text encoder",
    "caches": "KV caches",
    "activations": "a forward",
    "decoding": "decoder's memory",
    "decode_work": "a call of the decoder",
}


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
        """Of every rank, what libraries take apart."""
        return memory(self.sizes, Layout(self.blocks, (), self.decode, 0.0), self.load, self.storage)

    def frame_by_frame(self) -> Demand:
        """The same, with one latent frame by each call of the decoder, as a rank decodes where a chunk does not fit."""
        return replace(self, storage=replace(self.storage, decode_latents=1))

    def total(self, rank: int) -> int:
        """Bytes that the rank's device needs."""
        return self.memory()[rank].total + self.libraries

    def without_sessions(self, rank: int) -> int:
        """The same, but for what sessions take."""
        found = self.memory()[rank]
        return self.total(rank) - found.caches - found.decoding


@dataclass(frozen=True)
class Remedy:
    """An option that saves memory, and the demand with it."""

    option: str
    demand: Demand


def check(demand: Demand, rank: int, limits: Limits) -> None:
    """Raises ConfigError where the rank's part will not fit into what its device had free at first, or may have."""
    for limit, where in limits:
        if (text := misfit(demand, rank, limit, where)) is not None:
            raise ConfigError(text)


def misfit(demand: Demand, rank: int, free: int, where: str) -> str | None:
    """Why the rank's demand is above `free` bytes, which are what `where` has, even if it decodes `frame_by_frame`:
    what takes how much, which options by themselves make it fit, or else which do together. None where it fits."""
    demand = demand.frame_by_frame()
    if (needed := demand.total(rank)) <= free:
        return None
    parts = [f"{_WORDS[name]} {_gb(count)}" for name, count in demand.memory()[rank].parts.items() if count]
    parts += [f"libraries {_gb(demand.libraries)}"] if demand.libraries else []
    return (
        f"{demand.sizes.spec.name} does not fit: rank {rank} needs {_gb(needed)} GB ({', '.join(parts)}), and {where} "
        f"has {_gb(free)} GB. {_ways_out(demand, rank, free)}"
    )


def _ways_out(demand: Demand, rank: int, free: int) -> str:
    found = [(each.option, each.demand.total(rank)) for each in remedies(demand, rank, free)]
    if enough := [f"{option} ({_gb(total)} GB)" for option, total in found if total <= free]:
        return f"Any of these makes it fit: {'; '.join(enough)}"
    options, total = _together(demand, rank, free)
    least = f"{' '.join(options)} ({_gb(total)} GB)"
    if total <= free:
        return f"No option alone makes it fit, these together do: {least}"
    return f"No option makes it fit; the least is {least}. Take a smaller model, a larger device, or more --stages"


def _together(demand: Demand, rank: int, free: int) -> tuple[list[str], int]:
    """Options one after the other until it fits, and what is needed then; those that gain nothing are left out."""
    options: list[str] = []
    used: set[str] = set()
    while demand.total(rank) > free:
        left = [each for each in remedies(demand, rank, free) if each.option.split()[0] not in used]
        left = [each for each in left if each.demand.total(rank) < demand.total(rank)]
        if not left:
            break
        chosen = left[0]
        used.add(chosen.option.split()[0])
        used |= {"--quantize", "--offload"} if used & {"--quantize", "--offload"} else set()  # one of the two
        options.append(chosen.option)
        demand = chosen.demand
    return options, demand.total(rank)


def remedies(demand: Demand, rank: int, free: int) -> Iterator[Remedy]:
    """Options that take less memory of the rank, those that change pictures least first. A window or a picture is the
    largest with which it fits, or the smallest there is."""
    storage, blocks = demand.storage, rank < len(demand.blocks) * demand.load.shares
    decodes = demand.memory()[rank].decode_work > 0
    if blocks and storage.quantize == "none" and storage.offload == "none":
        yield Remedy("--quantize int8", replace(demand, storage=replace(storage, quantize="int8")))
    if decodes and demand.changeable:
        small = replace(demand.sizes, decoder=decoder_sizes(demand.sizes.spec, demand.own, SMALL))
        if small.decoder != demand.sizes.decoder:
            yield Remedy(f"--vae {SMALL}", replace(demand, sizes=small, vae=SMALL))
    if demand.changeable:
        yield from _largest(_windows(demand) if blocks else (), rank, free)
        yield from _largest(_pictures(demand), rank, free)
    if blocks and storage.quantize == "none" and storage.offload == "none":
        yield Remedy("--offload blocks", replace(demand, storage=replace(storage, offload="blocks")))


def _largest(choices: Iterator[Remedy] | tuple[()], rank: int, free: int) -> Iterator[Remedy]:
    """The first of the choices, which grow smaller, that fits; else the last one; none where there is none."""
    chosen: Remedy | None = None
    for chosen in choices:
        if chosen.demand.total(rank) <= free:
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
        yield Remedy(f"--window {window}", replace(demand, sizes=replace(sizes, spec=shorter)))


def _pictures(demand: Demand) -> Iterator[Remedy]:
    """Smaller pictures of about the same shape."""
    spec = demand.sizes.spec
    for share in (0.85, 0.75, 0.625, 0.5, 0.375):
        width, height = (max(_UNIT, round(side * share / _UNIT) * _UNIT) for side in (spec.width, spec.height))
        if (width, height) == (spec.width, spec.height):
            continue
        smaller = with_size(spec, width, height)
        sizes = replace(demand.sizes, spec=smaller, decoder=decoder_sizes(smaller, demand.own, demand.vae))
        yield Remedy(f"--size {width}x{height}", replace(demand, sizes=sizes))


def _gb(count: int) -> str:
    return f"{count / _GB:.3g}"
