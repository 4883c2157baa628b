"""`make soak` runs the tests marked so and no others, and writes down what came of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import soak

TESTS = """
import pytest

@pytest.mark.soak
def test_long():
    pass

@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
def test_that_fails(size):
    assert size == 1

def test_short():
    raise AssertionError("this is none of them")
"""


@pytest.mark.slow
def test_what_held_and_what_did_not_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    out, project = tmp_path / "soak.json", soak.report.ROOT / "pyproject.toml"
    options = ["-c", str(project), "--rootdir", str(tmp_path), "-p", "tests.conftest", "-p", "no:cacheprovider"]
    assert soak.main(["--out", str(out), *options, str(tmp_path)]) == 1
    stored = json.loads(out.read_text())
    holds = {name: each["holds"] for name, each in stored["results"].items()}
    file = "test_some.py::"
    assert holds == {f"{file}test_long": True, f"{file}test_that_fails[1]": True, f"{file}test_that_fails[2]": False}
    assert all(each["seconds"] >= 0 for each in stored["results"].values())
    assert stored["header"]["commit"] and "2 of 3 hold" in capfd.readouterr().out
