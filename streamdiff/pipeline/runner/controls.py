"""What steers a model's world: the controls that are held now, and those that each chunk was admitted with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamdiff.core import Control
from streamdiff.models.spec import ActionRows


@dataclass
class HeldControls:
    """The controls of one session as they are held now, by index; those that are not named rest at 0.

    `pressed` are those that left rest since the last chunk was admitted, so that a tap that is over by then is not
    lost.
    """

    held: dict[int, float] = field(default_factory=dict)
    pressed: dict[int, float] = field(default_factory=dict)
    changes: int = 0
    """How often they were set."""

    def set(self, values: Mapping[int, float], pressed: bool = True) -> int:
        """Hold these values; others stay. Returns the number of this change. Not `pressed`: they have been held before,
        and are no tap when they are let go at once. Mutates: self."""
        for index, value in values.items():
            self.held[index] = value
            if value and pressed:
                self.pressed[index] = value
        self.changes += 1
        return self.changes

    def take(self, frames: int, controls: Sequence[Control]) -> Tensor:
        """The vectors `[frames, K]` of a chunk that is admitted now, float32 on the CPU: what is held holds for all its
        latent frames, a tap for the first, or for all where the control is so. Mutates: self."""
        vectors = torch.zeros(frames, len(controls))
        for index, value in self.held.items():
            vectors[:, index] = value
        for index, value in self.pressed.items():
            if not self.held[index]:
                vectors[: frames if controls[index].whole_chunk else 1, index] = value
        self.pressed.clear()
        still = (vectors == 0).all(1).to(vectors)
        for index, control in enumerate(controls):
            vectors[:, index] = still if control.idle else vectors[:, index] * control.scale
        return vectors


def action_rows(vectors: Tensor, before: Tensor | None, rows: ActionRows) -> Tensor:
    """The rows of actions `[rows, K]` of a chunk whose latent frames have these `vectors` `[F, K]`, each for the frames
    of the video that it decodes to, behind those that were before: `before` are the rows of the previous chunk, None at
    a stream's beginning, before which its first row held."""
    frames, past = len(vectors), rows.window - rows.stride + 1
    history = vectors[:1].expand(past, -1)
    if before is not None:  # whose last vector holds for one row more than it was given
        history = torch.cat([before, before[-1:]])[-past:]
    return torch.cat([history, vectors.repeat_interleave(rows.stride, 0)])[: rows.shape(frames)[0]]


def tracked_rows(track: Tensor, chunks: int, frames: int, rows: ActionRows) -> Tensor:
    """The rows of actions `[chunks, rows, K]` of chunks of so many latent frames, from a row for each frame of the
    video `[n, K]`: latent frame f sees those before its own, up to number 4 f - 1 where a latent frame is 4 frames;
    before the first one that holds."""
    count, _ = rows.shape(frames)
    places = torch.arange(chunks)[:, None] * frames * rows.stride - rows.window + torch.arange(count)
    return track[places.clamp(0, len(track) - 1)]
