"""Endless, steerable video from a prompt.

    for frame in streamdiff.stream("a red circle moving left", seconds=10): ...

`stream` gives frames, `open` a session that takes new prompts while it runs, `load` one that continues from a file;
`run_worker` is for the other ranks of a ring.
Importing this package is light: the rest, torch above all, is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamdiff.version import __version__

if TYPE_CHECKING:
    from streamdiff.api import StreamSession, load, open, run_worker, stream

__all__ = ["StreamSession", "__version__", "load", "open", "run_worker", "stream"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from streamdiff import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
