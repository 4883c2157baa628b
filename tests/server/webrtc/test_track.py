"""The queue of one viewer: bounded, begins with a key frame, and begins again with one after a loss."""

from __future__ import annotations

import asyncio

import av
import pytest
from aiortc.mediastreams import MediaStreamError
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.server.media.encoder import EncodedFrame, PacketQueue
from streamdiff.server.webrtc.sender import ViewerTrack


def _encoded(number: int, key: bool = False) -> EncodedFrame:
    packet = av.Packet(b"x")
    packet.pts = number
    return EncodedFrame(packet, number, key)


def _drain(queue: PacketQueue) -> list[int]:
    found = []
    while (encoded := queue.get()) is not None:
        found.append(encoded.pts)
    return found


def test_a_viewer_begins_with_a_key_frame() -> None:
    queue = PacketQueue()
    assert queue.put(_encoded(1))
    assert not queue.put(_encoded(2, key=True))
    assert not queue.put(_encoded(3))
    assert _drain(queue) == [2, 3]
    assert queue.dropped == 1


def test_a_viewer_too_far_behind_skips_to_the_next_key_frame() -> None:
    queue = PacketQueue(limit=3)
    queue.put(_encoded(0, key=True))
    queue.put(_encoded(1))
    queue.put(_encoded(2))
    assert queue.put(_encoded(3)), "it asks for a key frame"
    assert queue.put(_encoded(4))
    assert _drain(queue) == []
    queue.put(_encoded(5, key=True))
    queue.put(_encoded(6))
    assert _drain(queue) == [5, 6]
    assert queue.dropped == 5


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4))))
def test_never_above_the_limit_and_every_gap_ends_with_a_key_frame(steps: list[tuple[bool, int]]) -> None:
    queue = PacketQueue(limit=4)
    out: list[EncodedFrame] = []
    for number, (key, reads) in enumerate(steps):
        queue.put(_encoded(number, key))
        assert len(queue) <= 4
        out += [encoded for _ in range(reads) if (encoded := queue.get()) is not None]
    assert [encoded.pts for encoded in out] == sorted({encoded.pts for encoded in out})
    for before, after in zip([None, *out], out, strict=False):
        assert after.key or (before is not None and after.pts == before.pts + 1)
    assert len(out) + len(queue) + queue.dropped == len(steps)


def test_the_track_says_when_it_starts_and_ends_when_it_is_stopped() -> None:
    async def scene() -> None:
        started: list[ViewerTrack] = []
        wanted: list[int] = []
        track = ViewerTrack(started.append, lambda: wanted.append(1))
        receiving = asyncio.create_task(track.recv())
        await asyncio.sleep(0)
        assert started == [track]
        track.put(_encoded(1))
        assert wanted == [1]
        track.put(_encoded(2, key=True))
        assert (await receiving).pts == 2
        receiving = asyncio.create_task(track.recv())
        await asyncio.sleep(0)
        track.stop()
        with pytest.raises(MediaStreamError):
            await receiving
        assert started == [track]

    asyncio.run(scene())
