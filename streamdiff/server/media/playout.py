"""Playout buffer: frames arrive in bursts, a chunk at a time, and leave at an even rate; and how far the engine may be
ahead of it.

Pure: the caller gives the time, which never goes back. Knows nothing about sessions, encoders or viewers. Time is cut
into slots of `1 / fps` seconds, numbered from 0; slot `k` has presentation time `k * 90000 / fps` ticks, computed from
`k` alone, so the rate is exact for as long as one likes. A slot shows the next frame, or the last one again when there
is none.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

MEDIA_CLOCK_HZ = 90_000
RESTART_S = 3.0
START_WAIT_S, CAPACITY_FRAMES, CATCH_UP_S = 0.5, 256, 0.1
# After an underrun: speed = FOLLOW x the rate seen, so that frames gather again. While LEFT_OVER frames remain at every
# burst: x RISE; x RISE_FAST if half of `start_frames` remain.
FOLLOW, LEFT_OVER, RISE, RISE_FAST = 0.98, 2, 1.03, 1.25
# One stall must not make video crawl: the least speed, and the share of `start_frames` that, waiting for a second,
# doubles the speed.
SLOWEST, PLENTY = 0.1, 0.75
MARGIN_S, MARGIN_CHUNKS = 0.08, 0.25
"""Video that is to wait when the next chunk comes, on a machine that is always equally fast: at least so long, and such
a part of a chunk."""
STEP_S = 0.005
"""The most that the lead shrinks by with every chunk."""
_BEGIN = 2 / 3  # of the limit
_WINDOW = 24  # chunks that are looked back at, of which the worst counts
_SETTLING = 3  # chunks that were on their way when the lead grew


@dataclass(frozen=True)
class _Frame:
    """`picture` uint8 as in `streamdiff.video.pixel_format`, its session frame number and epoch."""

    picture: NDArray[np.uint8] = field(repr=False)
    frame: int
    epoch: int


@dataclass(frozen=True)
class PlayoutSlot(_Frame):
    """One slot and the frame in it; `pts` in ticks of 90 kHz; `repeated`: the slot before had the same frame."""

    pts: int
    repeated: bool


@dataclass
class PlayoutProgress:
    """How far the stream has come; frames count from the session's start. `frame`: the last one shown, -1 before.
    `shown`: new frames handed out; `repeated`: slots that showed the last frame again, because the next was not there;
    `dry`: those of them in which no frame waited at all, though the stream was under way;
    `dropped`: frames that came and were never shown; `missed`: slots that passed unseen because the caller asked too
    late; `passed`: frames shown or dropped, what `Shown.frames` reports to the engine; `buffered`: frames that wait."""

    frame: int = -1
    shown: int = 0
    repeated: int = 0
    dry: int = 0
    dropped: int = 0
    missed: int = 0
    passed: int = 0
    buffered: int = 0


class PlayoutBuffer:
    """The buffer between an engine that makes frames in bursts and viewers who want them evenly.

    Frames are shown in order and none is left out, except by `clear_before` and when more than `CAPACITY_FRAMES`
    wait (an engine within its limit never gets there); both are counted in `dropped`.

    At the start, and after nothing came for `RESTART_S`, frames wait until `start_frames` are there, or until the
    first has waited `START_WAIT_S` (the engine may have stopped short of that number).

    An engine that makes fewer frames than there are slots is followed: when the buffer has run dry, the share of slots
    that show a new frame is lowered to that seen since it last did, so that slow video moves evenly instead of in
    leaps. Only a dry buffer says how fast the engine can be (with a full one it waits for us). The share rises again
    while frames are left over when the next ones come.

    A caller who asks late by up to `CATCH_UP_S` gets the slots it missed one by one, at once, with their regular
    presentation times. Later than that, the missed slots pass without a picture (counted in `missed`): the
    media clock follows real time and the next frame is the next one.
    """

    def __init__(self, fps: float, *, start_frames: int = 1) -> None:
        self._progress = PlayoutProgress()
        self.latest: PlayoutSlot | None = None
        """The last slot handed out, for new viewers."""
        self._set_rate(fps)
        self._pts_base = 0  # presentation time of slot 0, since the rate was set
        self._start_frames = start_frames
        self._queue: deque[_Frame] = deque()
        self._oldest_epoch = 0
        self._slot = 0  # the next slot to hand out
        self._zero_s: float | None = None  # time of slot 0; None before the first frame is shown
        self._filling = True
        self._filling_since_s: float | None = None
        self._credit = 0.0  # of the next new frame, which takes 1
        self._begin_cycle(1.0)
        self._paused_at_s: float | None = None

    # ---- frames in ----------------------------------------------------------------------------------------------

    @property
    def buffered(self) -> int:
        """Frames that wait."""
        return len(self._queue)

    @property
    def progress(self) -> PlayoutProgress:
        """The counters, as they are now."""
        return replace(self._progress, buffered=self.buffered)

    def push(self, first: int, pictures: NDArray[np.uint8], *, epoch: int = 0) -> None:
        """Take consecutive frames, numbered from `first`; `pictures` uint8 `[n, ...]` is kept, not copied.

        Frames of an epoch that was cleared are dropped.

        Raises:
            ValueError: a frame number that came before.
        """
        expected = self._queue[-1].frame + 1 if self._queue else self._progress.passed
        if first < expected:
            raise ValueError(f"frames from {first} were pushed, but frames up to {expected - 1} came already")
        for offset, picture in enumerate(pictures):
            self._queue.append(_Frame(picture, first + offset, epoch))
            if epoch < self._oldest_epoch or len(self._queue) > CAPACITY_FRAMES:
                self._drop(self._queue.pop() if epoch < self._oldest_epoch else self._queue.popleft())

    def clear_before(self, epoch: int, reset: bool = True) -> None:
        """Drop every frame of an epoch older than `epoch`, those still to come as well. Behind a `reset` frames are
        shown at full speed, else as fast as the engine was seen to make them."""
        self._oldest_epoch = max(self._oldest_epoch, epoch)
        while self._queue and self._queue[0].epoch < self._oldest_epoch:
            self._drop(self._queue.popleft())
        self._begin_cycle(1.0 if reset else self._speed)

    def _drop(self, waiting: _Frame) -> None:
        self._progress.dropped += 1
        self._progress.passed = max(self._progress.passed, waiting.frame + 1)

    # ---- slots out ----------------------------------------------------------------------------------------------

    def pts(self, slot: int) -> int:
        """Presentation time of a slot in 90 kHz ticks; strictly increasing."""
        return self._pts_base + MEDIA_CLOCK_HZ * slot * self._per_s // self._slots

    def set_fps(self, fps: float) -> None:
        """Show frames at another rate from the next slot on, which keeps its time and is the first of a new count."""
        self._pts_base = self.pts(self._slot)
        if self._zero_s is not None:
            self._zero_s = self._slot_s(self._slot)
        self._slot = 0
        self._set_rate(fps)
        self._begin_cycle(1.0)

    def _set_rate(self, fps: float) -> None:
        rate = Fraction(fps).limit_denominator(1001)
        self._slots, self._per_s = rate.numerator, rate.denominator  # so many slots in so many seconds, exactly
        self._catch_up_slots = max(1, math.ceil(CATCH_UP_S * fps))

    def _slot_s(self, slot: int) -> float:
        assert self._zero_s is not None
        return self._zero_s + slot * self._per_s / self._slots

    @property
    def next_due_s(self) -> float | None:
        """When to call `due` next, `-inf` for at once; None: nothing will be due before a `push` or a `resume`.

        Ask again after every `push`.
        """
        if self._paused_at_s is not None:
            return None
        if self._zero_s is not None:
            return self._slot_s(self._slot)
        if not self._queue:
            return None
        if self._filling_since_s is None or len(self._queue) >= self._start_frames:
            return -math.inf
        return self._filling_since_s + START_WAIT_S

    def due(self, now_s: float) -> PlayoutSlot | None:
        """The slot that is due at `now_s`, or None. Call again at once: more may be due; then wait for `next_due_s`."""
        if self._paused_at_s is not None:
            return None
        self._end_filling(now_s)
        if self._zero_s is None:
            if self._filling:
                return None
            self._zero_s = now_s
        late_slots = math.floor((now_s - self._slot_s(self._slot)) * self._slots / self._per_s)
        if late_slots > self._catch_up_slots:  # they are too late to catch up, and pass
            self._progress.missed += late_slots
            self._slot += late_slots
        if now_s < self._slot_s(self._slot):
            return None
        self._follow_engine()
        return self._hand_out()

    def _end_filling(self, now_s: float) -> None:
        """Leave the filling state when enough frames wait, or when the first has waited long enough."""
        if not self._filling or not self._queue:
            self._filling_since_s = None
            return
        if self._filling_since_s is None:
            self._filling_since_s = now_s
        waited_s = now_s - self._filling_since_s
        if len(self._queue) >= self._start_frames or waited_s >= START_WAIT_S:
            self._filling = False
            self._filling_since_s = None

    def _begin_cycle(self, speed: float) -> None:
        """Reset the counters, and show a new frame in a share `speed` of the slots from now on."""
        self._speed = min(1.0, speed)
        self._cycle_slots = self._cycle_shown = self._dry_slots = 0
        self._watched, self._lowest, self._plenty_slots = 0, CAPACITY_FRAMES, 0

    def _follow_engine(self) -> None:
        """Before every slot: adapt the share of slots with a new frame to what the engine makes."""
        self._cycle_slots += 1
        if self._filling:
            return
        if not self._queue:
            self._dry_slots += 1
            if self._dry_slots * self._per_s > RESTART_S * self._slots:
                self._filling = True
                self._begin_cycle(1.0)
        elif self._dry_slots:
            self._begin_cycle(max(SLOWEST, min(self._speed, FOLLOW * self._cycle_shown / self._cycle_slots)))
        self._plenty_slots = self._plenty_slots + 1 if len(self._queue) >= PLENTY * self._start_frames else 0
        if self._plenty_slots * self._per_s >= self._slots:  # for a second
            self._begin_cycle(2 * self._speed)
        elif self._watched >= 2 * self._start_frames:  # two bursts: the lowest was among them
            if self._lowest >= LEFT_OVER:
                self._speed = min(1.0, self._speed * (RISE_FAST if 2 * self._lowest >= self._start_frames else RISE))
            self._watched, self._lowest = 0, CAPACITY_FRAMES

    def _hand_out(self) -> PlayoutSlot:
        self._credit = min(2.0, self._credit + self._speed)
        repeated = self._filling or not self._queue or self._credit < 1.0
        if repeated:
            assert self.latest is not None, "slots begin with a frame"
            shown: _Frame = self.latest
            self._progress.repeated += 1
            self._progress.dry += not (self._filling or self._queue)
        else:
            shown = self._queue.popleft()
            self._credit -= 1.0
            self._lowest = min(self._lowest, len(self._queue))
            self._watched += 1
            self._cycle_shown += 1
            self._progress.shown += 1
            self._progress.frame, self._progress.passed = shown.frame, shown.frame + 1
        self.latest = PlayoutSlot(shown.picture, shown.frame, shown.epoch, self.pts(self._slot), repeated)
        self._slot += 1
        return self.latest

    # ---- pause --------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self._paused_at_s is not None

    def pause(self, now_s: float) -> None:
        """Hold the media clock. Frames may still be pushed."""
        if self._paused_at_s is None:
            self._paused_at_s = now_s

    def resume(self, now_s: float) -> None:
        """Go on where `pause` held the media clock."""
        if self._paused_at_s is None:
            return
        held_s = now_s - self._paused_at_s
        self._paused_at_s = None
        if self._zero_s is not None:
            self._zero_s += held_s
        if self._filling_since_s is not None:
            self._filling_since_s += held_s


class PlayoutLead:
    """The lead of one session.

    Its measure is the *slack*: seconds of video that still wait when a chunk's first frames come, or minus the seconds
    in which nothing did. The least slack of the last chunks is kept at a margin and half of what it varies by: below
    half of that the lead grows at once by what is missing, above it shrinks by at most STEP_S a chunk.
    """

    def __init__(self, chunk_s: float, limit_s: float, steered: bool = False) -> None:
        """Args:
        chunk_s: how long a chunk's frames are shown.
        limit_s: the most that the lead may be, of which it begins with a part; at least a chunk is always allowed.
        steered: at least two chunks are allowed, with which it begins: what waits makes controls late.
        """
        least_s = 2 * chunk_s if steered else chunk_s
        self._chunk_s, self._limit_s = chunk_s, max(limit_s, least_s)
        self.lead_s = least_s if steered else max(_BEGIN * limit_s, chunk_s)
        self._margin_s = max(MARGIN_S, MARGIN_CHUNKS * chunk_s)
        self._slacks: deque[float] = deque(maxlen=_WINDOW)
        self._settling = 0

    @property
    def spare_s(self) -> float:
        """How much the lead can still grow by."""
        return self._limit_s - self.lead_s

    def arrived(self, slack_s: float) -> None:
        """A chunk's first frames came with `slack_s` of slack. Mutates: self."""
        # An engine that needs more ahead takes it. Then the lead says nothing, and has to begin from what is there.
        self.lead_s = min(self._limit_s, max(self.lead_s, slack_s + self._chunk_s))
        self._slacks.append(slack_s)
        kept_s = self._margin_s + (max(self._slacks) - min(self._slacks)) / 2
        if self._settling:
            self._settling -= 1
        elif slack_s < kept_s / 2:
            self.lead_s = min(self._limit_s, self.lead_s + kept_s - slack_s)
            self._settling = _SETTLING
        elif len(self._slacks) == _WINDOW and (spare_s := min(self._slacks) - kept_s) > 0:
            less_s = min(spare_s, STEP_S, self.lead_s - self._chunk_s)
            self.lead_s -= less_s
            self._slacks = deque((each - less_s for each in self._slacks), _WINDOW)
