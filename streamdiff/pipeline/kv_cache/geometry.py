"""Geometry of the rolling KV cache: which slot a chunk writes and which latent frames it sees. Plain integers."""

from __future__ import annotations

from dataclasses import dataclass

from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.scheduler.kv_context import most_steps, spare_slots


def cache_geometry(spec: ModelSpec, kv_context: str, *, steps: int) -> CacheGeometry:
    """The geometry of a session's caches, the same on every stage, and whatever number of steps it changes to."""
    spare, absolute = spare_slots(kv_context, steps=most_steps(steps, spec.steps)), spec.rope == "absolute"
    return CacheGeometry(spec.sink_latents, spec.window(kv_context), spare, absolute, spec.chunk_latents)


@dataclass(frozen=True)
class CacheGeometry:
    """Geometry of a ring, in latent frames: `sink` first frames that stay, `window` frames that a chunk of `chunk`
    frames sees (sink and itself included); `spare` slots, in chunks, beyond that for newer chunks that are in flight at
    the same time. Where positions are `absolute` the sink's keys keep theirs, otherwise the sink stands right before
    the window."""

    sink: int
    window: int
    spare: int = 0
    absolute: bool = False
    chunk: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.sink <= self.window - self.chunk or self.chunk < 1 or self.spare < 0:
            raise ValueError(
                f"a ring of window {self.window}, sink {self.sink} and chunks of {self.chunk} latent frames with "
                f"{self.spare} spare slots cannot be: the window holds at least the sink and one chunk, nothing is "
                "negative"
            )

    @property
    def pinned(self) -> int:
        """Slots that are not written again, since the sink, or the end of it, is in them."""
        return -(-self.sink // self.chunk)

    @property
    def slots(self) -> int:
        return self.pinned - (self.sink - self.window) // self.chunk + self.spare

    def slot(self, chunk: int) -> int:
        """Where chunk `chunk` (from 0) is kept."""
        if chunk < self.pinned:
            return chunk
        return self.pinned + (chunk - self.pinned) % (self.slots - self.pinned)

    def place(self, frame: int) -> int:
        """Where latent frame `frame` of the stream is kept: frames of the slots, one after the other."""
        return self.slot(frame // self.chunk) * self.chunk + frame % self.chunk

    def frames(self, chunk: int, since: int = 0) -> tuple[int, int]:
        """What `chunk` sees of the stream's latent frames: how many of the first, as the sink, and the first of those
        in the window, which go on to its own last. Chunks before `since` are forgotten, except for the sink."""
        end = (chunk + 1) * self.chunk
        sink = min(self.sink, end)
        return sink, max(sink, end - (self.window - self.sink), min(since, chunk) * self.chunk)

    def evicted(self, chunk: int) -> int:
        """The chunk whose slot `chunk` takes; below `pinned` if there is none."""
        return chunk - (self.slots - self.pinned) if chunk >= self.pinned else -1

    def visible(self, chunk: int, since: int = 0) -> list[int]:
        """Chunks of which `chunk` sees a frame or more, oldest first, itself last."""
        sink, first = self.frames(chunk, since)
        return sorted({*range(-(-sink // self.chunk)), *range(first // self.chunk, chunk), chunk})
