"""How a session begins."""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamdiff.engine.features import NOTHING, Features
from streamdiff.engine.messages import Pictures
from streamdiff.snapshot_header import SavedStream


@dataclass(frozen=True)
class StreamSpec:
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

    def resumed(self, saved: SavedStream, prompt: str | None, steps: int | None = None) -> StreamSpec:
        """The spec of a session that resumes from a snapshot, with what was saved; a prompt and steps may replace
        it."""
        prompt, steps = saved.text if prompt is None else prompt, saved.steps if steps is None else steps
        return replace(self, prompt=prompt, steps=steps, seed=saved.seed, kv_context=saved.kv_context)
