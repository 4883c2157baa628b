"""The data channel of a viewer that misuses it or opens it again, with real aiortc peers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiortc.rtcsctptransport import WEBRTC_DCEP, WEBRTC_STRING, DataChunk, HeartbeatChunk, SackChunk

from streamdiff.server.webrtc import aiortc_compat
from tests.server.conftest import Peer, Site, open_site


def _reopen(peer: Peer) -> None:
    """Open another channel `control` on a peer's connection. Mutates: peer."""
    peer.messages.clear()
    peer.open_channel()


async def test_a_control_channel_that_was_closed_may_be_opened_again_and_a_second_one_beside_it_may_not() -> None:
    async with open_site() as site:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        beside = [peer.pc.createDataChannel(label) for label in ("control", "gossip")]
        await site.until(lambda: {each.readyState for each in beside} == {"closed"})
        assert peer.channel.readyState == "open"
        for number in range(3):
            peer.channel.close()
            await site.until(lambda: peer.channel.readyState == "closed")
            _reopen(peer)
            await peer.message({"type": "hello"})
            peer.channel.send(json.dumps({"type": "ping", "id": number}))
            await peer.message({"type": "pong", "id": number})
            await peer.message({"type": "stats"})
        speaking = [task for task in asyncio.all_tasks() if task.get_name().startswith(("control-", "stats-"))]
        assert len(speaking) == 2, "the conversations over closed channels have ended"
        await peer.frame()


async def test_a_control_channel_may_be_opened_before_the_end_of_the_old_one_is_known() -> None:
    async with open_site() as site:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        [viewer] = site.state.viewers._peers.values()
        old: Any = viewer.channel
        # Both packets leave together: the server hears of the new channel while the old one is still "closing".
        peer.channel.close()
        _reopen(peer)
        await peer.message({"type": "hello"})
        await site.until(lambda: old._channel.readyState == "closed")
        peer.channel.send('{"type": "ping", "id": 1}')
        await peer.message({"type": "pong", "id": 1})
        await peer.message({"type": "stats"})


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _ended(site: Site, end: str) -> bool:
    return f'viewers_ended_total{{end="{end}"}} 1.0'.encode() in site.state.metrics.text()


@pytest.mark.slow
async def test_a_peer_that_sends_megabytes_in_one_message_is_let_go_before_they_are_held() -> None:
    async with open_site() as site:
        peer, other = await site.watch(), await site.watch()
        await asyncio.gather(peer.message({"type": "hello"}), other.message({"type": "hello"}))
        [viewer, _] = site.state.viewers._peers.values()
        held = 0
        receive = viewer.sender.pc.sctp._receive_chunk  # type: ignore[union-attr]

        async def watched(chunk: Any) -> None:
            nonlocal held
            try:
                await receive(chunk)
            finally:
                streams = viewer.sender.pc.sctp._inbound_streams.values()  # type: ignore[union-attr]
                held = max(held, sum(len(each.user_data) for stream in streams for each in stream.reassembly))

        viewer.sender.pc.sctp._receive_chunk = watched  # type: ignore[method-assign,union-attr]
        peer.pc.sctp._remote_max_message_size = 0
        peer.channel.send("x" * 8_000_000)
        await site.until(lambda: site.state.viewers.count == 1)
        assert _ended(site, "data_limit")
        assert 100_000 < held < 400_000
        other.channel.send('{"type":"ping","id":1}')
        await other.message({"type": "pong", "id": 1})
        await other.frame()


def _chunk(peer: Peer, data: bytes = b"x", flags: int = 3, ahead: int = 0, stream_id: int = 1) -> DataChunk:
    """A data chunk as `peer` would send it next, or `ahead` of that."""
    sctp = peer.pc.sctp
    chunk = DataChunk(flags=flags)
    chunk.tsn = (sctp._local_tsn + ahead) % 2**32
    chunk.stream_id, chunk.stream_seq, chunk.protocol, chunk.user_data = stream_id, 0, WEBRTC_STRING, data
    return chunk


def _many_streams(peer: Peer) -> list[Any]:
    return [_chunk(peer, ahead=number, stream_id=100 + number) for number in range(100)]


def _messages_after_a_gap(peer: Peer) -> list[Any]:
    """Each is complete and delivered at once (unordered); the first one that is missing never comes."""
    return [_chunk(peer, flags=7, ahead=1 + number) for number in range(400)]


def _tiny_fragments(peer: Peer) -> list[Any]:
    return [_chunk(peer, flags=2 if number == 0 else 0, ahead=number) for number in range(400)]


def _heartbeats(peer: Peer) -> list[Any]:
    return [HeartbeatChunk() for _ in range(1000)]


def _huge_acknowledgement(peer: Peer) -> list[Any]:
    chunk = SackChunk()
    chunk.cumulative_tsn, chunk.gaps = peer.pc.sctp._last_received_tsn, [(1, 65535)] * 10
    return [chunk]


@pytest.mark.slow
@pytest.mark.parametrize(
    "chunks", [_many_streams, _messages_after_a_gap, _tiny_fragments, _heartbeats, _huge_acknowledgement]
)
async def test_a_peer_that_speaks_sctp_of_its_own_to_make_work_is_let_go(
    chunks: Callable[[Peer], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aiortc_compat, "CHUNK_BURST", 500.0)
    monkeypatch.setattr(aiortc_compat, "CHUNKS_PER_S", 0.001)

    async with open_site() as site:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        for chunk in chunks(peer):
            await peer.pc.sctp._send_chunk(chunk)
            await asyncio.sleep(0)
            if site.state.viewers.count == 0:
                break
        await site.until(lambda: site.state.viewers.count == 0)
        assert _ended(site, "data_limit")


# ---- what cannot be read ---------------------------------------------------------------------------------------------


async def test_text_that_is_not_utf8_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with open_site() as site:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        await peer.pc.sctp._send(peer.channel.id, WEBRTC_STRING, b'{"type":"ping","id":"\xff"}')
        assert "UTF-8" in (await peer.message({"type": "error", "code": "binary"}))["message"]
        assert b'streamdiff_control_total{result="binary",type="any"} 1.0' in site.state.metrics.text()
        peer.channel.send('{"type":"ping","id":5}')
        await peer.message({"type": "pong", "id": 5})
        await peer.frame()
    assert "Traceback" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stream", "packet"),
    [(None, b"\x03" + bytes(11)), (101, b"\x03" + bytes(8) + b"\x01\x00\x00" + b"\xff"), (101, b"\x02")],
    ids=["opened again", "a label of bytes", "nothing acknowledged"],
)
async def test_a_peer_whose_channel_packets_cannot_be_read_is_let_go_in_one_line(
    stream: int | None, packet: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site() as site:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        await peer.pc.sctp._send(stream or peer.channel.id, WEBRTC_DCEP, packet)
        await site.until(lambda: site.state.viewers.count == 0)
        assert _ended(site, "data_malformed")
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
