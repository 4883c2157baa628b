"""From the times that `stream_rank` wrote down to figures. Pure: the same raw times give the same figures, anywhere.

Times are seconds on the measuring process's clock. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple

from benchmarks.metrics import BUFFERS_S, buffer_name
from benchmarks.report import percentile


class Arrival(NamedTuple):
    """A piece of a chunk, decoded, in the host's memory: when it was handed out, of which chunk and epoch, how many
    frames; `chunk_s` is, on a chunk's last piece, the time since the chunk's admission."""

    at_s: float
    chunk: int
    epoch: int
    frames: int
    chunk_s: float | None


@dataclass
class Run:
    """What came of one stream that was asked for at `asked_s`."""

    asked_s: float
    arrivals: list[Arrival] = field(default_factory=list)

    def frame_times_s(self) -> list[float]:
        """When each frame came, in order."""
        return [piece.at_s for piece in self.arrivals for _ in range(piece.frames)]

    def ends(self) -> Iterator[tuple[float, int]]:
        """When each whole chunk was there, and how many frames came until then, its own included."""
        frames = 0
        for piece in self.arrivals:
            frames += piece.frames
            if piece.chunk_s is not None:
                yield piece.at_s, frames

    def first_s(self, chunk: int) -> float:
        """From the request to the first frame of `chunk`."""
        return next(piece.at_s for piece in self.arrivals if piece.chunk == chunk) - self.asked_s


class Prompt(NamedTuple):
    """A prompt that came at `asked_s`, and when the first frame of its epoch was there."""

    asked_s: float
    first_s: float


@dataclass
class Raw:
    """Everything that was measured of one case.

    openings: streams that were opened only to see their beginning.
    steady: a stream from its request on; chunks before `warm_up_chunks` do not count as steady.
    prompts: changes in that same stream, after what counts as steady.
    parts: seconds of each part, a value per round; parts that are not run here are not there.
    peak_bytes, threads: of each rank.
    occupancy: of each rank, share of the time at work; empty with one stage.
    """

    playback_fps: float
    warm_up_chunks: int
    load_s: float
    openings: list[Run]
    steady: Run
    prompts: list[Prompt]
    parts: dict[str, list[float]]
    peak_bytes: list[int]
    threads: list[int]
    occupancy: list[float]
    remarks: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Raw:
        def run(one: Mapping[str, Any]) -> Run:
            return Run(one["asked_s"], [Arrival(*piece) for piece in one["arrivals"]])

        made = {
            "openings": [run(each) for each in tree["openings"]],
            "steady": run(tree["steady"]),
            "prompts": [Prompt(*each) for each in tree["prompts"]],
        }
        return cls(**{**tree, **made})


def figures(raw: Raw) -> dict[str, float | None]:
    """Every figure of `metrics.METRICS` that `raw` tells; None where it was not measured."""
    firsts = [run.first_s(0) for run in raw.openings]
    seconds = [run.first_s(1) for run in raw.openings]
    latencies = chunk_latencies_s(raw)
    control = [prompt.first_s - prompt.asked_s for prompt in raw.prompts]
    found: dict[str, float | None] = {
        "fps": steady_fps(raw),
        "ttff_s": median(firsts),
        "ttff_worst_s": max(firsts),
        "ttfc_s": median([next(run.ends())[0] - run.asked_s for run in raw.openings]),
        "second_chunk_s": median(seconds),
        "device_fps": steady_fps(raw) / len(raw.peak_bytes),
        "rtf": raw.playback_fps / steady_fps(raw),
        "play_ratio": play_ratio(raw.steady, raw.playback_fps),
        **{f"chunk_p{percent}_s": percentile(latencies, percent) for percent in (50, 95, 99)},
        "control_p50_s": median(control) if control else None,
        "control_worst_s": max(control, default=None),
    }
    times_s = raw.steady.frame_times_s()
    for buffer_s in BUFFERS_S:
        count, waited_s = stalls(times_s, raw.playback_fps, buffer_s)
        found[f"stalls_{buffer_name(buffer_s)}"] = count
        found[f"stalled_{buffer_name(buffer_s)}_s"] = waited_s
    for name in ("text", "clean", "decode", "copy", "encode"):
        found[f"{name}_s"] = median(raw.parts[name]) if raw.parts.get(name) else None
    steps = [value for name, values in raw.parts.items() if name.startswith("step ") for value in values]
    found["step_s"] = median(steps) if steps else None
    found["peak_gib"] = max(raw.peak_bytes) / 2**30
    found["load_s"] = raw.load_s
    return found


def steady_fps(raw: Raw) -> float:
    """Frames per second from the last frame of the warm-up to the last frame of the last chunk that is whole.

    Raises:
        ValueError: no chunk after the warm-up.
    """
    begin, measured = _steady(raw)
    return sum(piece.frames for piece in measured) / (measured[-1].at_s - begin.at_s)


def chunk_latencies_s(raw: Raw) -> list[float]:
    """Of the chunks that count as steady."""
    return [piece.chunk_s for piece in _steady(raw)[1] if piece.chunk_s is not None]


def _steady(raw: Raw) -> tuple[Arrival, list[Arrival]]:
    """The last piece of the warm-up, and the pieces of the whole chunks after it."""
    ends = [piece.chunk for piece in raw.steady.arrivals if piece.chunk_s is not None]
    begin = next((p for p in raw.steady.arrivals if p.chunk == raw.warm_up_chunks - 1 and p.chunk_s is not None), None)
    measured = [p for p in raw.steady.arrivals if raw.warm_up_chunks <= p.chunk <= max(ends, default=-1)]
    if begin is None or not measured:
        raise ValueError(f"no chunk is whole after the {raw.warm_up_chunks} of the warm-up")
    return begin, measured


def play_ratio(run: Run, fps: float) -> float | None:
    """Share of the chunks that are whole when they are due, of a viewer who starts when the first is whole, shows `fps`
    frames per second and never waits. None: there is one chunk."""
    (start_s, before), *later = run.ends()
    met = []
    for at_s, frames in later:
        met.append(at_s <= start_s + before / fps + 1e-9)
        before = frames
    return sum(met) / len(met) if met else None


def stalls(times_s: Sequence[float], fps: float, buffer_s: float) -> tuple[int, float]:
    """A viewer who starts to play `buffer_s` after the first frame came, and shows one frame every 1 / `fps` s. Where a
    frame is not there when it is due, the viewer waits for it and goes on from there: that is one stall.

    Args:
        times_s: when each frame came, in order.

    Returns:
        How many stalls, and their seconds in all.
    """
    if not times_s:
        return 0, 0.0
    count, waited_s, start_s = 0, 0.0, times_s[0] + buffer_s
    for number, came_s in enumerate(times_s):
        due_s = start_s + number / fps + waited_s
        if came_s > due_s + 1e-9:
            count += 1
            waited_s += came_s - due_s
    return count, waited_s
