"""The encoder, against PyAV's decoders: colours, sizes, key frames, time stamps, bit rate."""

from __future__ import annotations

import threading
from queue import Queue
from typing import Any

import av
import numpy as np
import pytest
import torch

from streamdiff import clock
from streamdiff.models.autoencoder.picture_decoder import yuv420p
from streamdiff.server.media import encoder
from streamdiff.server.media.codecs import Codec, Format
from streamdiff.server.media.encoder import (
    KEY_INTERVAL_S,
    REOPEN_S,
    EncodedFrame,
    EncoderThread,
    KeyframeLimiter,
    VideoEncoder,
    as_rgb,
)
from streamdiff.video.pixel_format import shape_of

CODECS: tuple[Codec, ...] = ("h264", "vp8")
COLOURS = [(220, 40, 40), (40, 60, 220), (40, 180, 60), (240, 220, 40), (10, 10, 10), (250, 250, 250)]


def _decoder(codec: Codec) -> Any:
    return av.CodecContext.create("h264" if codec == "h264" else "vp8", "r")


def _flat(colour: tuple[int, int, int], size: int = 64) -> np.ndarray:
    return np.full((size, size, 3), colour, np.uint8)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", [1, 2, 3])
def test_a_packet_for_every_picture_in_the_right_colour_and_size(codec: Codec, scale: int) -> None:
    encoder, decoder = VideoEncoder(codec, Format(64, 64, 40.0, scale)), _decoder(codec)
    for number, colour in enumerate(COLOURS * 2):
        [encoded] = encoder.encode(_flat(colour), number * 2250, key=number == 0)
        assert encoded.pts == number * 2250
        assert encoded.key == (number == 0)
        [frame] = decoder.decode(encoded.packet)
        assert (frame.width, frame.height) == (64 * scale, 64 * scale)
        matrix = "ITU709" if codec == "h264" else "ITU601"
        shown = frame.to_ndarray(format="rgb24", src_colorspace=matrix)[20, 20]
        assert np.abs(shown.astype(int) - colour).max() <= 12


@pytest.mark.parametrize("codec", CODECS)
def test_a_key_frame_can_be_decoded_alone(codec: Codec) -> None:
    encoder = VideoEncoder(codec, Format(64, 64, 40.0))
    for number in range(7):
        [encoded] = encoder.encode(_flat(COLOURS[number % 6]), number * 2250, key=number in (0, 6))
    [frame] = _decoder(codec).decode(encoded.packet)
    assert frame.width == 64


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_the_bit_rate_is_kept_on_noise(codec: Codec) -> None:
    noise = np.random.default_rng(0).integers(100, 160, (30, 128, 128, 3)).astype(np.uint8)
    encoder = VideoEncoder(codec, Format(128, 128, 40.0, 2, 1_000_000))
    sizes = [encoder.encode(noise[n % 30], n * 2250, n == 0)[0].packet.size for n in range(160)]
    assert sum(sizes[40:]) * 8 / 3.0 < 2_000_000


def test_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="opened for"):
        VideoEncoder("h264", Format(64, 64, 40.0)).encode(_flat((0, 0, 0), 32), 0, True)


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


@pytest.mark.parametrize("codec", CODECS)
def test_the_thread_delivers_in_order_and_drops_the_oldest_when_flooded(codec: Codec) -> None:
    out: list[EncodedFrame] = []
    arrived = threading.Semaphore(0)

    def deliver(encoded: EncodedFrame) -> None:
        out.append(encoded)
        arrived.release()

    thread = EncoderThread(codec, Format(64, 64, 40.0), deliver)
    try:
        for number in range(3):
            thread.submit(_flat(COLOURS[number]), number * 2250)
            assert arrived.acquire(timeout=20)
        for number in range(3, 203):
            thread.submit(_flat(COLOURS[number % 6]), number * 2250)
        while not out or out[-1].pts != 202 * 2250:
            assert arrived.acquire(timeout=20)
    finally:
        thread.stop()
    stamps = [encoded.pts for encoded in out]
    assert stamps == sorted(set(stamps))
    assert out[0].key
    assert len(out) + thread.dropped == 203


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_another_bit_rate_holds_from_a_key_frame_on(codec: Codec) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (8, 128, 128, 3)).astype(np.uint8)
    out: list[EncodedFrame] = []
    arrived = threading.Semaphore(0)

    def deliver(encoded: EncodedFrame) -> None:
        out.append(encoded)
        arrived.release()

    thread = EncoderThread(codec, Format(128, 128, 40.0, 1, 4_000_000), deliver)
    try:
        for number in range(120):
            if number == 60:
                thread.set_bitrate(500_000)
            thread.submit(noise[number % 8], number * 2250)
            assert arrived.acquire(timeout=20)
    finally:
        thread.stop()
    assert out[60].key
    assert not any(encoded.key for encoded in out[1:60])
    before, after = (sum(encoded.packet.size for encoded in part) for part in (out[20:60], out[80:120]))
    assert after < before / 2
    assert thread._opened.bitrate_bps == 500_000


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


class _Fed:
    """An encoder thread that is given one picture after the other."""

    def __init__(self, codec: Codec, fmt: Format) -> None:
        self.thread = EncoderThread(codec, fmt, lambda encoded: None)
        self._given = 0
        self._made: Queue[list[EncodedFrame]] = Queue()
        encode = self.thread._encode

        def noted(*picture: Any) -> list[EncodedFrame]:
            packets = encode(*picture)
            self._made.put(packets)
            return packets

        self.thread._encode = noted  # type: ignore[method-assign]

    def give(self) -> list[EncodedFrame]:
        """What becomes of the next picture."""
        self.thread.submit(_flat(COLOURS[self._given % 6]), self._given * 2250)
        self._given += 1
        return self._made.get(timeout=20)


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_that_cannot_be_opened_for_another_rate_goes_on_with_the_old_one(
    codec: Codec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = _Works(monkeypatch)
    fed = _Fed(codec, Format(64, 64, 40.0, 1, 1_000_000))
    try:
        assert [each.key for each in fed.give()] == [True]
        library.opens = False
        fed.thread.set_bitrate(500_000)
        for _ in range(8):
            assert [each.key for each in fed.give()] == [False]
        assert len(library.threads) == 3, "at the next picture again, then once a second"
        assert (fed.thread._opened.bitrate_bps, fed.thread.failing_since_s) == (1_000_000, None)
        library.opens = True
        library.now_s += REOPEN_S
        assert [each.key for each in fed.give()] == [True]
        assert fed.thread._opened.bitrate_bps == 500_000
    finally:
        fed.thread.stop()
    assert caplog.text.count("cannot be opened") == 1


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_that_fails_is_opened_again_once_a_second_until_it_works(
    codec: Codec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = _Works(monkeypatch)
    fed = _Fed(codec, Format(64, 64, 40.0))
    try:
        assert fed.give()
        library.encodes = False
        assert fed.give() == []
        library.encodes, library.opens = True, False
        for _ in range(8):
            assert fed.give() == []
        assert len(library.threads) == 2
        assert fed.thread.failing_since_s == 100.0
        library.opens = True
        assert fed.give() == []
        library.now_s += REOPEN_S
        assert [each.key for each in fed.give()] == [True]
        assert fed.thread.failing_since_s is None
        assert fed.thread.dropped == 9
    finally:
        fed.thread.stop()
    assert caplog.text.count("It is opened again") == 1


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_that_cannot_be_opened_at_first_is_when_it_can(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Works(monkeypatch)
    library.opens = False
    fed = _Fed(codec, Format(64, 64, 40.0))
    try:
        assert fed.give() == []
        library.opens = True
        library.now_s += REOPEN_S
        assert [each.key for each in fed.give()] == [True]
    finally:
        fed.thread.stop()


@pytest.mark.parametrize("codec", CODECS)
def test_changes_of_the_format_that_follow_each_other_closely_share_a_key_frame(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Works(monkeypatch)
    fed = _Fed(codec, Format(64, 64, 40.0))
    try:
        assert [each.key for each in fed.give()] == [True]
        keys = []
        for number in range(20):
            for fps in (10.0, 20.0, 30.0 + number % 2):
                fed.thread.set_format(Format(64, 64, fps))
            keys += [each.key for each in fed.give()]
        assert keys == [True] + 19 * [False]
        library.now_s += REOPEN_S
        assert [each.key for each in fed.give()] == [True], "the latest"
        assert fed.thread._opened.fps == 31.0
        fed.thread.set_format(Format(64, 64, 31.0))
        library.now_s += REOPEN_S
        assert [each.key for each in fed.give()] == [False], "no other format"
    finally:
        fed.thread.stop()
    assert library.threads == 3 * [f"encoder-{codec}"]


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


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", [1, 2])
def test_yuv420_comes_out_in_the_right_colours(codec: Codec, scale: int) -> None:
    encoder, decoder = VideoEncoder(codec, Format(64, 48, 40.0, scale)), _decoder(codec)
    matrix = "ITU709" if codec == "h264" else "ITU601"
    for number, colour in enumerate(COLOURS * 2):
        picture = np.full((48, 64, 3), colour, np.uint8)
        [encoded] = encoder.encode(_planes(picture), number * 2250, key=number == 0)
        [frame] = decoder.decode(encoded.packet)
        assert (frame.width, frame.height) == (64 * scale, 48 * scale)
        shown = frame.to_ndarray(format="rgb24", src_colorspace=matrix)[20, 20]
        assert np.abs(shown.astype(int) - colour).max() <= 12


def test_h264_of_either_kind_of_picture_is_the_same_picture() -> None:
    shown = []
    for picture in (_smooth(), _planes(_smooth())):
        encoder, decoder = VideoEncoder("h264", Format(64, 48, 40.0, 1, 8_000_000)), _decoder("h264")
        for number in range(4):
            [encoded] = encoder.encode(picture, number * 2250, key=number == 0)
            [frame] = decoder.decode(encoded.packet)
        shown.append(frame.to_ndarray().astype(int))
    assert np.abs(shown[0] - shown[1]).mean() <= 1


def test_a_picture_of_either_kind_can_be_had_as_rgb() -> None:
    assert as_rgb(_smooth()) is not None and np.array_equal(as_rgb(_smooth()), _smooth())
    for colour in COLOURS:
        back = as_rgb(_planes(_flat(colour)))
        assert back.shape == (64, 64, 3) and np.abs(back.astype(int) - colour).max() <= 3


@pytest.mark.parametrize("shape", [(64, 64), (48, 64, 4), (48, 63), (0, 64, 3), (64,)])
def test_what_is_no_picture_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"a picture is of shape|opened for"):
        VideoEncoder("h264", Format(64, 64, 40.0)).encode(np.zeros(shape, np.uint8), 0, True)
