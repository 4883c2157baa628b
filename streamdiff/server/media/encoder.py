"""Encodes a stream once per codec, on a thread of its own, with the library that can be opened here; and the bounded
queue of encoded frames of one receiver.

Knows nothing about peer connections, sessions or pacing: pictures with time stamps go in, packets come out.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal, TypeAlias

import av
import numpy as np
from av.video.frame import PictureType, VideoFrame
from numpy.typing import NDArray

from streamdiff import clock
from streamdiff.errors import ConfigError
from streamdiff.video.pixel_format import kind_of, size_of

logger = logging.getLogger(__name__)

Codec = Literal["h264", "vp8"]
Library = Literal["libx264", "h264_nvenc", "libvpx"]

TIME_BASE = Fraction(1, 90_000)
PERIODIC_KEY_S = 10.0
BITS_PER_PIXEL = 0.35
LIBRARIES: dict[Codec, tuple[Library, ...]] = {"h264": ("h264_nvenc", "libx264"), "vp8": ("libvpx",)}
"""The codecs, and what is tried for each, best first."""

_MIN_BITRATE, _MAX_BITRATE = 1_000_000, 12_000_000
_PROBE_SIDE = 256
"""Pixels; NVENC refuses pictures below about 145."""
Packet: TypeAlias = "av.Packet[av.VideoStream]"

_IDR = re.compile(rb"\x00\x00\x01[\x05\x25\x45\x65]")
"""What begins a key frame of H.264."""

QUEUE_PACKETS = 40
"""Encoded frames that may wait for one viewer, 1 s at 40 FPS. A viewer further behind skips to a key frame.

UDP takes what it is given, so a viewer's line never fills this; a process that gets no CPU for a moment does, and then
a key frame for everybody would make it worse. What waited goes out at once, so the bound adds no delay.
"""
Picture = NDArray[np.uint8]
KEY_INTERVAL_S = 0.3
"""Key frame requests that come closer together than this share one key frame."""
YUV_COLOURS = "ITU709"
"""The colours of a YUV420 picture."""
REOPEN_S = 1.0
"""Between openings of a codec that fails again and again, or whose format is changed so: each takes up to tens of
milliseconds in which no other thread runs Python, as PyAV holds the interpreter's lock."""
QUEUE_PICTURES = 4
"""Pictures that may wait for the encoder, 0.1 s at 40 FPS; the oldest goes first."""


@dataclass(frozen=True)
class Format:
    """Parameters of an encoder: the model's picture size in pixels, its enlargement, the frame rate,
    the bit rate in bit/s (None: by size and frame rate)."""

    width: int
    height: int
    fps: float
    scale: int = 1
    bitrate: int | None = None

    @property
    def bitrate_bps(self) -> int:
        """The bit rate as configured, or one that fits size and pace."""
        if self.bitrate is not None:
            return self.bitrate
        wanted = BITS_PER_PIXEL * self.width * self.height * self.scale**2 * self.fps
        return int(min(max(wanted, _MIN_BITRATE), _MAX_BITRATE))

    def __post_init__(self) -> None:
        if (self.width * self.scale) % 2 or (self.height * self.scale) % 2:
            raise ConfigError(
                f"A picture of {self.width * self.scale}x{self.height * self.scale} cannot be encoded: "
                "both sides must be even. Choose an even serve.upscale."
            )


def open_context(codec: Codec, fmt: Format) -> av.VideoCodecContext:
    """A codec context for low delay: a packet out for each picture in.

    Raises:
        av.FFmpegError, ValueError: it cannot be opened here.
    """
    if (name := library(codec)) is None:
        raise ValueError(f"{codec} cannot be encoded here")
    return _open(name, fmt)


def _open(name: Library, fmt: Format) -> av.VideoCodecContext:
    context = av.CodecContext.create(name, "w")
    assert isinstance(context, av.VideoCodecContext)
    context.width, context.height = fmt.width * fmt.scale, fmt.height * fmt.scale
    context.pix_fmt = "yuv420p"
    context.time_base = TIME_BASE
    context.framerate = Fraction(fmt.fps).limit_denominator(1001)
    context.bit_rate = fmt.bitrate_bps
    context.gop_size = max(1, round(fmt.fps * PERIODIC_KEY_S * 2))
    context.thread_count = 1
    if name != "libvpx":
        context.colorspace, context.color_primaries, context.color_trc, context.color_range = 1, 1, 1, 1  # BT.709
    if name == "libx264":
        context.profile = "Baseline"
    context.options = _options(name, fmt.bitrate_bps)
    context.open()
    return context


def _options(name: Library, bitrate_bps: int) -> dict[str, str]:
    rate = str(bitrate_bps)
    h264 = {"forced-idr": "1", "bf": "0", "maxrate": rate, "bufsize": str(bitrate_bps // 4)}
    match name:
        case "libx264":
            repeat = {"x264-params": "repeat-headers=1:scenecut=0"}
            return {"preset": "ultrafast", "tune": "zerolatency"} | h264 | repeat
        case "h264_nvenc":
            latency = {"zerolatency": "1", "delay": "0", "no-scenecut": "1", "rc": "cbr"}
            return {"preset": "p2", "tune": "ull", "profile": "baseline"} | latency | h264
        case "libvpx":
            latency = {"deadline": "realtime", "cpu-used": "-12", "lag-in-frames": "0", "static-thresh": "1"}
            return latency | {"minrate": rate, "maxrate": rate, "qmin": "2", "qmax": "56"}


@cache
def fault(name: Library) -> str | None:
    """Why `name` cannot be used here, found by encoding one grey picture with it; None when it can.

    NVENC is part of every PyAV wheel, but data-centre GPUs may have no encoder at all: only opening it shows that.
    """
    try:
        context = _open(name, Format(_PROBE_SIDE, _PROBE_SIDE, 30.0))
        grey = np.full((_PROBE_SIDE, _PROBE_SIDE, 3), 128, np.uint8)
        frame = VideoFrame.from_ndarray(grey, format="rgb24").reformat(format="yuv420p")
        frame.pts = 0
        packets = [*context.encode(frame), *context.encode(None)]
    except (av.FFmpegError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None if packets else "it made no packet"


def library(codec: Codec) -> Library | None:
    """The library that encodes `codec` here, found by opening them; None: there is none."""
    return next((name for name in LIBRARIES[codec] if fault(name) is None), None)


def choose(wanted: str) -> tuple[Codec, ...]:
    """The codecs to offer, best first, for a value of `serve.codec`; nothing else is tried.

    Raises:
        ConfigError: what was asked for cannot be encoded here; says what can.
    """
    if not (found := tuple(codec for codec in LIBRARIES if wanted in ("auto", codec) and library(codec))):
        known = (
            ", ".join(codec for codec in LIBRARIES if library(codec))
            or "none of h264 and vp8: install another build of PyAV"
        )
        raise ConfigError(f"serve.codec is {wanted!r}, which cannot be encoded here; what can: {known}.")
    return found


@dataclass(frozen=True)
class EncodedFrame:
    """One encoded frame. `packet` is shared by all viewers of a codec and never written to.

    `pts` counts 90 kHz ticks; `encode_s` is what it took to make, in seconds.
    """

    packet: Packet
    pts: int
    key: bool
    encode_s: float = 0.0


class PacketQueue:
    """Holds what waits for one viewer, newest last. A viewer starts at a key frame, and restarts at one after a loss.

    `put` says whether a key frame is needed before this viewer can continue.
    """

    def __init__(self, limit: int = QUEUE_PACKETS) -> None:
        self._limit = limit
        self._waiting: deque[EncodedFrame] = deque()
        self._needs_key = True
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, encoded: EncodedFrame) -> bool:
        """Queue a packet, or drop it until the next key frame. True: ask the encoder for one. Mutates: self."""
        if len(self._waiting) >= self._limit:
            self.dropped += len(self._waiting)
            self._waiting.clear()
            self._needs_key = True
        self._needs_key = self._needs_key and not encoded.key
        if self._needs_key:
            self.dropped += 1
            return True
        self._waiting.append(encoded)
        return False

    def get(self) -> EncodedFrame | None:
        """The oldest packet that waits. Mutates: self."""
        return self._waiting.popleft() if self._waiting else None


def is_key_frame(codec: str, data: bytes) -> bool:
    """Whether an encoded frame can be decoded without those before it. `codec`: as SDP names it."""
    if codec == "VP8":
        return bool(data) and not data[0] & 1
    return _IDR.search(data) is not None


class KeyframeLimiter:
    """Decides when a key frame is made: on request, but never two within `KEY_INTERVAL_S`. Sans-IO."""

    def __init__(self) -> None:
        self._requested = True
        self._last_s = float("-inf")

    def request(self) -> None:
        """A viewer joined, or lost a frame. Mutates: self."""
        self._requested = True

    def due_s(self) -> float | None:
        """When the pending request may be met; None when there is none."""
        return self._last_s + KEY_INTERVAL_S if self._requested else None

    def take(self, now_s: float) -> bool:
        """Whether the frame of `now_s` becomes a key frame. Mutates: self."""
        since_s = now_s - self._last_s
        if (self._requested and since_s >= KEY_INTERVAL_S) or since_s >= PERIODIC_KEY_S:
            self._requested = False
            self._last_s = now_s
            return True
        return False


def frame_of(picture: Picture) -> VideoFrame:
    """A picture, uint8 as in `streamdiff.video.pixel_format`, as PyAV has it. Raises ValueError for what is none."""
    return VideoFrame.from_ndarray(picture, format={"rgb": "rgb24", "yuv420": "yuv420p"}[kind_of(picture.shape)])


def as_rgb(picture: Picture) -> Picture:
    """The same picture as uint8 `[H, W, 3]`. Raises ValueError for what is none."""
    if kind_of(picture.shape) == "rgb":
        return picture
    rgb = frame_of(picture).to_ndarray(format="rgb24", src_colorspace=YUV_COLOURS)
    return rgb.astype(np.uint8, copy=False)


class VideoEncoder:
    """One codec, one size. Not thread-safe."""

    def __init__(self, codec: Codec, fmt: Format) -> None:
        self._width, self._height = fmt.width * fmt.scale, fmt.height * fmt.scale
        self._size = (fmt.height, fmt.width)
        # VP8 knows BT.601 only; H.264 says what it is, and players trust it.
        self._colours = "ITU709" if codec == "h264" else "ITU601"
        # Of the same size only colours are brought together, where bicubic would blur and shift them.
        self._interpolation = "BICUBIC" if fmt.scale > 1 else "AREA"
        self._context = open_context(codec, fmt)

    def encode(self, picture: Picture, pts: int, key: bool) -> list[EncodedFrame]:
        """Encode a picture, uint8 as in `streamdiff.video.pixel_format`, shown at `pts` (90 kHz ticks, strictly
        increasing).

        YUV420 goes to the encoder as it is, unless it is to be enlarged, or the codec knows other colours only.

        Raises:
            ValueError: no picture, or one of another size.
        """
        begun_s = clock.monotonic_s()
        if size_of(picture.shape) != self._size:
            raise ValueError(f"The encoder was opened for pictures of {self._size}, not {size_of(picture.shape)}.")
        frame, rgb = frame_of(picture), kind_of(picture.shape) == "rgb"
        if rgb or self._colours != YUV_COLOURS or frame.width != self._width:
            size, colours = (self._width, self._height), (None if rgb else YUV_COLOURS, self._colours)
            frame = frame.reformat(*size, "yuv420p", *colours, self._interpolation)
        frame.pts, frame.time_base = pts, TIME_BASE
        frame.pict_type = PictureType.I if key else PictureType.NONE
        packets = self._context.encode(frame)
        took_s = clock.monotonic_s() - begun_s
        return [EncodedFrame(packet, int(packet.pts or pts), packet.is_keyframe, took_s) for packet in packets]


class EncoderThread:
    """One codec's encoder on its own thread. `deliver` is called there with each packet.

    Pictures never wait long: at most `QUEUE_PICTURES` do, then the oldest is dropped and counted. The codec is opened,
    and opened again for another format, on the thread. Where it cannot be opened the old one stays; without one,
    pictures are dropped until it can.
    """

    def __init__(self, codec: Codec, fmt: Format, deliver: Callable[[EncodedFrame], object]) -> None:
        self.codec: Codec = codec
        self.dropped = 0
        """Pictures that were not encoded."""
        self.failing_since_s: float | None = None
        """Since when the codec has made nothing of the pictures, by the monotonic clock; None while it works."""
        self._format = self._opened = fmt
        self._deliver = deliver
        self._encoder: VideoEncoder | None = None
        self._next_s = float("-inf")  # when the codec may be opened again
        self._is_told = False  # that it fails
        self._key_limiter = KeyframeLimiter()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Picture, int]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"encoder-{codec}", daemon=True)
        self._thread.start()

    def submit(self, picture: Picture, pts: int) -> None:
        """Queue one picture. Never waits."""
        with self._changed:
            if len(self._waiting) >= QUEUE_PICTURES:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append((picture, pts))
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """Pictures that wait."""
        return len(self._waiting)

    def request_key(self) -> None:
        """Make one of the next pictures a key frame."""
        with self._changed:
            self._key_limiter.request()

    def set_format(self, fmt: Format) -> None:
        """Encode in another format from one of the next pictures on, which becomes a key frame."""
        with self._changed:
            self._format = fmt

    def key_due_s(self) -> float | None:
        """When a requested key frame may be made; None when none is requested."""
        with self._changed:
            return self._key_limiter.due_s()

    def stop(self) -> None:
        """End the thread; what waits is dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        self._renew(self._format, clock.monotonic_s())
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                picture, pts = self._waiting.popleft()
                now_s = clock.monotonic_s()
                key = self._key_limiter.take(now_s)
                fmt = self._format
            if (self._encoder is None or fmt != self._opened) and now_s >= self._next_s:
                key = self._renew(fmt, now_s) or key
            for packet in self._encode(picture, pts, key, now_s):
                self._deliver(packet)

    def _renew(self, fmt: Format, now_s: float) -> bool:
        """Open the codec for `fmt`; whether it could be. Mutates: self."""
        try:
            encoder = VideoEncoder(self.codec, fmt)
        except (av.FFmpegError, ValueError):
            self._failed("cannot be opened", now_s)
            return False
        # Libraries differ in what they take while open; a new one begins with a key frame anyway. Changes that follow
        # each other closely share one.
        if self._encoder is not None:
            self._next_s = now_s + REOPEN_S
        self._encoder, self._opened = encoder, fmt
        return True

    def _encode(self, picture: Picture, pts: int, key: bool, now_s: float) -> list[EncodedFrame]:
        """One picture; when the codec library fails, the stream continues with a fresh encoder and a key frame."""
        if self._encoder is None:
            self.dropped += 1
            return []
        try:
            packets = self._encoder.encode(picture, pts, key)
        except av.FFmpegError:
            self._encoder = None
            self._failed("failed", now_s)
            return []
        self.failing_since_s = None
        self._is_told = self._is_told and self._opened != self._format
        return packets

    def _failed(self, how: str, now_s: float) -> None:
        """Say so once, and try again: with the next picture the first time. Mutates: self."""
        if not self._is_told:
            logger.exception("The %s encoder %s. It is opened again.", self.codec, how)
        self._next_s = now_s + (REOPEN_S if self._is_told else 0.0)
        self._is_told = True
        if self._encoder is None and self.failing_since_s is None:
            self.failing_since_s = now_s
