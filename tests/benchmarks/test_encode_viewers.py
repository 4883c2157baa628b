"""The viewers' benchmark measures a real server with real peers: small, and without looking at the figures' size."""

from __future__ import annotations

import json

import pytest

from benchmarks import encode_viewers

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_it_counts_what_viewers_get_and_use() -> None:
    found = encode_viewers.measure([1, 3], 1.5, encode_viewers.PAINTED)
    assert [row["viewers"] for row in found["rows"]] == [1, 3]
    for row in found["rows"]:
        assert row["viewer_fps_min"] > 0
        assert row["viewer_fps_min"] <= row["viewer_fps_mean"]
        assert row["shown_fps"] > 0
        assert row["kbit_s_per_viewer"] > 0
        assert row["cpu_percent_web"] > 0
    assert json.loads(json.dumps(found)) == found


def test_the_server_gets_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    row = {"viewers": 1, "cpu_percent_web": 1.0}

    def measure(counts: list[int], seconds: float, command: tuple[str, ...]) -> dict[str, object]:
        commands.append(command)
        return {"rows": [row], "cpu_percent_per_added_viewer": None}

    monkeypatch.setattr(encode_viewers, "measure", measure)
    encode_viewers.main(["--device", "cuda"])
    assert commands[0][commands[0].index("--device") + 1] == "cuda"
    with pytest.raises(SystemExit):
        encode_viewers.main(["--device", "cpu", "--painted"])


@pytest.mark.parametrize("words", [["--viewers", "some"], ["--viewers", "0"], ["--seconds", "0"]])
def test_wrong_numbers_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        encode_viewers.main(words)
    assert words[0] in capsys.readouterr().err
