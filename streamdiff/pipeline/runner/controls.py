"""What steers a model's world: the controls that are held now, and those that each chunk was admitted with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from streamdiff.core import Control


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

    def set(self, values: Mapping[int, float]) -> int:
        """Hold these values; others stay. Returns the number of this change. Mutates: self."""
        for index, value in values.items():
            self.held[index] = value
            if value:
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
        return vectors
