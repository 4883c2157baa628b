"""Prometheus text for `/metrics`: few figures, each counted where it happens. Knows nothing about HTTP."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

_FAST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_SLOW_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_Counter = partial[Counter]
_Gauge = partial[Gauge]
_Histogram = partial[Histogram]


class Metrics:
    """The figures of one server; the names below follow `streamdiff_`. Safe to use from any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        where: dict[str, Any] = {"namespace": "streamdiff", "registry": self._registry}
        make = partial(Counter, **where), partial(Gauge, **where), partial(Histogram, **where)
        self._add_engine(*make)
        self._add_sessions(*make)
        self._add_media(*make)
        self._add_peers(*make)

    def _add_engine(self, counter: _Counter, gauge: _Gauge, histogram: _Histogram) -> None:
        self.engine_up = gauge("engine_up", "1 while the engine runs")
        self.ready = gauge("ready", "1 while /readyz says that viewers can be sent here")
        self.disk_free = gauge("disk_free_ratio", "Free share of the disk with a folder, by its setting", ["folder"])
        self.engine_restarts = counter("engine_restarts", "Times the engine was started again after it had failed")
        self.lost_s = counter("lost_seconds", "Seconds of streams that were lost where they went on from a snapshot")
        self.stage_busy_s = counter("stage_busy_seconds", "Seconds that a rank was at work", ["stage"])
        self.forwards = counter("rows", "Forwards, by the number of rows that shared them", ["rows"])
        self.alone = counter("alone", "Forwards of one row, where several may share one, by the reason", ["reason"])
        self.encodings = counter("encodings", "Texts, pictures, pieces of video that were encoded here", ["encoder"])
        self.jobs_waiting = gauge("jobs_waiting", "Jobs that wait for their turn")
        self.jobs_running = gauge("jobs_running", "Jobs that are being made")
        self.jobs_limit = gauge("jobs_limit", "Jobs that may wait or run, 0 where none are taken")
        self.jobs_ended = counter("jobs_ended", "Jobs by their end; put_back: to begin again later", ["end"])

    def _add_sessions(self, counter: _Counter, gauge: _Gauge, histogram: _Histogram) -> None:
        session, seconds = ["session"], {"buckets": _SLOW_S}
        self.free_sessions = gauge("sessions_room", "Further sessions that could play, NaN before that is known")
        self.sessions = gauge("sessions", "Open sessions")
        self.sessions_watched = gauge("sessions_watched", "Those that somebody watches")
        self.sessions_limit = gauge("sessions_limit", "Default sessions that can play at once; NaN: not known yet")
        self.sessions_at = gauge("sessions_at", "Those with caches on the device, in host memory, on disk", ["place"])
        self.refused = counter("sessions_refused", "Sessions that were not opened, by the reason", ["reason"])
        self.made = counter("frames_made", "Frames the engine made", session)
        self.chunk_s = histogram("chunk_seconds", "From a chunk's admission to its last frame", session, **seconds)
        self.session_first_s = histogram(
            "session_first_frame_seconds", "From asking for a session until its first frame is made", **seconds
        )
        self.steps = gauge("session_steps", "Denoise steps of a chunk, under load fewer than asked for", session)
        self.asked_steps = gauge("session_asked_steps", "Those that were asked for", session)
        self.fps = gauge("session_fps", "Frames shown per second, under load fewer than asked for", session)
        self.asked_fps = gauge("session_asked_fps", "Those that were asked for", session)
        self.load_changes = counter(
            "load_changes", "Times that load took from an adaptive session (down), or gave back (up)", ["direction"]
        )
        self.unanswered = gauge("requests_unanswered", "Requests that the engine has not answered yet", session)
        self.request_lag_s = histogram(
            "request_lag_seconds",
            "From a request's arrival until it is accepted, its first chunk is made (applied), its first frame shown",
            ["kind", "stage"], **seconds,
        )  # fmt: skip
        self.controls = counter("control", "Control messages", ["type", "result"])

    def _add_media(self, counter: _Counter, gauge: _Gauge, histogram: _Histogram) -> None:
        session, codec, output = ["session"], ["codec"], ["output"]
        self.shown = counter("frames_shown", "New frames handed to the encoders", session)
        self.repeated = counter("slots_repeated", "Slots without a new frame", session)
        self.dropped = counter("frames_dropped", "Frames made and never shown", session)
        self.buffered = gauge("frames_buffered", "Frames made that wait", session)
        self.encode_s = histogram("encode_seconds", "To enlarge, convert and encode a frame", codec, buckets=_FAST_S)
        self.encoded_bytes = counter("encoded_bytes", "Bytes out of the encoders", codec)
        self.key_frames = counter("key_frames", "Key frames", codec)
        self.encoder_waiting = gauge("encoder_waiting", "Frames that wait for their session's encoders", session)
        self.encoder_dropped = counter("encoder_dropped", "Frames that came faster than they were encoded", codec)
        self.bitrate = gauge("bitrate_bps", "Bit rate of an encoder", codec)
        self.output_up = gauge("output_up", "1 while an output is sent", output)
        self.output_frames = counter("output_frames", "Frames handed to it", output)
        self.output_dropped = counter("output_dropped", "Frames it did not get", output)

    def forget_output(self, name: str) -> None:
        """Take away the figures of an output that has ended."""
        for figure in (self.output_up, self.output_frames, self.output_dropped):
            figure.remove(name)

    def _add_peers(self, counter: _Counter, gauge: _Gauge, histogram: _Histogram) -> None:
        reason, end = ["reason"], ["end"]
        self.viewers = gauge("viewers", "Viewers, those still connecting included")
        self.viewers_limit = gauge("viewers_limit", "Viewers that are let in")
        self.viewers_refused = counter("viewers_refused", "Viewers that were not let in, by the reason", reason)
        self.viewers_ended = counter("viewers_ended", "Viewers that left, by the reason", end)
        first = "From a viewer's offer until its first frame is sent"
        self.viewer_first_s = histogram("viewer_first_frame_seconds", first, buckets=_SLOW_S)
        self.viewer_waiting = gauge("viewer_waiting", "Encoded frames that wait for the viewer furthest behind")
        self.viewer_dropped = counter("viewer_dropped", "Encoded frames that a slow viewer did not get")
        self.keyframe_requests = counter("key_wishes", "Key frames that viewers asked for after a loss")
        self.keyframe_requests_refused = counter("key_wishes_refused", "The same, from viewers that ask too often")
        self.ice_failures = counter("ice_failures", "Times that a STUN or TURN server gave no address", ["url"])
        self.sockets = gauge("control_sockets", "Open control WebSockets")
        self.sockets_refused = counter("control_sockets_refused", "Those not let in, by the reason", reason)
        self.sockets_ended = counter("control_sockets_ended", "Control WebSockets, by their end", end)

    def text(self, sessions: Collection[str] | None = None) -> bytes:
        """Everything in Prometheus' text format; of figures by session those of `sessions`, None: of all."""
        return generate_latest(self._registry if sessions is None else _OfSessions(self._registry, sessions))


class _OfSessions(Collector):
    """The figures of a registry, without the samples of other sessions."""

    def __init__(self, registry: CollectorRegistry, sessions: Collection[str]) -> None:
        self._registry, self._visible = registry, {None, *sessions}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [each for each in metric.samples if each.labels.get("session") in self._visible]
            yield metric


class CounterDelta:
    """Turns a cumulative total into increases; a total that falls has started again from 0. Sans-IO."""

    def __init__(self) -> None:
        self._last = 0.0

    def increase(self, total: float) -> float:
        """What was added since the last call, 0 or more. Mutates: self."""
        increase = total - self._last if total >= self._last else total
        self._last = total
        return increase
