"""Estimates frames per second of a named GPU, in every KV context, for one session and for several.

The ring is simulated with estimated costs (`costs.estimate`, `simulator`), memory is counted (`memory`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamdiff.pipeline.planner import gpus
from streamdiff.pipeline.planner.costs import Costs, estimate
from streamdiff.pipeline.planner.fit import Demand
from streamdiff.pipeline.planner.gpus import UNKNOWN_HOST_GBPS, Gpu
from streamdiff.pipeline.planner.memory import LIBRARIES_BYTES, Storage, memory, offloaded_bytes
from streamdiff.pipeline.planner.model_sizes import ModelSizes
from streamdiff.pipeline.planner.simulator import Setup, Stream, simulate
from streamdiff.pipeline.planner.stage_layout import Layout, Workload, choose_layout, decode_stage

DTYPES = {4: "float32", 2: "bfloat16"}
_CHUNKS = 40
"""Simulated per session: enough for a steady state."""


@dataclass(frozen=True)
class Expected:
    """What to expect of `sessions` sessions in one KV context: frames per second of each, seconds of a chunk from its
    admission, and to the first one of who waits longest, bytes of the fullest rank, and whether that fits and the
    target rate is reached."""

    kv_context: str
    sessions: int
    frames_per_s: float
    latency_s: float
    first_chunk_s: float
    nbytes: int
    fits: bool
    reaches: bool


@dataclass(frozen=True)
class Forecast:
    """Expectations by KV context and number of sessions, and how many sessions the memory holds by KV context."""

    expected: tuple[Expected, ...]
    most_sessions: dict[str, int]

    def reaching(self, sessions: int) -> tuple[str, ...]:
        """KV contexts in which so many sessions fit and reach the target rate."""
        return tuple(e.kv_context for e in self.expected if e.sessions == sessions and e.fits and e.reaches)


@dataclass(frozen=True)
class Question:
    """What a forecast is made of: costs by KV context, a workload whose KV context and sessions are varied, the bytes
    that a program may take of each device, and the frames per second that shall be reached."""

    sizes: ModelSizes
    costs: dict[str, Costs]
    load: Workload
    decode: str
    storage: Storage
    usable_bytes: int
    target_fps: float


def costs_on(gpu: Gpu, sizes: ModelSizes, load: Workload, storage: Storage, link: str | None = None) -> Costs:
    """Estimated costs in the workload's KV context, blocks copied from host memory where they are offloaded. `link` is
    what several are linked by, one of `gpu.links`; None: the fastest."""
    blocks, ceilings = -(-sizes.blocks // load.stages), gpu.ceilings(DTYPES[storage.value_bytes], link)
    return estimate(
        sizes,
        ceilings,
        kv_context=load.kv_context,
        max_rows=load.max_rows,
        value_bytes=storage.value_bytes,
        block_copy_s=offloaded_bytes(sizes, blocks, storage) / blocks / (gpu.host_gbps * 1e9),
        shares=load.shares,
    )


def offload_words(sizes: ModelSizes, storage: Storage, load: Workload, gpu: Gpu | None) -> str | None:
    """What offload costs: bytes per step over the host's rate beside computing, an estimate, for one line. `gpu` is
    None where it is not in the table. None without offload."""
    if storage.offload == "none":
        return None
    blocks = -(-sizes.blocks // load.stages)
    copied = offloaded_bytes(sizes, blocks, storage)
    if copied == 0:
        return f"offload: {blocks} blocks all have a buffer on the device, so nothing is copied"
    rate = gpu.host_gbps if gpu is not None else UNKNOWN_HOST_GBPS
    copying_s, computing_s = copied / rate / 1e9, 0.0
    beside = "computing is not known of this device"
    if gpu is not None:
        computing_s = blocks * costs_on(gpu, sizes, load, replace(storage, offload="none")).block_s[0][0]
        beside = f"computing {computing_s:.3g} s, and the longer one counts"
    frames = sizes.spec.chunk_frames / (load.passes * max(copying_s, computing_s))
    return (
        f"offload: {copied / 1e9:.3g} GB per step and stage from host memory at {rate:.3g} GB/s take {copying_s:.3g} "
        f"s, {beside}: at most {frames:.3g} frames/s of all sessions together; estimated"
    )


def offload_note(demand: Demand, card: str | None, graphs: bool) -> str:
    """What is said of offload at a start, on the GPU that its driver calls `card` (None: a CPU); `graphs` were wanted.
    Empty without offload."""
    gpu = None if card is None else gpus.recognise(card)
    words = offload_words(demand.sizes, demand.storage, demand.load, gpu)
    if words is None:
        return ""
    if card is None:
        words = "offload: on a CPU the blocks are in host memory anyway, so it costs time and saves nothing"
    return f"{words}; no graphs of the transformer are made" if graphs else words


def forecast(question: Question) -> Forecast:
    """Expectations for one session, and for as many as the workload has."""
    counts = sorted({1, question.load.sessions})
    expected = [expect(question, kv_context, count) for kv_context in question.costs for count in counts]
    most = {kv_context: most_sessions(question, kv_context) for kv_context in question.costs}
    return Forecast(tuple(expected), most)


def expect(question: Question, kv_context: str, sessions: int, chunks: int = _CHUNKS) -> Expected:
    """What to expect of so many sessions in this KV context, each simulated for `chunks` chunks."""
    sizes, load = question.sizes, replace(question.load, kv_context=kv_context, sessions=sessions)
    costs = question.costs[kv_context]
    layout = choose_layout(costs, load, question.decode)
    links = link_times(costs, load.stages)
    figures = simulate(ring_setup(sizes, load, layout, links, costs.decode_s, chunks)).figures
    rate = figures.chunks_per_s * sizes.spec.chunk_frames / sessions
    storage = _storage(question, layout, load)
    taken = max(row.total for row in memory(sizes, layout, load, storage)) + LIBRARIES_BYTES
    return Expected(
        kv_context,
        sessions,
        rate,
        figures.latency_s,
        figures.first_chunk_s,
        taken,
        taken <= question.usable_bytes,
        rate >= question.target_fps,
    )


def ring_setup(
    sizes: ModelSizes, load: Workload, layout: Layout, links: tuple[float, ...], decode_s: float, chunks: int
) -> Setup:
    """What is simulated of alike sessions; `links` are the seconds of a message on each link, the way back the last."""
    stream = Stream(load.steps, load.kv_context, first_steps=sizes.first_chunk_steps)
    return Setup(
        stage_s=layout.stage_s,
        streams=(stream,) * load.sessions,
        link_s=links if load.stages > 1 else (),
        decode_s=decode_s,
        decode_stage=decode_stage(layout.decode, load.stages),
        max_rows=load.max_rows,
        chunks=chunks,
    )


def link_times(costs: Costs, stages: int) -> tuple[float, ...]:
    """Seconds of a message on each link of the ring."""
    return (*[costs.link_s] * (stages - 1), costs.flow_s)


def _storage(question: Question, layout: Layout, load: Workload) -> Storage:
    """That of the question; where one session has no room for a call of the decoder for a chunk, with a latent frame by
    each call, as a rank decodes then."""
    rows = memory(question.sizes, layout, replace(load, sessions=1), question.storage)
    fits = max(row.total for row in rows) + LIBRARIES_BYTES <= question.usable_bytes
    return question.storage if fits else replace(question.storage, decode_latents=1)


def most_sessions(question: Question, kv_context: str) -> int:
    """Sessions that every rank has memory for."""
    load = replace(question.load, kv_context=kv_context)
    layout = choose_layout(question.costs[kv_context], load, question.decode)
    storage = _storage(question, layout, load)
    none, one = (memory(question.sizes, layout, replace(load, sessions=n), storage) for n in (0, 1))
    counts = []
    for empty, full in zip(none, one, strict=True):
        left = question.usable_bytes - LIBRARIES_BYTES - empty.total
        if left < 0:
            return 0
        if (each := full.total - empty.total) > 0:
            counts.append(left // each)
    return min(counts)
