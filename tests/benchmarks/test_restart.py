"""The restart benchmark reads its figures from what viewers saw and heard, and kills a rank of a real server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import restart
from benchmarks.metrics import METRICS
from benchmarks.restart import Restart, Viewer


def viewer(changes: list[float], engine: list[tuple[float, str]], states: list[str] | None = None) -> Viewer:
    return Viewer(changes, engine, states=states or ["connected"])


TOLD = [(9.0, "running"), (10.2, "restarting"), (13.0, "running")]


def test_what_was_made_before_the_kill_is_not_new() -> None:
    found = restart.of_viewers([viewer([9.9, 10.1, 10.5, 13.25, 13.5], TOLD)], killed_s=10.0)
    assert found is not None
    assert (found.told_s, found.running_s, found.kept) == pytest.approx((0.2, 3.0, 1))
    assert found.resumed_s == pytest.approx([3.25]) and found.still_s == pytest.approx([2.75])


def test_nothing_is_found_before_the_last_viewer_sees_something_new() -> None:
    seeing = viewer([9.9, 13.5], TOLD)
    for late in (viewer([9.9, 10.5], TOLD), viewer([9.9, 10.5], TOLD[:2]), viewer([9.9, 10.5], TOLD[:1])):
        assert restart.of_viewers([seeing, late], killed_s=10.0) is None
    found = restart.of_viewers([seeing, viewer([9.9, 14.0], TOLD, ["connected", "failed"])], killed_s=10.0)
    assert found is not None and found.kept == 1
    assert found.resumed_s == pytest.approx([3.5, 4.0])


def test_figures_are_of_the_worst_viewer() -> None:
    found = restart.figures(
        [Restart(0.1, 2.0, [3.0, 4.0], [1.0, 2.0], 2, 0.4), Restart(0.3, 4.0, [8.0, 6.0], [5.0, 4.0], 2, 0.7)]
    )
    assert found == pytest.approx(
        {"told_s": 0.2, "running_s": 3.0, "resumed_s": 6.0, "resumed_worst_s": 8.0, "still_s": 3.5, "kept_past": 0.7}
    )
    assert set(found) <= set(METRICS)


def test_a_picture_is_another_one_where_a_shape_has_moved_and_not_where_a_codec_differs() -> None:
    picture = np.full((256, 256), 90, np.uint8)
    picture[100:160, 100:160] = 200
    noise = np.random.default_rng(0).integers(-8, 9, picture.shape)
    assert not restart.is_other(picture, (picture + noise).astype(np.uint8))
    assert restart.is_other(picture, np.roll(picture, 4, axis=1))


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
