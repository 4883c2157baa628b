"""What a session's viewers ask for, and how they are told where load leaves less of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from streamdiff.engine.features import NOTHING, Features
from streamdiff.engine.messages import Pictures
from streamdiff.server.load.load_policy import Asked, LoadLimit
from streamdiff.server.sessions.control import AdaptiveMessage, ControlMessage, FpsMessage, StepsMessage
from streamdiff.server.sessions.receipts import LOAD


@dataclass(frozen=True)
class SessionSpec:
    """How a session starts; None means the engine's default. `fps`: frames shown per second. `image`: the picture that
    it begins with, see `messages.Open`. `features` stand for it, for the prompt, or for a video. `adaptive`: whether it
    gives up steps and frame rate under load."""

    prompt: str
    seed: int
    fps: float
    steps: int | None = None
    kv_context: str | None = None
    image: Pictures | None = None
    features: Features = NOTHING
    adaptive: bool = False


def asked_after(asked: Asked, message: ControlMessage) -> Asked:
    """What is asked for with a message that is carried out."""
    match message:
        case StepsMessage(steps=steps):
            return replace(asked, steps=steps)
        case FpsMessage(fps=fps):
            return replace(asked, fps=fps)
        case AdaptiveMessage(adaptive=adaptive):
            return replace(asked, adaptive=adaptive)
    return asked


def is_more(asked: Asked, before: Asked) -> bool:
    """Whether more of the engine's time may be needed than before."""
    return asked.fps > before.fps or asked.steps > before.steps or asked.adaptive < before.adaptive


def what_is_left(message: ControlMessage, limit: LoadLimit) -> dict[str, Any]:
    """What a request's receipts say where load leaves less than it asks for."""
    match message:
        case StepsMessage(steps=asked) if (steps := limit.steps_of(asked)) < asked:
            return {"steps": steps, "reason": LOAD}
        case FpsMessage(fps=asked) if (fps := limit.fps_of(asked)) < asked:
            return {"fps": fps, "reason": LOAD}
    return {}


def state_of(asked: Asked, limit: LoadLimit, steps: int) -> dict[str, Any]:
    """What everybody is told of a session whose chunks have `steps` steps now."""
    fps = limit.fps_of(asked.fps)
    return {
        "adaptive": asked.adaptive,
        "reason": LOAD if limit.steps_of(asked.steps) < asked.steps or fps < asked.fps else "",
        "steps": steps,
        "asked_steps": asked.steps,
        "fps": fps,
        "asked_fps": asked.fps,
    }
