"""The data channel of a viewer that misuses it or opens it again, with real aiortc peers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.serve.conftest import Peer, Site, run_scene


def _reopen(peer: Peer) -> None:
    """Open another channel `control` on a peer's connection. Mutates: peer."""
    peer.messages.clear()
    peer.channel = peer.pc.createDataChannel("control")

    @peer.channel.on("message")
    def on_message(text: str) -> None:
        peer.messages.append(json.loads(text))
        peer.arrived.set()


def test_a_control_channel_that_was_closed_may_be_opened_again_and_a_second_one_beside_it_may_not() -> None:
    async def scene(site: Site) -> None:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        beside = peer.pc.createDataChannel("control")
        await site.until(lambda: beside.readyState == "closed")
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

    run_scene(scene)


def test_a_control_channel_may_be_opened_before_the_end_of_the_old_one_is_known() -> None:
    async def scene(site: Site) -> None:
        peer = await site.watch()
        await peer.message({"type": "hello"})
        [viewer] = site.services.viewers._viewers.values()
        old: Any = viewer.channel
        # Both packets leave together: the server hears of the new channel while the old one is still "closing".
        peer.channel.close()
        _reopen(peer)
        await peer.message({"type": "hello"})
        await site.until(lambda: old._channel.readyState == "closed")
        peer.channel.send('{"type": "ping", "id": 1}')
        await peer.message({"type": "pong", "id": 1})
        await peer.message({"type": "stats"})

    run_scene(scene)
