"""State and statistics of one session, for the page and for Prometheus. Independent of viewers and frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamdiff import clock
from streamdiff.engine.features import Features
from streamdiff.engine.messages import Ready
from streamdiff.server.load.load_policy import LoadLimit, SessionDemand
from streamdiff.server.media.playout import Progress
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.rate_limit import Rate
from streamdiff.server.sessions.engine_status import EngineStatus
from streamdiff.server.sessions.playback import Playback
from streamdiff.server.sessions.receipts import LOAD, Receipt, RequestTracker
from streamdiff.server.sessions.session_input import SessionInput
from streamdiff.server.sessions.session_spec import state_of

STALLED_S = 2.0
_STATE_FIELDS = ("prompt", "text", "notice", "seed", "paused", "place", "rev", "kv_context")
"""Attributes of a session that its state has under the same name."""


class SessionStats:
    """Counts what a session makes and shows. After `end` its metrics are gone, and what still comes is not counted."""

    def __init__(self, metrics: Metrics, session: str) -> None:
        self._metrics, self._session = metrics, session
        self._repeated, self._dropped = CounterDelta(), CounterDelta()
        self._made, self._shown = Rate(), Rate()
        self._opening_s: float | None = None
        self._chunk_s: float | None = None
        self._lag_s: float | None = None
        self._ended = False

    def opening(self, now_s: float) -> None:
        """`Open` was sent at `now_s`. Mutates: self."""
        self._opening_s = now_s

    def made(self, frames: int, chunk_s: float | None, now_s: float) -> None:
        """The engine made so many frames; `chunk_s` is what their chunk took, with its last ones. Mutates: self."""
        self._made.add(frames, now_s)
        if self._ended:
            return
        self._metrics.made.labels(self._session).inc(frames)
        if self._opening_s is not None:
            self._metrics.session_first_s.observe(now_s - self._opening_s)
            self._opening_s = None
        if chunk_s is not None:
            self._chunk_s = chunk_s
            self._metrics.chunk_s.labels(self._session).observe(chunk_s)

    def shown(self, now_s: float) -> None:
        """A new frame is on show. Mutates: self."""
        self._shown.add(1, now_s)
        if not self._ended:
            self._metrics.shown.labels(self._session).inc()

    def receipt(self, receipt: Receipt) -> None:
        """Count a receipt by kind and stage, and its lag. Mutates: self."""
        if receipt.owner == LOAD:
            return
        kind, stage, lag_s = receipt.kind, receipt.stage, receipt.lag_s
        if stage in ("accepted", "refused", "superseded"):
            self._metrics.controls.labels(kind, stage).inc()
        if stage in ("accepted", "applied", "shown") and kind in ("prompt", "reset"):
            self._metrics.request_lag_s.labels(kind, stage).observe(lag_s)
        self._lag_s = lag_s if stage == "shown" else self._lag_s

    def figures(self, progress: Progress, encoder_dropped: int, now_s: float) -> dict[str, Any]:
        """For the page, JSON-able: among others frames per second shown and made, a chunk's and a request's time;
        None before the first."""
        return {
            "type": "stats",
            "shown_fps": round(self._shown.per_s(now_s), 1),
            "made_fps": round(self._made.per_s(now_s), 1),
            "chunk_ms": None if self._chunk_s is None else round(self._chunk_s * 1000),
            "prompt_lag_ms": None if self._lag_s is None else round(self._lag_s * 1000),
            "encoder_dropped": encoder_dropped,
            **{name: getattr(progress, name) for name in ("frame", "buffered", "repeated", "dropped", "missed")},
        }

    def update(self, progress: Progress, **gauges: float) -> None:
        """Copy figures of other objects to the metrics: frames so far, and gauges by their names there. Mutates:
        self."""
        if self._ended:
            return
        name, metrics = self._session, self._metrics
        metrics.repeated.labels(name).inc(self._repeated.increase(progress.repeated))
        metrics.dropped.labels(name).inc(self._dropped.increase(progress.dropped))
        for gauge, value in gauges.items():
            getattr(metrics, gauge).labels(name).set(value)

    def end(self) -> None:
        """The session has ended. Mutates: self."""
        self._ended, metrics = True, self._metrics
        counted = (metrics.made, metrics.shown, metrics.repeated, metrics.dropped, metrics.chunk_s)
        waiting = (metrics.buffered, metrics.unanswered, metrics.encoder_waiting)
        by_load = (metrics.steps, metrics.asked_steps, metrics.fps, metrics.asked_fps)
        for figure in (*counted, *waiting, *by_load):
            figure.labels(self._session)  # `remove` wants it to be there
            figure.remove(self._session)


class SessionStateMixin:
    """State and statistics of a `LiveSession`."""

    id: str
    paused: bool
    steps: int
    begins_with_image: bool
    features: Features
    switches: tuple[str, ...]
    limit: LoadLimit
    engine: EngineStatus
    playback: Playback
    input: SessionInput
    _demand: SessionDemand
    _ready: Ready
    _stats: SessionStats
    _requests: RequestTracker
    _occupancy: Callable[[], Sequence[float]]

    def stalled_s(self) -> float:
        """Seconds since the engine made a frame, while it should; 0 when it need not."""
        return 0.0 if self.paused or self.input.holds else self.playback.stalled_s()

    def stats(self) -> dict[str, Any]:
        """Live figures, JSON-able; None where nothing was measured yet."""
        progress, dropped = self.playback.pacer.progress(), self.playback.fanout.dropped
        figures = self._stats.figures(progress, dropped, clock.monotonic_s())
        return figures | {
            "occupancy": [round(share, 3) for share in self._occupancy()],
            "input": self.input.figures(),
            "stalled": self.stalled_s() > STALLED_S,
            "lead_ms": round(self.playback.lead.lead_s * 1000),
        }

    def update_metrics(self) -> None:
        """Copy figures that other objects hold into the metrics. Mutates: the metrics."""
        playback, demand, progress = self.playback, self._demand, self.playback.pacer.progress()
        waiting = {"buffered": progress.buffered, "encoder_waiting": playback.fanout.waiting}
        by_load = {"steps": self.steps, "asked_steps": demand.steps, "fps": playback.fps, "asked_fps": demand.fps}
        self._stats.update(progress, unanswered=self._requests.unanswered, **waiting, **by_load)

    def state(self, may_control: bool) -> dict[str, Any]:
        """All that a page needs to draw itself, JSON-able; for a caller that may control the session, or may not."""
        fmt = self.playback.format
        return {
            "type": "state",
            "session": self.id,
            **{name: getattr(self, name) for name in _STATE_FIELDS},
            "image": self.begins_with_image,
            "features": list(self.features.names),
            "input": self.input.state(may_control),
            "engine": self.engine.state,
            "engine_reason": self.engine.reason_for(may_control),
            **state_of(self._demand, self.limit, self.steps),
            "steps_known": list(self._ready.steps_known),
            "switches": list(self.switches),
            "native_fps": self._ready.native_fps,
            **{name: getattr(fmt, name) for name in ("width", "height", "scale")},
            "bitrate": fmt.bitrate_bps,
            "codecs": list(self.playback.fanout.codecs),
        }
