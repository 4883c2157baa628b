"""A run from end to end: the file's floor and share follow from its own parts and ceilings."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from benchmarks import fps_ttff, throughput_model


@pytest.mark.slow
def test_the_floor_follows_from_what_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "floor.json"
    words = ["--kv-context", "clean", "--steps", "2", "--rounds", "1", "--device", "cpu"]
    words += ["--out", str(out)]
    assert throughput_model.main(words) == fps_ttff.OK
    stored = json.loads(out.read_text())
    assert stored["benchmark"] == "throughput_model" and stored["header"]["warm_up"]
    (found,) = stored["results"].values()
    figures, parts = found["figures"], found["parts"]
    for part in parts:
        matrix_s, copy_s = part["gflop"] / 1e3 / figures["matrix_tflops"], part["mb"] / 1e3 / figures["copy_gbps"]
        assert part["floor_ms"] == pytest.approx(1000 * max(matrix_s, copy_s))
        assert part["set by"] == ("matrix" if matrix_s >= copy_s else "copy")
    assert figures["floor_s"] == pytest.approx(sum(part["floor_ms"] for part in parts) / 1000)
    steps = [value for name, values in found["raw"].items() if name.startswith("step") for value in values]
    assert figures["forward_s"] == median(steps) and figures["share"] == figures["floor_s"] / figures["forward_s"]
    assert "share" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--stages", "2"], "--stages must be 1: a forward is measured on one device"),
        (["--decoder", "big"], "--decoder is big"),
    ],
)
def test_what_it_cannot_measure_is_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert throughput_model.main([*words, "--kv-context", "matched"]) == fps_ttff.USAGE
    assert told in capsys.readouterr().err
