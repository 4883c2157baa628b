"""What the API's description says of a body is what is obeyed: one declaration, seen from both sides."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.server.problem import Problem
from streamdiff.server.routes.schemas import NewSession, SessionChange, read
from streamdiff.server.sessions.control import MESSAGES, Body, ControlError, message_schema, parse

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
