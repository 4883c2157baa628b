"""Prometheus text for `/metrics`: few figures, each counted where it happens. Knows nothing about HTTP."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FAST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_SLOW_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


class Metrics:
    """The figures of one server. Safe to use from any thread."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        session = ["session"]
        codec = ["codec"]
        self.made = Counter("streamdiff_frames_made", "Frames the engine made", session, registry=registry)
        self.shown = Counter("streamdiff_frames_shown", "New frames handed to the encoders", session, registry=registry)
        self.repeated = Gauge(
            "streamdiff_slots_repeated", "Slots without a new frame since the start", session, registry=registry
        )
        self.dropped = Gauge(
            "streamdiff_frames_dropped", "Frames made and never shown since the start", session, registry=registry
        )
        self.buffered = Gauge("streamdiff_frames_buffered", "Frames made that wait", session, registry=registry)
        self.chunk_s = Histogram(
            "streamdiff_chunk_seconds", "From a chunk's admission to its last frame", session,
            buckets=_SLOW_S, registry=registry,
        )  # fmt: skip
        self.request_lag_s = Histogram(
            "streamdiff_request_lag_seconds", "From a request's arrival until its first frame is shown", ["kind"],
            buckets=_SLOW_S, registry=registry,
        )  # fmt: skip
        self.encode_s = Histogram(
            "streamdiff_encode_seconds", "To enlarge, convert and encode a frame", codec,
            buckets=_FAST_S, registry=registry,
        )  # fmt: skip
        self.encoded_bytes = Counter("streamdiff_encoded_bytes", "Bytes out of the encoders", codec, registry=registry)
        self.key_frames = Counter("streamdiff_key_frames", "Key frames", codec, registry=registry)
        self.encoder_dropped = Counter(
            "streamdiff_encoder_dropped", "Frames that came faster than they were encoded", codec, registry=registry
        )
        self.viewers = Gauge("streamdiff_viewers", "Viewers, those still connecting included", registry=registry)
        self.viewers_ended = Counter(
            "streamdiff_viewers_ended", "Viewers that left, by the reason", ["end"], registry=registry
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
        self.bitrate = Gauge("streamdiff_bitrate_bps", "Bit rate of an encoder", codec, registry=registry)
        self.sessions = Gauge("streamdiff_sessions", "Open sessions", registry=registry)
        self.engine_restarts = Counter(
            "streamdiff_engine_restarts", "Times the engine was started again after it had failed", registry=registry
        )
        self.refused = Counter(
            "streamdiff_sessions_refused", "Sessions that were not opened, by the reason", ["reason"], registry=registry
        )
        output = ["output"]
        self.output_up = Gauge("streamdiff_output_up", "1 while an output is sent", output, registry=registry)
        self.output_frames = Counter("streamdiff_output_frames", "Frames handed to it", output, registry=registry)
        self.output_dropped = Counter("streamdiff_output_dropped", "Frames it did not get", output, registry=registry)
        self.sockets_ended = Counter(
            "streamdiff_control_sockets_ended", "Control WebSockets, by their end", ["end"], registry=registry
        )
        self.controls = Counter("streamdiff_control", "Control messages", ["type", "result"], registry=registry)

    def forget(self, session: str) -> None:
        """A session has ended: its figures are no longer told."""
        for figure in (self.made, self.shown, self.repeated, self.dropped, self.buffered, self.chunk_s):
            figure.labels(session)
            figure.remove(session)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)
