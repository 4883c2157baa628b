"""What a fake pipeline answers that takes no video and swaps no session."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from streamdiff.core import ModelInfo
from streamdiff.errors import RequestError


class BarePipeline:
    info: ModelInfo
    encodings = 0
    inputs: tuple[int, ...] = ()
    savings: tuple[int, ...] = ()

    @property
    def swapping(self) -> Any:
        """The fake is its own collaborators."""
        return self

    saving = video = figures = swapping

    def attend(self) -> None:
        """Begin a step: there is no swapping and no video."""

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def schedule(self) -> None:
        """No ring: all is done in `collect`."""

    def run(self, message: None) -> None:
        """See `schedule`."""

    def sample(self) -> list[Any]:
        return []

    def decode(self, message: None, finished: list[Any]) -> None:
        """See `schedule`."""

    def check_input(self, strength: float | None) -> None:
        raise RequestError("input", f"{self.info.model} takes no video; steer it by its prompt alone")

    def input_figures(self, session: int) -> None:
        return None

    def max_swapped_sessions(self) -> int | None:
        return 0

    def is_away(self, session: int) -> bool:
        return False

    def can_swap_out(self, session: int, returning: int | None = None) -> bool:
        return False

    def at_rest(self, session: int) -> bool:
        return False

    def place(self, session: int) -> str:
        return "device"

    def memory_bytes(self) -> int:
        return 3 << 20

    def take_lost(self) -> list[int]:
        return []
