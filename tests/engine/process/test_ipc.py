"""Messages as bytes, and both ends of the bridge over a real socket."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.core import Control
from streamdiff.engine import messages
from streamdiff.engine.messages import Closed, Failed, FrameBatch, SetPaused, SetPrompt, Shown
from streamdiff.engine.process.ipc import (
    _BESIDE,
    HIGH_WATER,
    KINDS,
    EngineClient,
    EngineServer,
    SerializationError,
    decode,
    encode,
)
from streamdiff.engine.timeline import LoraChange, TimedChange
from streamdiff.errors import EngineFailure

LIMIT_S = 240.0
PICTURES = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
READY = messages.Ready(
    "tiny", "cpu", 128, 96, 40.0, 12, 4, "clean", (4, 2), "keep", (7, 96), examples=("one", "two"),
    controls=(Control("x", keys=("KeyA", "KeyD")), Control("jump", "button")),
    suggestions=(("one", "two"), ("three", "four")), vocabulary="words", chunk_compute_s=0.2, max_sessions=7,
)  # fmt: skip
MESSAGES = [
    messages.Open("a", "a red circle", 5, 4, "clean"),
    messages.SetPrompt("a", "blue", "r1"),
    messages.SetPaused("a", True),
    messages.SetPaused("a", False),
    messages.SetMaxAhead("a", 24),
    messages.SetSteps("a", 2, "r3"),
    messages.Close("a"),
    messages.Shown("a", 12),
    messages.Shutdown(),
    READY,
    messages.Opened("a", 0, "text", "notice"),
    messages.Accepted("a", "r1", 1, "text"),
    messages.Applied("a", 1, 3, 36),
    messages.FrameBatch("a", 1, 3, 36, 0.25, PICTURES),
    messages.FrameBatch("a", 1, 3, 36, None, np.arange(2 * 6 * 8, dtype=np.uint8).reshape(2, 6, 8)),
    messages.SetActive("a", False, True),
    messages.Swapped("a", "host"),
    messages.Closed("a"),
    messages.Refused("a", "", "session", "why", "memory"),
    messages.LoadFigures(0.25, (0.5, 1.0), (3.0, 4.5)),
    messages.Alive(),
    messages.Failed("reason"),
    messages.Open("a", "a red circle", image=PICTURES[:1]),
    messages.Reset("a", 7, "r2", PICTURES[1:]),
    messages.Open("a", "", snapshot=b"file"),
    messages.SetInput("a", None),
    messages.SetControls("a", {"x": -0.5, "jump": 1.0}, "r5"),
    messages.SetTimeline(
        "a", (TimedChange(at=1, prompt="x"), TimedChange(at=2, controls={"shape": 0.5}, loop=True)), "r6", 0
    ),
    messages.SetLora("a", "oil", 0.5, 3, "r8"),
    messages.SetTimeline("a", (TimedChange(at=1, lora=LoraChange("oil", None)),)),
    messages.GetLog("a", "r7"),
    messages.Rewind("a", 40, 2, "r8"),
    messages.Kept("a", (7, 40)),
    messages.Kept("a", None),
    messages.Open("a", "x", changes=(TimedChange(at=1, taps={"jump": 1.0}),), facts={"weights": ["00"]}),
    messages.ControlsApplied("a", ("r5",), 3, 36),
    messages.InputFrames("a", PICTURES),
    messages.InputUsed("a", 0.5, 24, 12, "why"),
    messages.Save("a", "r4"),
    messages.Saved("a", "r4", b""),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives(message: messages.Command | messages.Event) -> None:
    back = decode([bytes(part) for part in encode(message)])
    assert type(back) is type(message)
    for item in fields(message):
        value, expected = getattr(back, item.name), getattr(message, item.name)
        assert np.array_equal(value, expected)
        assert type(value) is type(expected)


def test_every_message_there_is_was_tried() -> None:
    assert {type(message) for message in MESSAGES} == {*KINDS.values()}


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_any_text_survives(text: str) -> None:
    """Lone surrogates and zeros too: what is allowed in a prompt is not decided here."""
    message = SetPrompt("a", text, text)
    assert decode([bytes(part) for part in encode(message)]) == message


def test_pictures_are_not_copied_on_the_way() -> None:
    _, raw = encode(FrameBatch("a", 0, 0, 0, None, PICTURES))
    assert np.shares_memory(np.frombuffer(raw, np.uint8), PICTURES)
    _, raw = encode(FrameBatch("a", 0, 0, 0, None, PICTURES[:, :, ::2]))
    assert bytes(raw) == PICTURES[:, :, ::2].tobytes()


@pytest.mark.parametrize(
    ("header", "raw"),
    [
        (["Nonsense", {}], []),
        ([None, {}], []),
        (["Shown", {"session": "a"}], []),
        (["Shown", {"session": "a", "frames": 1, "more": 1}], []),
        (["Saved", {"session": "a", "request": "r", "data": {_BESIDE: None}}], []),
        (["InputFrames", {"session": "a", "pictures": {_BESIDE: [2, 3]}}], [b"x" * 7]),
        (["InputFrames", {"session": "a", "pictures": {_BESIDE: "23"}}], [b"x" * 6]),
        ([1], []),
        *((no_json, []) for no_json in (b"", b"\xff\xfe", b"{")),
    ],
)
def test_what_is_no_message_is_refused(header: object, raw: list[bytes]) -> None:
    with pytest.raises(SerializationError):
        decode([header if isinstance(header, bytes) else json.dumps(header).encode(), *raw])


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
    await client.send(SetPaused("a", True))
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
    sending = asyncio.create_task(client.send(SetPaused("a", True)))
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
    stranger.send_multipart([b'["Reboot", {}]'])
    with pytest.raises(SerializationError):
        await poll(server)
    stranger.close(linger=0)
    context.term()


async def test_a_folder_with_too_long_a_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="TMPDIR"):
        EngineClient(tmp_path / ("x" * 100))


async def collect(client: EngineClient) -> list[object]:
    return [event async for event in client.events()]
