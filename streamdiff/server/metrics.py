"""Prometheus text for `/metrics`: few figures, each counted where it happens. Knows nothing about HTTP."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

_FAST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_SLOW_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


class Metrics:
    """The figures of one server. Safe to use from any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counter = partial(Counter, registry=self._registry)
        self._gauge = partial(Gauge, registry=self._registry)
        self._histogram = partial(Histogram, registry=self._registry)
        self._add_sessions()
        self._add_engine()
        self._add_encoding()
        self._add_viewers()
        self._add_control()
        output = ["output"]
        self.output_up = self._gauge("streamdiff_output_up", "1 while an output is sent", output)
        self.output_frames = self._counter("streamdiff_output_frames", "Frames handed to it", output)
        self.output_dropped = self._counter("streamdiff_output_dropped", "Frames it did not get", output)

    def _add_sessions(self) -> None:
        counter, gauge, session = self._counter, self._gauge, ["session"]
        self.sessions = gauge("streamdiff_sessions", "Open sessions")
        self.refused = counter(
            "streamdiff_sessions_refused", "Sessions that were not opened, by the reason", ["reason"]
        )
        self.made = counter("streamdiff_frames_made", "Frames the engine made", session)
        self.shown = counter("streamdiff_frames_shown", "New frames handed to the encoders", session)
        self.repeated = counter("streamdiff_slots_repeated", "Slots without a new frame", session)
        self.dropped = counter("streamdiff_frames_dropped", "Frames made and never shown", session)
        self.buffered = gauge("streamdiff_frames_buffered", "Frames made that wait", session)
        self.unanswered = gauge(
            "streamdiff_requests_unanswered", "Requests that the engine has not answered yet", session
        )
        self.chunk_s = self._histogram(
            "streamdiff_chunk_seconds", "From a chunk's admission to its last frame", session, buckets=_SLOW_S
        )
        self.session_first_s = self._histogram(
            "streamdiff_session_first_frame_seconds", "From asking for a session until its first frame is made",
            buckets=_SLOW_S,
        )  # fmt: skip

    def _add_engine(self) -> None:
        counter = self._counter
        self.engine_up = self._gauge("streamdiff_engine_up", "1 while the engine runs")
        self.engine_restarts = counter(
            "streamdiff_engine_restarts", "Times the engine was started again after it had failed"
        )
        self.room = self._gauge(
            "streamdiff_sessions_room", "Further sessions that could play, NaN before that is known"
        )
        self.stage_busy_s = counter(
            "streamdiff_stage_busy_seconds", "Seconds that a rank was at work; its rate is its busy share", ["stage"]
        )

    def _add_encoding(self) -> None:
        counter, gauge, codec = self._counter, self._gauge, ["codec"]
        self.encode_s = self._histogram(
            "streamdiff_encode_seconds", "To enlarge, convert and encode a frame", codec, buckets=_FAST_S
        )
        self.encoded_bytes = counter("streamdiff_encoded_bytes", "Bytes out of the encoders", codec)
        self.key_frames = counter("streamdiff_key_frames", "Key frames", codec)
        self.encoder_waiting = gauge(
            "streamdiff_encoder_waiting", "Frames that wait for their session's encoders", ["session"]
        )
        self.encoder_dropped = counter(
            "streamdiff_encoder_dropped", "Frames that came faster than they were encoded", codec
        )
        self.bitrate = gauge("streamdiff_bitrate_bps", "Bit rate of an encoder", codec)

    def _add_viewers(self) -> None:
        counter, gauge = self._counter, self._gauge
        self.viewers = gauge("streamdiff_viewers", "Viewers, those still connecting included")
        self.viewers_refused = counter(
            "streamdiff_viewers_refused", "Viewers that were not let in, by the reason", ["reason"]
        )
        self.viewers_ended = counter("streamdiff_viewers_ended", "Viewers that left, by the reason", ["end"])
        self.viewer_first_s = self._histogram(
            "streamdiff_viewer_first_frame_seconds", "From a viewer's offer until its first frame is sent",
            buckets=_SLOW_S,
        )  # fmt: skip
        self.viewer_waiting = gauge(
            "streamdiff_viewer_waiting", "Encoded frames that wait for the viewer furthest behind"
        )
        self.viewer_dropped = counter("streamdiff_viewer_dropped", "Encoded frames that a slow viewer did not get")
        self.keyframe_requests = counter("streamdiff_key_wishes", "Key frames that viewers asked for after a loss")
        self.keyframe_requests_refused = counter(
            "streamdiff_key_wishes_refused", "The same, from viewers that ask too often"
        )

    def _add_control(self) -> None:
        counter = self._counter
        self.request_lag_s = self._histogram(
            "streamdiff_request_lag_seconds",
            "From a request's arrival until it is accepted, its first chunk is made (applied), its first frame shown",
            ["kind", "stage"], buckets=_SLOW_S,
        )  # fmt: skip
        self.controls = counter("streamdiff_control", "Control messages", ["type", "result"])
        self.sockets = self._gauge("streamdiff_control_sockets", "Open control WebSockets")
        self.sockets_refused = counter(
            "streamdiff_control_sockets_refused", "Those not let in, by the reason", ["reason"]
        )
        self.sockets_ended = counter("streamdiff_control_sockets_ended", "Control WebSockets, by their end", ["end"])

    def text(self, sessions: Collection[str] | None = None) -> bytes:
        """Everything in Prometheus' text format; of figures by session those of `sessions`, None: of all."""
        return generate_latest(self._registry if sessions is None else _OfSessions(self._registry, sessions))


class _OfSessions(Collector):
    """What a registry has, without the samples of other sessions."""

    def __init__(self, registry: CollectorRegistry, sessions: Collection[str]) -> None:
        self._whole, self._sessions = registry, sessions

    def collect(self) -> Iterator[Metric]:
        for metric in self._whole.collect():
            metric.samples = [each for each in metric.samples if self._is_visible(each.labels)]
            yield metric

    def _is_visible(self, labels: Mapping[str, str]) -> bool:
        return "session" not in labels or labels["session"] in self._sessions


class CounterDelta:
    """Turns a total that is read now and then into increases; a total that falls began afresh. Sans-IO."""

    def __init__(self) -> None:
        self._last = 0.0

    def increase(self, total: float) -> float:
        """What was added since the last call, 0 or more. Mutates: self."""
        increase = total - self._last if total >= self._last else total
        self._last = total
        return increase
