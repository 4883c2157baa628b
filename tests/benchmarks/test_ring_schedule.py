"""The schedule benchmark runs real processes and reports what it was asked for. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ring_parallel, ring_schedule
from benchmarks.hop_trace import travels
from benchmarks.sleeping_ring import PROBES, Done, Plan, Ran, figures_of
from streamdiff.pipeline.scheduler.kv_context import KV_CONTEXTS


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_stages_are_compared_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ring.json"
    words = ["--stages", "2", "--steps", "2", "--forward-s", "0.02", "--rounds", "1", "--out", str(out)]
    assert ring_schedule.main(words) == 0
    stored = json.loads(out.read_text())
    assert stored["plan"]["stages"] == 2 and "sleep" in stored["claim"]
    results = stored["results"]["20 ms"]
    for context, sessions in (("clean", 2), ("staircase", 1), ("matched", 1)):
        found = results[context]
        assert found["sessions"] == sessions
        for name in ("one_stage", "stages"):
            assert found[name]["chunks_per_s"] > 0
            # Two steps of 0.02 s each at least: what sleeps cannot be quicker.
            assert found[name]["first_chunk_s"] >= 0.04
        # Of two stages twice the rate is the best; what is judged is the share of it.
        assert found["ideal_rate_ratio"] == pytest.approx(2, rel=0.34)
        assert found["met"]["rate"] == (found["rate_ratio"] >= 3.5 / 4 * found["ideal_rate_ratio"])
        assert found["met"]["latency"] == (found["latency_of_ideal"] <= 1.15)
        # A rank's round is its sleep, its own work and its waiting; no message arrives before it was sent.
        hop = found["hop"]
        assert all(hop[name] > 0 for name in ("head_own_us", "others_own_us", "transport_us", "cpu_us"))
        # The model's layers before and behind the blocks are part of a rank's own work.
        assert 0 < hop["embedding_us"] < hop["head_own_us"] and 0 < hop["output_layer_us"] < hop["others_own_us"]
        assert min(hop["head_waits_us"], hop["others_wait_us"], hop["overslept_us"]) >= 0
    printed = capsys.readouterr().out
    assert "| matched" in printed and len([line for line in printed.splitlines() if "times" in line]) == 6


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_a_message_that_came_before_anybody_looked_shifts_no_other(missing: int) -> None:
    sent = [float(number) for number in range(40)]
    arrived = [*(at + 0.25 for at in sent), 41.0][missing:]
    assert travels(sent, arrived) == pytest.approx([0.25] * (40 - missing - (40 - missing) // 4))


def test_figures_are_those_of_what_was_finished_after_the_warm_up() -> None:
    """Two sessions in turn, a chunk a second; one of the second session's comes late."""
    done = [Done(float(at), 2.0 if at < 4 else 3.0, at % 2) for at in range(9)]
    done[7] = done[7]._replace(at_s=7.5)
    found = figures_of(done, 3)
    assert found["chunks_per_s"] == pytest.approx(6 / (8 - 2))
    assert found["latency_s"] == pytest.approx((2 + 5 * 3) / 6)
    assert (found["mean_gap_s"], found["longest_gap_s"]) == pytest.approx(((3 * 2 + 2 + 2 + 2.5) / 6, 2.5))


@pytest.mark.slow
def test_the_ideal_of_the_design_is_four_times_the_chunks_at_the_same_latency() -> None:
    for context in KV_CONTEXTS:
        plan = Plan(kv_context=context, forward_s=1.0)
        many, one = ring_schedule.ideal(plan, 4), ring_schedule.ideal(plan, 1)
        assert many.chunks_per_s / one.chunks_per_s == pytest.approx(4, rel=0.02)
        assert many.latency_s == pytest.approx(4, rel=0.07)


@pytest.mark.parametrize(("rate", "latency", "words"), [(3.71, 1.15, ["met", "met"]), (3.69, 1.16, ["MISSED"] * 2)])
def test_what_is_missed_is_said(rate: float, latency: float, words: list[str]) -> None:
    figures = {"chunks_per_s": rate, "latency_s": 4 * latency, "mean_gap_s": 1.0, "longest_gap_s": 1.5}
    found = ring_schedule.judged(Plan(forward_s=1.0), {**figures, "chunks_per_s": 1.0}, Ran(figures, {}))
    lines = ring_schedule.verdicts({"matched": found})
    assert [line.split()[0] for line in lines] == words


def test_a_stage_that_sleeps_too_long_makes_the_ideal_longer_too() -> None:
    figures = {"chunks_per_s": 3.71, "latency_s": 4.4, "mean_gap_s": 1.0, "longest_gap_s": 1.5}
    plan, alone = Plan(forward_s=1.0), {**figures, "chunks_per_s": 1.0}
    punctual, late = (ring_schedule.judged(plan, alone, Ran(figures, {"overslept_us": us})) for us in (0, 0.025e6))
    assert late["latency_of_ideal"] == pytest.approx(punctual["latency_of_ideal"] / 1.1)
    assert late["rate_ratio"] == punctual["rate_ratio"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_ranks_that_share_a_stage_are_compared_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ring.json"
    words = ["--parallel", "1x2", "--steps", "1", "--forward-s", "0.02", "--rounds", "1", "--out", str(out)]
    assert ring_schedule.main(words) == 0
    results = json.loads(out.read_text())["results"]["20 ms"]
    assert [found["sessions"] for found in results.values()] == [1, 2]
    for label, found in results.items():
        assert label.startswith("1x2, ")
        assert found["ranks"]["chunks_per_s"] > 0 and found["one_rank"]["chunks_per_s"] > 0
        # A shared stage sleeps for half a forward, and exchanges beside that; the simulator knows what that takes.
        assert found["stage_ms"] > 10 and found["simulated_stage_ms"] > 10
        assert 1 < found["simulated_rate_ratio"] < 2.05 or found["simulated_stage_ms"] > 20
        assert found["exchange_floor_us"] >= 0 and found["exchange_gbps"] > 0
        assert found["rate_aim"] is None  # one stream of forwards so short promises nothing
    assert "through the simulator's" in capsys.readouterr().out


def test_an_exchange_is_fitted_to_what_was_tried() -> None:
    """Two exchanges in a block, of 3/4 and 1/4 of the bytes, at 1 GB/s with a floor of 100 us each."""
    nbytes, ranks = 4e6, 4
    taken = [2e-4 + times * nbytes * 3 / 4 / 1e9 for times in PROBES]
    model = ring_parallel.exchange_of(taken, nbytes, ranks)
    assert (model.floor_s, model.gbps) == pytest.approx((1e-4, 1.0))


@pytest.mark.parametrize(("rate", "word"), [(3.31, "met"), (3.29, "MISSED")])
def test_one_stream_on_four_ranks_that_share_is_judged(rate: float, word: str) -> None:
    """With free exchanges four ranks that share a stage are four times as fast, and so the simulator says."""
    plan = Plan(stages=1, kv_context="clean", streams=1)
    figures = {"chunks_per_s": rate, "latency_s": 1 / rate, "first_chunk_s": 1.0}
    alone = {**figures, "chunks_per_s": 1.0}
    found = ring_parallel.judged(plan, 4, alone, Ran(figures, {}, (1e-9, 2e-9), 0.05))
    assert found["simulated_rate_ratio"] == pytest.approx(4, rel=1e-3)
    assert found["rate_of_simulated"] == pytest.approx(rate / 4, rel=1e-3)  # of one rank: a chunk a second
    assert ring_parallel.verdicts({"1x4, 1 stream": found})[0].split()[0] == word


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--parallel", "4"], "--parallel is '4', but must be a list of PxC"),
        (["--parallel", "1x4", "--stages", "2"], "--stages and --parallel are both given"),
        (["--parallel", "7x1"], "stages is 7, but must be 1 to 6"),
        (["--parallel", "1x3"], "3 ranks cannot share 64 tokens of a frame"),
        (["--stages", "1"], "--stages must be at least 2"),
        (["--stages", "7"], "stages is 7, but must be 1 to 6: every stage needs a block"),
        (["--forward-s", "0"], "--forward-s more than 0"),
        (["--rounds", "0"], "--rounds at least 1"),
    ],
)
def test_plans_that_measure_nothing_are_refused(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ring_schedule.main(words)
    assert ended.value.code == 2 and answer in capsys.readouterr().err
