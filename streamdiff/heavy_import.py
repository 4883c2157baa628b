"""Imports that take seconds: of torch, and of what loads a pipeline. A fifth of it is the garbage collector, which
looks through a million new objects again and again and finds nothing to free; and at the end of the process once more,
for longer than a second."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_import() -> Iterator[None]:
    """Imports within do not collect garbage, nor does the end of the process.

    Mutates: the process's collector, which is on afterwards if it was; what is done at the process's end.
    """
    was_on = gc.isenabled()
    gc.disable()
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # what is there when the process ends is not looked through any more
    try:
        yield
    finally:
        if was_on:
            gc.enable()
