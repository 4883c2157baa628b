"""The thread that paces a session: takes frames as the engine makes them and hands them to the encoders evenly.

Knows nothing about the engine, prompts, or who watches; only whether somebody does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from streamdiff import clock
from streamdiff.server.media.encoder import EncoderThread, Picture
from streamdiff.server.media.playout import MEDIA_CLOCK_HZ, PlayoutBuffer, PlayoutProgress, PlayoutSlot

REPEAT_S = 0.2
"""While the engine makes nothing, the last picture is sent again this often, so that connections stay alive."""
STILL_S = 0.5
"""The same while the stream is paused."""
SETTLE_S = 0.05
SLACK_S = 0.2
"""How far the media clock may lag real time before the time stamps jump ahead."""


class RtpClock:
    """Turns the media clock, which stands still while nothing is shown, into time stamps that follow real time.

    A viewer's jitter buffer takes a stamp that falls behind real time for a slow network, and adds delay for good.
    Stamps are 90 kHz ticks and strictly increase. Sans-IO.
    """

    def __init__(self) -> None:
        self._zero_s: float | None = None
        self._offset: int | None = None
        self._last = -1

    def media(self, pts: int, now_s: float) -> int:
        """The stamp of a frame with media time `pts` that is sent at `now_s`. Mutates: self."""
        real = self._real(now_s)
        if self._offset is None or real - (pts + self._offset) > SLACK_S * MEDIA_CLOCK_HZ:
            self._offset = real - pts
        return self._advance(pts + self._offset)

    def still(self, now_s: float) -> int:
        """The stamp of a picture that is sent again at `now_s`, outside the media clock. Mutates: self."""
        return self._advance(self._real(now_s))

    def jump(self) -> None:
        """The media clock was held: the next frame is stamped with real time. Mutates: self."""
        self._offset = None

    def _real(self, now_s: float) -> int:
        if self._zero_s is None:
            self._zero_s = now_s
        return round((now_s - self._zero_s) * MEDIA_CLOCK_HZ)

    def _advance(self, stamp: int) -> int:
        self._last = max(stamp, self._last + 1)
        return self._last


class Pacer:
    """Owns the playout buffer and its thread. Every method may be called from the event loop and never waits long.

    `on_shown` is called on the pacer's thread after each new frame.
    """

    def __init__(
        self, fps: float, start_frames: int, on_shown: Callable[[PlayoutSlot], object], pause_after_s: float = 0.0
    ) -> None:
        """`pause_after_s`: how long the stream plays on when the last viewer has left."""
        self._pause_after_s = pause_after_s
        self._until_s = float("-inf")  # so long it plays with nobody watching
        self._on_shown = on_shown
        self._playout = PlayoutBuffer(fps, start_frames=start_frames)
        self._rtp_clock = RtpClock()
        self._changed = threading.Condition()
        self._encoders: tuple[EncoderThread, ...] = ()
        self._paused = False
        self._stopping = False
        self._sent_s = float("-inf")
        self._pushed: Picture | None = None
        self._playout.pause(clock.monotonic_s())  # until somebody watches
        self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)
        self._thread.start()

    # ---- called from the event loop -----------------------------------------------------------------------------

    def push(self, first: int, pictures: Picture, epoch: int) -> None:
        """Take frames from the engine; see `PlayoutBuffer.push`."""
        with self._changed:
            self._playout.push(first, pictures, epoch=epoch)
            self._pushed = pictures[-1]
            self._changed.notify()

    def clear_before(self, epoch: int, reset: bool = True) -> None:
        """Drop frames of older epochs that wait, see `PlayoutBuffer.clear_before`."""
        with self._changed:
            self._playout.clear_before(epoch, reset)
            self._changed.notify()

    def set_paused(self, paused: bool) -> None:
        """Hold the stream's time, or let it go on."""
        with self._changed:
            self._paused = paused
            self._hold()

    def set_encoders(self, encoders: tuple[EncoderThread, ...]) -> None:
        """Set the encoders that get the pictures. With none, after the grace time, time stands still."""
        with self._changed:
            if self._encoders and not encoders:
                self._until_s = clock.monotonic_s() + self._pause_after_s
            self._encoders = encoders
            self._hold()

    def set_fps(self, fps: float) -> None:
        """Show frames at another rate from now on."""
        with self._changed:
            self._playout.set_fps(fps)
            self._changed.notify()

    @property
    def held(self) -> bool:
        """Whether the stream's time stands still."""
        with self._changed:
            return self._playout.paused

    def wake(self) -> None:
        """A key frame was requested: send a picture, even if nothing new is due."""
        with self._changed:
            self._changed.notify()

    def progress(self) -> PlayoutProgress:
        """The counters, as they are now."""
        with self._changed:
            return self._playout.progress

    def picture(self) -> Picture | None:
        """The picture on show, or the newest one made when nothing was shown yet."""
        with self._changed:
            return self._newest()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _hold(self) -> None:
        """Hold the media clock while the stream is paused or has no viewers."""
        now_s = clock.monotonic_s()
        if self._paused or not (self._encoders or now_s < self._until_s):
            self._playout.pause(now_s)
        elif self._playout.paused:
            self._playout.resume(now_s)
            self._rtp_clock.jump()
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    return
                now_s = clock.monotonic_s()
                if not self._encoders and now_s >= self._until_s:
                    self._playout.pause(now_s)
                due = self._playout.due(now_s)
                encoders = self._encoders
                send = self._choose(due, now_s)
                if due is None and send is None:
                    self._changed.wait(self._wait_s(now_s))
                    continue
            if send is not None:
                for encoder in encoders:
                    encoder.submit(*send)
            if due is not None and not due.repeated:
                self._on_shown(due)

    def _newest(self) -> Picture | None:
        latest = self._playout.latest
        return latest.picture if latest else self._pushed

    def _choose(self, due: PlayoutSlot | None, now_s: float) -> tuple[Picture, int] | None:
        """What is sent now, with its time stamp: a new frame always, an old one when it is time for it."""
        if not self._encoders:
            return None
        if due is not None and not due.repeated:
            picture, stamp = due.picture, self._rtp_clock.media(due.pts, now_s)
        else:
            old = self._newest()
            if old is None or now_s < self._resend_s():
                return None
            picture = old
            stamp = self._rtp_clock.media(due.pts, now_s) if due is not None else self._rtp_clock.still(now_s)
        self._sent_s = now_s
        return picture, stamp

    def _resend_s(self) -> float:
        """When the last picture is sent again if nothing new comes."""
        requested_s = [due_s for encoder in self._encoders if (due_s := encoder.key_due_s()) is not None]
        idle_s = self._sent_s + (STILL_S if self._playout.paused else REPEAT_S)
        # An encoder takes a moment to make a key frame; without the pause it would be handed pictures without end.
        return min([idle_s, *(max(key_s, self._sent_s + SETTLE_S) for key_s in requested_s)])

    def _wait_s(self, now_s: float) -> float | None:
        """How long nothing is to be done; None: until something changes."""
        next_s = self._playout.next_due_s
        moments = [] if next_s is None else [next_s]
        if not self._encoders and not self._playout.paused:
            moments.append(self._until_s)
        if self._encoders and self._newest() is not None and self._playout.paused:
            moments.append(self._resend_s())
        return max(0.0, min(moments) - now_s) if moments else None
