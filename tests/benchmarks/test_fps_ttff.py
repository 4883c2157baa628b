"""A run from end to end, in real processes: figures that the raw times in the file give again, a header, a picture. No
figure is judged here. Figures of hand-made times, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fps_ttff, stream_options
from benchmarks.metrics import METRICS
from benchmarks.stream_case import Case
from benchmarks.stream_figures import Arrival, Prompt, Raw, Run, figures, play_ratio, stalls

SMALL = ["--openings", "1", "--chunks", "2", "--margin", "1", "--prompts", "1", "--rounds", "1", "--device", "cpu"]


def cases(*words: str) -> list[Case]:
    options = fps_ttff.parser().parse_args(list(words))
    return fps_ttff.profiled(stream_options.cases_of(options), options.profile)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_stages_are_measured_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "result.json", tmp_path / "result.png"
    words = ["--kv-context", "staircase", "--stages", "2", *SMALL, "--out", str(out), "--plot", str(plot)]
    assert fps_ttff.main(words) == fps_ttff.OK
    stored = json.loads(out.read_text())
    assert stored["benchmark"] == "fps_ttff" and stored["device"] == "cpu" and stored["failed"] == []
    assert set(stored["header"]) == {"command", "date", "commit", "hardware", "software", "threads", "warm_up"}
    two = "tiny, 4 steps, staircase, 2 stages"
    assert list(stored["results"]) == list(stored["settings"]) == [two]
    result = stored["results"][two]
    raw = Raw.from_json(result["raw"])
    assert figures(raw) == result["figures"]
    assert result["figures"]["fps"] > 0 and result["figures"]["control_p50_s"] > 0
    assert [piece.frames for piece in raw.steady.arrivals] == [4] * len(raw.steady.arrivals)
    times = [piece.at_s for piece in raw.steady.arrivals]
    assert times == sorted(times) and times[0] > raw.steady.asked_s
    assert len({piece.epoch for piece in raw.steady.arrivals}) == 1, "the prompts belong behind the steady part"
    parts = {"text", "step 0", "step 1", "step 2", "step 3", "clean", "decode", "copy", "encode"}
    assert set(result["raw"]["parts"]) == parts and not result["remarks"]
    assert len(result["raw"]["peak_bytes"]) == len(result["raw"]["occupancy"]) == 2
    assert plot.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert printed.count(f"| {two}") == 2 and "parts, alone, in ms" in printed


def test_options_stand_in_place_of_the_presets_lists(tmp_path: Path) -> None:
    (case,) = cases(
        "--preset", "wan-1.3b", "--steps", "2", "--decoder", "full", "--stages", "4", "--kv-context", "clean"
    )
    assert (case.config.steps, case.config.stages, case.config.vae) == (2, 4, "random:wan2.1")
    (case,) = cases(
        "--preset", "wan-1.3b", "--model", "self-forcing", "--dtype", "float32", "--set", "device_memory_gb=2.5"
    )
    config = case.config
    assert (config.name, config.vae, config.dtype, config.device_memory_gb) == ("self-forcing", None, "float32", 2.5)
    one, two = cases("--stages", "2,4", "--profile", str(tmp_path))
    assert one.profile != two.profile and Path(str(one.profile)).parent == tmp_path
    assert Case.from_json(json.loads(json.dumps(one.to_json()))) == one


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
