"""A ring that cannot end: rank 1 fails, all others wait for ever. For the test of `processes.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Event


def main(rank: int, message: str, folder: Path) -> None:
    """Each says in a file of the folder which process it is."""
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        raise ValueError(message)
    Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], Path(sys.argv[5]))
