"""MicroStep: one (session, chunk, step) through all blocks, the unit that the scheduler hands out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class MicroStep:
    """Integers only, so that later ranks can be told by a fixed-size record.

    `step` counts from 0; `step == steps` is the clean pass, which only rewrites the chunk's keys and values. `epoch`
    is the session's epoch when the chunk was admitted: all of a chunk's steps use the same prompt.
    """

    session: int
    chunk: int
    step: int
    steps: int
    epoch: int

    @property
    def clean(self) -> bool:
        """Whether this is the clean pass."""
        return self.step == self.steps

    @property
    def last(self) -> bool:
        """Whether the chunk's latents are finished when this step has come back."""
        return self.step == self.steps - 1
