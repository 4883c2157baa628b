"""A device that carries out later what it is handed, with a clock of its own: a stand-in for a GPU and its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Event:
    """As `torch.cuda.Event` with timing, on one stream of the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.at_s: float | None = None

    def record(self) -> None:
        self.at_s = None
        self._device.hand_over(self._pass)

    def query(self) -> bool:
        return self.at_s is not None

    def elapsed_time(self, end_event: Event) -> float:
        assert self.at_s is not None and end_event.at_s is not None, "CUDA raises an error"
        return (end_event.at_s - self.at_s) * 1000

    def _pass(self) -> None:
        self.at_s = self._device.now_s


class Device:
    """One stream of it. What it is handed takes no time of the host's."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._handed: deque[Callable[[], None]] = deque()

    def event(self) -> Event:
        return Event(self)

    def hand_over(self, operation: Callable[[], None]) -> None:
        self._handed.append(operation)

    def compute(self, seconds: float) -> None:
        """Hand over something that takes so long."""
        self.hand_over(lambda: self.wait(seconds))

    def wait(self, seconds: float) -> None:
        """Time passes on the device."""
        self.now_s += seconds

    def carry_out(self, operations: int | None = None) -> None:
        """Come to the end of so many operations; None: of all."""
        for _ in range(len(self._handed) if operations is None else operations):
            self._handed.popleft()()
