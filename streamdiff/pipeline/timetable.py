"""The timetable of paced sessions: see `scheduler`. Pure, no torch."""

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
