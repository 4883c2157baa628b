"""How tests compile: by torch's own compiler as the product does, or without the C++ compiler behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

FOUND = "eager"
"""Graphs are found, and no code is made: what they are of runs as it is."""
TRACED = "aot_eager"
"""Functions become the graphs that they are compiled from, and those run as they are."""
COMPILED = "inductor"
"""The product's own. A stage takes half a minute of the C++ compiler."""
BACKENDS = [TRACED, pytest.param(COMPILED, marks=pytest.mark.soak)]
FINDING = [FOUND, *BACKENDS[1:]]
"""For tests of which graphs there are, and of what runs without one. Finding is half of what `TRACED` takes."""


@contextmanager
def compiled_by(backend: str) -> Iterator[None]:
    """Meanwhile `torch.compile` uses this backend. Mutates: torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        yield
