"""The validator of messages, whose description is what is obeyed, and the tracker of open requests."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamdiff.server.problem import Problem
from streamdiff.server.routes.schemas import NewSession, SessionChange, read
from streamdiff.server.sessions.control import (
    MESSAGES,
    Body,
    ControlError,
    PromptMessage,
    RequestTracker,
    StepsMessage,
    message_schema,
    parse,
)


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"type": "prompt", "prompt": " a \n red\tcircle ", "id": 7}, {"prompt": "a red circle"}),
        ({"type": "prompt", "prompt": "x" * 2000, "id": "abc", "switch": "flush", "if_rev": 4}, {}),
        ({"type": "reset"}, {}),
        ({"type": "reset", "seed": 2**31 - 1}, {}),
        ({"type": "pause", "id": "x" * 64, "if_rev": 0}, {}),
        ({"type": "resume", "id": None, "if_rev": None}, {}),
        ({"type": "ping", "id": -(2**53) + 1}, {}),
        ({"type": "steps", "steps": 2, "id": 1, "if_rev": 3}, {}),
        ({"type": "fps", "fps": 24, "id": 1}, {"fps": 24.0}),
    ],
)
def test_good_messages(message: dict[str, object], read: dict[str, object]) -> None:
    assert parse(json.dumps(message)).model_dump(exclude_unset=True) == message | read


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ("", "bad_json", ""),
        ("[" * 100_000, "bad_json", ""),
        ('{"type": "ping", "' + "x" * 15_000 + '": 1}', "unknown_field", "x" * 40),
        ('{"type": "pause", "\\ud800": 1}', "bad_json", ""),
        (json.dumps({"type": "prompt", "prompt": "x" * 2001}), "bad_prompt", "prompt"),
    ],
)
def test_bad_messages_name_the_field(text: str, code: str, field: str) -> None:
    """Others are in tests/messages.txt."""
    with pytest.raises(ControlError) as caught:
        parse(text)
    assert (caught.value.code, caught.value.field) == (code, field)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        ("ping", "id", ["true", "2.5", "9007199254740993", "9" * 4000, '{"a": 1}', f'"{"x" * 65}"']),
        ("reset", "seed", ["-1", "2147483648", "1e999", "0.5", "true", '"7"']),
        ("prompt", "switch", ['"explode"', '["keep"]', '""']),
        ("steps", "steps", ["0", "1001", "2.5", "true", '"2"']),
        ("fps", "fps", ["true", "1e999", "0.5"]),
        ("pause", "if_rev", ['"1"']),
    ],
)
def test_values_out_of_range_name_the_field_and_the_message(kind: str, field: str, values: list[str]) -> None:
    prompt = ', "prompt": "a"' if kind == "prompt" else ""
    own = "" if field == "id" else ', "id": 12'
    for value in values:
        with pytest.raises(ControlError) as caught:
            parse(f'{{"type": "{kind}"{prompt}{own}, "{field}": {value}}}')
        assert (caught.value.code, caught.value.field) == ("out_of_range", field), value
        assert caught.value.id == (12 if own else None) and len(str(caught.value)) < 300


_json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), lambda each: st.lists(each) | st.dictionaries(st.text(), each)
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(_json)
def test_any_json_is_a_control_or_a_control_error(value: object) -> None:
    try:
        parse(json.dumps(value))
    except ControlError as error:
        assert error.code


def test_a_request_is_followed_to_the_screen() -> None:
    tracker = RequestTracker()
    request = tracker.begin(PromptMessage(type="prompt", id=7, prompt="a"), "me", 1.0)
    [accepted] = tracker.accepted(request, 3, "a red a", "", 1.1)
    assert (accepted.stage, accepted.control.id, accepted.owner, accepted.epoch) == ("accepted", 7, "me", 3)
    assert tracker.shown(50, 2, 1.2) == []
    [applied] = tracker.applied(3, 60, 1.3, chunk=5)
    assert (applied.stage, applied.frame, applied.message()["chunk"]) == ("applied", 60, 5)
    assert tracker.shown(59, 2, 1.4) == []
    [shown] = tracker.shown(60, 3, 1.5, pts=135_000)
    message = shown.message()
    assert [message[name] for name in ("stage", "chunk", "frame", "pts", "id")] == ["shown", 5, 60, 135_000, 7]
    assert math.isclose(shown.lag_s, 0.5)
    assert tracker.shown(61, 3, 1.6) == []


def test_the_book_does_not_grow() -> None:
    tracker = RequestTracker(limit=4)
    requests = [tracker.begin(PromptMessage(type="prompt", id=n, prompt="a"), "me", 0.0) for n in range(100)]
    assert tracker.find(requests[0]) is None
    assert tracker.find(requests[-1]) is not None


def _three_prompts() -> RequestTracker:
    """One shown soon (frame 10, which is made), one taken, one not taken."""
    tracker = RequestTracker()
    for number, prompt in enumerate("abc"):
        tracker.begin(PromptMessage(type="prompt", id=number, prompt=prompt), "me", 0.0)
    tracker.accepted("r1", 1, "a", "", 0.1)
    tracker.applied(1, 10, 0.2)
    tracker.accepted("r2", 2, "b", "", 0.3)
    return tracker


def test_what_a_lost_engine_had_taken_last_holds_for_the_next_one_and_what_it_had_not_is_refused() -> None:
    tracker = _three_prompts()
    [refused] = tracker.engine_lost(3, 12, "it died", 0.4)
    assert (refused.control.id, refused.stage, refused.reason) == (2, "refused", "it died")
    assert [(receipt.control.id, receipt.stage) for receipt in tracker.shown(11, 1, 0.5)] == [(0, "shown")]
    [applied] = tracker.applied(3, 12, 0.6)
    assert (applied.control.id, applied.stage, applied.epoch, applied.frame) == (1, "applied", 3, 12)
    assert [(receipt.control.id, receipt.stage) for receipt in tracker.shown(12, 3, 0.7)] == [(1, "shown")]


def _mixed() -> RequestTracker:
    """Two prompts and two numbers of steps by turns, all taken."""
    tracker = RequestTracker()
    controls = (
        PromptMessage(type="prompt", id="red", prompt="red"),
        StepsMessage(type="steps", id="few", steps=2),
        PromptMessage(type="prompt", id="blue", prompt="blue"),
        StepsMessage(type="steps", id="many", steps=4),
    )
    for number, control in enumerate(controls, start=1):
        tracker.accepted(tracker.begin(control, "me", 0.0), number, "", "", 0.1)
    return tracker


def test_what_was_made_and_never_seen_is_superseded_by_its_own_kind_only() -> None:
    """Frames 10 to 29 bring `red` and `few`; they are skipped, and frame 30 brings the others."""
    tracker = _mixed()
    assert {receipt.control.id for receipt in tracker.applied(2, 10, 0.2)} == {"red", "few"}
    assert {receipt.control.id for receipt in tracker.applied(3, 20, 0.2)} == {"blue"}
    assert {receipt.control.id: receipt.stage for receipt in tracker.shown(20, 3, 0.3)} == {
        "red": "superseded",
        "few": "shown",
        "blue": "shown",
    }
    assert {receipt.control.id: receipt.stage for receipt in tracker.applied(4, 30, 0.4)} == {"many": "applied"}


def test_a_lost_engine_s_prompt_and_steps_are_both_carried_over() -> None:
    tracker = _mixed()
    assert tracker.engine_lost(9, 10, "it died", 0.2) == []
    stages = {receipt.control.id: (receipt.stage, receipt.epoch) for receipt in tracker.applied(9, 10, 0.3)}
    assert stages == {
        "red": ("superseded", 1), "few": ("superseded", 2), "blue": ("applied", 9), "many": ("applied", 9),
    }  # fmt: skip


def test_with_no_engine_to_come_all_that_has_no_frames_is_refused() -> None:
    tracker = _three_prompts()
    assert [(receipt.control.id, receipt.stage) for receipt in tracker.engine_lost(None, 12, "it died", 0.4)] == [
        (1, "refused"),
        (2, "refused"),
    ]
    assert [receipt.control.id for receipt in tracker.shown(10, 1, 0.5)] == [0], "its frames have come"


VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 4, 2.5, 120, 121, 1001, 2**31 - 1, 2**31, 2**53 - 1, 2**53, -(2**53)),
    *("a red circle", "keep", "fly", "clean", "128x128", "", " \n", "x" * 65, "x" * 2001, [], {}),
)
MODELS = (*MESSAGES.values(), NewSession, SessionChange)
NAMES = sorted({name for model in MODELS for name in model.model_fields} - {"type"} | {"strength"})
FIELDS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES), max_size=3)


def _is_valid(schema: dict[str, Any], body: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(body)


def _is_message(message: dict[str, Any]) -> bool:
    try:
        parse(json.dumps(message))
    except ControlError:
        return False
    return True


@pytest.mark.slow
@given(st.sampled_from([*MESSAGES, "explode"]), FIELDS)
def test_the_description_of_a_message_takes_what_is_obeyed_and_nothing_else(kind: str, fields: dict[str, Any]) -> None:
    message = {"type": kind, **fields}
    assert _is_valid(message_schema(), message) == _is_message(message), message


@pytest.mark.slow
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_description_takes_the_prompts_that_are_obeyed(prompt: str) -> None:
    message = {"type": "prompt", "prompt": prompt}
    assert _is_valid(message_schema(), message) == _is_message(message)


@pytest.mark.slow
@pytest.mark.parametrize("model", [NewSession, SessionChange])
@given(fields=FIELDS)
def test_the_description_of_a_session_s_body_takes_what_is_obeyed_and_nothing_else(
    model: type[Body], fields: dict[str, Any]
) -> None:
    try:
        read(model, fields)
    except Problem as problem:
        assert problem.status == 422
        obeyed = False
    else:
        obeyed = True
    assert _is_valid(model.model_json_schema(), fields) == obeyed, fields
