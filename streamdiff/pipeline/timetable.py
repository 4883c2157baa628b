"""When chunks of a `matched` session enter the ring. Pure arithmetic.

**Paced admission.** Chunks of one `matched` session that enter as soon as they may finish together, and then nothing
finishes for long. So such a session has a timetable. In a ring of equal stages a forward moves on by one stage per
tick, and a micro-step is back after P ticks (P stages). Chunk n is put on tick `timetable_tick(n)`, about every S ticks
(S steps), and its step s on P * s ticks later. That is a perfect packing, one micro-step on every tick, and micro-steps
enter in its order: a new chunk is admitted when all steps of the session's chunks in flight that stand before it have
entered, and then goes before those that stand after it. Nobody looks at a clock, only the order counts; whatever the
stages take, chunks finish one by one. Admission waits for nothing but steps of the same session that are in flight,
which wait for nothing but the ring; so it never stalls, and a chunk that comes late (there was no room) only moves the
chunks after it. `staircase` and `clean` space themselves by their own rules.
"""

from __future__ import annotations

from math import gcd


def timetable_tick(chunk: int, *, stages: int, passes: int) -> int:
    """Tick on which the timetable of a paced session has step 0 of a chunk; step s stands `s * stages` ticks later.

    With P stages and S passes per chunk, a round is P chunks in P * S ticks: chunk i of it stands on tick
    `i * S + floor(i * gcd(P, S) / P)`. The second term moves chunks on by a tick whenever the first falls on the same
    stage (modulo P) as an earlier one; so all micro-steps of all chunks stand on ticks of their own, without a hole,
    and starts are S or S + 1 ticks apart, once a round `S + 1 - gcd(P, S)`.
    """
    rounds, place = divmod(chunk, stages)
    return rounds * stages * passes + place * passes + place * gcd(stages, passes) // stages
