"""streamdiff as nodes of ComfyUI: a stream that goes on from run to run of a workflow, steered by each.

`Session` holds a model and its stream, `Controls` names what is held, `Frames` takes the next frames under a prompt, or
makes those of a video that is fed. The stream runs in ComfyUI's process, by `streamdiff.open`. Images are ComfyUI's:
float32 `[n, H, W, 3]` from 0 to 1, RGB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from itertools import islice
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

import streamdiff
from streamdiff.core import PROMPT_POLICIES

_SESSION, _CONTROLS = "STREAMDIFF_SESSION", "STREAMDIFF_CONTROLS"
_TEXT = {"multiline": True, "default": ""}
_P, _R = ParamSpec("_P"), TypeVar("_R")

Inputs = dict[str, dict[str, Any]]
"""What a node takes, in ComfyUI's words."""


@dataclass(eq=False)
class Stream:
    """An open stream, and what the latest run asked of it."""

    session: streamdiff.StreamSession
    options: str
    """Of the model, as they were typed."""
    prompt: str
    controls: dict[str, float] = field(default_factory=dict)
    strength: float | None = None
    """Of the video that it follows; None: it follows none."""

    def steer(self, prompt: str, switch: str, controls: dict[str, float], strength: float | None) -> str:
        """Let the next frames be made under these; the at most two chunks that were made ahead under others are left
        out. Returns the model's remark on the prompt. Mutates: self.

        Raises:
            RequestError: what cannot be had, by name; what comes before it in this signature is changed.
        """
        before = (self.prompt, self.controls)
        if prompt != self.prompt:
            self.session.set_prompt(prompt, None if switch == "model" else switch)
            self.prompt = prompt
        if controls != self.controls:
            self.session.control(**dict.fromkeys(self.controls, 0.0) | controls)
            self.controls = dict(controls)
        ahead: int | None = 0 if before == (prompt, controls) else 2 * self.session.chunk_frames
        if strength != self.strength:
            self.session.video(strength)
            # Without its video no chunk is begun, so this ends.
            self.strength, ahead = strength, ahead if strength is None else None
        for _ in islice(self.session, ahead):
            pass
        return self.session.notice

    def follow(self, video: np.ndarray) -> Iterator[np.ndarray]:
        """What the stream makes of `video`, uint8 `[n, H, W, 3]`, piece by piece."""
        for at in range(0, len(video), self.session.chunk_frames):
            self.session.feed(video[at : at + self.session.chunk_frames])
            yield from self.session


_open: dict[str, Stream] = {}
"""By node. One whose model changes closes its stream first, so that both never share the device."""


def outside_inference(run: Callable[_P, _R]) -> Callable[_P, _R]:
    """ComfyUI runs nodes in torch's inference mode, whose tensors other threads of the engine could not write to."""

    @wraps(run)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.inference_mode(False), torch.no_grad():
            return run(*args, **kwargs)

    return wrapped


def to_uint8(images: torch.Tensor) -> np.ndarray:
    """ComfyUI's images as frames, uint8 `[n, H, W, 3]`."""
    return (images[..., :3].clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()


def to_images(frames: list[np.ndarray]) -> torch.Tensor:
    """Frames as ComfyUI's images."""
    return torch.from_numpy(np.stack(frames)).to(torch.float32) / 255


class Session:
    """A model and its stream, which begins again when the prompt, the seed or the picture here changes."""

    CATEGORY = "streamdiff"
    DESCRIPTION = __doc__
    RETURN_TYPES = (_SESSION,)
    FUNCTION = "open"

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        return {
            "required": {
                "prompt": ("STRING", {**_TEXT, "default": "a red circle moving right over a meadow"}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**53}),
                "model": ("STRING", {"default": "tiny", "tooltip": "a model of the catalogue, or a folder"}),
                "options": ("STRING", {**_TEXT, "default": "{}", "tooltip": "settings of section model, as JSON"}),
            },
            "optional": {"image": ("IMAGE", {"tooltip": "the picture that the stream begins with"})},
            "hidden": {"node": "UNIQUE_ID"},
        }

    @outside_inference
    def open(
        self, prompt: str, seed: int, model: str, options: str, node: str, image: torch.Tensor | None = None
    ) -> tuple[Stream]:
        """The node's stream, opened or begun again.

        Raises:
            StreamdiffError: what cannot be had, by name; there is no stream then.
        """
        given = json.dumps({"model": model, **json.loads(options or "{}")}, sort_keys=True)
        picture = None if image is None else to_uint8(image)[0]
        if node in _open and _open[node].options != given:
            _open.pop(node).session.close()
        if node in _open:
            session = _open[node].session
            session.restart(prompt, seed=seed, image=picture)
        else:
            session = streamdiff.open(prompt, seed=seed, image=picture, **json.loads(given))
        _open[node] = Stream(session, given, prompt)
        return (_open[node],)


class Controls:
    """Holds a control of the model while the frames of a run are made; several are chained."""

    CATEGORY = "streamdiff"
    DESCRIPTION = __doc__
    RETURN_TYPES = (_CONTROLS,)
    FUNCTION = "hold"

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        return {
            "required": {
                "name": ("STRING", {"default": "move_x"}),
                "value": ("FLOAT", {"default": 1.0, "min": -1.0, "max": 1.0, "step": 0.05}),
            },
            "optional": {"others": (_CONTROLS,)},
        }

    def hold(self, name: str, value: float, others: dict[str, float] | None = None) -> tuple[dict[str, float]]:
        return ({**(others or {}), name: value},)


class Frames:
    """The stream's next frames under a prompt, or with a video what the stream makes of it. Each run continues."""

    CATEGORY = "streamdiff"
    DESCRIPTION = __doc__
    RETURN_TYPES = ("IMAGE", "STRING", "FLOAT")
    RETURN_NAMES = ("images", "notice", "fps")
    FUNCTION = "take"

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        switches = ["model", *PROMPT_POLICIES]
        return {
            "required": {
                "session": (_SESSION,),
                "prompt": ("STRING", {**_TEXT, "tooltip": "empty: the one before"}),
                "count": ("INT", {"default": 40, "min": 1, "max": 100_000, "tooltip": "frames; not used with a video"}),
                "switch": (switches, {"tooltip": "what a new prompt does to earlier chunks"}),
            },
            "optional": {
                "controls": (_CONTROLS,),
                "video": ("IMAGE", {"tooltip": "frames that the stream follows, a multiple of its chunk"}),
                "strength": ("FLOAT", {"default": 0.4, "min": 0.01, "max": 1.0, "step": 0.01}),
            },
        }

    @classmethod
    def IS_CHANGED(cls, **_: object) -> float:
        """Never what it was: ComfyUI takes a node's earlier output where this is equal, or the same object."""
        return float("nan")

    @outside_inference
    def take(
        self, session: Stream, prompt: str, count: int, switch: str, controls: dict[str, float] | None = None,
        video: torch.Tensor | None = None, strength: float = 0.4,
    ) -> tuple[torch.Tensor, str, float]:  # fmt: skip
        """The frames, the model's remark on the prompt, and the rate at which they are to be shown.

        Raises:
            StreamdiffError: what cannot be had, by name.
            ValueError: fewer frames of video than a chunk has.
        """
        following = None if video is None else strength
        notice = session.steer(prompt or session.prompt, switch, controls or {}, following)
        frames = list(islice(session.session, count) if video is None else session.follow(to_uint8(video)))
        if not frames:
            chunk = session.session.chunk_frames
            raise ValueError(f"{len(video)} frames of video make no chunk, which has {chunk}: feed a multiple of that.")
        return (to_images(frames), notice, session.session.fps)


NODE_CLASS_MAPPINGS = {f"Streamdiff{node.__name__}": node for node in (Session, Controls, Frames)}
NODE_DISPLAY_NAME_MAPPINGS = {name: f"streamdiff {node.__name__.lower()}" for name, node in NODE_CLASS_MAPPINGS.items()}
