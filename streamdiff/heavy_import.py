"""Slow imports (torch, and what loads a pipeline) without garbage collection, which takes a fifth of their time as it
scans a million new objects in vain, and would take another second at the end of the process."""

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
