"""Slow imports (torch, and what loads a pipeline) without garbage collection, which takes a fifth of their time as it
scans a million new objects in vain, and would take another second at the end of the process. And imports of packages
that need not be there."""

from __future__ import annotations

import atexit
import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from streamdiff.errors import ConfigError


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


def optional(module: str, extra: str, what: str, field: str = "") -> Any:
    """A module that comes with an extra of this package, which `what` takes.

    Raises:
        ConfigError: it is not installed; says the command that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = f"{what} takes {module.partition('.')[0]} ({error}); install it with: pip install 'streamdiff[{extra}]'"
        raise ConfigError(why, field=field, code="missing") from None
