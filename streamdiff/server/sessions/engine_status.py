"""State of the engine, and what callers may learn of a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PLAIN_REASON = "it failed; who may steer is told why"
_WORDS = {"restarting": "The engine is being started again", "failed": "The engine stopped"}


@dataclass(frozen=True)
class EngineStatus:
    """State of the engine. `reason`: why it does not run; `retry_after_s`: in how many seconds it may, as far as known.

    A reason may end with the last lines that the engine wrote: paths, addresses, what an exception held. Only callers
    that may control a session get it; others learn only that the engine failed.
    """

    state: Literal["running", "restarting", "failed"] = "running"
    reason: str = ""
    retry_after_s: int = 1

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def code(self) -> str:
        """For programs, of an engine that does not run."""
        return "engine" if self.state == "failed" else self.state

    def reason_for(self, may_control: bool) -> str:
        """The reason that a caller may see; empty where there is none."""
        return self.reason if may_control or not self.reason else PLAIN_REASON

    def message(self, may_control: bool, consequence: str = "") -> str:
        """A sentence on an engine that does not run, and why."""
        return f"{_WORDS[self.state]}{consequence}: {self.reason_for(may_control)}"
