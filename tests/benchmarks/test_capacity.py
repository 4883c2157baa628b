"""The load curve's command: what it compares, what it keeps, and a short run of both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import arrivals, capacity, report, slo
from benchmarks.capacity import Variant, rows_variant, variant_of
from benchmarks.slo import LIVE_LIMITS
from streamdiff.cli.parser import parse
from tests.benchmarks.test_report import numbers

TIMES = {
    "forward_s": [0.02, 0.025, 0.03, 0.035], "decode_s": 0.04, "work_s": 0.14, "chunk_frames": 12, "chunk_latents": 3,
    "steps": 4, "kv_context": "clean", "steps_known": [4, 2],
}  # fmt: skip


@pytest.fixture
def times(tmp_path: Path) -> str:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"times": TIMES}))
    return str(path)


def test_variants_are_arguments_of_serve_and_the_simulator_plays_those_that_it_knows() -> None:
    assert variant_of("plain=") == Variant("plain", (), 1)
    assert variant_of("four=--batching dynamic").max_rows == 4
    assert variant_of("wait=--batching dynamic --batching-wait-ms 20").max_rows is None
    lowered = variant_of("a=--adaptive --batching dynamic --max-rows 2")
    assert (lowered.max_rows, lowered.adaptive) == (2, True)
    assert rows_variant(2, True).words == ("--batching", "dynamic", "--max-rows", "2", "--adaptive")
    assert variant_of("quick = --steps 2") == Variant("quick", ("--steps", "2"), None)
    assert rows_variant(1) == Variant("max_rows 1", (), 1)
    for rows in (1, 2, 8):
        one = rows_variant(rows)
        arguments = parse(["serve", *one.words])
        assert variant_of(f"x={' '.join(one.words)}").max_rows == one.max_rows == rows
        assert getattr(arguments, "batching.max_rows") in (rows, None)
    options = capacity.parser().parse_args(["--rows", "2", "--", "--steps", "2"])
    assert [each.max_rows for each in capacity.check(options)[1]] == [None]
    with pytest.raises(ValueError, match="NAME"):
        variant_of("--adaptive")


@pytest.mark.parametrize(
    "words",
    [
        ["--share", "0"], ["--stay", "1"], ["--loads", "4,2"], ["--rows", "0"], ["--rows", "2,2"],
        ["--variant", "x"], ["--slo", "speed=1"], ["--tokens", "2", "--model", "tiny"], ["--add"], ["--plot", "x.doc"],
    ],
)  # fmt: skip
def test_wrong_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert capacity.main(words) == capacity.USAGE
    assert "error:" in capsys.readouterr().err


@pytest.mark.slow
def test_the_simulated_curve_has_a_tipping_point_and_goes_on_in_the_same_file(times: str, tmp_path: Path) -> None:
    out, plot = tmp_path / "capacity.json", tmp_path / "capacity.png"
    words = ["--side", "simulator", "--times", times, "--seconds", "12", "--loads", "2,6,18", "--jobs", "6"]
    words += ["--out", str(out), "--add", "--slo", "first_frame=2,stalls=0,rate=0.9,job=60"]
    assert capacity.main([*words, "--rows", "1"]) == capacity.OK
    assert capacity.main([*words, "--rows", "4", "--adaptive", "1", "--plot", str(plot)]) == capacity.OK
    stored = json.loads(out.read_text())
    assert list(stored["results"]) == ["max_rows 1", "max_rows 1, adaptive", "max_rows 4"] and stored["times"] == TIMES
    assert stored["settings"]["slo"]["job"] == 60
    one, lowered, four = (stored["results"][name]["simulator"] for name in stored["results"])
    assert lowered["points"][0]["goodput"] == one["points"][0]["goodput"], "where all fit nothing is given up"
    assert one["tipping_load"] in (2.0, 6.0) and one["first_load_above"] in (6.0, 18.0)
    assert (four["tipping_load"] or 0) >= one["tipping_load"]
    assert "--rows 1" in one["command"] and "--rows 4" in four["command"]
    for point in one["points"]:
        assert point["goodput"] <= point["offered"] and set(point["first_frame_s"]) == {"p50", "p95", "p99"}
    shares = [point["served_share"] for point in one["points"]]
    assert shares == sorted(shares, reverse=True) and shares[0] >= 0.95 > shares[-1]
    assert plot.stat().st_size > 5000
    readme = (report.ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    known = {"chunk_frames", "chunk_latents", "steps", "kv_context", "steps_known"}
    found = numbers(stored["results"]) | set(stored["times"]) - known
    assert not [name for name in found - set(LIVE_LIMITS) if f"`{name}`" not in readme]
    # Others' settings are not mixed in.
    assert capacity.main([*words, "--rows", "2", "--fps", "20"]) == capacity.USAGE


def test_both_sides_get_the_same_people() -> None:
    options = capacity.parser().parse_args(["--seed", "5", "--jobs", "3"])
    load = capacity.load_of(options, 4.0)
    assert arrivals.visitors(load, options.seed) == arrivals.visitors(capacity.load_of(options, 4.0), 5)
    assert load.jobs_per_minute == 3.0


def test_a_job_counts_against_its_own_limit_only() -> None:
    limits = slo.parse("first_frame=1,job=5", capacity.LIMITS)
    assert slo.Visit(0.0, 5.0, 0.5, [(0.5, 1), (1.0, 6)]).broken(limits, 10.0) == []


@pytest.mark.slow
def test_the_times_of_an_engine_are_measured() -> None:
    from benchmarks import load_times
    from streamdiff.config import ModelConfig

    found = load_times.measure(ModelConfig(steps=2), 2, rounds=1)
    assert len(found.forward_s) == 2 and min(*found.forward_s, found.decode_s, found.work_s) > 0
    assert (found.chunk_frames, found.chunk_latents, found.steps, found.kv_context) == (12, 3, 2, "clean")


@pytest.mark.slow
@pytest.mark.soak
def test_a_short_run_of_server_and_simulator(times: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "capacity.json"
    words = ["--loads", "1", "--rows", "", "--variant", "two=--batching dynamic --max-rows 2", "--seconds", "3"]
    # Whatever a busy machine does, somebody comes, and is counted.
    words += ["--stay", "5", "--slo", "first_frame=60", "--share", "0.01", "--jobs", "60", "--job-seconds", "0.3"]
    assert capacity.main([*words, "--times", times, "--tokens", "2", "--out", str(out)]) == capacity.OK
    stored: dict[str, Any] = json.loads(out.read_text())
    sides = stored["results"]["two"]
    for side in ("server", "simulator"):
        [point] = sides[side]["points"]
        assert point["visits"] == sides["simulator"]["points"][0]["visits"] > 0
        assert point["jobs"]["videos"] == sides["simulator"]["points"][0]["jobs"]["videos"] > 0
        assert "error" not in " ".join(point["broken"])
    assert stored["settings"]["tokens"] == 2 and "| two " in capsys.readouterr().out
