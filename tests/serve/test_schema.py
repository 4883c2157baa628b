"""What the API's description says of a control message is what is obeyed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.serve.control import FIELDS, ControlError, parse
from streamdiff.serve.schema import control_message

VALUES: tuple[Any, ...] = (None, True, -1, 0, 1, 4, 2.5, 120, 121, 2**31 - 1, 2**31, 2**53 + 1, "a red circle", "keep",
                           "fly", "x" * 2001, [], {})  # fmt: skip
NAMES = sorted({*(name for fields in FIELDS.values() for name in fields - {"type", "id"}), "strength"})


@given(
    st.sampled_from([*FIELDS, "explode"]),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES), max_size=3),
    st.sampled_from([{}, {"id": 7}, {"id": "abc"}]),
)
def test_the_description_takes_what_is_obeyed_and_nothing_else(
    kind: str, fields: dict[str, Any], id: dict[str, Any]
) -> None:
    message = {"type": kind, **fields, **id}
    try:
        parse(json.dumps(message))
    except ControlError:
        obeyed = False
    else:
        obeyed = True
    assert jsonschema.Draft202012Validator(control_message()).is_valid(message) == obeyed, message


def test_every_kind_is_described_with_its_fields() -> None:
    jsonschema.Draft202012Validator.check_schema(control_message())
    kinds = {each["title"]: set(each["properties"]) for each in control_message()["oneOf"]}
    assert kinds == {kind: set(fields) for kind, fields in FIELDS.items()}
