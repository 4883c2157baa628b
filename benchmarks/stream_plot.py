"""A picture of a result of `fps_ttff`: rates, what a chunk's time is made of, and frames over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.stream_figures import Raw
from streamdiff.pipeline.planner.simulator import check_plot

_PARTS = ("steps", "clean", "decode", "copy", "encode")


def check(path: Path) -> None:
    """Raises ConfigError when no picture can be drawn to `path`."""
    check_plot(path)


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Draw `results` (as `fps_ttff` writes them) to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2 + 0.9 * len(results) + 3), layout="constrained")
    rates, parts, frames = figure.subplots(3, 1, height_ratios=[1, 1, 1.6])
    labels = list(results)
    rates.barh(labels, [results[label]["figures"]["fps"] for label in labels], color="tab:blue")
    rates.set_xlabel("frames per second, steady state, decode included")
    left = [0.0] * len(labels)
    for name in _PARTS:
        widths = [1000 * part_s(results[label], name) for label in labels]
        parts.barh(labels, widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    parts.set_xlabel("parts of a chunk, each alone, ms (decode, copy and encode run beside the next chunk)")
    parts.legend(loc="upper right", fontsize="small", ncols=len(_PARTS))
    for label in labels:
        raw = Raw.from_json(results[label]["raw"])
        times = [at_s - raw.steady.asked_s for at_s in raw.steady.frame_times_s()]
        frames.step(times, range(1, len(times) + 1), where="post", label=label)
    frames.set_xlabel("seconds since the request")
    frames.set_ylabel("frames")
    frames.legend(fontsize="small")
    for axes in (rates, parts):
        axes.invert_yaxis()
    figure.savefig(path)


def part_s(result: Mapping[str, Any], name: str) -> float:
    """Seconds of a part of one chunk; 0 where it was not measured."""
    if name == "steps":
        return float(sum(result["step_s_by_step"].values()))
    return float(result["figures"][f"{name}_s"] or 0.0)
