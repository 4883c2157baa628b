"""Who was served well: a service level objective (SLO) as limits by name, and what a request for a video came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import report

VIDEO_LIMITS = {
    "total": "seconds from the request until the video is downloaded, at most",
    "submit": "seconds until the request is taken, at most",
    "wait": "seconds from there until the video is complete, at most",
    "download": "seconds of its download, at most",
}
AT_LEAST = ("rate",)
PERCENTILES = (50, 95, 99)
PROMPTS = (
    "a red circle moving right over a meadow",
    "a blue star rising at night",
    "a yellow square moving left at sunset",
    "a green triangle sinking over the sea",
    "a white heart drifting left at sunset",
)
"""What visitors and jobs ask for, in turns."""

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


def spread(values: Sequence[float]) -> dict[str, report.Value]:
    """Percentiles by name; None where there are no values."""
    return {f"p{percent}": round(report.percentile(values, percent), 4) if values else None for percent in PERCENTILES}


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
        return [self.error] if self.error else broken({name: getattr(self, f"{name}_s") for name in VIDEO_LIMITS}, slo)


def video_figures(videos: Sequence[Video], slo: Slo, seconds: float) -> dict[str, report.Json]:
    """What so many requests for videos come to, in so many seconds: videos per minute, all that came and those served
    well."""
    why = [video.broken(slo) for video in videos]
    done = [total_s for video in videos if (total_s := video.total_s) is not None]
    parts = {name: [getattr(video, f"{name}_s") for video in videos] for name in VIDEO_LIMITS}
    return {
        "videos": len(videos),
        "completed": len(done),
        "served_well": sum(not reasons for reasons in why),
        "per_minute": round(60 * len(done) / seconds, 3),
        "goodput_per_minute": round(60 * sum(not reasons for reasons in why) / seconds, 3),
        **{f"{name}_s": spread([each for each in times if each is not None]) for name, times in parts.items()},
        "errors": dict(Counter(video.error for video in videos if video.error)),
        "broken": dict(Counter(reason for reasons in why for reason in reasons)),
    }
