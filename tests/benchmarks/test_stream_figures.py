"""Figures of hand-made times, worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.metrics import METRICS
from benchmarks.stream_figures import Arrival, Prompt, Raw, Run, figures, play_ratio, stalls


def chunk(number: int, at_s: float, chunk_s: float, epoch: int = 0) -> list[Arrival]:
    """Two pieces of 4 frames, half a second apart, the last at `at_s`."""
    return [Arrival(at_s - 0.5, number, epoch, 4, None), Arrival(at_s, number, epoch, 4, chunk_s)]


def made(**changes: object) -> Raw:
    arrivals = [*chunk(0, 1.5, 1.5), *chunk(1, 3.0, 2.0), *chunk(2, 4.0, 2.0), *chunk(3, 5.0, 3.0), *chunk(4, 7.0, 4.0)]
    values = {
        "playback_fps": 8.0,
        "warm_up_chunks": 2,
        "load_s": 9.0,
        "openings": [
            Run(10.0, chunk(0, 11.0, 1.0) + chunk(1, 12.5, 1.0)),
            Run(20.0, chunk(0, 20.8, 1.0) + chunk(1, 22, 1.0)),
        ],
        "steady": Run(0.0, [*arrivals, Arrival(7.2, 5, 0, 4, None)]),
        "prompts": [Prompt(8.0, 9.0), Prompt(10.0, 12.5), Prompt(13.0, 13.5)],
        "parts": {"step 0": [0.1, 0.2], "step 1": [0.4, 0.3], "clean": [0.5, 0.7, 0.6], "decode": [0.05]},
        "peak_bytes": [2**30, 3 * 2**30],
        "threads": [1, 1],
        "occupancy": [],
        "remarks": [],
        **changes,
    }
    return Raw(**values)  # type: ignore[arg-type]


def test_every_figure_is_what_the_times_say() -> None:
    found = figures(made())
    # 24 frames of chunks 2 to 4 between the end of chunk 1 (3.0) and 7.0; the piece of chunk 5 is not whole.
    assert found["fps"] == pytest.approx(24 / 4.0)
    assert (found["ttff_s"], found["ttff_worst_s"]) == pytest.approx(((0.5 + 0.3) / 2, 0.5))
    assert found["ttfc_s"] == pytest.approx((1.0 + 0.8) / 2)
    assert (found["rtf"], found["device_fps"]) == pytest.approx((8 / 6, 6 / 2))
    # Begun at 1.5, chunks 1 to 4 are due at 2.5, 3.5, 4.5 and 5.5, and come at 3, 4, 5 and 7.
    assert found["play_ratio"] == 0.0
    assert found["second_chunk_s"] == pytest.approx((2.0 + 1.5) / 2)
    assert (found["chunk_p50_s"], found["chunk_p95_s"]) == pytest.approx((3.0, 3.9))
    assert (found["control_p50_s"], found["control_worst_s"]) == pytest.approx((1.0, 2.5))
    assert (found["step_s"], found["clean_s"], found["decode_s"]) == pytest.approx((0.25, 0.6, 0.05))
    assert (found["text_s"], found["encode_s"]) == (None, None)
    assert found["peak_gib"] == 3.0
    assert set(found) <= set(METRICS)


def test_the_play_ratio_counts_the_chunks_that_are_there_when_they_are_due() -> None:
    run = Run(0.0, [*chunk(0, 1.0, 1.0), *chunk(1, 2.0, 1.0), *chunk(2, 3.5, 1.0), *chunk(3, 4.0, 1.0)])
    assert play_ratio(run, 8.0) == pytest.approx(2 / 3), "due at 2, 3 and 4"
    assert play_ratio(run, 4.0) == 1.0
    assert play_ratio(Run(0.0, chunk(0, 1.0, 1.0)), 8.0) is None


@pytest.mark.parametrize(
    ("buffer_s", "count", "waited_s"),
    [
        # At 4 frames per second frame n is due n / 4 s after the start. Frames 2 and 3 come at 1.0, frame 4 at 2.5.
        (0.0, 2, 0.5 + 1.0),  # frame 2, due 0.5, waits 0.5; frame 4, then due 1.5, waits 1.0
        (0.5, 1, 1.0),  # frame 2 is due at 1.0 and there; frame 4, due 1.5, waits 1.0
        (1.0, 1, 0.5),
        (1.5, 0, 0.0),
    ],
)
def test_stalls_of_hand_made_times(buffer_s: float, count: int, waited_s: float) -> None:
    assert stalls([0.0, 0.0, 1.0, 1.0, 2.5], 4.0, buffer_s) == (count, pytest.approx(waited_s))
