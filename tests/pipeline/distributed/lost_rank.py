"""A ring that cannot end: rank 1 fails, all others wait for ever. For the test of `processes.py`."""

from __future__ import annotations

import sys
from threading import Event


def main(rank: int, message: str) -> None:
    if rank == 1:
        raise ValueError(message)
    Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4])
