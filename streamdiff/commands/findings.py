"""What `streamdiff doctor` reports: findings, a line each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Grade(Enum):
    """Severity of a finding."""

    GOOD = "ok"
    NOTE = "note"
    BAD = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    grade: Grade
    text: str
