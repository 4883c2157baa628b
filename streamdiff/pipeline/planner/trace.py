"""A simulation as a Chrome/Perfetto trace and as a plot: when each stage works on which step of which chunk.

One track per stage and one for decoding. A decode that keeps a stage busy stands on both tracks.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streamdiff.atomic_write import temporary_sibling
from streamdiff.errors import ConfigError
from streamdiff.pipeline.planner.simulator import Span

PICTURES = (".png", ".svg", ".pdf")
# Beyond this many whole rounds of the ring bars are thinner than their text.
_PLOTTED_CHUNKS = 8


@dataclass(frozen=True)
class Bar:
    """One job on one track: `rows` are (session, chunk, step), step None for a decode."""

    track: int
    begin_s: float
    end_s: float
    rows: tuple[tuple[int, int, int | None], ...]

    @property
    def label(self) -> str:
        """As in `session 0 chunk 3 step 1`; `decode` in place of a step."""
        return " + ".join(
            f"session {session} chunk {chunk} " + ("decode" if step is None else f"step {step}")
            for session, chunk, step in self.rows
        )


def bars(spans: Sequence[Span], stages: int) -> list[Bar]:
    """The jobs of a run, in order of track and begin: tracks 0 to `stages` - 1, then decoding."""
    forwards: dict[tuple[int, int], list[Span]] = defaultdict(list)
    found = []
    for span in spans:
        if span.step is not None:
            assert span.stage is not None, "only a decode runs beside the stages"
            forwards[span.stage, span.forward].append(span)
            continue
        for track in {stages, stages if span.stage is None else span.stage}:
            found.append(Bar(track, span.begin_s, span.end_s, ((span.session, span.chunk, None),)))
    for (stage, _), rows in forwards.items():
        found.append(Bar(stage, rows[0].begin_s, rows[0].end_s, tuple((r.session, r.chunk, r.step) for r in rows)))
    return sorted(found, key=lambda bar: (bar.track, bar.begin_s))


def chrome_trace(spans: Sequence[Span], stages: int) -> dict[str, object]:
    """The trace as JSON for chrome://tracing or ui.perfetto.dev; times in microseconds."""
    names = [*(f"stage {n}" for n in range(stages)), "decode"]
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "streamdiff plan"}}
    ]
    for track, name in enumerate(names):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": track, "args": {"sort_index": track}})
    for bar in bars(spans, stages):
        rows = [{"session": s, "chunk": c, "step": "decode" if step is None else step} for s, c, step in bar.rows]
        times = {"ts": bar.begin_s * 1e6, "dur": (bar.end_s - bar.begin_s) * 1e6}
        events.append({"name": bar.label, "ph": "X", "pid": 0, "tid": bar.track, **times, "args": {"rows": rows}})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, spans: Sequence[Span], stages: int) -> None:
    """Write `chrome_trace` to `path`, which is replaced only by a complete file. Raises OSError."""
    with _replacing(path) as place:
        place.write_text(json.dumps(chrome_trace(spans, stages)) + "\n", encoding="utf-8")


def check_plot(path: Path) -> None:
    """Raises ConfigError when no picture can be drawn to `path`: unknown ending of its name, or no matplotlib."""
    if path.suffix not in PICTURES:
        raise ConfigError(f"--plot is {str(path)!r}, but must end in {', '.join(PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; try: pip install 'streamdiff[plot]'")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` once it is whole; `path` itself where that is no file that could be
    replaced, as /dev/stdout. A link goes on pointing to where it does."""
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()
    with temporary_sibling(target) as temporary:
        yield temporary
        os.replace(temporary, target)


def write_plot(path: Path, spans: Sequence[Span], stages: int) -> None:
    """Draw the first chunks of a run to `path`: one line per track, one colour per chunk, the step's number inside. It
    is replaced only by a complete file.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    shown = [span for span in spans if span.chunk < _PLOTTED_CHUNKS]
    found = bars(shown, stages)
    end_s = max(bar.end_s for bar in found)
    colours = colormaps["tab10"]
    figure = Figure(figsize=(16, 1.5 + 0.6 * (stages + 1)), layout="constrained")
    axes = figure.subplots()
    for bar in found:
        session, chunk, step = bar.rows[0]
        width_s = bar.end_s - bar.begin_s
        colour = colours((chunk + 3 * session) % 10)
        axes.barh(bar.track, width_s, left=bar.begin_s, height=0.8, color=colour, edgecolor="white", linewidth=0.5)
        if width_s > end_s / 120:
            axes.text(
                bar.begin_s + width_s / 2, bar.track, "d" if step is None else f"{step}", ha="center", va="center"
            )
    axes.set_yticks(range(stages + 1), [*(f"stage {n}" for n in range(stages)), "decode"])
    axes.set_ylim(stages + 0.5, -0.5)  # the first stage on top
    axes.set_xlim(0, end_s)
    axes.set_xlabel(f"seconds; chunks 0 to {_PLOTTED_CHUNKS - 1}, a colour per chunk, the step's number inside")
    with _replacing(path) as place:
        figure.savefig(place, format=path.suffix[1:])
