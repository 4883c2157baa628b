"""Waits for a decoder's thread."""

from __future__ import annotations

import threading

from streamdiff.pipeline.decode.decode_worker import Decoding


def drain(decoding: Decoding) -> None:
    """Return when all that was asked for is done: what a stream that there is not has is saved after it."""
    saved = decoding.save(10**6)
    while saved() is None:
        decoding.check()
        threading.Event().wait(0.005)
