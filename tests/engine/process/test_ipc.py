"""Both ends of the bridge over a real socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from streamdiff.engine.messages import Closed, Failed, FrameBatch, Pause, SetPrompt, Shown
from streamdiff.engine.process.ipc import HIGH_WATER, EngineClient, EngineServer
from streamdiff.engine.process.serializer import SerializationError
from streamdiff.errors import EngineFailure

LIMIT_S = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EngineServer]:
    server = EngineServer(tmp_path, stall_s=0.2)
    yield server
    server.close(linger_s=0)


def batch(number: int) -> FrameBatch:
    return FrameBatch("a", 0, number, number * 4, None, np.full((4, 8, 8, 3), number % 256, np.uint8))


async def poll(server: EngineServer) -> list[object]:
    return list(await asyncio.to_thread(server.poll, LIMIT_S))


async def test_commands_arrive_in_order(tmp_path: Path, server: EngineServer) -> None:
    client = EngineClient(tmp_path)
    sent = [SetPrompt("a", f"prompt {number}", str(number)) for number in range(50)]
    for command in sent:
        await client.send(command)
    received: list[object] = []
    while len(received) < 50:
        received += await poll(server)
    assert received == sent
    assert server.poll(0) == []
    client.close()


async def test_events_and_their_pictures_arrive_in_order(tmp_path: Path, server: EngineServer) -> None:
    client = EngineClient(tmp_path)
    events = client.events()
    for number in range(20):
        server.send(batch(number))
    for number in range(20):
        event = await asyncio.wait_for(anext(events), LIMIT_S)
        assert isinstance(event, FrameBatch)
        assert np.array_equal(event.pictures, batch(number).pictures)
        assert not event.pictures.flags.writeable
    await events.aclose()
    client.close()


async def test_pictures_may_be_written_again_after_send(tmp_path: Path, server: EngineServer) -> None:
    client = EngineClient(tmp_path)
    sent = batch(1)
    server.send(sent)
    sent.pictures[:] = 99
    async for event in client.events():
        assert isinstance(event, FrameBatch)
        assert int(event.pictures[0, 0, 0, 0]) == 1
        break
    client.close()


async def test_a_wake_descriptor_ends_a_waiting_poll(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    server = EngineServer(tmp_path, wake_fd=reader)
    waiting = asyncio.create_task(asyncio.to_thread(server.poll, None))
    os.write(writer, b"x")
    assert await asyncio.wait_for(waiting, LIMIT_S) == []
    server.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.slow
async def test_a_reader_that_reads_nothing_stops_the_engine_and_not_its_memory(
    tmp_path: Path, server: EngineServer
) -> None:
    client = EngineClient(tmp_path)
    big = FrameBatch("a", 0, 0, 0, None, np.zeros((1, 256, 256, 3), np.uint8))
    sent = 0
    with pytest.raises(EngineFailure, match=f"has read nothing for 0.2 s; {HIGH_WATER} messages wait"):
        while sent < 10 * HIGH_WATER:
            await asyncio.to_thread(server.send, big)
            sent += 1
    assert sent <= 2 * HIGH_WATER + 64, "both sides' queues, and what the kernel holds"
    client.close()


@pytest.mark.slow
async def test_an_engine_that_reads_nothing_holds_its_caller_back(tmp_path: Path, server: EngineServer) -> None:
    client = EngineClient(tmp_path)
    await client.send(Pause("a"))
    await poll(server)  # connected
    command = SetPrompt("a", "x" * 50_000)
    sent = 0

    async def flood() -> None:
        nonlocal sent
        while True:
            await client.send(command)
            sent += 1

    flooding = asyncio.create_task(flood())
    before = -1
    while before != sent:  # until it stands still
        before = sent
        await asyncio.sleep(0.3)
    assert 0 < sent <= 2 * HIGH_WATER + 64
    assert not flooding.done()
    assert await poll(server)
    while sent == before:
        await poll(server)
        await asyncio.sleep(0)
    flooding.cancel()
    client.close()


async def test_the_end_of_the_engine_reaches_everyone(tmp_path: Path, server: EngineServer) -> None:
    client = EngineClient(tmp_path)
    server.send(batch(0))
    server.send(Closed("a"))
    collecting = asyncio.create_task(collect(client))
    client.end(Failed("it is gone"))
    kinds = [type(event) for event in await asyncio.wait_for(collecting, LIMIT_S)]
    assert kinds == [FrameBatch, Closed, Failed], "what was sent before arrives, then the reason"
    with pytest.raises(EngineFailure, match="it is gone"):
        await client.send(Shown("a", 1))
    client.close()


async def test_an_engine_that_said_why_is_not_spoken_over(tmp_path: Path, server: EngineServer) -> None:
    client = EngineClient(tmp_path)
    server.send(Failed("my own words"))
    client.end(Failed("it is gone"))
    assert await asyncio.wait_for(collect(client), LIMIT_S) == [Failed("my own words")]
    client.close()


async def test_a_waiting_reader_and_sender_end_with_the_engine(tmp_path: Path) -> None:
    """Nobody is connected: the sender waits for ever, were it not for the end."""
    client = EngineClient(tmp_path)
    collecting = asyncio.create_task(collect(client))
    sending = asyncio.create_task(client.send(Pause("a")))
    await asyncio.sleep(0)
    client.end(None)
    assert await asyncio.wait_for(collecting, LIMIT_S) == []
    with pytest.raises(EngineFailure, match="the engine has ended"):
        await asyncio.wait_for(sending, LIMIT_S)
    client.close()


async def test_a_cancelled_reader_loses_nothing(tmp_path: Path, server: EngineServer) -> None:
    client = EngineClient(tmp_path)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(client.events()), 0.05)
    server.send(Closed("a"))
    assert await asyncio.wait_for(anext(client.events()), LIMIT_S) == Closed("a")
    client.close()


async def test_bytes_that_are_not_a_command(tmp_path: Path, server: EngineServer) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.PAIR)
    stranger.bind(f"ipc://{tmp_path}/engine")
    stranger.send_multipart([b'{"kind":"Reboot"}'])
    with pytest.raises(SerializationError, match="Reboot"):
        await poll(server)
    stranger.close(linger=0)
    context.term()


async def test_a_folder_with_too_long_a_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="TMPDIR"):
        EngineClient(tmp_path / ("x" * 100))


async def collect(client: EngineClient) -> list[object]:
    return [event async for event in client.events()]
