"""What may share a forward, and the record of one, both derived from the fields of MicroStep."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamdiff.core import PER_ROW, MicroStep, differing_field, pack, record_length, shared_fields, unpack

NAMES = [each.name for each in fields(MicroStep)]
int64 = st.integers(-(2**63), 2**63 - 1)
microsteps = st.builds(MicroStep, *[int64 for _ in NAMES])


@pytest.mark.parametrize("metadata", [{}, {"in_a_forward": "maybe"}, {"note": "shared"}])
def test_a_field_that_does_not_say_so_is_refused(metadata: dict[str, str]) -> None:
    @dataclass(frozen=True)
    class Forgetful:
        step: int = field(metadata=PER_ROW)
        guidance: int = field(metadata=metadata)

    with pytest.raises(TypeError):
        shared_fields(Forgetful)
    with pytest.raises(TypeError):
        differing_field(Forgetful(1, 2), Forgetful(1, 2))


@given(st.lists(microsteps, max_size=5), st.integers(0, 3), int64)
def test_what_is_packed_is_unpacked_and_the_length_never_changes(
    rows: list[MicroStep], spare: int, sequence: int
) -> None:
    max_rows = len(rows) + spare
    record = pack(rows, max_rows, sequence)
    assert len(record) == record_length(max_rows) == 2 + len(NAMES) * max_rows
    assert all(type(value) is int for value in record)
    assert unpack(record) == (sequence, rows)
