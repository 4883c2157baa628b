"""A rank reads its own blocks and what goes with them, and says what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamdiff.errors import ConfigError
from streamdiff.models.wan.weights import FILE, load_blocks
from tests.small import CPU, small_transformer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformer")
    small_transformer(3, layers=4).save_pretrained(folder)
    return folder


def test_parts_together_are_the_whole(folder: Path) -> None:
    whole = small_transformer(3, layers=4).state_dict()
    seen = set()
    for first, last in ((0, 1), (1, 3), (3, 4)):
        for name, tensor in load_blocks(folder, CPU, (first, last)).state_dict().items():
            if tensor.is_meta:
                continue
            if name.startswith("blocks."):
                number, rest = name.removeprefix("blocks.").split(".", 1)
                name = f"blocks.{int(number) + first}.{rest}"
            assert torch.equal(tensor, whole[name]), name
            seen.add(name)
    assert seen == set(whole)


@pytest.mark.parametrize(
    ("blocks", "patch", "output"), [((0, 2), True, False), ((1, 2), False, False), ((2, 4), False, True)]
)
def test_what_does_not_belong_to_a_stage_takes_no_memory(
    folder: Path, blocks: tuple[int, int], patch: bool, output: bool
) -> None:
    model = load_blocks(folder, CPU, blocks)
    assert len(model.blocks) == blocks[1] - blocks[0]
    assert model.patch_embedding.weight.is_meta == (not patch)
    assert model.proj_out.weight.is_meta == (not output)
    assert not model.condition_embedder.time_proj.weight.is_meta


def test_a_tensor_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / FILE)
    del tensors["blocks.2.attn1.to_q.weight"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / FILE)
    load_blocks(tmp_path, CPU, (0, 2))  # not this rank's business
    with pytest.raises(ConfigError, match=r"1 tensor is missing, for example blocks\.2\.attn1\.to_q\.weight"):
        load_blocks(tmp_path, CPU, (2, 4))


def test_a_tensor_of_another_shape_is_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / FILE)
    tensors["blocks.3.ffn.net.2.bias"] = torch.zeros(7)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ConfigError, match=r"blocks\.3\.ffn\.net\.2\.bias has shape \[7\], but \[24\] is expected"):
        load_blocks(tmp_path, CPU, (2, 4))
