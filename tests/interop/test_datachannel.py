"""A third-party WHIP sender and WHEP viewer: libdatachannel in Node, the WebRTC stack of OBS, used as OBS does.

`tools/interop.sh` installs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from aiortc.codecs import depayload
from aiortc.rtcrtpparameters import RTCRtpCodecParameters
from aiortc.rtp import RtpPacket

from tests.server.conftest import LIMIT_S, open_site
from tests.server.routes.test_whip import fed, served, state, used
from tests.server.scripted import COLOURS

pytestmark = [pytest.mark.slow, pytest.mark.interop, pytest.mark.node]

PEER = Path(__file__).with_name("datachannel_peer.js")
GREEN = (20, 200, 30)
H264 = RTCRtpCodecParameters("video/H264", 90000, payloadType=96)


@contextlib.asynccontextmanager
async def peer(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("node", str(PEER), *words, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def left(process: asyncio.subprocess.Process) -> None:
    """Waits until it has gone, with a DELETE that was answered with 200."""
    _, complaint = await process.communicate(b"")
    assert process.returncode == 0, complaint.decode()


def green(file: Path) -> Path:
    """30 access units of H.264, the first a key frame, each after its length."""
    options = {"profile": "baseline", "g": "30", "bf": "0", "tune": "zerolatency", "preset": "ultrafast"}
    encoder: Any = av.CodecContext.create("libx264", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.framerate = 640, 360, "yuv420p", 30
    encoder.time_base, encoder.options = 1 / encoder.framerate, options
    picture = np.random.default_rng(0).integers(0, 3, (360, 640, 3), np.uint8) + np.array(GREEN, np.uint8)
    frames = [av.VideoFrame.from_ndarray(picture, "rgb24") for _ in range(30)]
    units = [bytes(packet) for frame in [*frames, None] for packet in encoder.encode(frame)]
    assert len(units) == 30 and len(units[0]) > 1200, "one that takes several packets is among them"
    file.write_bytes(b"".join(struct.pack("!I", len(unit)) + unit for unit in units))
    return file


async def test_libdatachannel_feeds_a_session_as_obs_does(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    async with served() as site:
        await (await site.watch()).frame()
        async with peer("send", f"{site.base}/whip", str(green(tmp_path / "green.h264"))) as sender:
            figures = await used(site, 24)
            assert figures["size"] == [640, 360]
            assert np.abs(np.median(fed(site)[-1].reshape(-1, 3), axis=0) - GREEN).max() < 30
            assert (await state(site))["input"] == {"kind": "WHIP sender", "strength": 0.4, "fault": ""}
            await left(sender)
        assert (await state(site))["input"] is None and not site.state.feeders._peers


async def colour(viewer: asyncio.subprocess.Process, decoder: Any, wanted: str) -> int:
    """Decodes what comes until the picture has that colour: how many pictures it took."""
    assert viewer.stdout is not None
    unit, seen = b"", 0
    async with asyncio.timeout(LIMIT_S):
        while True:
            (length,) = struct.unpack("!I", await viewer.stdout.readexactly(4))
            packet = RtpPacket.parse(await viewer.stdout.readexactly(length))
            unit += depayload(H264, packet.payload)
            if not packet.marker:
                continue
            for frame in decoder.decode(av.Packet(unit)):
                seen += 1
                assert (frame.width, frame.height) == (128, 128)
                if np.abs(frame.to_ndarray(format="rgb24")[40, 40].astype(int) - COLOURS[wanted]).max() < 30:
                    return seen
            unit = b""


async def test_libdatachannel_plays_the_stream_and_steers_it() -> None:
    async with open_site() as site, peer("watch", f"{site.base}/whep") as viewer:
        assert viewer.stdin is not None and viewer.stderr is not None
        decoder = av.CodecContext.create("h264", "r")
        await colour(viewer, decoder, "red")
        viewer.stdin.write(json.dumps({"type": "prompt", "id": 7, "prompt": "a blue circle"}).encode() + b"\n")
        await colour(viewer, decoder, "blue")
        stages = set()
        async with asyncio.timeout(LIMIT_S):
            while "shown" not in stages:
                message = json.loads(await viewer.stderr.readline())
                stages |= {message["stage"]} if message.get("id") == 7 else set()
        await left(viewer)
        assert site.state.viewers.count == 0
