"""Which sessions have failed by themselves, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamdiff.engine.validation import reason_of
from streamdiff.errors import EngineFailure


@dataclass
class Failures:
    """The first failure of each slot, by slot, until its session is ended."""

    _reasons: dict[int, str] = field(default_factory=dict)

    def note(self, slot: int, why: str) -> None:
        """A session has failed. Mutates: self."""
        self._reasons.setdefault(slot, why)

    def note_error(self, slot: int, error: Exception) -> None:
        """Note an error as its session's failure; an EngineFailure is raised instead. Mutates: self."""
        if isinstance(error, EngineFailure):
            raise error
        self.note(slot, reason_of(error))

    def drop(self, slot: int) -> None:
        """The slot's session has ended. Mutates: self."""
        self._reasons.pop(slot, None)

    def take(self) -> dict[int, str]:
        """All reasons, which are gone then. Mutates: self."""
        reasons, self._reasons = self._reasons, {}
        return reasons
