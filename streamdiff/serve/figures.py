"""The live figures of one session: how fast frames are made and shown, for the page and for `/metrics`."""

from __future__ import annotations

from typing import Any

from streamdiff.serve.metrics import Metrics
from streamdiff.serve.pacer import Progress
from streamdiff.serve.rate import Rate


class Figures:
    """Counts what happens. Times in seconds of one clock. `last_made_s`: when the engine last made a frame."""

    def __init__(self, session: str, metrics: Metrics, now_s: float) -> None:
        self.last_made_s = now_s
        self._session, self._metrics = session, metrics
        self._made, self._shown = Rate(), Rate()
        self._chunk_s: float | None = None

    def made(self, count: int, chunk_s: float | None, now_s: float) -> None:
        """Frames have come; `chunk_s` with the last ones of a chunk, which took so long. Mutates: self."""
        self.last_made_s = now_s
        self._made.add(count, now_s)
        self._metrics.made.labels(self._session).inc(count)
        if chunk_s is not None:
            self._chunk_s = chunk_s
            self._metrics.chunk_s.labels(self._session).observe(chunk_s)

    def shown(self, now_s: float) -> None:
        """A new frame is on show. Mutates: self."""
        self._shown.add(1, now_s)
        self._metrics.shown.labels(self._session).inc()

    def stats(self, progress: Progress, encoder_dropped: int, lag_s: float | None, now_s: float) -> dict[str, Any]:
        """JSON-able; None where nothing was measured yet. Tells `/metrics` the same."""
        self._metrics.repeated.labels(self._session).set(progress.repeated)
        self._metrics.dropped.labels(self._session).set(progress.dropped)
        self._metrics.buffered.labels(self._session).set(progress.buffered)
        return {
            "type": "stats",
            "frame": progress.frame,
            "shown_fps": round(self._shown.per_s(now_s), 1),
            "made_fps": round(self._made.per_s(now_s), 1),
            "chunk_ms": None if self._chunk_s is None else round(self._chunk_s * 1000),
            "prompt_lag_ms": None if lag_s is None else round(lag_s * 1000),
            "buffered": progress.buffered,
            "repeated": progress.repeated,
            "dropped": progress.dropped,
            "missed": progress.missed,
            "encoder_dropped": encoder_dropped,
        }
