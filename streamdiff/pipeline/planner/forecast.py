"""Estimates frames per second of named GPUs: in every KV context, for one session and for several, and for every way to
use a number of them as P stages of C ranks.

The ring is simulated with estimated costs (`costs.estimate`, `simulator`), memory is counted (`memory`). Pure: sizes
and rates in, estimates out; never a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from typing import Literal

import yaml

from streamdiff.core import KV_CONTEXTS
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.costs import Ceilings, Costs, estimate
from streamdiff.pipeline.planner.memory import Demand, Storage
from streamdiff.pipeline.planner.model_sizes import ModelSizes
from streamdiff.pipeline.planner.partition import Layout, Workload, choose_layout, possible_shares
from streamdiff.pipeline.planner.simulator import Setup, Stream, simulate

DTYPES = {4: "float32", 2: "bfloat16"}
CONTEXT_BYTES = 600_000_000
"""What a CUDA context takes of a card before anything is loaded: an assumption."""
MEMORY_SHARE = 0.8
"""Of a device memory's rate, what element-wise kernels reach; copies measured by many reach 0.8 to 0.9."""
HOST_SHARE = 0.8
"""Of a PCIe rate, what copies from pinned host memory reach: about 25 of 32, and 50 of 64 GB/s."""
UNKNOWN_HOST_GBPS = HOST_SHARE * 32
"""Copies from pinned host memory to a GPU that is not in the table: PCIe 4.0 x16."""
CONVOLUTION_SHARE = 0.25
"""Of the tensor cores' rate, what the decoders' convolutions reach: Wan's decoder, 54 TFLOP for 16 frames of 832x464 in
1.05 s on an RTX 5090 (github.com/kaarelkaarelson/lingbot-world-v2-realtime), is 0.25 of its 209."""
ELEMENTWISE_ACTIVATIONS = 52.0
"""What element-wise kernels of a block read and write, in hidden states of a chunk: the plain path's
(benchmarks/results/kernel_count.json). Compiled blocks move less."""
EXCHANGE_SHARE = 2 / 3
"""Of a link's rate, what an all-to-all reaches: 300 of NVLink's 450 GB/s, an assumption."""
EXCHANGE_FLOOR_S = 5e-5
"""What an all-to-all costs beside its bytes: its launch, ranks that wait for one another, what kernels of fewer rows
lose. An assumption: of FLUX by xDiT on H100s, 28 steps of 4,608 tokens, compiled, 4.30 s on one, 2.68 s on two, 1.63 s
on four (its docs/performance/flux.md), bytes and copies leave 40 to 55 us for each of four exchanges in 57 blocks."""
FACTOR = 1.5
"""Within which published figures of well-made engines lie, both ways (tests/pipeline/planner/test_forecast.py)."""
_CHUNKS = {"forecast": 40, "comparison": 12}
"""Simulated per session: enough for a steady state; bursts of a ring of 8 stages come back often enough."""
_BEYOND = 2
"""More sessions than stages by this fill the ring: still more of them change no rate."""
_ALIKE = 0.99
"""Rates nearer to the best than this are taken as equal, and the shorter latency counts."""


# ---- GPUs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A GPU of `gpus.yaml`. `tflops` are 10^12 operations per second by dtype, dense, with sums in float32; rates are
    10^9 bytes per second, of links and PCIe in one direction; `matrix_share` and `attention_share` are the shares of
    `tflops` that matrix products and attention reach, and `shares_from` what these rest on."""

    name: str
    title: str
    tflops: dict[str, float]
    memory_gib: float
    memory_gbps: float
    link_gbps: float
    pcie_gbps: float
    source: str
    matrix_share: float
    attention_share: float
    shares_from: str

    @property
    def usable_bytes(self) -> int:
        """Of its memory, what is left for a program."""
        return round(self.memory_gib * 2**30) - CONTEXT_BYTES

    @property
    def host_gbps(self) -> float:
        """10^9 bytes per second of copies from pinned host memory."""
        return HOST_SHARE * self.pcie_gbps

    @property
    def links(self) -> dict[str, float]:
        """10^9 bytes per second, one way, of what links it to its like, the fastest first."""
        pcie = {"pcie": self.pcie_gbps}
        return {"nvlink": self.link_gbps, **pcie} if self.link_gbps > self.pcie_gbps else pcie

    def pick_link(self, wanted: str | None) -> str:
        """`wanted`, or where that is None the fastest. Raises ConfigError: it has no such link."""
        if wanted is not None and wanted not in self.links:
            raise ConfigError(
                f"--link is {wanted!r}, but {self.title} can be linked by {' or '.join(self.links)}", field="link"
            )
        return wanted or next(iter(self.links))

    def ceilings(self, dtype: str, link: str) -> Ceilings:
        """What it is expected to reach in `dtype`, a key of `tflops`, linked by `link`, one of `links`."""
        peak, link_gbps = self.tflops[dtype], self.links[link]
        return Ceilings(
            tflops=self.matrix_share * peak,
            gbps=MEMORY_SHARE * self.memory_gbps,
            link_gbps=MEMORY_SHARE * link_gbps,
            attention_tflops=self.attention_share * peak,
            decode_tflops=CONVOLUTION_SHARE * peak,
            elementwise=ELEMENTWISE_ACTIVATIONS,
            device=self.title,
            exchange_floor_s=EXCHANGE_FLOOR_S,
            exchange_gbps=EXCHANGE_SHARE * link_gbps,
        )


@cache
def gpus() -> dict[str, Gpu]:
    """The table of GPUs, by name."""
    table = yaml.safe_load(files(__package__).joinpath("gpus.yaml").read_text(encoding="utf-8"))
    return {name: Gpu(name, **facts) for name, facts in table.items()}


def find(name: str) -> Gpu:
    """The GPU called `name`, in capitals or not. Raises ConfigError: there is none."""
    if (found := gpus().get(name.lower())) is None:
        raise ConfigError(
            f"--gpu is {name!r}, but must be one of {', '.join(gpus())}; of others --tflops and --gbps tell",
            field="gpu",
        )
    return found


def recognise(title: str) -> Gpu | None:
    """The GPU that a driver calls so, as `NVIDIA H100 80GB HBM3`; None for one that is not in the table."""
    words = title.lower().split()
    if {"pcie", "laptop", "nvl"} & set(words):
        return None  # slower ones of the same name
    return next((gpu for name, gpu in gpus().items() if name in words), None)


# ---- one ring --------------------------------------------------------------------------------------------------


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

    @property
    def together(self) -> float:
        """Frames per second of all sessions."""
        return self.frames_per_s * self.sessions


@dataclass(frozen=True)
class GpuRing:
    """A model on GPUs alike, linked by `link`: how it is kept, what is asked of it, and where chunks are decoded, as
    `choose_layout` wants it."""

    gpu: Gpu
    link: str
    sizes: ModelSizes
    storage: Storage
    load: Workload
    decode: str

    @cached_property
    def costs(self) -> Costs:
        """Estimated, in the workload's KV context; blocks are copied from host memory where they are offloaded."""
        blocks = -(-self.sizes.blocks // self.load.stages)
        return estimate(
            self.sizes,
            self.gpu.ceilings(DTYPES[self.storage.value_bytes], self.link),
            kv_context=self.load.kv_context,
            max_rows=self.load.max_rows,
            value_bytes=self.storage.value_bytes,
            block_copy_s=self.storage.copied_bytes(self.sizes, blocks) / blocks / (self.gpu.host_gbps * 1e9),
            shares=self.load.shares,
        )

    @cached_property
    def layout(self) -> Layout:
        return choose_layout(self.costs, self.load, self.decode)

    def demand(self, sessions: int | None = None) -> Demand:
        """What it takes of the devices, with the workload's sessions or so many. Where one session has no room for a
        call of the decoder for a chunk, it decodes a latent frame by each call, as a rank does then."""
        load = replace(self.load, sessions=1)
        one = Demand(self.sizes, self.storage, self.layout.blocks, self.layout.decode, load)
        fits = max(one.totals) <= self.gpu.usable_bytes
        load = self.load if sessions is None else replace(load, sessions=sessions)
        return replace(one if fits else one.frame_by_frame(), load=load)

    def expect(self, kv_context: str, sessions: int, target_fps: float, chunks: int) -> Expected:
        """What to expect of so many sessions in this KV context, each simulated for `chunks` chunks."""
        ring = replace(self, load=replace(self.load, kv_context=kv_context, sessions=sessions))
        figures = simulate(ring_setup(self.sizes, ring.load, ring.layout, chunks)).figures
        rate = figures.chunks_per_s * self.sizes.spec.chunk_frames / sessions
        taken = max(ring.demand().totals)
        fits, reaches = taken <= self.gpu.usable_bytes, rate >= target_fps
        return Expected(kv_context, sessions, rate, figures.latency_s, figures.first_chunk_s, taken, fits, reaches)

    def most_sessions(self) -> int:
        """Sessions that every rank has memory for."""
        one = self.demand(1)
        counts = []
        for row in one.memory():
            left = self.gpu.usable_bytes - row.total + row.sessions
            if left < 0:
                return 0
            if row.sessions > 0:
                counts.append(left // row.sessions)
        return min(counts)


def ring_setup(sizes: ModelSizes, load: Workload, layout: Layout, chunks: int) -> Setup:
    """What is simulated of the workload's alike sessions."""
    stream = Stream(load.steps, load.kv_context, first_steps=sizes.first_chunk_steps)
    return Setup(
        stage_s=layout.stage_s,
        streams=(stream,) * load.sessions,
        link_s=layout.link_s if load.stages > 1 else (),
        decode_s=layout.decode_s,
        decode_stage=layout.decode_stage,
        max_rows=load.max_rows,
        chunks=chunks,
    )


def forecast(ring: GpuRing, target_fps: float) -> tuple[Expected, ...]:
    """In every KV context, for one session and for as many as the workload has."""
    return tuple(
        ring.expect(kv_context, count, target_fps, _CHUNKS["forecast"])
        for kv_context in KV_CONTEXTS
        for count in sorted({1, ring.load.sessions})
    )


def offload_words(sizes: ModelSizes, storage: Storage, load: Workload, gpu: Gpu | None) -> str | None:
    """What offload costs: bytes per step over the host's rate beside computing, an estimate, for one line. `gpu` is
    None where it is not in the table. None without offload."""
    if storage.offload == "none":
        return None
    blocks = -(-sizes.blocks // load.stages)
    copied = storage.copied_bytes(sizes, blocks)
    if copied == 0:
        return f"offload: {blocks} blocks all have a buffer on the device, so nothing is copied"
    rate = gpu.host_gbps if gpu is not None else UNKNOWN_HOST_GBPS
    copying_s, computing_s = copied / rate / 1e9, 0.0
    beside = "computing is not known of this device"
    if gpu is not None:
        ring = GpuRing(gpu, gpu.pick_link(None), sizes, replace(storage, offload="none"), load, "head")
        computing_s = blocks * ring.costs.block_s[0][0]
        beside = f"computing {computing_s:.3g} s, and the longer one counts"
    frames = sizes.spec.chunk_frames / (load.passes * max(copying_s, computing_s))
    return (
        f"offload: {copied / 1e9:.3g} GB per step and stage from host memory at {rate:.3g} GB/s take {copying_s:.3g} "
        f"s, {beside}: at most {frames:.3g} frames/s of all sessions together; estimated"
    )


def offload_note(demand: Demand, card: str | None, graphs: bool) -> str:
    """What is said of offload at a start, on the GPU that its driver calls `card` (None: a CPU); `graphs` were wanted.
    Empty without offload."""
    gpu = None if card is None else recognise(card)
    words = offload_words(demand.sizes, demand.storage, demand.load, gpu)
    if words is None:
        return ""
    if card is None:
        words = "offload: on a CPU the blocks are in host memory anyway, so it costs time and saves nothing"
    return f"{words}; no graphs of the transformer are made" if graphs else words


# ---- every ring of so many GPUs --------------------------------------------------------------------------------


Kind = Literal["one", "sessions", "many"]
"""One session; as many as were asked for; and as many as fit, or of these as many as fill the ring."""


@dataclass(frozen=True)
class Case:
    """A ring of P stages x C ranks, what to expect of it by kind of sessions, and how many sessions it has memory
    for."""

    ring: GpuRing
    expected: dict[Kind, Expected]
    sessions_that_fit: int

    @property
    def parallel(self) -> str:
        """As `--parallel` has it."""
        return f"{self.ring.load.stages}x{self.ring.load.shares}"

    @property
    def decode(self) -> str:
        return self.ring.layout.decode

    @property
    def forward_s(self) -> float:
        """A row's way through all stages."""
        return self.ring.layout.forward_s

    @property
    def rank_bytes(self) -> list[int]:
        """Of each rank with the sessions that were asked for."""
        ring = self.ring
        return Demand(ring.sizes, ring.storage, ring.layout.blocks, ring.layout.decode, ring.load).totals


@dataclass(frozen=True)
class Comparison:
    """All cases of `count` GPUs, and what one of them does by itself."""

    count: int
    one_gpu: Case
    cases: tuple[Case, ...]

    @property
    def machine(self) -> str:
        """The GPUs, for people."""
        ring = self.one_gpu.ring
        return f"{self.count} x {ring.gpu.title}" + (f", linked by {ring.link}" if self.count > 1 else "")

    def best(self, kind: Kind) -> Case | None:
        """The case with the most frames per second of all sessions together; of those about alike that with the
        shortest latency. None where the sessions fit in no case."""
        fitting = [case for case in self.cases if case.expected[kind].fits]
        most = max((case.expected[kind].together for case in fitting), default=0.0)
        near = (case for case in fitting if case.expected[kind].together >= _ALIKE * most)
        return min(near, key=lambda case: case.expected[kind].latency_s, default=None)


def compare(ring: GpuRing, count: int, chunks: int | None = None) -> Comparison:
    """Every case of `count` GPUs, for the ring's workload, whose stages and shares do not count. Decoding is where the
    ring has it; for `auto` on the head or the last rank, and beside these cases are those with a GPU for decoding
    alone. `chunks` are simulated per session.

    Raises:
        ConfigError: the model cannot be split over so many GPUs.
    """
    sizes, chunks = ring.sizes, chunks or _CHUNKS["comparison"]
    splits = list(_splits(count, sizes, ring.decode))
    if not splits:
        ways = ", ".join(map(str, possible_shares(sizes)))
        raise ConfigError(
            f"--gpus is {count}: {sizes.spec.name} has {sizes.blocks} blocks, and every stage needs one; of ranks "
            f"{ways} can share a stage. No stages x ranks make {count}",
            field="gpus",
        )

    def case(stages: int, shares: int, decode: str) -> Case:
        split = replace(ring, load=replace(ring.load, stages=stages, shares=shares), decode=decode)
        split = replace(split, decode=split.layout.decode)
        most = split.most_sessions()
        many = max(1, min(most, stages + _BEYOND))
        target_fps, context = sizes.spec.native_fps, ring.load.kv_context
        counts: dict[Kind, int] = {"one": 1, "sessions": ring.load.sessions, "many": many}
        expected = {kind: split.expect(context, count, target_fps, chunks) for kind, count in counts.items()}
        return Case(split, expected, most)

    return Comparison(count, case(1, 1, "head"), tuple(case(*split) for split in splits))


def _splits(count: int, sizes: ModelSizes, decode: str) -> Iterator[tuple[int, int, str]]:
    """(stages, shares, decode's place): all ranks compute, or one of them decodes; where shares do not divide what is
    left then, a GPU stays idle."""
    for shares in possible_shares(sizes):
        fits = count % shares == 0 and count // shares <= sizes.blocks
        if fits and decode != "dedicated":
            yield count // shares, shares, decode
    if decode == "dedicated" or (decode == "auto" and sizes.decoder.flops):
        for shares in possible_shares(sizes):
            stages, idle = divmod(count - 1, shares)
            if idle <= 1 and 1 <= stages <= sizes.blocks:
                yield stages, shares, "dedicated"
