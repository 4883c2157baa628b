"""The restart benchmark reads its figures from what viewers saw and heard, and kills a rank of a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import restart
from benchmarks.restart import Restart, Viewer


def viewer(changes: list[float], engine: list[tuple[float, str]], states: list[str] | None = None) -> Viewer:
    return Viewer(changes, engine, states=states or ["connected"])


TOLD = [(9.0, "running"), (10.2, "restarting"), (13.0, "running")]


def test_what_was_made_before_the_kill_is_not_new() -> None:
    found = restart.of_viewers([viewer([9.9, 10.1, 10.5, 13.25, 13.5], TOLD)], killed_s=10.0)
    assert found is not None
    assert (found.told_s, found.running_s, found.kept) == pytest.approx((0.2, 3.0, 1))
    assert found.resumed_s == pytest.approx([3.25]) and found.still_s == pytest.approx([2.75])


@pytest.mark.slow
@pytest.mark.soak
def test_a_rank_of_a_real_server_is_killed_and_three_viewers_see_video_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "restart.json"
    words = ["--repeats", "1", "--rest", "0", "--no-spare", "--keep-s", "1", "--out", str(out)]
    assert restart.main(words) == restart.OK
    stored = json.loads(out.read_text())
    assert stored["benchmark"] == "restart"
    assert set(stored["header"]) == {"command", "date", "commit", "hardware", "software", "threads", "warm_up"}
    [(label, result)] = stored["results"].items()
    assert list(stored["settings"]) == [label] and result["kept"] == 3
    assert restart.figures([Restart(**each) for each in result["restarts"]]) == result["figures"]
    assert len(result["restarts"]) == 1
    for each in result["restarts"]:
        assert 0 < each["told_s"] < each["running_s"] < max(each["resumed_s"])
        assert each["kept_past"] >= 0
        assert len(each["resumed_s"]) == len(each["still_s"]) == 3
    assert f"| {label} " in capsys.readouterr().out
