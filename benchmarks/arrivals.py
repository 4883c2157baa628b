"""Who comes when: live viewers and jobs of an open loop, drawn from a seed. Nobody waits for anybody else's end.

The same seed gives the same people at every load: only the time between them is longer or shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

PROMPTS = (
    "a red circle moving right over a meadow",
    "a blue star rising at night",
    "a yellow square moving left at sunset",
    "a green triangle sinking over the sea",
    "a white heart drifting left at sunset",
)
LEAST_S = 3.0
"""The shortest visit, and how long it goes on after a prompt at least: less than that says nothing."""


@dataclass(frozen=True)
class Visitor:
    """Opens a session at `at_s`, watches it for `stay_s`, and says another prompt at each of `prompts_s`, which count
    from the arrival. Sessions of two visitors differ in `seed`."""

    at_s: float
    stay_s: float
    seed: int
    prompts_s: tuple[float, ...]

    @property
    def leaves_s(self) -> float:
        return self.at_s + self.stay_s

    def prompt(self, number: int) -> str:
        """Its first prompt is number 0."""
        return PROMPTS[(self.seed + number) % len(PROMPTS)]


@dataclass(frozen=True)
class JobArrival:
    """Asks at `at_s` for a video of `seconds`."""

    at_s: float
    seconds: float
    seed: int


@dataclass(frozen=True)
class Load:
    """What is offered, for `seconds`: `sessions` live ones at once on average, each of which stays for `stay_s` on
    average, and `jobs_per_minute` jobs of `job_seconds` of video. A visitor says another prompt every `prompt_s` on
    average.

    Before, in `stay_s / 2`, as many sessions as are there on average come one after the other; who is there at the end
    stays for `LEAST_S` more at most.

    Raises:
        ValueError: a value is out of range.
    """

    sessions: float
    seconds: float
    stay_s: float = 8.0
    jobs_per_minute: float = 0.0
    job_seconds: float = 1.0
    prompt_s: float = 4.0

    def __post_init__(self) -> None:
        for name in ("sessions", "seconds", "job_seconds", "prompt_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name):g}, but must be above 0")
        if self.jobs_per_minute < 0:
            raise ValueError(f"jobs_per_minute is {self.jobs_per_minute:g}, but must be 0 or more")
        if self.stay_s <= LEAST_S:
            raise ValueError(f"stay_s is {self.stay_s:g}, but must be above {LEAST_S:g}, which everybody stays")

    @property
    def begin_s(self) -> float:
        """From when on the load is that which is offered."""
        return self.stay_s / 2

    @property
    def end_s(self) -> float:
        """When the last ones have come."""
        return self.begin_s + self.seconds


def exponentials(seed: str) -> Iterator[float]:
    """Draws of the unit exponential, of which any eight that begin at a multiple of eight are one from each eighth of
    the distribution: so short runs too have the load that was asked for, about."""
    own = Random(seed)
    while True:
        for eighth in own.sample(range(8), 8):
            yield -math.log(1 - (eighth + own.random()) / 8)


def visitors(load: Load, seed: int) -> list[Visitor]:
    """In the order in which they come."""
    gaps, stays = exponentials(f"visitors {seed}"), exponentials(f"stays {seed}")
    people = round(load.sessions)
    times = [load.begin_s * number / people for number in range(people)]
    # By Little's law so many are there on average as come while one stays.
    at_s = load.begin_s + next(gaps) * load.stay_s / load.sessions
    while at_s < load.end_s:
        times.append(at_s)
        at_s += next(gaps) * load.stay_s / load.sessions
    return [_visitor(load, at_s, next(stays), seed, number) for number, at_s in enumerate(times)]


def _visitor(load: Load, at_s: float, stay: float, seed: int, number: int) -> Visitor:
    """Stays for `LEAST_S` and a drawn time."""
    own = Random(f"visitor {seed} {number}")
    stay_s = LEAST_S + stay * (load.stay_s - LEAST_S)
    stay_s = min(stay_s, load.end_s + LEAST_S - at_s)
    prompts, prompt_s = [], own.expovariate(1.0) * load.prompt_s
    while prompt_s < stay_s - LEAST_S:
        prompts.append(prompt_s)
        prompt_s += own.expovariate(1.0) * load.prompt_s
    return Visitor(at_s, stay_s, number, tuple(prompts))


def jobs(load: Load, seed: int) -> list[JobArrival]:
    """In the order in which they come, from the beginning of what is measured on."""
    if load.jobs_per_minute == 0:
        return []
    gaps, found = exponentials(f"jobs {seed}"), list[JobArrival]()
    at_s = load.begin_s + next(gaps) * 60 / load.jobs_per_minute
    while at_s < load.end_s:
        found.append(JobArrival(at_s, load.job_seconds, len(found)))
        at_s += next(gaps) * 60 / load.jobs_per_minute
    return found
