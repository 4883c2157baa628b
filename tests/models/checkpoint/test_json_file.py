"""JSON files that come with weights: what cannot be read, or used as a number, is a sentence with the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.json_file import Table, read_object


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"a": ' + "9" * 5000 + "}", "[]"])
def test_what_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: (not valid JSON|must hold)"):
        read_object(tmp_path / "config.json")


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), 0, -1, True, "1"])
def test_a_number_is_one_that_can_be_computed_with(value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a number above 0"):
        Table(tmp_path / "config.json", {"rate": value}).number("rate")
    assert Table(tmp_path / "config.json", {"rate": 10**300}).number("rate") == 1e300
