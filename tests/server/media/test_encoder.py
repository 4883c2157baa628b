"""The encoder, against PyAV's decoders: colours, sizes, key frames, time stamps, bit rate; the queue of packets; what
can be encoded here. The last seconds of a stream as a file."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from io import BytesIO
from queue import Queue
from typing import Any

import av
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from streamdiff import clock
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.picture_decoder import yuv420p
from streamdiff.server.media import clip, encoder
from streamdiff.server.media import encoder as codecs
from streamdiff.server.media.clip import RecentFrames, write_clip
from streamdiff.server.media.encoder import (
    KEY_INTERVAL_S,
    REOPEN_S,
    Codec,
    EncodedFrame,
    EncoderThread,
    Format,
    KeyframeLimiter,
    PacketQueue,
    VideoEncoder,
)
from streamdiff.server.media.playback import FLOOR, SETTLE_S, BitrateController
from streamdiff.video.pixel_format import shape_of

CODECS: tuple[Codec, ...] = ("h264", "vp8")
COLOURS = [(220, 40, 40), (40, 60, 220), (40, 180, 60), (240, 220, 40), (10, 10, 10), (250, 250, 250)]


def _decoder(codec: Codec) -> Any:
    return av.CodecContext.create("h264" if codec == "h264" else "vp8", "r")


def _flat(colour: tuple[int, int, int], size: int = 64) -> np.ndarray:
    return np.full((size, size, 3), colour, np.uint8)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("scale", "kind"), [(1, "rgb"), (2, "rgb"), (1, "yuv420"), (2, "yuv420")])
def test_a_packet_for_every_picture_in_the_right_colour_and_size(codec: Codec, scale: int, kind: str) -> None:
    encoder, decoder = VideoEncoder(codec, Format(64, 48, 40.0, scale)), _decoder(codec)
    matrix = "ITU709" if codec == "h264" else "ITU601"
    for number, colour in enumerate(COLOURS * 2):
        picture = np.full((48, 64, 3), colour, np.uint8)
        [encoded] = encoder.encode(_planes(picture) if kind == "yuv420" else picture, number * 2250, key=number == 0)
        assert encoded.pts == number * 2250
        assert encoded.key == (number == 0)
        [frame] = decoder.decode(encoded.packet)
        assert (frame.width, frame.height) == (64 * scale, 48 * scale)
        shown = frame.to_ndarray(format="rgb24", src_colorspace=matrix)[20, 20]
        assert np.abs(shown.astype(int) - colour).max() <= 12


def test_wishes_for_key_frames_are_brought_together() -> None:
    gate = KeyframeLimiter()
    assert gate.take(0.0)
    assert not gate.take(0.025)
    gate.request()
    gate.request()
    assert gate.due_s() == KEY_INTERVAL_S
    assert not gate.take(KEY_INTERVAL_S - 0.01)
    assert gate.take(KEY_INTERVAL_S)
    assert gate.due_s() is None
    assert not gate.take(5.0)
    assert gate.take(11.0), "periodically"
    storm = 0
    for tick in range(400):
        gate.request()
        storm += gate.take(20 + tick * 0.025)
    assert storm <= 10 / KEY_INTERVAL_S + 1


class _Fed:
    """An encoder thread that is given one picture after the other, and its packets. A context manager."""

    def __init__(self, codec: Codec, fmt: Format) -> None:
        self.packets: list[EncodedFrame] = []
        self.thread = EncoderThread(codec, fmt, self.packets.append)
        self._given = 0
        self.made: Queue[list[EncodedFrame]] = Queue()
        encode = self.thread._encode

        def noted(*picture: Any) -> list[EncodedFrame]:
            packets = encode(*picture)
            self.made.put(packets)
            return packets

        self.thread._encode = noted  # type: ignore[method-assign]

    def __enter__(self) -> _Fed:
        return self

    def __exit__(self, *error: object) -> None:
        self.thread.stop()

    def submit(self, picture: np.ndarray | None = None) -> None:
        self.thread.submit(_flat(COLOURS[self._given % 6]) if picture is None else picture, self._given * 2250)
        self._given += 1

    def keys(self) -> list[bool]:
        """`give`, by whether what it becomes is a key frame."""
        return [each.key for each in self.give()]

    def give(self, picture: np.ndarray | None = None) -> list[EncodedFrame]:
        """What becomes of the next picture."""
        self.submit(picture)
        return self.made.get(timeout=240)


@pytest.mark.parametrize("codec", CODECS)
def test_the_thread_delivers_in_order_and_drops_the_oldest_when_flooded(codec: Codec) -> None:
    with _Fed(codec, Format(64, 64, 40.0)) as fed:
        for _ in range(3):
            fed.give()
        for _ in range(200):
            fed.submit()
        while fed.made.get(timeout=240)[-1].pts != 202 * 2250:
            pass
    stamps = [encoded.pts for encoded in fed.packets]
    assert stamps == sorted(set(stamps))
    assert fed.packets[0].key
    assert len(fed.packets) + fed.thread.dropped == 203


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_another_bit_rate_holds_from_a_key_frame_on(codec: Codec) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (8, 128, 128, 3)).astype(np.uint8)
    with _Fed(codec, Format(128, 128, 40.0, 1, 4_000_000)) as fed:
        for number in range(120):
            if number == 60:
                fed.thread.set_format(Format(128, 128, 40.0, 1, 500_000))
            fed.give(noise[number % 8])
    assert [number for number, encoded in enumerate(fed.packets) if encoded.key][:2] == [0, 60]
    before, after = (sum(encoded.packet.size for encoded in fed.packets[at : at + 40]) for at in (20, 80))
    assert after < before / 2


class _Works:
    """The codec library: opened so often, on these threads, and whether it fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.opens, self.encodes = True, True
        self.now_s = 100.0
        open_context, encode = encoder.open_context, VideoEncoder.encode

        def opened(codec: Codec, fmt: Format) -> av.VideoCodecContext:
            self.threads.append(threading.current_thread().name)
            if not self.opens:
                raise av.FFmpegError(12, "Cannot allocate memory")
            return open_context(codec, fmt)

        def encoded(self_: VideoEncoder, picture: np.ndarray, pts: int, key: bool) -> list[EncodedFrame]:
            if not self.encodes:
                raise av.FFmpegError(5, "Input/output error")
            return encode(self_, picture, pts, key)

        monkeypatch.setattr(encoder, "open_context", opened)
        monkeypatch.setattr(VideoEncoder, "encode", encoded)
        monkeypatch.setattr(clock, "monotonic_s", lambda: self.now_s)


def test_a_codec_that_cannot_be_opened_for_another_rate_goes_on_with_the_old_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = _Works(monkeypatch)
    with _Fed("h264", Format(64, 64, 40.0, 1, 1_000_000)) as fed:
        assert fed.keys() == [True]
        library.opens = False
        fed.thread.set_format(Format(64, 64, 40.0, 1, 500_000))
        for _ in range(8):
            assert fed.keys() == [False]
        assert len(library.threads) == 3, "at the next picture again, then once a second"
        assert (fed.thread._opened.bitrate_bps, fed.thread.failing_since_s) == (1_000_000, None)
        library.opens = True
        library.now_s += REOPEN_S
        assert fed.keys() == [True]
        assert fed.thread._opened.bitrate_bps == 500_000
    assert caplog.text.count("cannot be opened") == 1


def test_a_codec_that_fails_is_opened_again_once_a_second_until_it_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = _Works(monkeypatch)
    library.opens = False
    with _Fed("h264", Format(64, 64, 40.0)) as fed:
        assert fed.give() == []
        library.opens = True
        library.now_s += REOPEN_S
        assert fed.keys() == [True]
        library.encodes = False
        assert fed.give() == []
        library.encodes, library.opens = True, False
        for _ in range(8):
            assert fed.give() == []
        assert len(library.threads) == 4
        assert fed.thread.failing_since_s == library.now_s
        library.opens = True
        assert fed.give() == []
        library.now_s += REOPEN_S
        assert fed.keys() == [True]
        assert fed.thread.failing_since_s is None
        assert fed.thread.dropped == 10
    assert caplog.text.count("It is opened again") == 2, "once for each time"


def test_changes_of_the_format_that_follow_each_other_closely_share_a_key_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = _Works(monkeypatch)
    with _Fed("h264", Format(64, 64, 40.0)) as fed:
        assert fed.keys() == [True]
        keys = []
        for number in range(20):
            for fps in (10.0, 20.0, 30.0 + number % 2):
                fed.thread.set_format(Format(64, 64, fps))
            keys += fed.keys()
        assert keys == [True] + 19 * [False]
        library.now_s += REOPEN_S
        assert fed.keys() == [True], "the latest"
        assert fed.thread._opened.fps == 31.0
        fed.thread.set_format(Format(64, 64, 31.0))
        library.now_s += REOPEN_S
        assert fed.keys() == [False], "no other format"
    assert library.threads == 3 * ["encoder-h264"]


def _smooth(width: int = 64, height: int = 48) -> np.ndarray:
    """Colours that differ from place to place, and hard edges in all directions."""
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([x * 4 % 256, y * 5 % 256, (x + y) * 2 % 256], 2)
    picture[10:21, 13:30] = (230, 20, 200)
    return picture.astype(np.uint8)


def _planes(picture: np.ndarray) -> np.ndarray:
    """YUV420 of an RGB picture as the model's device makes it."""
    return yuv420p(torch.from_numpy(picture).permute(2, 0, 1)[None].float())[0].numpy()


def test_yuv420_made_on_the_device_is_that_of_libswscale() -> None:
    """As `VideoEncoder` has it made of RGB, for H.264; over all colours, and at edges too."""
    levels = np.linspace(0, 255, 16).astype(np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(64, 64, 3)
    for picture in (_smooth(), cube, cube.repeat(2, 0).repeat(2, 1)):
        height, width = picture.shape[:2]
        frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
        frame = frame.reformat(width, height, "yuv420p", dst_colorspace="ITU709", interpolation="AREA")
        expected, got = frame.to_ndarray().astype(int), _planes(picture).astype(int)
        assert got.shape == expected.shape == shape_of("yuv420", height, width)
        assert np.abs(got - expected).max() <= 2


@pytest.mark.parametrize("shape", [(64, 64), (48, 64, 4), (48, 63), (0, 64, 3), (64,), (32, 32, 3)])
def test_what_is_no_picture_or_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        VideoEncoder("h264", Format(64, 64, 40.0)).encode(np.zeros(shape, np.uint8), 0, True)


# ---- the queue of one viewer: bounded, begins with a key frame, and again with one after a loss ------------------


def _encoded(number: int, key: bool = False) -> EncodedFrame:
    packet = av.Packet(b"x")
    packet.pts = number
    return EncodedFrame(packet, number, key)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4))))
@example([(True, 0), (False, 0), (False, 0), (False, 0), (False, 1)])
def test_never_above_the_limit_and_every_gap_ends_with_a_key_frame(steps: list[tuple[bool, int]]) -> None:
    queue = PacketQueue(limit=4)
    out: list[EncodedFrame] = []
    for number, (key, reads) in enumerate(steps):
        asks = queue.put(_encoded(number, key))
        assert asks == (len(queue) == 0), "for a key frame, once all that waited was dropped"
        assert len(queue) <= 4
        out += [encoded for _ in range(reads) if (encoded := queue.get()) is not None]
    assert [encoded.pts for encoded in out] == sorted({encoded.pts for encoded in out})
    for before, after in zip([None, *out], out, strict=False):
        assert after.key or (before is not None and after.pts == before.pts + 1)
    assert len(out) + len(queue) + queue.dropped == len(steps)


def test_it_falls_when_lines_carry_less_than_is_sent_and_comes_back() -> None:
    governor = BitrateController(4_000_000)
    assert governor.decide([2_000_000, 2_000_000, 9_000_000], 4_000_000, 0.0) == 1_700_000
    assert governor.decide([1_000_000] * 3, 1_700_000, 1.0) is None, "too soon"
    now_s, rates = 0.0, []
    while governor.rate_bps < 4_000_000:
        now_s += SETTLE_S
        rates.append(governor.decide([int(1.5 * governor.rate_bps)], governor.rate_bps, now_s))
    assert rates == sorted(r for r in rates if r is not None)
    assert len(rates) <= 5, "an estimate is bounded by 1.5 times what is received; that is enough to get back up"


@pytest.mark.parametrize(
    ("estimates_bps", "sent_bps"), [([300_000, 6_000_000, 6_000_000], 4_000_000), ([700_000], 450_000), ([], 4_000_000)]
)
def test_one_bad_line_of_many_a_simple_picture_and_no_estimates_change_nothing(
    estimates_bps: list[int], sent_bps: int
) -> None:
    assert BitrateController(4_000_000).decide(estimates_bps, sent_bps, 0.0) is None


@given(st.lists(st.tuples(st.integers(1, 20_000_000), st.integers(1, 20_000_000)), max_size=50))
def test_it_stays_between_floor_and_configured_rate(looks: list[tuple[int, int]]) -> None:
    governor = BitrateController(3_000_000)
    for second, (line_bps, sent_bps) in enumerate(looks):
        before = governor.rate_bps
        rate_bps = governor.decide([line_bps], sent_bps, float(second))
        assert FLOOR * 3_000_000 <= governor.rate_bps <= 3_000_000
        if rate_bps is not None and rate_bps < before:
            assert line_bps < sent_bps, "it falls only for a line that does not carry what is sent"


def test_the_default_bit_rate_fits_size_and_pace() -> None:
    assert Format(512, 512, 40.0).bitrate_bps == pytest.approx(3_670_016)
    assert Format(128, 128, 40.0, 2).bitrate_bps == 1_000_000
    assert Format(1920, 1080, 60.0).bitrate_bps == 12_000_000
    assert Format(64, 64, 40.0, 1, 250_000).bitrate_bps == 250_000


def test_an_odd_size_is_refused_before_anything_is_encoded() -> None:
    with pytest.raises(ConfigError):
        Format(63, 64, 40.0, 1)
    Format(63, 63, 40.0, 2)


def test_nvenc_is_taken_only_where_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = list[str](), codecs._open

    def fails(name: codecs.Library, fmt: Format) -> object:
        opened.append(name)
        if name == "h264_nvenc":
            raise av.error.PermissionError(1, "Operation not permitted")
        return real(name, fmt)

    monkeypatch.setattr(codecs, "_open", fails)
    codecs.fault.cache_clear()
    try:
        assert codecs.choose("h264") == ("h264",) and codecs.library("h264") == "libx264"
        assert codecs.choose("auto") == ("h264", "vp8")
        assert opened == ["h264_nvenc", "libx264", "libvpx"], "each is opened once"
    finally:
        codecs.fault.cache_clear()


def test_a_codec_that_cannot_be_made_is_refused_with_those_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "fault", lambda name: None if name == "libvpx" else "gone")
    with pytest.raises(ConfigError):
        codecs.choose("h264")
    assert codecs.choose("auto") == ("vp8",)


FORMAT = Format(64, 64, 40.0)
TICKS = 2250
"""Of a frame."""


def shown(codec: Codec, numbers: Iterable[int], held: Sequence[int] = (), key_every: int = 400) -> RecentFrames:
    """What is kept of pictures whose grey is their second; time is held while some are sent."""
    encoder, recent, asked = VideoEncoder(codec, FORMAT), RecentFrames(), True
    for number in numbers:
        picture = np.full((64, 64, 3), 3 * (number // 40) % 256, np.uint8)
        for encoded in encoder.encode(picture, number * TICKS, asked or number % key_every == 0):
            asked = recent.put(encoded, held=number in held)
    return recent


def seconds_of(file: bytes) -> list[int]:
    """The second in which each picture of a file was shown."""
    with av.open(BytesIO(file)) as video:
        return [round(frame.to_ndarray(format="gray").mean() / 3) for frame in video.decode(video=0)]


@pytest.mark.parametrize("seconds", [1, 10, 30])
def test_an_mp4_plays_exactly_the_last_seconds(seconds: int) -> None:
    recent = shown("h264", range(40 * 41))
    found = seconds_of(write_clip("h264", FORMAT, recent.last(seconds), seconds))
    assert len(found) == 40 * seconds
    assert (found[0], found[-1]) == (pytest.approx(41 - seconds, abs=1), pytest.approx(40, abs=1))
    assert recent.kept_s < 30 + 10 + 1, "one group of pictures more than the longest clip"


def test_a_webm_begins_at_the_key_frame_before() -> None:
    found = seconds_of(write_clip("vp8", FORMAT, shown("vp8", range(40 * 25)).last(10), 10))
    assert len(found) == 40 * 15 and found[-1] == pytest.approx(24, abs=1)


def test_a_stream_younger_than_that_is_given_whole() -> None:
    assert len(seconds_of(write_clip("h264", FORMAT, shown("h264", range(60)).last(10), 10))) == 60
    assert RecentFrames().last(10) == []


def test_a_pause_is_left_out_and_the_stream_goes_on_at_a_key_frame() -> None:
    recent = shown("h264", [*range(100), *range(100, 4000, 40), *range(4000, 4100)], held=range(100, 4000))
    with av.open(BytesIO(write_clip("h264", FORMAT, recent.last(10), 10))) as video:
        times = [float(frame.time or 0) for frame in video.decode(video=0)]
    assert 195 < len(times) <= 200 and times[-1] < 6


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sum(each.encoded.packet.size for each in shown("h264", range(400), key_every=40).last(30))
    monkeypatch.setattr(clip, "MOST_BYTES", whole // 3)
    kept = shown("h264", range(400), key_every=40).last(30)
    assert kept and kept[0].encoded.key
    assert sum(each.encoded.packet.size for each in kept) <= whole // 3
