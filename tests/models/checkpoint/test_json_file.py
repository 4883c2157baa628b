"""JSON files that come with weights: what cannot be read, or used as a number, is a sentence with the file's name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from streamdiff.errors import ConfigError
from streamdiff.models.weight_files import read_object, validated


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"a": ' + "9" * 5000 + "}", "[]"])
def test_what_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: (not valid JSON|must hold)"):
        read_object(tmp_path / "config.json")


class _Rate(BaseModel):
    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), 0, -1, True, "1"])
def test_a_number_is_one_that_can_be_computed_with(value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: rate: "):
        validated(tmp_path / "config.json", _Rate, {"rate": value})
    assert validated(tmp_path / "config.json", _Rate, {"rate": 10**300}).rate == 1e300
