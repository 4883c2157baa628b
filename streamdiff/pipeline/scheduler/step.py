"""MicroStep: one (session, chunk, step) through all blocks, the unit that the scheduler hands out; and its fixed-size
record.

A field says by its metadata whether rows of one forward may differ in it. What may share a forward, and what a record
looks like, is derived from the fields; neither is listed anywhere else.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any, cast

SHARED: dict[str, str] = {"in_a_forward": "shared"}
"""Metadata of a field that must be equal in all rows of a forward."""
PER_ROW: dict[str, str] = {"in_a_forward": "per_row"}
"""Metadata of a field that each row of a forward has for itself: the model takes a vector of it."""

_HEAD = 2  # sequence number and count go before the rows


@dataclass(frozen=True, order=True)
class MicroStep:
    """One step of one chunk of one session; integers only, so that a forward's rows travel as a fixed-size record.

    `step` counts from 0; `step == steps` is the clean pass, which only rewrites the chunk's keys and values. `epoch`
    is the session's epoch when the chunk was admitted: all of a chunk's steps use the same prompt. `recache_end` is the
    newest chunk of a window that is run again in one forward, of which this is a row; -1: it is no such row.
    """

    session: int = field(metadata=PER_ROW)
    chunk: int = field(metadata=PER_ROW)
    step: int = field(metadata=PER_ROW)
    steps: int = field(metadata=PER_ROW)
    epoch: int = field(metadata=PER_ROW)
    recache_end: int = field(default=-1, metadata=SHARED)

    @property
    def clean(self) -> bool:
        """Whether this is the clean pass."""
        return self.step == self.steps

    @property
    def recaches(self) -> bool:
        """Whether it is a row of a forward in which a window is run again, which has no other rows."""
        return self.recache_end >= 0

    @property
    def last(self) -> bool:
        """Whether the chunk's latents are finished when this step has come back."""
        return self.step == self.steps - 1


@cache
def shared_fields(kind: type) -> tuple[str, ...]:
    """Fields of a dataclass in which all rows of a forward must be equal.

    Raises:
        TypeError: a field does not say whether it is shared.
    """
    for each in fields(kind):
        if each.metadata.get("in_a_forward") not in ("shared", "per_row"):
            raise TypeError(
                f"{kind.__name__}.{each.name} does not say whether rows of one forward may differ in it; "
                "declare it as field(metadata=SHARED) or field(metadata=PER_ROW)"
            )
    return tuple(each.name for each in fields(kind) if each.metadata["in_a_forward"] == "shared")


def differing_field(one: Any, other: Any) -> str | None:
    """The first shared field in which two of the same kind differ, so that they cannot share a forward; None: they may.
    If each of some may with the first, all may."""
    return next(
        (name for name in shared_fields(cast(Hashable, type(one))) if getattr(one, name) != getattr(other, name)), None
    )


_FIELDS = len(fields(MicroStep))
_VALUES = attrgetter(*(each.name for each in fields(MicroStep)))


def record_length(max_rows: int) -> int:
    """Integers in the record of a forward of up to `max_rows` rows."""
    return _HEAD + max_rows * _FIELDS


def pack(rows: Sequence[MicroStep], max_rows: int, sequence: int) -> list[int]:
    """The record of a forward: sequence number, count, each row's fields in order, zeros up to `record_length`.

    Raises:
        ValueError: more rows than `max_rows`.
    """
    if len(rows) > max_rows:
        raise ValueError(f"there are {len(rows)} rows; a record for max_rows {max_rows} holds at most {max_rows}")
    record = [sequence, len(rows)]
    for row in rows:
        record += _VALUES(row)
    return record + [0] * (record_length(max_rows) - len(record))


def unpack(record: Sequence[int], max_rows: int) -> tuple[int, list[MicroStep]]:
    """Sequence number and rows of a record that `pack` made for the same `max_rows`.

    Raises:
        ValueError: the record has another length, a count that cannot be, or something behind its rows.
    """
    if len(record) != record_length(max_rows):
        raise ValueError(
            f"a record has {len(record)} integers; for max_rows {max_rows} it must have {record_length(max_rows)}"
        )
    sequence, count = record[:_HEAD]
    if not 0 <= count <= max_rows:
        raise ValueError(f"a record's count is {count}; for max_rows {max_rows} it must be from 0 to {max_rows}")
    end = record_length(count)
    if any(record[end:]):
        raise ValueError(f"a record of {count} rows has something other than zeros behind them: {list(record[end:])}")
    return sequence, [MicroStep(*record[at : at + _FIELDS]) for at in range(_HEAD, end, _FIELDS)]
