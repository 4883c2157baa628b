"""Files of tensors: whole or not there. What is refused is tested where it is asked for, in test_convert.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from streamdiff.errors import ConfigError
from streamdiff.tensor_files import check_target, read_tensor, write_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(4, 3, 2).to(dtype).transpose(0, 1)
    write_tensor(tmp_path / "a.safetensors", "noise", tensor)
    again = read_tensor(tmp_path / "a.safetensors", "noise", "C, F, w")
    assert again.dtype == dtype
    assert torch.equal(again, tensor)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_at_the_end_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    write_tensor(tmp_path / "a.safetensors", "x", torch.ones(2))

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(error):
        write_tensor(tmp_path / "a.safetensors", "x", torch.zeros(2))
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert torch.equal(read_tensor(tmp_path / "a.safetensors", "x", "n"), torch.ones(2))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.pt", r"a\.pt must be a file whose name ends in \.safetensors"),
        ("folder.safetensors", "must be a file"),
        ("none/a.safetensors", "does not exist; create it first"),
    ],
)
def test_targets_that_cannot_be_written(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ConfigError, match=message):
        check_target(tmp_path / name)
    with pytest.raises(ConfigError, match=message):
        write_tensor(tmp_path / name, "x", torch.ones(1))
