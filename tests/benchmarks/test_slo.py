"""Who was served well, on records made by hand; and the tipping point of curves that are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import slo
from benchmarks.slo import Tipping, Video, Visit, find_tipping

FPS = 10.0
LIMITS = {"first_frame": 0.5, "stalls": 0.0, "rate": 0.9, "control": 0.6}


def visit(
    *counts: int, first_frame_s: float | None = 0.4, controls: tuple[float, ...] = (), refused: str = ""
) -> Visit:
    """Ten seconds, with looks at the frames shown twice a second."""
    looks = [(10.0 + 0.5 * number, count) for number, count in enumerate(counts)]
    return Visit(10.0, 20.0, first_frame_s, looks, list(controls), refused)


GOOD = (1, 6, 11, 16, 21, 26)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (visit(*GOOD), []),
        (visit(*GOOD, controls=(0.2, 0.6)), []),
        (visit(*GOOD, first_frame_s=0.51), ["first_frame"]),
        (visit(*GOOD, controls=(0.2, 0.61)), ["control"]),
        (visit(1, 6, 8, 13, 18, 23), ["stalls"]),  # 2 of 5 in one look, 22 of 25 in all and one that may be on its way
        (visit(1, 5, 9, 13, 17, 21), ["rate"]),  # slow, but it never stood
        (visit(1, 1, 1, 1, 6, 11), ["stalls", "rate"]),
        (visit(first_frame_s=None), ["first_frame", "rate"]),
        (visit(3), []),  # too short to tell
        (visit(refused="time"), ["time"]),
    ],
)
def test_a_visit_is_served_well_when_every_limit_is_kept(one: Visit, why: list[str]) -> None:
    assert one.broken(LIMITS, FPS) == why


def test_looks_that_follow_each_other_are_one_stall() -> None:
    assert visit(1, 1, 1, 6, 11, 11, 16).stalls(FPS) == 2
    assert visit(*GOOD).stalls(FPS) == 0


def test_a_look_that_came_late_is_no_stall() -> None:
    late = Visit(0.0, 5.0, 0.1, [(0.0, 1), (0.7, 6), (1.0, 11), (1.5, 16)])
    assert late.stalls(FPS) == 0 and late.broken(LIMITS, FPS) == []


def test_goodput_is_of_those_served_well_and_of_the_time_measured() -> None:
    visits = [visit(*GOOD), visit(*GOOD, first_frame_s=2.0, controls=(0.3,)), visit(first_frame_s=None, refused="time")]
    found = slo.live_figures(visits, LIMITS, FPS, 15.0, 25.0)
    assert (found["visits"], found["served_well"], found["served_share"]) == (3, 1, pytest.approx(1 / 3))
    assert (found["offered"], found["goodput"]) == (1.5, 0.5)  # the last five seconds of each
    assert found["broken"] == {"first_frame": 1, "time": 1}
    assert found["first_frame_s"] == {"p50": 1.2, "p95": pytest.approx(1.92), "p99": pytest.approx(1.984)}
    assert found["control_s"] == {"p50": 0.3, "p95": 0.3, "p99": 0.3}
    assert slo.live_figures([], LIMITS, FPS, 0.0, 1.0)["first_frame_s"] == {"p50": None, "p95": None, "p99": None}


def test_videos_are_counted_by_what_became_of_them() -> None:
    videos = [
        Video(0.0, 0.1, 3.0, 0.2),
        Video(0.0, 0.1, 9.0, 0.2),
        Video(0.0, 0.1, error="failed"),
        Video(0.0, error="http 429"),
        Video(0.0, 0.1),  # not done at the end
    ]
    found = slo.video_figures(videos, {"total": 5.0}, 60.0)
    assert (found["videos"], found["completed"], found["served_well"]) == (5, 2, 1)
    assert (found["per_minute"], found["goodput_per_minute"]) == (2.0, 1.0)
    assert found["errors"] == {"failed": 1, "http 429": 1}
    assert found["broken"] == {"total": 1, "failed": 1, "http 429": 1, "unfinished": 1}
    assert slo.video_figures(videos, {}, 60.0)["served_well"] == 2
    total_s = found["total_s"]
    assert isinstance(total_s, dict) and total_s["p50"] == pytest.approx(6.3)


@pytest.mark.parametrize(
    ("text", "word"), [("speed=1", "speed"), ("rate", "rate"), ("rate=1,rate=1", "twice"), ("rate=-1", "0 or more")]
)
def test_an_objective_that_cannot_be_is_refused(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        slo.parse(text, slo.LIVE_LIMITS)
    assert slo.parse("first_frame=0.5, stalls=0", slo.LIVE_LIMITS) == {"first_frame": 0.5, "stalls": 0.0}


@pytest.mark.parametrize(
    ("holds_to", "halvings", "tipping", "tried"),
    [
        (5.2, 0, Tipping(4, 6), [2, 4, 6, 8]),
        (5.2, 2, Tipping(5, 5.5), [2, 4, 6, 8, 5, 5.5]),
        (1.0, 3, Tipping(None, 2), [2, 4]),  # nothing below it was tried
        (99.0, 3, Tipping(10, None), [2, 4, 6, 8, 10]),
        (9.0, 1, Tipping(9, 10), [2, 4, 6, 8, 10, 9]),
    ],
)
def test_the_tipping_point_of_a_curve_that_is_known(
    holds_to: float, halvings: int, tipping: Tipping, tried: list[float]
) -> None:
    asked: list[float] = []
    assert find_tipping(noting(asked, lambda load: load <= holds_to), [2, 4, 6, 8, 10], halvings=halvings) == tipping
    assert asked == tried


def noting(asked: list[float], served: Callable[[float], bool]) -> Callable[[float], bool]:
    def ask(load: float) -> bool:
        asked.append(load)
        return served(load)

    return ask


def test_a_load_that_is_served_beyond_one_that_was_not_is_not_the_tipping_point() -> None:
    assert find_tipping(lambda load: load != 4, [2, 4, 6], beyond=2) == Tipping(2, 4)


@pytest.mark.parametrize("ladder", [[], [4, 2], [2, 2]])
def test_a_ladder_that_does_not_rise_is_refused(ladder: list[float]) -> None:
    with pytest.raises(ValueError, match="rising"):
        find_tipping(lambda load: True, ladder)
