"""Whether the engine runs, in words, and to whom its reasons are told.

A reason may end with the last lines that the engine wrote: paths, addresses, what an exception held. Only who may steer
reads it; others are told that there is one.
"""

from __future__ import annotations

from typing import Literal

EngineState = Literal["running", "restarting", "failed"]
LOST = {"restarting": "The engine is being started again", "failed": "The engine stopped"}
PLAIN_REASON = "it failed; who may steer is told why"


def reason_for(reason: str, may_control: bool) -> str:
    """A reason as a caller is told it; empty where there is none."""
    return reason if may_control or not reason else PLAIN_REASON


def lost_message(engine: EngineState, reason: str, may_control: bool) -> str:
    """What a caller is told of an engine that is not `running`."""
    return f"{LOST[engine]}: {reason_for(reason, may_control)}"
