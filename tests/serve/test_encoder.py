"""The encoder, against PyAV's decoders: colours, sizes, key frames, time stamps, bit rate."""

from __future__ import annotations

import threading
from typing import Any

import av
import numpy as np
import pytest

from streamdiff.serve.codecs import Codec, Format
from streamdiff.serve.encoder import KEY_INTERVAL_S, EncoderThread, KeyGate, PictureEncoder
from streamdiff.serve.tracks import Encoded

CODECS: tuple[Codec, ...] = ("h264", "vp8")
COLOURS = [(220, 40, 40), (40, 60, 220), (40, 180, 60), (240, 220, 40), (10, 10, 10), (250, 250, 250)]


def _decoder(codec: Codec) -> Any:
    return av.CodecContext.create("h264" if codec == "h264" else "vp8", "r")


def _flat(colour: tuple[int, int, int], size: int = 64) -> np.ndarray:
    return np.full((size, size, 3), colour, np.uint8)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", [1, 2, 3])
def test_a_packet_for_every_picture_in_the_right_colour_and_size(codec: Codec, scale: int) -> None:
    encoder, decoder = PictureEncoder(codec, Format(64, 64, 40.0, scale)), _decoder(codec)
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
    encoder = PictureEncoder(codec, Format(64, 64, 40.0))
    for number in range(7):
        [encoded] = encoder.encode(_flat(COLOURS[number % 6]), number * 2250, key=number in (0, 6))
    [frame] = _decoder(codec).decode(encoded.packet)
    assert frame.width == 64


@pytest.mark.parametrize("codec", CODECS)
def test_the_bit_rate_is_kept_on_noise(codec: Codec) -> None:
    noise = np.random.default_rng(0).integers(100, 160, (30, 128, 128, 3)).astype(np.uint8)
    encoder = PictureEncoder(codec, Format(128, 128, 40.0, 2, 1_000_000))
    sizes = [encoder.encode(noise[n % 30], n * 2250, n == 0)[0].packet.size for n in range(160)]
    assert sum(sizes[40:]) * 8 / 3.0 < 2_000_000


def test_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="opened for"):
        PictureEncoder("h264", Format(64, 64, 40.0)).encode(_flat((0, 0, 0), 32), 0, True)


def test_wishes_for_key_frames_are_brought_together() -> None:
    gate = KeyGate()
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
    out: list[Encoded] = []
    arrived = threading.Semaphore(0)

    def deliver(encoded: Encoded) -> None:
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
    assert len(out) + thread.counters.dropped == 203


@pytest.mark.parametrize("codec", CODECS)
def test_another_bit_rate_holds_from_a_key_frame_on(codec: Codec) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (8, 128, 128, 3)).astype(np.uint8)
    out: list[Encoded] = []
    arrived = threading.Semaphore(0)

    def deliver(encoded: Encoded) -> None:
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
    assert thread.counters.bitrate_bps == 500_000
