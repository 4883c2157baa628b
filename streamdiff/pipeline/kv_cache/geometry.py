"""Geometry of the rolling KV cache: which slot a chunk writes and which latent frames it sees. Plain integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from streamdiff.core import most_steps, spare_slots
from streamdiff.models.spec import ModelSpec
from streamdiff.session_state.fields import session_state


def cache_geometry(spec: ModelSpec, kv_context: str, *, steps: int) -> CacheGeometry:
    """The geometry of a session's caches, the same on every stage, and whatever number of steps it changes to."""
    spare, absolute = spare_slots(kv_context, steps=most_steps(steps, spec.steps)), spec.rope == "absolute"
    adaptive = spec.adaptive_ring(kv_context)
    sizes = spec.sink_latents, spec.window(kv_context), spare, absolute, spec.chunk_latents, adaptive
    return CacheGeometry(*sizes, spec.positions or 0)


@session_state("cache-geometry")
@dataclass(frozen=True)
class CacheGeometry:
    """Geometry of a ring, in latent frames: `sink` first frames that stay, `window` frames that a chunk of `chunk`
    frames sees (sink and itself included); `spare` slots, in chunks, beyond that for newer chunks that are in flight at
    the same time. Where positions are `absolute` the sink's keys keep theirs, otherwise the sink stands right before
    the window; of `positions`, if not 0, that a model knows: once the stream is longer it stands so that the chunk's
    last frame has the last of these. `adaptive`: the sink takes chunks in, so that once the ring is full which slot a
    chunk takes, and which chunks are in sight, is known on the device alone (`adaptive_ring`); it sees all slots
    then, holds whole chunks, and has no spare slot. The window holds at least the sink and one chunk
    (`models.spec.check_spec`)."""

    sink: int
    window: int
    spare: int = 0
    absolute: bool = False
    chunk: int = 1
    adaptive: bool = False
    positions: int = 0

    @cached_property
    def pinned(self) -> int:
        """Slots that are not written again, since the sink, or the end of it, is in them."""
        return -(-self.sink // self.chunk)

    @cached_property
    def slots(self) -> int:
        return self.pinned - (self.sink - self.window) // self.chunk + self.spare

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Slots of a cache; slots whose keys are kept un-rotated too, none in an adaptive ring; and, in such, length of
        a layer's queue tensor: next rolling slot, number of waiting sink slots, and their numbers, newest last. At most
        one sink slot waits for each of the chunks that fill the ring."""
        return (self.slots, 0, 2 + self.slots) if self.adaptive else (self.slots, self.pinned, 0)

    @property
    def period(self) -> int:
        """Chunks after which the slots that a chunk sees repeat, once the window is full."""
        return self.slots - self.pinned if self.spare else 1

    def slot(self, chunk: int) -> int:
        """Where chunk `chunk` (from 0) is kept."""
        if chunk < self.pinned:
            return chunk
        return self.pinned + (chunk - self.pinned) % (self.slots - self.pinned)

    def position(self, frame: int) -> int:
        """Position in the cache, in latent frames, of frame `frame` of the stream."""
        return self.slot(frame // self.chunk) * self.chunk + frame % self.chunk

    def frames(self, chunk: int, visible_from_chunk: int = 0) -> tuple[int, int]:
        """Which latent frames of the stream `chunk` sees: the length of the sink, and the first frame of the window,
        which ends with the chunk itself. Outside the sink nothing before `visible_from_chunk` is visible."""
        end = (chunk + 1) * self.chunk
        sink = min(self.sink, end)
        return sink, max(sink, end - (self.window - self.sink), min(visible_from_chunk, chunk) * self.chunk)

    def sink_at(self, chunk: int, visible_from_chunk: int = 0) -> int:
        """The rotary position of the sink's first frame, as `chunk` sees it; other frames stand where they are in the
        stream. Relative: the sink's last frame is followed by the window's first, so count back from there."""
        if not self.absolute:
            sink, first = self.frames(chunk, visible_from_chunk)
            return first - sink
        return max(0, (chunk + 1) * self.chunk - self.positions) if self.positions else 0

    def evicted(self, chunk: int) -> int:
        """The chunk whose slot `chunk` takes; below `pinned` if there is none."""
        return chunk - (self.slots - self.pinned) if chunk >= self.pinned else -1

    def full(self, chunk: int) -> bool:
        """Whether the stream had more frames than the window when `chunk` was made."""
        return (chunk + 1) * self.chunk > self.window

    def recached(self, chunk: int, visible_from_chunk: int = 0) -> list[int]:
        """Chunks that are run again together after `chunk`, oldest first: those with frames in its own window, and the
        sink's as long as the window is not `full`."""
        sink, first = self.frames(chunk, visible_from_chunk)
        kept = () if self.full(chunk) else range(-(-sink // self.chunk))
        return sorted({*kept, *range(first // self.chunk, chunk + 1)})

    def visible(self, chunk: int, visible_from_chunk: int = 0) -> list[int]:
        """Chunks of which `chunk` sees a frame or more, oldest first, itself last."""
        sink, first = self.frames(chunk, visible_from_chunk)
        return sorted({*range(-(-sink // self.chunk)), *range(first // self.chunk, chunk), chunk})
