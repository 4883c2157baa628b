"""Every message survives the trip, and nothing else gets through."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.engine import messages
from streamdiff.engine.process import serializer
from streamdiff.engine.process.serializer import SerializationError

PICTURES = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
MESSAGES = [
    messages.Open("a", "a red circle", 5, 4, "clean"),
    messages.Open("a", "a red circle"),
    messages.SetPrompt("a", "blue", "r1"),
    messages.Pause("a"),
    messages.Resume("a"),
    messages.Reset("a", None, "r2"),
    messages.Reset("a", 7),
    messages.SetPrompt("a", "blue", "r1", "flush"),
    messages.SetMaxAhead("a", 24),
    messages.SetSteps("a", 2, "r3"),
    messages.Close("a"),
    messages.Shown("a", 12),
    messages.Shutdown(),
    messages.Ready(
        "tiny",
        "cpu",
        128,
        96,
        40.0,
        12,
        4,
        "clean",
        (4, 2),
        "keep",
        (7, 96),
        (8, 3, 16, 16),
        2,
        ("one", "two"),
        (("one", "two"), ("three", "four")),
        "words",
    ),
    messages.Opened("a", 0, "text", "notice"),
    messages.Accepted("a", "r1", 1, "text"),
    messages.Applied("a", 1, 3, 36),
    messages.Refused("a", "r1", "prompt", "why"),
    messages.FrameBatch("a", 1, 3, 36, 0.25, PICTURES),
    messages.FrameBatch("a", 1, 3, 36, None, PICTURES[:, :, ::2]),
    messages.FrameBatch("a", 1, 3, 36, None, np.arange(2 * 6 * 8, dtype=np.uint8).reshape(2, 6, 8)),
    messages.SetActive("a", False, True),
    messages.Swapped("a", "host"),
    messages.Closed("a"),
    messages.Ready(
        "tiny", "cpu", 128, 96, 40.0, 12, 4, "clean", steps_known=(2, 4), chunk_compute_s=0.2, max_sessions=7
    ),
    messages.Refused("a", "", "session", "why", "memory"),
    messages.Measured(0.25, (0.5, 1.0), (3.0, 4.5)),
    messages.Alive(),
    messages.Open("a", "a red circle", epoch=3, made_frames=50, shown_frames=40),
    messages.Failed("reason"),
    messages.Open("a", "a red circle", image=PICTURES[:1]),
    messages.Reset("a", 7, "r2", PICTURES[1:]),
    messages.Reset("a", no_image=True),
    messages.Open("a", "", snapshot=b"file"),
    messages.SetInput("a", 0.5, "r5"),
    messages.SetInput("a", None),
    messages.InputFrames("a", PICTURES),
    messages.InputUsed("a", 0.5, 24, 12, "why"),
    messages.InputUsed("a", None, 0, 0),
    messages.Save("a", "r4"),
    messages.Saved("a", "r4", b"\0" * 9),
    messages.Saved("a", "r4", b""),
]


def decode(parts: list[serializer.Part]) -> object:
    kind = json.loads(bytes(parts[0]))["kind"]
    return (
        serializer.decode_command if kind in {c.__name__ for c in serializer.COMMANDS} else serializer.decode_event
    )(parts)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives(message: messages.Command | messages.Event) -> None:
    back = decode([bytes(part) for part in serializer.encode(message)])
    assert type(back) is type(message)
    for item in fields(message):
        value, expected = getattr(back, item.name), getattr(message, item.name)
        assert np.array_equal(value, expected)
        assert type(value) is type(expected)


def test_every_message_there_is_was_tried() -> None:
    assert {type(message) for message in MESSAGES} == {*serializer.COMMANDS, *serializer.EVENTS}


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_any_text_survives(text: str) -> None:
    """Lone surrogates and zeros too: what is allowed in a prompt is not decided here."""
    message = messages.SetPrompt("a", text, text)
    assert serializer.decode_command([bytes(part) for part in serializer.encode(message)]) == message


def test_pictures_are_not_copied_on_the_way() -> None:
    _, raw = serializer.encode(messages.FrameBatch("a", 0, 0, 0, None, PICTURES))
    assert np.shares_memory(np.frombuffer(raw, np.uint8), PICTURES)


HEADER = {"kind": "Shown", "session": "a", "frames": 3}
BATCH = {"kind": "FrameBatch", "session": "a", "epoch": 0, "chunk": 0, "first": 0, "chunk_s": None}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({**HEADER, "kind": "Nonsense"}, "unknown kind 'Nonsense'; expected Open, Save, SetPrompt"),
        ({**HEADER, "kind": "Closed"}, "unknown kind 'Closed'"),
        ({**HEADER, "kind": None}, "unknown kind None"),
        ({**HEADER, "more": 1}, r"Shown: unknown fields \['more'\], missing fields \[\]"),
        ({"kind": "Shown", "session": "a"}, r"missing fields \['frames'\]"),
        ({**HEADER, "frames": "3"}, "Shown.frames is '3', expected <class 'int'>"),
        ({**HEADER, "frames": True}, "Shown.frames is True"),
        ({**HEADER, "frames": 3.0}, "Shown.frames is 3.0"),
        ({**HEADER, "session": None}, "Shown.session is None"),
        ([1], "a header is list"),
    ],
)
def test_what_is_not_a_command_is_refused(header: object, message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        serializer.decode_command([json.dumps(header).encode()])


@pytest.mark.parametrize("raw", [[], [b"1234"], [b"12345", b"more"]])
def test_a_snapshot_of_another_size_than_told_is_refused(raw: list[bytes]) -> None:
    header = {"kind": "Saved", "session": "a", "request": "r", "data": 5}
    with pytest.raises(SerializationError, match="Saved"):
        serializer.decode_event([json.dumps(header).encode(), *raw])


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"{", b"[" * 100_000])
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(SerializationError, match="is not JSON"):
        serializer.decode_event([data])


@pytest.mark.parametrize(
    ("shape", "raw"),
    [
        ([2, 3, 4, 3], [b"x" * 71]),
        ([2, 3, 4, 3], []),
        ([2, 3, 4, 3], [b"x" * 72, b"more"]),
        ([2, 3, 4, 1], [b"x" * 24]),
        ([0, 3, 4, 3], [b""]),
        ([-2, -3, 4, 3], [b"x" * 72]),
        ([24, 3], [b"x" * 72]),
        ([2, 6, 8], [b"x" * 95]),
        ([2, 6, 7], [b"x" * 84]),
        ([2, 5, 8], [b"x" * 80]),
        ("2343", [b"x" * 72]),
    ],
)
def test_pictures_that_do_not_fit_their_shape_are_refused(shape: object, raw: list[bytes]) -> None:
    with pytest.raises(SerializationError):
        serializer.decode_event([json.dumps({**BATCH, "pictures": shape}).encode(), *raw])


@pytest.mark.parametrize(
    "pictures", [PICTURES.astype(np.float32), PICTURES[0], PICTURES[:0], PICTURES[..., :2], PICTURES.tolist(), None]
)
def test_a_sender_with_a_fault_is_told_at_once(pictures: object) -> None:
    with pytest.raises(SerializationError, match=r"FrameBatch\.pictures"):
        serializer.encode(messages.FrameBatch("a", 0, 0, 0, None, pictures))  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match=r"Shown\.frames"):
        serializer.encode(messages.Shown("a", "many"))  # type: ignore[arg-type]
