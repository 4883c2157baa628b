"""The picture of a result of `capacity`: goodput and percentiles over the offered load, server and simulator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SIDES = ("server", "simulator")
_STYLES = {"p50": "-", "p95": "--", "p99": ":"}
_ROWS = {
    "first_frame_s": "first frame after, s",
    "control_s": "prompt seen after, s",
    "short_of_rate": "share of frames missing",
}


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Draw `results` (as `capacity` writes them) to `path`: a column for each side, a colour for each variant."""
    from matplotlib.figure import Figure

    sides = [side for side in _SIDES if any(side in result for result in results.values())]
    figure = Figure(figsize=(1 + 5 * len(sides), 11), layout="constrained")
    grid = figure.subplots(1 + len(_ROWS), len(sides), squeeze=False, sharex=True, sharey="row")
    for column, side in enumerate(sides):
        grid[0][column].set_title(side)
        for number, (name, result) in enumerate(results.items()):
            if side in result:
                _variant(grid[:, column], result[side]["points"], f"C{number}", name)
        most = max(
            point["offered"] for result in results.values() if side in result for point in result[side]["points"]
        )
        grid[0][column].plot([0, most], [0, most], color="lightgray", zorder=0)
        grid[-1][column].set_xlabel("offered: sessions at once, on average")
    grid[0][0].set_ylabel("goodput: those served well")
    grid[0][0].legend(fontsize="small")
    for row, title in enumerate(_ROWS.values(), start=1):
        grid[row][0].set_ylabel(title)
    for style_name, style in _STYLES.items():
        grid[1][0].plot([], [], style, color="gray", label=style_name)
    grid[1][0].legend(fontsize="small")
    for axes in grid.flat:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _variant(column: Any, points: list[dict[str, Any]], color: str, name: str) -> None:
    """One variant's lines in a column of axes."""
    offered = [point["offered"] for point in points]
    column[0].plot(offered, [point["goodput"] for point in points], "o-", color=color, label=name, markersize=4)
    for axes, figure_name in zip(column[1:], _ROWS, strict=True):
        for percentile, style in _STYLES.items():
            there = [(x, y) for x, point in zip(offered, points, strict=True)
                     if (y := point[figure_name][percentile]) is not None]  # fmt: skip
            axes.plot([x for x, _ in there], [y for _, y in there], style, color=color, marker=".", markersize=3)
