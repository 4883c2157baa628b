"""KV contexts: what they cost in chunks in flight, caches and slots. Pure, no torch."""

from __future__ import annotations

from collections.abc import Sequence

KV_CONTEXTS = ("clean", "staircase", "matched")


def in_flight_limit(kv_context: str, *, steps: int, stages: int) -> int:
    """Chunks of one session that may be in flight at once.

    Raises:
        ValueError: unknown KV context.
    """
    if kv_context not in KV_CONTEXTS:
        raise ValueError(f"kv_context is {kv_context!r}; it can be {', '.join(KV_CONTEXTS)}")
    return {"clean": 1, "staircase": steps + 1, "matched": stages}[kv_context]


def sessions_to_fill(kv_context: str, *, steps: int, stages: int) -> int:
    """Sessions that keep all stages busy."""
    return -(-stages // in_flight_limit(kv_context, steps=steps, stages=stages))


def most_steps(steps: int, known: Sequence[int]) -> int:
    """The steps that a session's caches are made for: it may change to any number that its model has (`known`), and
    nothing is allocated while it plays."""
    return max(steps, *known) if known else steps


def cache_count(kv_context: str, *, steps: int) -> int:
    """Caches of one session: `matched` keeps one per step."""
    return steps if kv_context == "matched" else 1


def spare_slots(kv_context: str, *, steps: int) -> int:
    """Slots, in chunks, that a cache has beyond the window, for newer chunks in flight.

    Only a staircase's newcomers write into the cache that older chunks still read, so it needs one for each of them,
    in-flight limit less one. A cache of `matched` holds one step, which chunks pass in order. So no cache depends on
    the number of stages, and on any number the same keys are summed in the same order.
    """
    return in_flight_limit(kv_context, steps=steps, stages=1) - 1 if kv_context == "staircase" else 0


def minimum_lead(kv_context: str, *, steps: int, stages: int, chunk_frames: int, first_chunks: int = 1) -> int:
    """Frames a viewer's lead must allow so that the ring can run: the chunks in flight and one being shown, and at the
    beginning those that are made together."""
    return chunk_frames * max(in_flight_limit(kv_context, steps=steps, stages=stages) + 1, first_chunks)
