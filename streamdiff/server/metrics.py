"""Prometheus text for `/metrics`: few figures, each counted where it happens. Knows nothing about HTTP."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

_FAST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_SLOW_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


class Metrics:
    """The figures of one server. Safe to use from any thread."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._add_sessions(registry)
        self._add_engine(registry)
        self._add_encoding(registry)
        self._add_viewers(registry)
        self._add_control(registry)
        output = ["output"]
        self.output_up = Gauge("streamdiff_output_up", "1 while an output is sent", output, registry=registry)
        self.output_frames = Counter("streamdiff_output_frames", "Frames handed to it", output, registry=registry)
        self.output_dropped = Counter("streamdiff_output_dropped", "Frames it did not get", output, registry=registry)

    def _add_sessions(self, registry: CollectorRegistry) -> None:
        session = ["session"]
        self.sessions = Gauge("streamdiff_sessions", "Open sessions", registry=registry)
        self.refused = Counter(
            "streamdiff_sessions_refused", "Sessions that were not opened, by the reason", ["reason"], registry=registry
        )
        self.made = Counter("streamdiff_frames_made", "Frames the engine made", session, registry=registry)
        self.shown = Counter("streamdiff_frames_shown", "New frames handed to the encoders", session, registry=registry)
        self.repeated = Counter("streamdiff_slots_repeated", "Slots without a new frame", session, registry=registry)
        self.dropped = Counter(
            "streamdiff_frames_dropped", "Frames made and never shown", session, registry=registry
        )  # fmt: skip
        self.buffered = Gauge("streamdiff_frames_buffered", "Frames made that wait", session, registry=registry)
        self.unanswered = Gauge(
            "streamdiff_requests_unanswered", "Requests that the engine has not answered yet", session,
            registry=registry,
        )  # fmt: skip
        self.chunk_s = Histogram(
            "streamdiff_chunk_seconds", "From a chunk's admission to its last frame", session,
            buckets=_SLOW_S, registry=registry,
        )  # fmt: skip
        self.session_first_s = Histogram(
            "streamdiff_session_first_frame_seconds", "From asking for a session until its first frame is made",
            buckets=_SLOW_S, registry=registry,
        )  # fmt: skip

    def _add_engine(self, registry: CollectorRegistry) -> None:
        self.engine_up = Gauge("streamdiff_engine_up", "1 while the engine runs", registry=registry)
        self.engine_restarts = Counter(
            "streamdiff_engine_restarts", "Times the engine was started again after it had failed", registry=registry
        )
        self.room = Gauge(
            "streamdiff_sessions_room", "Further sessions that could play, NaN before that is known", registry=registry
        )
        self.stage_busy_s = Counter(
            "streamdiff_stage_busy_seconds", "Seconds that a rank was at work; its rate is its busy share", ["stage"],
            registry=registry,
        )  # fmt: skip

    def _add_encoding(self, registry: CollectorRegistry) -> None:
        codec = ["codec"]
        self.encode_s = Histogram(
            "streamdiff_encode_seconds", "To enlarge, convert and encode a frame", codec,
            buckets=_FAST_S, registry=registry,
        )  # fmt: skip
        self.encoded_bytes = Counter("streamdiff_encoded_bytes", "Bytes out of the encoders", codec, registry=registry)
        self.key_frames = Counter("streamdiff_key_frames", "Key frames", codec, registry=registry)
        self.encoder_waiting = Gauge(
            "streamdiff_encoder_waiting", "Frames that wait for their session's encoders", ["session"],
            registry=registry,
        )  # fmt: skip
        self.encoder_dropped = Counter(
            "streamdiff_encoder_dropped", "Frames that came faster than they were encoded", codec, registry=registry
        )
        self.bitrate = Gauge("streamdiff_bitrate_bps", "Bit rate of an encoder", codec, registry=registry)

    def _add_viewers(self, registry: CollectorRegistry) -> None:
        self.viewers = Gauge("streamdiff_viewers", "Viewers, those still connecting included", registry=registry)
        self.viewers_refused = Counter(
            "streamdiff_viewers_refused", "Viewers that were not let in, by the reason", ["reason"], registry=registry
        )
        self.viewers_ended = Counter(
            "streamdiff_viewers_ended", "Viewers that left, by the reason", ["end"], registry=registry
        )
        self.viewer_first_s = Histogram(
            "streamdiff_viewer_first_frame_seconds", "From a viewer's offer until its first frame is sent",
            buckets=_SLOW_S, registry=registry,
        )  # fmt: skip
        self.viewer_waiting = Gauge(
            "streamdiff_viewer_waiting", "Encoded frames that wait for the viewer furthest behind", registry=registry
        )
        self.viewer_dropped = Counter(
            "streamdiff_viewer_dropped", "Encoded frames that a slow viewer did not get", registry=registry
        )
        self.key_wishes = Counter(
            "streamdiff_key_wishes", "Key frames that viewers asked for after a loss", registry=registry
        )
        self.key_wishes_refused = Counter(
            "streamdiff_key_wishes_refused", "The same, from viewers that ask too often", registry=registry
        )

    def _add_control(self, registry: CollectorRegistry) -> None:
        self.request_lag_s = Histogram(
            "streamdiff_request_lag_seconds",
            "From a request's arrival until it is accepted, its first chunk is made (applied), its first frame shown",
            ["kind", "stage"], buckets=_SLOW_S, registry=registry,
        )  # fmt: skip
        self.controls = Counter("streamdiff_control", "Control messages", ["type", "result"], registry=registry)
        self.sockets = Gauge("streamdiff_control_sockets", "Open control WebSockets", registry=registry)
        self.sockets_refused = Counter(
            "streamdiff_control_sockets_refused", "Those not let in, by the reason", ["reason"], registry=registry
        )
        self.sockets_ended = Counter(
            "streamdiff_control_sockets_ended", "Control WebSockets, by their end", ["end"], registry=registry
        )

    def text(self, sessions: Collection[str] | None = None) -> bytes:
        """Everything in Prometheus' text format; of figures by session those of `sessions`, None: of all."""
        return generate_latest(self._registry if sessions is None else _OfSessions(self._registry, sessions))


class _OfSessions(Collector):
    """What a registry has, without the samples of other sessions."""

    def __init__(self, registry: CollectorRegistry, sessions: Collection[str]) -> None:
        self._whole, self._sessions = registry, sessions

    def collect(self) -> Iterator[Metric]:
        for metric in self._whole.collect():
            metric.samples = [each for each in metric.samples if self._is_told(each.labels)]
            yield metric

    def _is_told(self, labels: Mapping[str, str]) -> bool:
        return "session" not in labels or labels["session"] in self._sessions


class CounterDelta:
    """Turns a total that is told now and then into what came since; a total that falls began afresh. Sans-IO."""

    def __init__(self) -> None:
        self._told = 0.0

    def more(self, total: float) -> float:
        """What came since the last call, 0 or more. Mutates: self."""
        since = total - self._told if total >= self._told else total
        self._told = total
        return since


class StageMeter:
    """What the ranks of the engine tell about themselves, into the figures."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._totals: list[CounterDelta] = []

    def told(self, busy_s: Sequence[float]) -> None:
        """Seconds at work, one number per rank since its process began. Mutates: self."""
        while len(self._totals) < len(busy_s):
            self._totals.append(CounterDelta())
        for stage, total_s in enumerate(busy_s):
            self._metrics.stage_busy_s.labels(str(stage)).inc(self._totals[stage].more(total_s))
