"""What each KV context needs: chunks in flight, KV caches, cache slots, frames ahead. Pure logic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from streamdiff.config import KVContext

KV_CONTEXTS: tuple[str, ...] = get_args(KVContext)
PER_STEP = ("same_step",)
"""Those with a cache for each step."""


def in_flight_limit(kv_context: str, *, steps: int, stages: int) -> int:
    """Chunks of one session that may be in flight at once.

    Raises:
        ValueError: unknown KV context.
    """
    if kv_context not in KV_CONTEXTS:
        raise ValueError(f"kv_context is {kv_context!r}; it can be {', '.join(KV_CONTEXTS)}")
    return {"clean": 1, "staircase": steps + 1}.get(kv_context, stages)


def sessions_to_fill(kv_context: str, *, steps: int, stages: int) -> int:
    """Sessions that keep all stages busy."""
    return -(-stages // in_flight_limit(kv_context, steps=steps, stages=stages))


def most_steps(steps: int, known: Sequence[int]) -> int:
    """The largest number of steps that a session may change to (`known`: those its model has). Its caches are sized for
    it, so that nothing is allocated while it runs."""
    return max(steps, *known) if known else steps


def cache_count(kv_context: str, *, steps: int) -> int:
    """Caches of one session: `same_step` keeps one per step."""
    return steps if kv_context in PER_STEP else 1


def spare_slots(kv_context: str, *, steps: int) -> int:
    """Slots, in chunks, that a cache has beyond the window, for newer chunks in flight.

    Only a staircase's newcomers write into the cache that older chunks still read, so it needs one for each of them,
    in-flight limit less one. A cache of `same_step` holds one step, which chunks pass in order. So no cache
    depends on the number of stages, and on any number the same keys are summed in the same order.
    """
    return in_flight_limit(kv_context, steps=steps, stages=1) - 1 if kv_context == "staircase" else 0


def min_ahead_frames(kv_context: str, *, steps: int, stages: int, chunk_frames: int, first_chunks: int = 1) -> int:
    """Frames that must be allowed ahead of those shown so that the ring can run: the chunks in flight and one being
    shown; at the beginning those that are made together."""
    return chunk_frames * max(in_flight_limit(kv_context, steps=steps, stages=stages) + 1, first_chunks)
