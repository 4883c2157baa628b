"""Which P stages of C ranks are best for a number of GPUs: all that the model allows are simulated, with one session
and with several. Pure: sizes and rates in, estimates out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.forecast import Expected, Question, costs_on, expect, most_sessions
from streamdiff.pipeline.planner.gpus import Gpu
from streamdiff.pipeline.planner.memory import LIBRARIES_BYTES, Storage, memory
from streamdiff.pipeline.planner.model_sizes import ModelSizes
from streamdiff.pipeline.planner.partition import possible_shares
from streamdiff.pipeline.planner.stage_layout import Workload, choose_layout

GPUS_AT_MOST = 16
_CHUNKS = 12
"""Simulated per session: bursts of a ring of 8 stages come back often enough."""
_BEYOND = 2
"""More sessions than stages by this fill the ring: still more of them change no rate."""
_ALIKE = 0.99
"""Rates nearer to the best than this are taken as equal, and the shorter latency counts."""


@dataclass(frozen=True)
class Machine:
    """`count` GPUs alike, linked by `link`, one of `gpu.links`."""

    gpu: Gpu
    count: int
    link: str

    def __str__(self) -> str:
        return f"{self.count} x {self.gpu.title}" + (f", linked by {self.link}" if self.count > 1 else "")


@dataclass(frozen=True)
class Case:
    """`stages` x `shares` ranks, decoding at `decode`, and what to expect of one session, `alone`, of those that were
    asked for, `asked`, and of as many as fit, `crowd` (or as many of these as fill the ring). `forward_s` is a row's
    way through all stages; `rank_bytes` are those of each rank with the sessions that were asked for."""

    stages: int
    shares: int
    decode: str
    forward_s: float
    alone: Expected
    asked: Expected
    crowd: Expected
    sessions_that_fit: int
    rank_bytes: tuple[int, ...]

    @property
    def parallel(self) -> str:
        """As `--parallel` has it."""
        return f"{self.stages}x{self.shares}"


@dataclass(frozen=True)
class Comparison:
    """All cases of a machine, and what one of its GPUs does by itself."""

    machine: Machine
    one_gpu: Case
    cases: tuple[Case, ...]

    @property
    def for_one(self) -> Case | None:
        """The best of one session; None where it fits in no case."""
        return _best(self.cases, lambda case: case.alone)

    @property
    def for_asked(self) -> Case | None:
        """The best of those that were asked for."""
        return _best(self.cases, lambda case: case.asked)

    @property
    def for_many(self) -> Case | None:
        """The best of as many as fit."""
        return _best(self.cases, lambda case: case.crowd)


def compare(
    machine: Machine,
    sizes: ModelSizes,
    load: Workload,
    storage: Storage,
    decode: str = "auto",
    chunks: int | None = None,
) -> Comparison:
    """Every case of the machine, for the workload's sessions, whose stages and shares do not count. Decoding is at
    `decode`; for `auto` on the head or the last rank, and beside these cases are those with a GPU for
    decoding alone. `chunks` are simulated per session.

    Raises:
        ConfigError: the model cannot be split over so many GPUs.
    """
    splits = list(_splits(machine.count, sizes, decode))
    if not splits:
        ways = ", ".join(map(str, possible_shares(sizes)))
        raise ConfigError(
            f"--gpus is {machine.count}: {sizes.spec.name} has {sizes.blocks} blocks, and every stage needs one; of "
            f"ranks {ways} can share a stage. No stages x ranks make {machine.count}"
        )

    def case(stages: int, shares: int, place: str) -> Case:
        split = replace(load, stages=stages, shares=shares)
        return _case(machine, sizes, split, storage, place, chunks or _CHUNKS)

    return Comparison(machine, case(1, 1, "head"), tuple(case(*split) for split in splits))


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


def _case(machine: Machine, sizes: ModelSizes, load: Workload, storage: Storage, decode: str, chunks: int) -> Case:
    context, gpu = load.kv_context, machine.gpu
    costs = costs_on(gpu, sizes, load, storage, machine.link)
    layout = choose_layout(costs, load, decode)
    question = Question(sizes, {context: costs}, load, layout.decode, storage, gpu.usable_bytes, sizes.spec.native_fps)
    most = most_sessions(question, context)
    crowd = max(1, min(most, load.stages + _BEYOND))
    alone, asked, many = (expect(question, context, count, chunks) for count in (1, load.sessions, crowd))
    return Case(
        load.stages,
        load.shares,
        layout.decode,
        math.fsum(times[0] for times in layout.stage_s),
        alone,
        asked,
        many,
        most,
        tuple(row.total + LIBRARIES_BYTES for row in memory(sizes, layout, load, storage)),
    )


def _best(cases: tuple[Case, ...], of: Callable[[Case], Expected]) -> Case | None:
    """The most frames per second of all sessions together; of those about alike the shortest latency."""
    fitting = [case for case in cases if of(case).fits]
    if not fitting:
        return None
    most = max(_total(of(case)) for case in fitting)
    return min((case for case in fitting if _total(of(case)) >= _ALIKE * most), key=lambda case: of(case).latency_s)


def _total(expected: Expected) -> float:
    return expected.frames_per_s * expected.sessions
