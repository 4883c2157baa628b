"""Which sessions have their caches on the device: the active ones, and idle ones while there is memory.

Sans-IO, and without a clock: the web process says which sessions are active (`SetActive`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from streamdiff.engine.messages import Reset, SetActive, SetPrompt, SetSteps, StreamCommand
from streamdiff.engine.prompt_queue import PendingRequest
from streamdiff.errors import RequestError

if TYPE_CHECKING:
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

_T = TypeVar("_T")


class Swapping:
    """Swaps the sessions of a pipeline, by slot."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self._ring = pipeline.resting
        self._idle: dict[int, bool] = {}  # those that nobody needs, longest first; whether to be swapped out at once
        self._called: dict[int, None] = {}  # those that are to come back, longest first
        self._put_off: dict[int, list[PendingRequest]] = {}
        self._locations: dict[int, str] = {}  # as returned by `moved` last; of those that are not on the device

    def set_active(self, slot: int, message: SetActive) -> None:
        """Note whether a session is active; `advance` swaps it in or out. Mutates: self."""
        if not message.active:
            self._idle[slot] = message.swap_out
            if slot not in self._put_off:
                self._called.pop(slot, None)
        else:
            self._idle.pop(slot, None)
            if self._ring.is_away(slot):
                self._called[slot] = None

    def forget(self, slot: int) -> list[PendingRequest]:
        """The session has ended; returns its requests that were put off. Mutates: self."""
        self._idle.pop(slot, None)
        self._called.pop(slot, None)
        self._locations.pop(slot, None)
        return self._put_off.pop(slot, [])

    def call(self, slot: int) -> None:
        """Have a session that is away swapped in, though nobody needs it. Mutates: self."""
        self._called[slot] = None

    def retry_after_swap_out(self, call: Callable[[], _T], returning: int | None = None) -> _T:
        """Run `call`, which takes memory for a new session or the one `returning`; while there is too little, swap
        out the longest idle session and retry.

        Raises:
            RequestError: as `call`; code "memory" where all that fit are needed.
        """
        while True:
            try:
                return call()
            except RequestError as error:
                if error.code != "memory" or not self._swap_out_longest_idle(returning):
                    raise

    def put_off(self, slot: int, pending: PendingRequest) -> bool:
        """Whether a request has to wait until its session is swapped in, which is then begun: a reset of the stream,
        or a prompt or steps after one. Mutates: self.

        Raises:
            RequestError: no memory for it, code "memory".
        """
        if not self._ring.is_away(slot):
            return False
        request = pending.request
        if not (_resets(request) or (slot in self._put_off and isinstance(request, SetPrompt | SetSteps))):
            return False
        self._swap_in(slot)
        self._called.pop(slot, None)
        self._put_off.setdefault(slot, []).append(pending)
        return True

    @property
    def has_work(self) -> bool:
        """Whether `advance` or `moved` has anything to do."""
        return bool(self._idle or self._called or self._put_off or self._locations)

    def advance(self) -> list[PendingRequest]:
        """Swap sessions in and out; returns the put-off requests of those that are back, in their order. Mutates: self,
        pipeline."""
        for slot in list(self._called):
            if self._ring.is_away(slot):
                try:
                    self._swap_in(slot)
                except RequestError:
                    break  # all that fit are needed; it waits
            del self._called[slot]
        for slot, at_once in self._idle.items():
            if at_once and slot not in self._put_off and self._ring.at_rest(slot) and self._ring.can_swap_out(slot):
                self._ring.swap_out(slot)
        back = [slot for slot in self._put_off if not self._ring.is_away(slot)]
        return [request for slot in back for request in self._put_off.pop(slot)]

    def moved(self) -> list[tuple[int, str]]:
        """Sessions whose caches have moved since the last call, and their location: device, host or disk. Mutates:
        self."""
        now = {slot: self._ring.place(slot) for slot in {*self._idle, *self._locations}}
        moved = [(slot, location) for slot, location in now.items() if location != self._locations.get(slot, "device")]
        self._locations = {slot: location for slot, location in now.items() if location != "device"}
        return moved

    def take_lost(self) -> list[int]:
        """Sessions that came back without their caches; a reset is to follow. Each is returned once. Mutates:
        pipeline."""
        return self._ring.take_lost()

    def _swap_in(self, slot: int) -> None:
        """Swap a session in, others out for it. Raises RequestError as `retry_after_swap_out`. Mutates: pipeline."""
        self.retry_after_swap_out(lambda: self._ring.swap_in(slot), slot)

    def _swap_out_longest_idle(self, returning: int | None) -> bool:
        """Swap out the session that has been idle longest; whether there was one. Mutates: self, pipeline."""
        for slot in self._idle:
            if slot not in self._put_off and self._ring.can_swap_out(slot, returning):
                self._ring.swap_out(slot)
                return True
        return False


def _resets(request: StreamCommand) -> bool:
    """Whether a request resets the stream."""
    return isinstance(request, Reset) or (isinstance(request, SetPrompt) and request.switch == "reset")
