"""Files that stand for a prompt or a seed: what fits is read as it is, and every other file is refused with what was
expected and what is there, before any of its numbers are read. A tensor is written whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamdiff.errors import ConfigError, StreamdiffError
from streamdiff.models import tensor_file
from streamdiff.models.headers import (
    NORMALISED,
    FreeDim,
    latents_contract,
    parse_header,
)
from streamdiff.models.tensor_file import check_target, read_latents, read_noise, read_rows, write_tensor, writing

TEXT = (6, 4)
CHUNK = (4, 3, 2, 5)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def save(metadata: dict[str, str] | None = None, **tensors: Tensor) -> Path:
        save_file(tensors, tmp_path / "given.safetensors", metadata)
        return tmp_path / "given.safetensors"

    return save


Save = Callable[..., Path]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(6, 4), (1, 6, 4), (3, 4), (1, 1, 4)])
def test_prompt_embeddings_are_read_as_their_file_has_them(
    save: Save, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    rows = torch.randn(shape).to(dtype)
    read = read_rows(save(prompt_embeds=rows), TEXT)
    assert read.dtype == torch.float32
    assert torch.equal(read, rows.reshape(shape[-2], 4).float())


def test_noise_is_read_with_its_companion(save: Save) -> None:
    initial, renoise = torch.randn(5, *CHUNK), torch.randn(5, 3, *CHUNK)
    path = save({"from": "elsewhere"}, initial=initial, renoise=renoise)
    read = read_noise(path, CHUNK, steps=4, chunks=5)
    assert torch.equal(read[0], initial) and torch.equal(read[1], renoise)
    with pytest.raises(ConfigError):
        read_noise(save(initial=initial, renoise=renoise[:4]), CHUNK, steps=4)


@pytest.mark.parametrize("given_too", [True, False])
def test_one_step_needs_no_noise_between_steps(save: Save, given_too: bool) -> None:
    more = {"renoise": torch.zeros(2, 0, *CHUNK)} if given_too else {}
    initial, renoise = read_noise(save(initial=torch.ones(2, *CHUNK), **more), CHUNK, steps=1)
    assert initial.shape == (2, *CHUNK) and renoise.shape == (2, 0, *CHUNK)


def test_latents_may_have_free_sizes(save: Save) -> None:
    latents = torch.randn(2, *CHUNK)
    path = save(latents=latents)
    assert torch.equal(read_latents(path, CHUNK), latents)
    assert torch.equal(read_latents(path, (4, FreeDim("frames"), FreeDim("height"), FreeDim("width"))), latents)
    with pytest.raises(ConfigError):
        read_latents(path, (16, FreeDim("frames"), 2, 5))


def test_what_is_read_stays_when_the_file_changes(save: Save) -> None:
    latents = torch.randn(2, *CHUNK)
    path = save(latents=latents)
    read = read_latents(path, CHUNK)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(read, latents)


def noise(path: Path) -> object:
    return read_noise(path, CHUNK, steps=3, chunks=2)


def embeds(path: Path) -> object:
    return read_rows(path, TEXT)


def latents(path: Path) -> object:
    return tensor_file.read(path, latents_contract(CHUNK, max_bytes=500))


@pytest.mark.parametrize(
    ("read", "tensors"),
    [
        (embeds, {"prompt_embed": torch.zeros(TEXT)}),
        (embeds, {}),
        (embeds, {"prompt_embeds": torch.zeros(TEXT), "mask": torch.zeros(6)}),
        (embeds, {"prompt_embeds": torch.zeros(6)}),
        (embeds, {"prompt_embeds": torch.zeros(7, 4)}),
        (embeds, {"prompt_embeds": torch.zeros(0, 4)}),
        (embeds, {"prompt_embeds": torch.zeros(6, 5)}),
        (embeds, {"prompt_embeds": torch.zeros(2, 6, 4)}),
        (embeds, {"prompt_embeds": torch.zeros(TEXT, dtype=torch.int32)}),
        (embeds, {"prompt_embeds": torch.zeros(TEXT, dtype=torch.bool)}),
        (noise, {"initial": torch.zeros(2, *CHUNK)}),
        (noise, {"renoise": torch.zeros(2, 2, *CHUNK)}),
        (noise, {"initial": torch.zeros(1, *CHUNK), "renoise": torch.zeros(1, 2, *CHUNK)}),
        (noise, {"initial": torch.zeros(2, *CHUNK), "renoise": torch.zeros(2, 3, *CHUNK)}),
        (latents, {"latents": torch.zeros(1, *CHUNK)}),
        (embeds, {"prompt_embeds": torch.zeros(600, 600)}),
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    save: Save, read: Callable[[Path], object], tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("the numbers were touched")

    path = save(**tensors)
    monkeypatch.setattr(tensor_file, "load_file", touched)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_with_their_place(save: Save, value: float) -> None:
    latents = torch.zeros(2, *CHUNK)
    latents[1, 3, 0, 1, 4] = latents[1, 3, 2, 1, 4] = value
    with pytest.raises(ConfigError):
        read_latents(save(latents=latents), CHUNK)


def test_not_even_the_header_of_a_file_that_is_too_large_is_read(tmp_path: Path) -> None:
    path = tmp_path / "given.safetensors"
    path.write_bytes(raw(b"{" * 5000))
    with pytest.raises(ConfigError):
        read_latents_at_most(path, 1000)
    with pytest.raises(ConfigError):
        read_latents_at_most(path, 5008)


def read_latents_at_most(path: Path, max_bytes: int) -> None:
    tensor_file.read(path, latents_contract(CHUNK, max_bytes=max_bytes))


def raw(tree: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_FILES = {
    "empty": b"",
    "short": b"\x01\x02\x03",
    "old pickle": pickle.dumps({"latents": list(range(99))}, 2),
    "new pickle": pickle.dumps({"latents": list(range(99))}, 5),
    "text": b"just some words that are no tensors",
    "cut off": raw({"a": entry([2], 0, 8)}, b"\x00" * 7),
    "too long": raw({"a": entry([2], 0, 8)}, b"\x00" * 9),
    "cut in the header": raw({"a": entry([2], 0, 8)})[:20],
    "huge header": raw(b"{}", length=2**63),
    "no JSON": raw(b"{'a': 1}"),
    "no text": raw(b"\xff\xfe{}"),
    "deep": raw(b"[" * 100000),
    "a list": raw([1, 2]),
    "twice": raw(b'{"a": {}, "a": {}}'),
    "no shape": raw({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"\x00" * 4),
    "not an object": raw({"a": 5}),
    "shape of texts": raw({"a": {**entry([2], 0, 8), "shape": ["2"]}}, b"\x00" * 8),
    "negative": raw({"a": entry([-2, -1], 0, 8)}, b"\x00" * 8),
    "three offsets": raw({"a": {**entry([2], 0, 8), "data_offsets": [0, 4, 8]}}, b"\x00" * 8),
    "backwards": raw({"a": entry([2], 8, 0)}, b"\x00" * 8),
    "other length": raw({"a": entry([3], 0, 8)}, b"\x00" * 8),
    "overlap": raw({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, b"\x00" * 12),
    "gap": raw({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, b"\x00" * 16),
    "metadata": raw({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_broken_file_is_refused_by_what_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "given.safetensors"
    path.write_bytes(BAD_FILES[kind])
    for call in (lambda: parse_header(path), lambda: read_latents(path, CHUNK)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(path) in str(caught.value)


def test_files_of_other_libraries_are_refused(tmp_path: Path) -> None:
    torch.save({"latents": torch.zeros(3)}, tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.zeros(3))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("x", "y")
    for path in (*tmp_path.iterdir(), tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError):
            parse_header(path)


@pytest.mark.parametrize("length", [0x0280, 0x0580, 0x4B50])
def test_a_file_is_no_pickle_for_the_length_of_its_header(tmp_path: Path, length: int) -> None:
    """A header's length may begin with the bytes that a pickle, or a zip file, begins with."""
    path = tmp_path / "given.safetensors"
    path.write_bytes(raw(json.dumps({"a": entry([2], 0, 8)}).encode().ljust(length), b"\0" * 8))
    assert parse_header(path).entries["a"].shape == (2,)


@given(st.data())
def test_no_damage_to_a_header_gets_past(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever byte of the header is changed, the file is read as it was or refused; nothing else comes out."""
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    latents = torch.arange(120.0).reshape(1, *CHUNK)
    save_file({"latents": latents}, path)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 481))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        read = read_latents(path, CHUNK)
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        assert read.shape == latents.shape and (torch.equal(read, latents) or b'"F32"' not in content)


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
