"""How a session starts, what its viewers demand, and the message fields that report load limits. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from streamdiff.engine.features import NOTHING, Features
from streamdiff.engine.messages import Pictures
from streamdiff.server.load import LoadLimit, SessionDemand
from streamdiff.server.sessions.control import AdaptiveMessage, ControlMessage, FpsMessage, StepsMessage
from streamdiff.server.sessions.receipts import LOAD
from streamdiff.snapshot_header import SavedSession


@dataclass(frozen=True)
class SessionSpec:
    """Initial settings of a session; None means the engine's default. `fps`: frames shown per second. `image`: the
    picture that it begins with, see `messages.Open`. `features` replace the image, the prompt, or a video. `adaptive`:
    whether its steps and frame rate are reduced under load."""

    prompt: str
    seed: int
    fps: float
    steps: int | None = None
    kv_context: str | None = None
    image: Pictures | None = None
    features: Features = NOTHING
    adaptive: bool = False


def resumed(spec: SessionSpec, saved: SavedSession, prompt: str | None, steps: int | None = None) -> SessionSpec:
    """`spec` for a session that goes on from a snapshot, with what was saved; a prompt and steps may replace it."""
    prompt, steps = saved.text if prompt is None else prompt, saved.steps if steps is None else steps
    return replace(spec, prompt=prompt, steps=steps, seed=saved.seed, kv_context=saved.kv_context)


def demand_after(demand: SessionDemand, message: ControlMessage) -> SessionDemand:
    """The session's demand after `message` is carried out; unchanged by messages other than steps, fps, adaptive."""
    match message:
        case StepsMessage(steps=steps):
            return replace(demand, steps=steps)
        case FpsMessage(fps=fps):
            return replace(demand, fps=fps)
        case AdaptiveMessage(adaptive=adaptive):
            return replace(demand, adaptive=adaptive)
    return demand


def is_more(demand: SessionDemand, before: SessionDemand) -> bool:
    """Whether `demand` may need more engine time than `before`."""
    return demand.fps > before.fps or demand.steps > before.steps or demand.adaptive < before.adaptive


def load_limited_fields(message: ControlMessage, limit: LoadLimit) -> dict[str, Any]:
    """Additional receipt fields of a request that the load limit reduces: the value in force and reason `load`; else
    empty."""
    match message:
        case StepsMessage(steps=requested) if (steps := limit.steps_of(requested)) < requested:
            return {"steps": steps, "reason": LOAD}
        case FpsMessage(fps=requested) if (fps := limit.fps_of(requested)) < requested:
            return {"fps": fps, "reason": LOAD}
    return {}
