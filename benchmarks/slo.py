"""Who was served well: records of visits and videos against a service level objective (SLO), and the load up to which
most are. Pure; knows neither servers nor clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks import report

LIVE_LIMITS = {
    "first_frame": "seconds from the request to the first frame, at most",
    "stalls": "times that the picture stood, at most",
    "rate": "frames shown of those due, a share, at least",
    "control": "seconds from a prompt to its first frame on show, every prompt, at most",
}
JOB_LIMITS = {"job": "seconds from the request for a job until its video is there, at most"}
VIDEO_LIMITS = {
    "total": "seconds from the request until the video is downloaded, at most",
    "submit": "seconds until the request is taken, at most",
    "wait": "seconds from there until the video is complete, at most",
    "download": "seconds of its download, at most",
}
AT_LEAST = ("rate",)
PERCENTILES = (50, 95, 99)
STILL_SHARE = 0.5
"""The picture stood between two looks where less of the frames due were new."""

Slo = Mapping[str, float]


def parse(text: str, known: Mapping[str, str]) -> dict[str, float]:
    """`first_frame=0.5,stalls=0` as limits by name.

    Raises:
        ValueError: a name that is not `known`, a name twice, or no number.
    """
    found: dict[str, float] = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        if name not in known:
            raise ValueError(f"--slo has {name!r}; it can limit {', '.join(known)}, as in {next(iter(known))}=2")
        if name in found:
            raise ValueError(f"--slo limits {name} twice")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(f"--slo limits {name} to {value!r}, which is no number") from None
        if not 0 <= found[name] < float("inf"):
            raise ValueError(f"--slo limits {name} to {value}, but must be 0 or more")
    return found


def broken(found: Mapping[str, float | None], slo: Slo) -> list[str]:
    """The limits that were not kept. What never came is None, and keeps none."""
    return [
        name
        for name, limit in slo.items()
        if (value := found[name]) is None or (value < limit if name in AT_LEAST else value > limit)
    ]


@dataclass
class Visit:
    """What a live visitor got. Times in seconds of one clock.

    `looks`: (time, frames shown so far) again and again, from the first frame on. `controls`: of every prompt, how long
    it took to be seen, or until the visitor left in vain. `refused`: why there was no session, a word; `received`:
    frames that came in over the network.
    """

    at_s: float
    leaves_s: float
    first_frame_s: float | None = None
    looks: list[tuple[float, int]] = field(default_factory=list)
    controls: list[float] = field(default_factory=list)
    refused: str = ""
    received: int | None = None

    def stalls(self, fps: float) -> int:
        """Times that the picture stood: of looks that follow each other one stall."""
        still = [
            frames - before < STILL_SHARE * fps * (at_s - was_s)
            for (was_s, before), (at_s, frames) in pairwise(self.looks)
        ]
        return sum(now and not before for before, now in pairwise([False, *still]))

    def rate(self, fps: float) -> float | None:
        """Share of the frames due that were shown, 1 at most; None for who was there too short to tell."""
        if len(self.looks) < 2 or self.looks[-1][0] <= self.looks[0][0]:
            return None
        (begin_s, first), (end_s, last) = self.looks[0], self.looks[-1]
        return min(1.0, (last - first + 1) / (fps * (end_s - begin_s)))  # the latest may be due just after the look

    def broken(self, slo: Slo, fps: float) -> list[str]:
        """Why this visitor was not served well; empty: was."""
        if self.refused:
            return [self.refused]
        rate = self.rate(fps)
        found = {
            "first_frame": self.first_frame_s,
            "stalls": float(self.stalls(fps)),
            "rate": 1.0 if rate is None and self.first_frame_s is not None else rate,
            "control": max(self.controls, default=0.0),
        }
        return broken(found, {name: limit for name, limit in slo.items() if name in LIVE_LIMITS})

    def watched_s(self, begin_s: float, end_s: float) -> float:
        """Seconds of the visit that lie in a span."""
        return max(0.0, min(self.leaves_s, end_s) - max(self.at_s, begin_s))


@dataclass
class Video:
    """What became of a request for a video: seconds of each part, None where it did not get so far. `error` is empty or
    says in a word what went wrong."""

    at_s: float
    submit_s: float | None = None
    wait_s: float | None = None
    download_s: float | None = None
    error: str = ""
    bytes: int = 0

    @property
    def total_s(self) -> float | None:
        """From the request until the video was there."""
        parts = (self.submit_s, self.wait_s, self.download_s)
        there = [part for part in parts if part is not None]
        return sum(there) if len(there) == len(parts) and not self.error else None

    def broken(self, slo: Slo) -> list[str]:
        """Why it was not served well; empty: was."""
        if self.error:
            return [self.error]
        if self.total_s is None:
            return ["unfinished"]
        return broken({name: getattr(self, f"{name}_s") for name in VIDEO_LIMITS}, slo)


def spread(values: Sequence[float]) -> dict[str, report.Value]:
    """Percentiles by name; None where there are no values."""
    return {f"p{percent}": round(report.percentile(values, percent), 4) if values else None for percent in PERCENTILES}


def live_figures(visits: Sequence[Visit], slo: Slo, fps: float, begin_s: float, end_s: float) -> dict[str, report.Json]:
    """What so many visits come to, between two times. `offered` and `goodput` are sessions at once on average: those
    who came, and those of them who were served well."""
    why = [visit.broken(slo, fps) for visit in visits]
    seconds = [visit.watched_s(begin_s, end_s) for visit in visits]
    good_s = sum(time_s for time_s, reasons in zip(seconds, why, strict=True) if not reasons)
    seen = [visit for visit in visits if visit.first_frame_s is not None]
    rates = [rate for visit in seen if (rate := visit.rate(fps)) is not None]
    shown = sum(visit.looks[-1][1] for visit in seen if visit.looks and visit.received is not None)
    received = sum(visit.received or 0 for visit in seen if visit.looks)
    return {
        "visits": len(visits),
        "served_well": sum(not reasons for reasons in why),
        "served_share": sum(not reasons for reasons in why) / len(visits) if visits else 1.0,
        "offered": round(sum(seconds) / (end_s - begin_s), 3),
        "goodput": round(good_s / (end_s - begin_s), 3),
        "first_frame_s": spread([visit.first_frame_s for visit in seen if visit.first_frame_s is not None]),
        "control_s": spread([lag_s for visit in seen for lag_s in visit.controls]),
        # The slowest are the high percentiles here, as with seconds.
        "short_of_rate": spread([1 - rate for rate in rates]),
        "stalls": sum(visit.stalls(fps) for visit in visits),
        "received_share": round(received / shown, 3) if shown else None,
        "broken": dict(Counter(reason for reasons in why for reason in reasons)),
    }


def video_figures(videos: Sequence[Video], slo: Slo, seconds: float) -> dict[str, report.Json]:
    """What so many requests for videos come to, in so many seconds: videos per minute, all that came and those served
    well."""
    why = [video.broken(slo) for video in videos]
    done = [total_s for video in videos if (total_s := video.total_s) is not None]
    return {
        "videos": len(videos),
        "completed": len(done),
        "served_well": sum(not reasons for reasons in why),
        "per_minute": round(60 * len(done) / seconds, 3),
        "goodput_per_minute": round(60 * sum(not reasons for reasons in why) / seconds, 3),
        **{f"{name}_s": spread(_known(videos, f"{name}_s")) for name in VIDEO_LIMITS},
        "errors": dict(Counter(video.error for video in videos if video.error)),
        "broken": dict(Counter(reason for reasons in why for reason in reasons)),
    }


def _known(videos: Sequence[Video], name: str) -> list[float]:
    return [value for video in videos if (value := getattr(video, name)) is not None]


@dataclass(frozen=True)
class Tipping:
    """`load`: the largest one up to which all that were tried were served; None: not even the least was. `above`: the
    least that was not; None: all were, and the tipping point is not reached."""

    load: float | None
    above: float | None


def find_tipping(
    served: Callable[[float], bool], ladder: Sequence[float], *, halvings: int = 0, beyond: int = 1
) -> Tipping:
    """Climb the `ladder` of loads until one is not `served`, then halve the step below it so often. So many loads
    `beyond` are tried too, to see how it goes on there; whatever they say, the tipping point is the first one.

    Raises:
        ValueError: no loads, or not in rising order.
    """
    if not ladder or list(ladder) != sorted(set(ladder)):
        raise ValueError(f"loads are {list(ladder)}, but must be one or more in rising order")
    low: float | None = None
    high: float | None = None
    for number, load in enumerate(ladder):
        if not served(load):
            high = load
            for further in ladder[number + 1 : number + 1 + beyond]:
                served(further)
            break
        low = load
    for _ in range(halvings if low is not None and high is not None else 0):
        assert low is not None and high is not None
        middle = (low + high) / 2
        if served(middle):
            low = middle
        else:
            high = middle
    return Tipping(low, high)
