"""Waits for a decoder's thread."""

from __future__ import annotations

from streamdiff.pipeline.decode.decode_worker import Decoding


def drain(decoding: Decoding) -> None:
    """Return when all that was asked for is done: what a stream that there is not has is saved after it."""
    decoding.save(10**6)()
