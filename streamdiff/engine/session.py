"""One stream's life, without I/O: what was asked goes in, what is to be done and told comes out.

Knows nothing about torch, sockets or clocks; texts are already understood when they get here. `Action`s are for the
pipeline, `Event`s for who asked.

Epochs: every accepted prompt, number of steps and reset gets the next one, the pipeline stamps it on the chunks made
under it, and the first frames that bring a new epoch produce `Applied`. Prompts and steps do not go to the pipeline one
by one: they wait until `take_changes`, and of each kind the latest that waits wins. So an accepted epoch may be
skipped, never undone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamdiff.engine.messages import SWITCHES, Accepted, Applied, Closed, Event, FrameBatch, Opened


@dataclass(frozen=True)
class UseText:
    """Make chunks from `text`, from the next admitted one on; `switch` says what they see of the past."""

    text: str
    epoch: int
    switch: str = "keep"


@dataclass(frozen=True)
class UseSteps:
    """Make chunks in `steps` steps, from the next one on that is admitted after those in flight."""

    steps: int
    epoch: int


@dataclass(frozen=True)
class StartAfresh:
    """Drop what is in flight and begin again with chunk 0."""

    text: str
    seed: int
    epoch: int


@dataclass(frozen=True)
class Hold:
    """Admit no chunks while `paused`."""

    paused: bool


@dataclass(frozen=True)
class Allow:
    """At most `frames` frames may come beyond those that have come."""

    frames: int


@dataclass(frozen=True)
class End:
    """Free the stream."""


Action = UseText | UseSteps | StartAfresh | Hold | Allow | End
Output = Action | Event


class Session:
    """One stream. Every method returns what is to be done and told, in this order."""

    def __init__(
        self,
        name: str,
        *,
        text: str,
        seed: int,
        kv_context: str,
        epoch: int,
        lead_frames: int,
        least_lead_frames: int = 0,
        made_frames: int = 0,
        shown_frames: int = 0,
    ) -> None:
        """Args:
        kv_context: that the pipeline has opened it with.
        epoch: of the first chunk.
        lead_frames: how many frames may be made beyond those reported as shown.
        least_lead_frames: what the lead is at least.
        made_frames, shown_frames: of the stream that this one takes up; its own frames are numbered from there.
        """
        self.name = name
        self.text = text
        self.seed = seed
        self.kv_context = kv_context
        self.epoch = epoch
        self.chunk = -1
        """The last chunk of which frames have come; -1 before the first. Starts again with a reset."""
        self._wanted_lead_frames = lead_frames
        self._least_lead_frames = least_lead_frames
        self._text_waits: UseText | None = None
        self._steps_wait: UseSteps | None = None
        self._applied_epoch = epoch - 1
        self._oldest_epoch = epoch
        self._paused = False
        self._made_frames = made_frames
        self._shown_frames = min(shown_frames, made_frames)

    @property
    def room_frames(self) -> int:
        """How many more frames may come now."""
        lead_frames = max(self._wanted_lead_frames, self._least_lead_frames)
        return lead_frames - (self._made_frames - self._shown_frames)

    def open(self, notice: str = "", switches: tuple[str, ...] = SWITCHES) -> list[Output]:
        """Begin: the pipeline has opened the stream with this session's text, seed and epoch; it can do `switches`."""
        return [Allow(self.room_frames), Opened(self.name, self.epoch, self.text, notice, switches)]

    def set_prompt(self, text: str, notice: str, request: str, switch: str = "keep") -> list[Output]:
        """Take a prompt; `take_changes` gives it to the pipeline, unless a later one comes first. With `switch` "reset"
        the stream begins afresh with it, at once."""
        self.text = text
        if switch == "reset":
            *actions, _ = self.reset(None, request)
            return [*actions, Accepted(self.name, request, self.epoch, text, notice)]
        self.epoch += 1
        self._text_waits = UseText(text, self.epoch, switch)
        return [Accepted(self.name, request, self.epoch, text, notice)]

    def set_steps(self, steps: int, least_lead_frames: int, request: str) -> list[Output]:
        """Take a number of steps, which needs this lead at least; `take_changes` gives it to the pipeline, unless a
        later one comes first."""
        self.epoch += 1
        self._least_lead_frames = least_lead_frames
        self._steps_wait = UseSteps(steps, self.epoch)
        return [Allow(self.room_frames), Accepted(self.name, request, self.epoch, "")]

    def take_changes(self) -> list[Output]:
        """The latest prompt and steps, in the order of their epochs, if they have not gone to the pipeline yet."""
        waiting = [change for change in (self._text_waits, self._steps_wait) if change is not None]
        self._text_waits = self._steps_wait = None
        return [*sorted(waiting, key=lambda change: change.epoch)]

    def reset(self, seed: int | None, request: str) -> list[Output]:
        """Begin again, with the latest prompt and steps. A paused stream stays paused.

        Frames made so far are not waited for: who asked for a reset drops those not shown yet.
        """
        self.seed = self.seed if seed is None else seed
        self.epoch += 1
        self.chunk = -1
        self._oldest_epoch = self.epoch
        steps: list[Output] = [self._steps_wait] if self._steps_wait is not None else []
        self._text_waits = self._steps_wait = None
        self._shown_frames = self._made_frames
        start = StartAfresh(self.text, self.seed, self.epoch)
        accepted = Accepted(self.name, request, self.epoch, self.text)
        return [*steps, start, Hold(self._paused), Allow(self.room_frames), accepted]

    def set_paused(self, paused: bool) -> list[Output]:
        """Pause or go on; saying it twice does nothing."""
        if paused == self._paused:
            return []
        self._paused = paused
        return [Hold(paused)]

    def set_lead(self, frames: int) -> list[Output]:
        """Another lead from now on."""
        self._wanted_lead_frames = frames
        return [Allow(self.room_frames)]

    def shown(self, frames: int) -> list[Output]:
        """So many frames have been shown in all. Never goes back, and never beyond what was made."""
        shown_frames = min(max(frames, self._shown_frames), self._made_frames)
        if shown_frames == self._shown_frames:
            return []
        self._shown_frames = shown_frames
        return [Allow(self.room_frames)]

    def made(self, *, epoch: int, chunk: int, pictures: NDArray[np.uint8], chunk_s: float | None) -> list[Output]:
        """Frames have come: number them and tell. Frames of before the last reset are dropped."""
        if epoch < self._oldest_epoch:
            return []
        assert epoch <= self.epoch, f"frames of epoch {epoch}, but the last one asked for is {self.epoch}"
        same_chunk = chunk == self.chunk and epoch == self._applied_epoch
        next_chunk = chunk == self.chunk + 1 and epoch >= self._applied_epoch
        assert same_chunk or next_chunk, (
            f"chunk {chunk} of epoch {epoch} came after chunk {self.chunk} of epoch {self._applied_epoch}"
        )
        outputs: list[Output] = []
        first = self._made_frames
        if epoch > self._applied_epoch:
            self._applied_epoch = epoch
            outputs.append(Applied(self.name, epoch, chunk, first))
        self.chunk = chunk
        self._made_frames += len(pictures)
        outputs.append(Allow(self.room_frames))
        outputs.append(FrameBatch(self.name, epoch, chunk, first, chunk_s, pictures))
        return outputs

    def close(self) -> list[Output]:
        """End."""
        return [End(), Closed(self.name)]
