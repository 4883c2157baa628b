"""State and figures of one session, for the page and for Prometheus. Independent of viewers and frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamdiff import clock
from streamdiff.config import PROMPT_POLICIES
from streamdiff.engine.messages import Ready
from streamdiff.server.load import UNLIMITED, SessionDemand
from streamdiff.server.metrics import CounterDelta, Metrics
from streamdiff.server.peers import Rate
from streamdiff.server.sessions.engine_status import EngineStatus
from streamdiff.server.sessions.playback import Playback
from streamdiff.server.sessions.receipts import LOAD, Receipt, RequestTracker
from streamdiff.server.sessions.session_input import SessionInput
from streamdiff.server.sessions.session_spec import SessionSpec

STALLED_S = 2.0
_STATE_FIELDS = ("prompt", "text", "notice", "seed", "paused", "place", "rev", "kv_context")
"""Attributes of a session that its state has under the same name."""


class SessionState:
    """What a session is and shows: its state and figures for the page, its metrics for Prometheus. Base of
    `LiveSession`, which changes it. After `_end_metrics` the metrics are gone, and what still comes is not counted."""

    playback: Playback
    input: SessionInput
    _requests: RequestTracker

    def __init__(
        self, id: str, spec: SessionSpec, ready: Ready, metrics: Metrics, occupancy: Callable[[], Sequence[float]]
    ) -> None:
        """`occupancy`: what share of the time, 0 to 1, each rank was at work."""
        self.id = id
        self.prompt, self.seed, self.image, self.features = spec.prompt, spec.seed, spec.image, spec.features
        self.begins_with_image = spec.image is not None
        self.steps = ready.steps if spec.steps is None else spec.steps
        self.limit = UNLIMITED
        self._demand = SessionDemand(self.steps, spec.fps, spec.adaptive)
        self._ready, self._metrics, self._occupancy = ready, metrics, occupancy
        self.kv_context = ready.kv_context if spec.kv_context is None else spec.kv_context
        self.rev = 0  # of the state: goes up with every request
        self.text, self.notice, self.switches = "", "", PROMPT_POLICIES
        self.paused = False
        self.place = "none"
        """Where its caches lie: `device`, `host` (memory) or `disk`; `none` while the engine has not opened it."""
        self.engine = EngineStatus()
        self._repeated, self._dropped = CounterDelta(), CounterDelta()
        self._made, self._shown = Rate(), Rate()
        self._opening_s: float | None = None  # when `Open` was sent, until the first frame is made
        self._chunk_s: float | None = None
        self._lag_s: float | None = None
        self._ended = False

    # ---- counting -----------------------------------------------------------------------------------------------

    def _count_made(self, frames: int, chunk_s: float | None, now_s: float) -> None:
        """The engine made so many frames; `chunk_s` is what their chunk took, with its last ones. Mutates: self."""
        self._made.add(frames, now_s)
        if self._ended:
            return
        self._metrics.made.labels(self.id).inc(frames)
        if self._opening_s is not None:
            self._metrics.session_first_s.observe(now_s - self._opening_s)
            self._opening_s = None
        if chunk_s is not None:
            self._chunk_s = chunk_s
            self._metrics.chunk_s.labels(self.id).observe(chunk_s)

    def _count_shown(self, now_s: float) -> None:
        """A new frame is on show. Mutates: self."""
        self._shown.add(1, now_s)
        if not self._ended:
            self._metrics.shown.labels(self.id).inc()

    def _count_receipt(self, receipt: Receipt) -> None:
        """Count a receipt by kind and stage, and its lag. Mutates: self."""
        if receipt.owner == LOAD:
            return
        kind, stage, lag_s = receipt.kind, receipt.stage, receipt.lag_s
        if stage in ("accepted", "refused", "superseded"):
            self._metrics.controls.labels(kind, stage).inc()
        if stage in ("accepted", "applied", "shown") and kind in ("prompt", "reset"):
            self._metrics.request_lag_s.labels(kind, stage).observe(lag_s)
        self._lag_s = lag_s if stage == "shown" else self._lag_s

    # ---- what there is to see -----------------------------------------------------------------------------------

    def stalled_s(self) -> float:
        """Seconds since the engine made a frame, while it should; 0 when it need not."""
        swapped_out = self.playback.pacer.held and self.place != "device"
        return 0.0 if self.paused or swapped_out or self.input.holds else self.playback.stalled_s()

    def stats(self) -> dict[str, Any]:
        """Live figures, JSON-able: among others frames per second shown and made, a chunk's and a request's time; None
        where nothing was measured yet."""
        now_s, playback, progress = clock.monotonic_s(), self.playback, self.playback.pacer.progress()
        return {
            "type": "stats",
            "shown_fps": round(self._shown.per_s(now_s), 1),
            "made_fps": round(self._made.per_s(now_s), 1),
            "chunk_ms": None if self._chunk_s is None else round(self._chunk_s * 1000),
            "prompt_lag_ms": None if self._lag_s is None else round(self._lag_s * 1000),
            "encoder_dropped": playback.fanout.dropped,
            **{name: getattr(progress, name) for name in ("frame", "buffered", "repeated", "dropped", "missed")},
            "occupancy": [round(share, 3) for share in self._occupancy()],
            "input": self.input.figures(),
            "stalled": self.stalled_s() > STALLED_S,
            "lead_ms": round(playback.lead.lead_s * 1000),
        }

    def update_metrics(self) -> None:
        """Copy figures that other objects hold into the metrics. Mutates: self, the metrics."""
        if self._ended:
            return
        playback, demand, metrics = self.playback, self._demand, self._metrics
        progress = playback.pacer.progress()
        metrics.repeated.labels(self.id).inc(self._repeated.increase(progress.repeated))
        metrics.dropped.labels(self.id).inc(self._dropped.increase(progress.dropped))
        metrics.buffered.labels(self.id).set(progress.buffered)
        metrics.unanswered.labels(self.id).set(self._requests.unanswered)
        metrics.encoder_waiting.labels(self.id).set(playback.fanout.waiting)
        metrics.steps.labels(self.id).set(self.steps)
        metrics.asked_steps.labels(self.id).set(demand.steps)
        metrics.fps.labels(self.id).set(playback.fps)
        metrics.asked_fps.labels(self.id).set(demand.fps)

    def _end_metrics(self) -> None:
        """The session has ended. Mutates: self, the metrics."""
        self._ended, metrics = True, self._metrics
        counted = (metrics.made, metrics.shown, metrics.repeated, metrics.dropped, metrics.chunk_s)
        waiting = (metrics.buffered, metrics.unanswered, metrics.encoder_waiting)
        by_load = (metrics.steps, metrics.asked_steps, metrics.fps, metrics.asked_fps)
        for figure in (*counted, *waiting, *by_load):
            figure.labels(self.id)  # `remove` wants it to be there
            figure.remove(self.id)

    def state(self, may_control: bool) -> dict[str, Any]:
        """All that a page needs to draw itself, JSON-able; for a caller that may control the session, or may not."""
        fmt, demand = self.playback.format, self._demand
        fps = self.limit.fps_of(demand.fps)
        return {
            "type": "state",
            "session": self.id,
            **{name: getattr(self, name) for name in _STATE_FIELDS},
            "image": self.begins_with_image,
            "features": list(self.features.names),
            "input": self.input.state(may_control),
            "engine": self.engine.state,
            "engine_reason": self.engine.reason_for(may_control),
            "adaptive": demand.adaptive,
            "reason": LOAD if self.limit.steps_of(demand.steps) < demand.steps or fps < demand.fps else "",
            "steps": self.steps,
            "asked_steps": demand.steps,
            "fps": fps,
            "asked_fps": demand.fps,
            "steps_known": list(self._ready.steps_known),
            "switches": list(self.switches),
            "native_fps": self._ready.native_fps,
            **{name: getattr(fmt, name) for name in ("width", "height", "scale")},
            "bitrate": fmt.bitrate_bps,
            "codecs": list(self.playback.fanout.codecs),
        }
