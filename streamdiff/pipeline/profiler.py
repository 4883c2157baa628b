"""Profiles some chunks of a running stream with PyTorch's profiler: writes the trace and a one-page summary.

`Profiler` waits until a stream's window is full, traces some chunks from their first micro-step to their last picture,
and writes two files: the Chrome trace, and a summary of operators, kernels, launches and host waits per chunk. What is
traced is slower than usual, so no rate is given here. In a ring the trace is of rank 0.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from streamdiff.errors import ConfigError
from streamdiff.pipeline.output import Frames
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

logger = logging.getLogger(__name__)

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


def check_folder(folder: Path) -> None:
    """Make the folder, if it is not there.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--profile {folder}: cannot be made: {error.strerror or error}; name a folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--profile {folder}: cannot be written to; name another folder")


def check_traced(folder: object, chunks: int | None) -> None:
    """Raises ConfigError: a number of chunks, and no folder for what is said about them."""
    if chunks is not None and folder is None:
        raise ConfigError(
            f"--profile-chunks (model.trace_chunks) is {chunks}, but nothing is traced: "
            "say where to, with --profile DIR"
        )


class Profiler:
    """Traces `chunks` chunks of a pipeline, whose `hook` it is."""

    def __init__(self, pipeline: StreamingPipeline, folder: Path, chunks: int = CHUNKS) -> None:
        """Raises ConfigError as `check_folder`. Mutates: the pipeline's `hook`; removes from `folder` what an earlier
        run left unfinished."""
        check_folder(folder)
        for left in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        self._pipeline, self.folder, self.chunks = pipeline, folder, chunks
        self._writing: threading.Thread | None = None
        self._before = pipeline.model.spec.window_chunks(pipeline.info.kv_context) + 1  # chunks before the first one
        self._profile: profile | None = None
        self._seen = self._micro_steps = 0
        self._begun: set[tuple[int, int, int]] = set()  # chunks that were under way when the trace began
        pipeline.hook = self

    def around_step(self) -> AbstractContextManager[object]:
        """Entered for each step of the pipeline: names it in the trace."""
        return nullcontext() if self._profile is None else record_function(_STEP)

    def after_step(self, frames: Sequence[Frames]) -> None:
        """Count finished chunks; begin and end the trace. Mutates: self."""
        ended = [each for each in frames if each.last]
        if self._writing is not None:
            return
        if self._profile is None:
            if any(each.chunk + 1 >= self._before for each in ended):
                self._start()
            return
        self._seen += sum((each.session, each.chunk, each.epoch) not in self._begun for each in ended)
        if self._seen >= self.chunks:
            self._seen = self.chunks
            self._stop()

    @property
    def traced(self) -> bool:
        """Whether all chunks are; the files may still be written, until `close` returns."""
        return self._writing is not None

    def _start(self) -> None:
        cuda = torch.cuda.is_available() and self._pipeline.info.device.startswith("cuda")
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # decoding has a thread of its own
            acc_events=True,
        )
        # Several chunks may come out at once that were computed before, while decoding was behind: they do not count.
        self._begun = self._pipeline.unfinished()
        self._micro_steps = self._pipeline.ring.worker.done
        self._profile.start()
        logger.info("%d chunks are traced now, and slower", self.chunks)

    def _stop(self) -> None:
        """End the trace; the files are written on a thread, for that takes seconds and the stream goes on."""
        assert self._profile is not None
        micro_steps = self._pipeline.ring.worker.done - self._micro_steps
        self._profile.stop()
        self._writing = threading.Thread(target=self._write, args=(self._profile, micro_steps), name="profile")
        self._writing.start()
        self._profile = None

    def _write(self, traced: profile, micro_steps: int) -> None:
        info = self._pipeline.info
        title = f"{info.model} on {info.device}, {info.width}x{info.height}, {info.steps} steps, {info.kv_context}"
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=self.folder) as name:
            plain, trace, summary = Path(name) / "trace.json", Path(name) / TRACE, Path(name) / SUMMARY
            traced.export_chrome_trace(str(plain))  # packed here: torch would do that in the system's temporary folder
            with plain.open("rb") as source, gzip.open(trace, "wb") as packed:
                shutil.copyfileobj(source, packed)
            found = summarise(json.loads(plain.read_bytes())["traceEvents"])
            text = describe(found, title=title, chunks=self._seen, micro_steps=micro_steps)
            summary.write_text(text, encoding="utf-8")
            for whole in (trace, summary):
                whole.replace(self.folder / whole.name)
        logger.info("profile of %d chunks in %s", self._seen, self.folder)

    def close(self) -> None:
        """Write a trace that was begun; waits until the files are there."""
        if self._profile is not None and self._seen:
            self._stop()
        if self._writing is not None:
            self._writing.join()
        else:
            logger.warning(
                "no profile: the stream ended before a chunk was made after the first %d, which fill the window",
                self._before,
            )


@dataclass(frozen=True)
class Cost:
    """An operation or kernel: how often it ran, its own microseconds (without what it called), and on whose thread."""

    name: str
    calls: int
    self_us: float
    where: str


@dataclass(frozen=True)
class Summary:
    """Summary of a trace. Counts are of the stream's own thread, and for all micro-steps together; `costs` are of every
    thread, the largest first. `launches` and `kernels` are None on a CPU, where `ops` counts operations that no other
    one called."""

    wall_us: float
    ops: int
    launches: int | None
    graphs: int | None
    kernels: int | None
    waits: Counter[str]
    costs: tuple[Cost, ...]


def summarise(events: Iterable[Event]) -> Summary:
    """Summarise the events of a Chrome trace from torch's profiler with steps named `streamdiff.step`."""
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
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for key, self_us in times:
        found[key].append(self_us)
    costs = (Cost(name, len(each), sum(each), where) for (name, where), each in found.items())
    return tuple(nlargest(_TOP, costs, key=lambda cost: cost.self_us))


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
