"""Encoder libraries: which makes which codec, how each is opened for low delay, and which can be opened here.

Knows nothing about threads, viewers or pacing.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

import av
import numpy as np
from av.video.frame import VideoFrame

from streamdiff.errors import ConfigError

Codec = Literal["h264", "vp8"]
Library = Literal["libx264", "h264_nvenc", "libvpx"]

TIME_BASE = Fraction(1, 90_000)
PERIODIC_KEY_S = 10.0
BITS_PER_PIXEL = 0.35
H264_LIBRARIES: tuple[Library, ...] = ("h264_nvenc", "libx264")
"""What is tried for H.264, best first."""

_MIN_BITRATE, _MAX_BITRATE = 1_000_000, 12_000_000
_PROBE_SIDE = 256
"""Pixels; NVENC refuses pictures below about 145."""


@dataclass(frozen=True)
class Format:
    """Parameters of an encoder: the model's picture size in pixels, its enlargement, the frame rate,
    the bit rate in bit/s (None: by size and frame rate), the H.264 library."""

    width: int
    height: int
    fps: float
    scale: int = 1
    bitrate: int | None = None
    h264: Library = "libx264"

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


def library(codec: Codec, fmt: Format) -> Library:
    """The library that encodes `codec`."""
    return fmt.h264 if codec == "h264" else "libvpx"


def open_context(codec: Codec, fmt: Format) -> av.VideoCodecContext:
    """A codec context for low delay: a packet out for each picture in.

    Raises:
        av.FFmpegError, ValueError: it cannot be opened here.
    """
    name = library(codec, fmt)
    context = av.CodecContext.create(name, "w")
    assert isinstance(context, av.VideoCodecContext)
    context.width, context.height = fmt.width * fmt.scale, fmt.height * fmt.scale
    context.pix_fmt = "yuv420p"
    context.time_base = TIME_BASE
    context.framerate = Fraction(fmt.fps).limit_denominator(1001)
    context.bit_rate = fmt.bitrate_bps
    context.gop_size = max(1, round(fmt.fps * PERIODIC_KEY_S * 2))
    context.thread_count = 1
    if codec == "h264":
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
    codec: Codec = "vp8" if name == "libvpx" else "h264"
    fmt = Format(_PROBE_SIDE, _PROBE_SIDE, 30.0, h264="libx264" if codec == "vp8" else name)
    try:
        context = open_context(codec, fmt)
        grey = np.full((_PROBE_SIDE, _PROBE_SIDE, 3), 128, np.uint8)
        frame = VideoFrame.from_ndarray(grey, format="rgb24").reformat(format="yuv420p")
        frame.pts = 0
        packets = [*context.encode(frame), *context.encode(None)]
    except (av.FFmpegError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None if packets else "it made no packet"


def openable(wanted: str = "auto") -> dict[Codec, Library]:
    """The codecs that can be encoded here, best first, and the library of each, found by opening them; for a value of
    `serve.codec`, and nothing else is tried."""
    tried: dict[Codec, tuple[Library, ...]] = {"h264": H264_LIBRARIES, "vp8": ("libvpx",)}
    found: dict[Codec, Library] = {}
    for codec, names in tried.items():
        name = next((name for name in names if fault(name) is None), None) if wanted in ("auto", codec) else None
        if name is not None:
            found[codec] = name
    return found


def choose(wanted: str) -> dict[Codec, Library]:
    """The codecs to offer, best first, for a value of `serve.codec`, and the library of each.

    Raises:
        ConfigError: what was asked for cannot be encoded here; says what can.
    """
    if not (found := openable(wanted)):
        known = ", ".join(openable()) or "none of h264 and vp8: install another build of PyAV (pip install av)"
        raise ConfigError(f"serve.codec is {wanted!r}, which cannot be encoded here; what can: {known}.")
    return found
