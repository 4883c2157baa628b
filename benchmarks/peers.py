"""WHEP viewers made of aiortc, in a process of their own: for benchmarks, and for tests that stop or kill one.

    python -m benchmarks.peers http://127.0.0.1:8000/whep --count 4

Prints a JSON line per second: for each viewer the frames and bytes it got so far and its connection's state. Frames
are put together from packets but not decoded, unless `--decode` is given: one machine can then play many viewers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import queue
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import aiortc.rtcrtpreceiver
import httpx
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from av import VideoFrame

from streamdiff import clock

SDP = {"Content-Type": "application/sdp"}


@dataclass
class Seen:
    """What one viewer got so far. `first_s`: when the first frame came, in seconds of `clock.monotonic_s`; only where
    nothing is decoded."""

    frames: int = 0
    first_s: float | None = None
    bytes: int = 0
    keys: int = 0
    width: int = 0
    packets: int = 0
    lost: int = 0
    state: str = "new"


_COUNTED: weakref.WeakKeyDictionary[Any, Seen] = weakref.WeakKeyDictionary()
"""Of each track that is not decoded, by the queue of its frames."""


_decode_frames: Any = aiortc.rtcrtpreceiver.decoder_worker


def _count_or_decode(loop: Any, pictures: queue.Queue[Any], decoded: Any, *rest: Any) -> None:
    """aiortc's decoder thread, but tracks that are not to be decoded are counted. In this process only, to its end."""
    seen = _COUNTED.get(decoded)
    if seen is None:
        _decode_frames(loop, pictures, decoded, *rest)
        return
    while (task := pictures.get()) is not None:
        if seen.first_s is None:
            seen.first_s = clock.monotonic_s()
        seen.frames += 1
        seen.bytes += len(task[1].data)


async def watch(
    http: httpx.AsyncClient,
    url: str,
    decode: bool,
    *,
    look: Callable[[VideoFrame], None] = lambda frame: None,
    hear: Callable[[str], None] | None = None,
    opened: Callable[[RTCDataChannel], None] = lambda channel: None,
    token: str | None = None,
) -> tuple[RTCPeerConnection, Seen]:
    """Connect one viewer; `look` is called with every decoded frame, `hear` with what the server says on a data
    channel, which is there only for that, and `opened` with that channel when it is open. `token` is shown to the
    server.

    Raises:
        RuntimeError: the server refused; with its answer.
    """
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    seen = Seen()
    pc.addTransceiver("video", direction="recvonly")
    pc.on("connectionstatechange", lambda: setattr(seen, "state", pc.connectionState))
    if decode:
        pc.on("track", lambda track: asyncio.ensure_future(_decode(track, seen, look)))
    if hear is not None:
        channel = pc.createDataChannel("control")
        channel.on("message", hear)
        channel.on("open", lambda: opened(channel))
    try:
        await _connect(pc, http, url, seen, decode, SDP if token is None else SDP | bearer(token))
    except BaseException:
        await pc.close()
        raise
    return pc, seen


def bearer(token: str) -> dict[str, str]:
    """The header that shows a token."""
    return {"Authorization": f"Bearer {token}"}


async def _connect(
    pc: RTCPeerConnection, http: httpx.AsyncClient, url: str, seen: Seen, decode: bool, headers: dict[str, str]
) -> None:
    await pc.setLocalDescription(await pc.createOffer())
    response = await http.post(url, content=pc.localDescription.sdp, headers=headers)
    if response.status_code != 201:
        raise RuntimeError(f"{url} answered {response.status_code}: {response.text}")
    if not decode:
        aiortc.rtcrtpreceiver.decoder_worker = cast(Any, _count_or_decode)
        pc.on("track", lambda track: _COUNTED.update({track._queue: seen}))
    await pc.setRemoteDescription(RTCSessionDescription(response.text, "answer"))
    while pc.connectionState in ("new", "connecting"):
        await asyncio.sleep(0.01)


async def _decode(track: Any, seen: Seen, look: Callable[[VideoFrame], None]) -> None:
    with contextlib.suppress(MediaStreamError):
        while True:
            frame = await track.recv()
            seen.frames += 1
            seen.keys += frame.key_frame
            seen.width = frame.width
            look(frame)


async def _count_packets(pc: RTCPeerConnection, seen: Seen) -> None:
    stats = await pc.getReceivers()[0].getStats()
    inbound = [each for each in stats.values() if each.type == "inbound-rtp"]
    seen.packets = sum(each.packetsReceived for each in inbound)
    seen.lost = sum(each.packetsLost for each in inbound)


async def _run(url: str, count: int, decode: bool) -> None:
    async with httpx.AsyncClient(timeout=20) as http:
        asked = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
        viewers = [await watch(http, url, decode) for _ in range(count)]
        while not asked.is_set():
            for pc, seen in viewers:
                await _count_packets(pc, seen)
            print(json.dumps([asdict(seen) for _, seen in viewers]), flush=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asked.wait()
        await asyncio.gather(*(pc.close() for pc, _ in viewers))


def main(argv: Sequence[str] | None = None) -> int:
    """Watch until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="WHEP viewers made of aiortc")
    parser.add_argument("url", help="WHEP address, such as http://127.0.0.1:8000/whep")
    parser.add_argument("--count", type=int, default=1, help="viewers")
    parser.add_argument("--decode", action="store_true", help="decode the pictures as well")
    options = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(options.url, options.count, options.decode))
    return 0


if __name__ == "__main__":
    sys.exit(main())
