"""The last seconds of a stream as a file: as long as asked for, up to what was shown last, within a bound of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO

import av
import numpy as np
import pytest

from streamdiff.server.media import clip
from streamdiff.server.media.clip import RecentFrames, write_clip
from streamdiff.server.media.encoder import Codec, Format, VideoEncoder

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
