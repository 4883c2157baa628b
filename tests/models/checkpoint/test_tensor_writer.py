"""A tensor to a file, part by part: whole at its place, or not there at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from streamdiff.errors import ConfigError, StreamdiffError
from streamdiff.models.headers import NORMALISED, parse_header
from streamdiff.models.tensor_file import check_target, read_latents, write_tensor, writing

CHUNK = (4, 3, 2, 5)


@pytest.mark.parametrize("chunks", [1, 2, 13])
def test_what_is_written_is_read_by_safetensors_and_by_us(tmp_path: Path, chunks: int) -> None:
    path, latents = tmp_path / "out.safetensors", torch.randn(chunks, *CHUNK)
    write_tensor(path, "latents", latents, {**NORMALISED, "model": "wan"})
    assert torch.equal(load_file(path)["latents"], latents)
    assert torch.equal(read_latents(path, CHUNK, chunks=chunks), latents)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"normalised": "model", "model": "wan"}
    assert parse_header(path).metadata["model"] == "wan"
    assert os.listdir(tmp_path) == ["out.safetensors"]


def test_chunks_may_come_one_by_one_in_any_float_format(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    latents = torch.randn(3, *CHUNK).to(torch.bfloat16)
    with writing(path, "latents", (3, *CHUNK)) as add:
        for chunk in latents:
            add(chunk.transpose(0, 1).contiguous().transpose(0, 1))  # its numbers lie in another order
            assert not path.exists(), "nothing is at the target before the end"
    assert torch.equal(load_file(path)["latents"], latents.float())


def test_numbers_begin_where_readers_expect_them(tmp_path: Path) -> None:
    """At a multiple of 8 bytes, as safetensors writes them: a reader may map them as they lie."""
    write_tensor(tmp_path / "out.safetensors", "latents", torch.ones(1, *CHUNK), {"note": "abc"})
    length = int.from_bytes((tmp_path / "out.safetensors").read_bytes()[:8], "little")
    assert length % 8 == 0


@pytest.mark.parametrize("before", [None, b"what was there"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
def test_an_error_on_the_way_leaves_what_was_there(
    tmp_path: Path, before: bytes | None, error: type[BaseException]
) -> None:
    path = tmp_path / "out.safetensors"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(error), writing(path, "latents", (2, *CHUNK)) as add:
        add(torch.zeros(CHUNK))
        raise error
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if before is None else [before])


@pytest.mark.parametrize(
    ("chunk", "error"),
    [
        (torch.zeros(4, 3, 2, 6), ValueError),
        (torch.zeros(1, *CHUNK), ValueError),
        (torch.full(CHUNK, torch.nan), StreamdiffError),
        (torch.full(CHUNK, 1e300, dtype=torch.float64), StreamdiffError),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused_and_nothing_is_left(
    tmp_path: Path, chunk: torch.Tensor, error: type[Exception]
) -> None:
    with pytest.raises(error), writing(tmp_path / "out.safetensors", "latents", (2, *CHUNK)) as add:
        add(torch.zeros(CHUNK))
        add(chunk)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_another_number_of_chunks_gives_no_file(tmp_path: Path, chunks: int) -> None:
    with pytest.raises(ValueError), writing(tmp_path / "out.safetensors", "latents", (2, *CHUNK)) as add:
        for _ in range(chunks):
            add(torch.zeros(CHUNK))
    assert os.listdir(tmp_path) == []


def test_a_target_that_cannot_be_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.safetensors").mkdir()
    before = sorted(os.listdir(tmp_path))
    for place in ("folder.safetensors", "none/out.safetensors", "file/out.safetensors", "out.pt"):
        path = tmp_path / place
        with pytest.raises(ConfigError):
            check_target(path)
        with pytest.raises(ConfigError), writing(path, "latents", (2, *CHUNK)):
            pass
    assert sorted(os.listdir(tmp_path)) == before
