"""Embeddings on disk: an encoder loaded afresh is asked nothing again; bounded, private, no fault where it fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamdiff.config import ModelConfig
from streamdiff.models import catalogue, text_encoder
from streamdiff.models.loader import load_text_encoder
from streamdiff.models.resolve import ResolvedModel
from streamdiff.models.text_encoder import EmbeddingFolder, WanText, choose_device, find_text_files
from tests.models.text_encoder import umt5

PROMPT = "a red fox trots"


def rows(count: int, total: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.zeros(total, 4, dtype=dtype)
    made[:count] = torch.arange(1, count * 4 + 1).view(count, 4)
    return made


def test_a_restart_asks_the_encoder_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text encoder of a model by name, loaded afresh; a checkpoint that has changed is asked again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loads = 0
    load = text_encoder.load_encoder

    def counted(*given: Any) -> Any:
        nonlocal loads
        loads += 1
        return load(*given)

    monkeypatch.setattr(text_encoder, "load_encoder", counted)
    entry = catalogue.find("self-forcing")
    architecture = {**catalogue.transformer_arguments(entry), "text_dim": umt5.WIDTH}
    model = ResolvedModel(entry.name, tmp_path / "none", text_encoder=tmp_path / "text", entry=entry)
    spec = catalogue.make_spec(entry.name, entry, architecture)

    def encode() -> Tensor:
        config = ModelConfig(name=entry.name)
        return load_text_encoder(model, config, spec.text_shape, torch.device("cpu")).encode(PROMPT)

    umt5.write(tmp_path / "text")
    made, kept = encode(), encode()
    assert loads == 1 and torch.equal(made, kept) and made.shape == (512, umt5.WIDTH)
    umt5.write(tmp_path / "text", seed=1)
    assert not torch.equal(encode(), made) and loads == 2


@pytest.mark.parametrize(("share", "home"), [(3, "cuda"), (2.9, "cpu")])
def test_a_gpu_with_room_for_it_runs_the_text_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, home: str
) -> None:
    encoder = umt5.write(tmp_path)
    size = 2 * sum(parameter.numel() for parameter in encoder.parameters())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (round(share * size), 10**12))
    assert choose_device(find_text_files(tmp_path), torch.device("cuda")) == torch.device(home)
    assert choose_device(find_text_files(tmp_path), torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_what_was_put_comes_back_and_zeros_take_no_room(tmp_path: Path, count: int, dtype: torch.dtype) -> None:
    kept = EmbeddingFolder(tmp_path / "kept")
    kept.put("a", rows(count, dtype=dtype))
    found = kept.get("a")
    assert found is not None and found.dtype == dtype and torch.equal(found, rows(count, dtype=dtype))
    (file,) = (tmp_path / "kept").iterdir()
    other = EmbeddingFolder(tmp_path / "other")
    other.put("a", rows(count, total=800, dtype=dtype))
    assert next((tmp_path / "other").iterdir()).stat().st_size <= file.stat().st_size + 16


def test_every_part_of_the_key_counts(tmp_path: Path) -> None:
    umt5.write(tmp_path / "a")
    umt5.write(tmp_path / "b")
    texts = (WanText(tmp_path / "a"), WanText(tmp_path / "b"), WanText(tmp_path / "a", length=9))
    cuda = WanText(tmp_path / "a", device="cuda")  # nothing is loaded yet
    changed = WanText(tmp_path / "a")
    changed.revision = "another"
    assert len({*(each.key(PROMPT) for each in (*texts, cuda, changed)), texts[0].key("b")}) == 6
    assert WanText(tmp_path / "a").key(PROMPT) == texts[0].key(PROMPT)


def test_a_text_is_encoded_once_and_only_so_many_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_encoder, "_TEXTS_IN_MEMORY", 2)
    umt5.write(tmp_path)
    text, asked = WanText(tmp_path, length=8), list[str]()
    encode = text.encode_anew
    monkeypatch.setattr(text, "encode_anew", lambda text: asked.append(text) or encode(text))
    first = text.encode("a")
    assert text.encode("a") is first and torch.equal(first, encode("a"))
    for other in "bca":
        text.encode(other)
    assert asked == ["a", "b", "c", "a"]


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        EmbeddingFolder(tmp_path / "cache" / "kept").put("0123", rows(2))
    finally:
        os.umask(before)
    (file,) = (tmp_path / "cache" / "kept").iterdir()
    assert file.parent.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600


def test_those_used_longest_ago_go_first(tmp_path: Path) -> None:
    kept = EmbeddingFolder(tmp_path)
    kept.put("a", rows(8))
    size = next(tmp_path.iterdir()).stat().st_size
    kept.max_bytes = 3 * size
    for text in "bc":
        kept.put(text, rows(8))
    for age, path in enumerate((kept._path("a"), kept._path("b"), kept._path("c"))):
        os.utime(path, (age, age))
    assert kept.get("a") is not None  # used: now the newest
    (tmp_path / "cut off.part").write_bytes(b"x" * size)  # of a process that was killed
    os.utime(tmp_path / "cut off.part", (0, 0))
    kept.put("d", rows(8))
    assert {text for text in "abcd" if kept.get(text) is not None} == {"a", "c", "d"}
    assert len(list(tmp_path.iterdir())) == 3
    kept.max_bytes = size - 1
    kept.put("e", rows(8))
    assert kept.get("e") is None, "larger than the whole folder may be"


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.write_bytes(b""), lambda path: path.write_bytes(path.read_bytes()[:-3]),
     lambda path: path.write_bytes(path.read_bytes().replace(b"rows", b"cows"))],
    ids=["empty", "cut off", "without a header"],
)  # fmt: skip
def test_a_damaged_file_counts_as_not_there(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    kept = EmbeddingFolder(tmp_path)
    kept.put("a", rows(2))
    damage(kept._path("a"))
    assert kept.get("a") is None and not list(tmp_path.iterdir())
    kept.put("a", rows(3))
    found = kept.get("a")
    assert found is not None and torch.equal(found, rows(3))


def test_a_folder_that_cannot_be_written_is_told_once_and_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = EmbeddingFolder(tmp_path / "file" / "kept")
    for text in "ab":
        kept.put(text, rows(2))
        assert kept.get(text) is None
    assert caplog.text.count("embeddings are not kept on disk") == 1
