"""Checkpoint files: which one, which container of it, and nothing read that is not asked for."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Annotated

import pytest
import torch
from pydantic import BaseModel, Field
from safetensors.torch import save_file

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint import LORA_CONTAINERS, open_checkpoint
from streamdiff.models.weight_files import read_object, validated

NAME = "blocks.0.self_attn.q.weight"


def marked(value: float) -> dict[str, torch.Tensor]:
    """A set of tensors that tells by its values which one it is."""
    return {NAME: torch.full((2, 3), float(value)), "head.head.bias": torch.full((4,), value, dtype=torch.bfloat16)}


def which(path: Path, container: str | None = None, **options: tuple[str, ...]) -> tuple[float, str]:
    """The mark of the set that is taken, and the container's name."""
    checkpoint = open_checkpoint(path, container, **options)
    name = next(name for name in checkpoint.names if name.endswith(NAME))
    return checkpoint.read(name)[0, 0].item(), checkpoint.container


TREES = {
    "ema first": ({"generator": marked(1), "generator_ema": marked(2), "critic": marked(3)}, (2, "generator_ema")),
    "generator": ({"critic": marked(3), "generator": marked(1), "step": 7}, (1, "generator")),
    "model": ({"state_dict": marked(3), "model": marked(1)}, (1, "model")),
    "state_dict": ({"state_dict": marked(1), "optimizer": {"state": {}}, "epoch": 3}, (1, "state_dict")),
    "module": ({"module": marked(1)}, (1, "module")),
    "one in another": (
        {"state_dict": {"generator": marked(1), "generator_ema": marked(2)}},
        (2, "state_dict.generator_ema"),
    ),
    "flat": (marked(1), (1, "")),
    "flat with other things": (marked(1) | {"epoch": 3, "betas": [0.1], "freqs": torch.zeros(1)}, (1, "")),
}


@pytest.mark.parametrize("case", TREES)
def test_the_usual_container_of_a_torch_file(case: str, tmp_path: Path) -> None:
    tree, expected = TREES[case]
    torch.save(tree, tmp_path / "model.pt")
    assert which(tmp_path / "model.pt") == expected


BOTH = {"generator": marked(1), "generator_ema": marked(2), "critic": marked(3)}
STUDENT = {"student": marked(1), "teacher": marked(2)}
FLAT = {f"{key}.model.{name}": t for key in ("generator", "generator_ema") for name, t in BOTH[key].items()}
ONE = {f"generator_ema.{name}": t for name, t in marked(1).items()}
PREFIXED = {f"model.{name}": t for name, t in marked(1).items()}
ASKED = [
    (BOTH, "generator", (1, "generator")),
    (BOTH, "critic", (3, "critic")),
    (BOTH, "teacher", None),
    (STUDENT, "teacher", (2, "teacher")),
    (STUDENT, None, None),  # of containers that nobody knows one has to be named
    (marked(1), "generator", (1, "")),  # without containers there is no choice
    (FLAT, None, (2, "generator_ema")),  # in a flat file a container is the beginning of names
    (FLAT, "generator", (1, "generator")),
    (FLAT, "critic", None),
    (ONE, None, (1, "generator_ema")),
    (ONE, "generator", None),
    (PREFIXED, "generator", (1, "")),  # only a prefix
]


@pytest.mark.parametrize(("tree", "container", "expected"), ASKED)
def test_the_container_that_is_asked_for(
    tree: dict[str, object], container: str | None, expected: tuple[float, str] | None, tmp_path: Path
) -> None:
    torch.save(tree, tmp_path / "model.pth")
    paths = [tmp_path / "model.pth"]
    if all(isinstance(each, torch.Tensor) for each in tree.values()):
        save_file(tree, tmp_path / "model.safetensors")
        paths.append(tmp_path / "model.safetensors")
    for path in paths:
        if expected is not None:
            assert which(path, container) == expected
            continue
        with pytest.raises(ConfigError):
            open_checkpoint(path, container)


def test_the_container_of_a_lora(tmp_path: Path) -> None:
    torch.save({"generator": marked(1), "generator_lora": marked(2)}, tmp_path / "lora.pt")
    assert which(tmp_path / "lora.pt", order=LORA_CONTAINERS) == (2, "generator_lora")


@pytest.mark.parametrize("place", [".", "transformer"])
def test_a_folders_usual_file_is_taken(place: str, tmp_path: Path) -> None:
    model, tmp_path = tmp_path, tmp_path / place
    tmp_path.mkdir(exist_ok=True)
    save_file(marked(1), tmp_path / "diffusion_pytorch_model.safetensors")
    save_file(marked(2), tmp_path / "another.safetensors")
    torch.save(marked(3), tmp_path / "Wan2.1_VAE.pth")
    (tmp_path / "config.json").write_text('{"num_layers": 1}')
    assert which(model) == (1, "")
    assert open_checkpoint(model).config == {"num_layers": 1}


def test_a_folders_only_file_is_taken_whatever_its_name(tmp_path: Path) -> None:
    torch.save(marked(2), tmp_path / "b.pt")
    assert which(tmp_path) == (2, "")
    save_file(marked(1), tmp_path / "a.safetensors")
    assert which(tmp_path) == (1, "")  # safetensors before pickles


def test_a_folder_that_could_mean_several_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path)
    for name in ("a", "b"):
        save_file(marked(1), tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path)


def shards(folder: Path, places: dict[str, str]) -> Path:
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


def test_only_the_shards_that_are_needed_are_opened(tmp_path: Path) -> None:
    index = shards(tmp_path, {NAME: "one.safetensors", "head.head.bias": "two.safetensors"})
    save_file({NAME: torch.ones(2, 3)}, tmp_path / "one.safetensors")
    for path in (tmp_path, index):
        checkpoint = open_checkpoint(path)
        assert sorted(checkpoint.names) == [NAME, "head.head.bias"]
        assert checkpoint.read(NAME).sum() == 6
        with pytest.raises(ConfigError):
            checkpoint.read("head.head.bias")


def test_a_shard_that_does_not_hold_what_the_index_says(tmp_path: Path) -> None:
    shards(tmp_path, {NAME: "one.safetensors"})
    save_file({"other": torch.ones(2)}, tmp_path / "one.safetensors")
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path).entries[NAME]


@pytest.mark.parametrize("place", ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors"])
def test_an_index_does_not_lead_out_of_its_folder(place: str, tmp_path: Path) -> None:
    shards(tmp_path, {NAME: place})
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"generator": marked(1), "config": Trap(tmp_path / "sprung")}, tmp_path / "model.pt")
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(tmp_path / "model.pt")
    assert "safetensors" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert not (tmp_path / "sprung").exists()
    assert pickle.loads(pickle.dumps(Trap(tmp_path / "sprung"))) is None
    assert (tmp_path / "sprung").exists(), "the trap works"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and nothing", b"version https://git-lfs.github.com/spec/v1\n"])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_damaged_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path / name)


def test_a_torch_file_that_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    torch.save(marked(1), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path / "old.pt")


@pytest.mark.parametrize("tree", [[1, 2], {"step": 3}])
def test_a_torch_file_without_tensors(tree: object, tmp_path: Path) -> None:
    torch.save(tree, tmp_path / "a.pt")
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path / "a.pt")


def test_what_is_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path / "nowhere.safetensors")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path / "a.gguf")


def test_a_dtype_whose_numbers_need_others_is_refused_by_name(tmp_path: Path) -> None:
    header = json.dumps({"blocks.0.weight": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ConfigError):
        open_checkpoint(path)


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
