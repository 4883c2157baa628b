"""Summarises a Chrome trace written by torch's profiler: operators, kernels, launches and host waits per chunk."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CHUNKS = 4
"""How many chunks are traced, unless it is said."""


TRACE, SUMMARY = "trace.json.gz", "summary.txt"


_UNFINISHED = ".unfinished-"
"""What files are called below, while they are written: under their names they are whole, whenever the process ends."""


_STEP = "streamdiff.step"


_TOP = 10


# What CUDA's runtime and driver call the launch of a kernel, or of a whole graph of them, and waiting for the device.
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")


_GRAPHS = ("cudaGraphLaunch", "cuGraphLaunch")


_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cuStreamSynchronize")


_NO_WAIT = ("cudaMemcpyAsync",)


# Operations that read a value back, and so wait wherever the tensor is not on the CPU.
_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")


Event = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """An operation or kernel: how often it ran, its own microseconds (without what it called), and on whose thread."""

    name: str
    calls: int
    self_us: float
    where: str


@dataclass(frozen=True)
class Summary:
    """Counts are of the stream's own thread, and for all micro-steps together; `costs` are of every thread, the largest
    first. `launches` and `kernels` are None on a CPU, where `ops` counts operations that no other one called."""

    wall_us: float
    ops: int
    launches: int | None
    graphs: int | None
    kernels: int | None
    waits: Counter[str]
    costs: tuple[Cost, ...]


def summarise(events: Iterable[Event]) -> Summary:
    """What the events of a Chrome trace say that torch's profiler wrote around steps named `streamdiff.step`."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [event for event in spans if event["name"] == _STEP and event.get("cat") == "user_annotation"]
    own = {event["tid"] for event in steps}
    wall_us = max((e["ts"] + e["dur"] for e in steps), default=0.0) - min((e["ts"] for e in steps), default=0.0)
    kernels = [event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [e for e in spans if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["tid"] in own]
    operations, outermost = _own_times([event for event in spans if event.get("cat") == "cpu_op"], own)
    waits = Counter(e["name"] for e in calls if e["name"].startswith(_WAITS) and e["name"] not in _NO_WAIT)
    if not kernels:
        waits = Counter(e["name"] for e in spans if e["name"] in _READS and e["tid"] in own)
    return Summary(
        wall_us=wall_us,
        ops=outermost,
        launches=sum(e["name"].startswith(_LAUNCHES) for e in calls) if kernels else None,
        graphs=sum(e["name"].startswith(_GRAPHS) for e in calls) if kernels else None,
        kernels=sum(e["cat"] == "kernel" for e in kernels) if kernels else None,
        waits=waits,
        costs=_largest(((e["name"], "device"), e["dur"]) for e in kernels) if kernels else _largest(operations),
    )


def _own_times(events: list[Event], own: set[Any]) -> tuple[list[tuple[tuple[str, str], float]], int]:
    """Each operation with its time less that of what it called; and how many on the threads `own` nobody called."""
    found: list[tuple[tuple[str, str], float]] = []
    outermost = 0
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        threads[event["tid"]].append(event)
    for thread, theirs in threads.items():
        where = "stream" if thread in own else "other threads"
        stack: list[tuple[Event, list[float]]] = []  # an operation that runs, and its time so far without its calls
        for event in sorted(theirs, key=lambda each: (each["ts"], -each["dur"])):
            while stack and event["ts"] >= stack[-1][0]["ts"] + stack[-1][0]["dur"]:
                done, (left,) = stack.pop()
                found.append(((done["name"], where), left))
            if stack:
                stack[-1][1][0] -= event["dur"]
            elif thread in own:
                outermost += 1
            stack.append((event, [event["dur"]]))
        found += [((done["name"], where), left) for done, (left,) in stack]
    return found, outermost


def _largest(times: Iterable[tuple[tuple[str, str], float]]) -> tuple[Cost, ...]:
    calls: Counter[tuple[str, str]] = Counter()
    sums: Counter[tuple[str, str]] = Counter()
    for key, self_us in times:
        calls[key] += 1
        sums[key] += self_us  # type: ignore[assignment]
    return tuple(Cost(name, calls[name, where], us, where) for (name, where), us in sums.most_common(_TOP))


def describe(summary: Summary, *, title: str, chunks: int, micro_steps: int) -> str:
    """The summary as text, counts per micro-step."""
    each = max(micro_steps, 1)
    lines = [
        title,
        f"{chunks} chunks, {micro_steps} micro-steps, {summary.wall_us / 1e3:.1f} ms of the stream's thread, traced "
        "(slower than usual: take no rate from here)",
        "",
        "per micro-step, on the stream's thread",
    ]
    if summary.launches is not None:
        lines += [
            f"  {summary.launches / each:10.1f}  kernel launches",
            f"  {(summary.graphs or 0) / each:10.1f}  graph launches",
            f"  {(summary.kernels or 0) / each:10.1f}  kernels that ran on the device, decoding's included",
            f"  {summary.waits.total() / each:10.1f}  host syncs",
        ]
    else:
        lines += [
            f"  {summary.ops / each:10.1f}  operations (those that another operation called are not counted)",
            f"  {summary.waits.total() / each:10.1f}  host syncs: on a CPU nothing waits; these would on a GPU",
        ]
    lines += [f"  {count / each:10.1f}    {name}" for name, count in summary.waits.most_common()]
    whose = "on the device" if summary.launches is not None else "of operations, without what they called"
    lines += ["", f"ten largest costs, time {whose}", f"  {'ms':>9}  {'calls':>7}  {'where':13}  name"]
    lines += [f"  {cost.self_us / 1e3:9.2f}  {cost.calls:7}  {cost.where:13}  {cost.name}" for cost in summary.costs]
    return "\n".join(lines) + "\n"
