"""What is wrong with a checkpoint is said before anything is loaded, by name, with counts and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamdiff.errors import ConfigError
from tests.models.layouts import HEADS, State, fused, load, original, save, small_state

LAYERS = 4


def faulty(tmp_path: Path, changes: State, without: str = "nothing") -> Path:
    """An original file of four blocks with some tensors replaced, added, or left out."""
    state = {name: t for name, t in original(small_state(LAYERS)).items() if without not in name}
    return save(tmp_path / "model.safetensors", state | changes)


def told(path: Path, **options: object) -> str:
    """What is said of a file that is not loaded."""
    with pytest.raises(ConfigError) as caught:
        load(path, **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


QUERY = "blocks.2.self_attn.q.weight"
FAULTS: dict[str, tuple[State, str, str]] = {
    "one missing": ({}, QUERY, f"1 missing ({QUERY})"),
    "a block missing": ({}, "blocks.2.", "27 missing (blocks.2.modulation"),
    "unexpected": ({"blocks.2.self_attn.q.scale": torch.ones(1)}, "nothing", "blocks.2.self_attn.q.scale"),
    "of an image model": ({"img_emb.proj.0.weight": torch.ones(8)}, "nothing", "img_emb.proj.0.weight"),
    "misshapen": ({QUERY: torch.zeros(24, 31)}, "nothing", f"{QUERY} [24, 31] instead of [24, 24]"),
    "integers": ({QUERY: torch.zeros(24, 24, dtype=torch.int8)}, "nothing", f"1 not floating point ({QUERY} is int8)"),
    "infinite": ({QUERY: torch.full((24, 24), torch.inf)}, "nothing", QUERY),
    "not a number": ({QUERY: torch.full((24, 24), torch.nan)}, "nothing", QUERY),
    "twice": ({f"net.{QUERY}": torch.zeros(24, 24)}, "nothing", "are both blocks.2.attn1.to_q.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_tensor_that_does_not_fit_is_named(fault: str, tmp_path: Path) -> None:
    changes, without, expected = FAULTS[fault]
    path = faulty(tmp_path, changes, without)
    config = HEADS | {"image_dim": None}
    assert expected in told(path, config=config) and expected in told(path, config=config, blocks=(2, 4))
    if fault in ("one missing", "a block missing", "misshapen", "integers", "infinite", "not a number"):
        load(path, config=config | {"num_layers": LAYERS}, blocks=(0, 2))  # not this rank's business


def test_many_faults_are_counted_and_told_at_once(tmp_path: Path) -> None:
    strange = {"strange": torch.zeros(1), "head.head.bias": torch.zeros(1)}
    found = told(faulty(tmp_path, strange, without="norm_k"))
    assert "8 missing (blocks.0.self_attn.norm_k.weight, " in found
    assert "1 unexpected (" in found and "1 of another shape (" in found
    assert "123 tensors in original Wan names of a Wan transformer of 4 blocks, 24 wide, feed-forward 32" in found
    assert found.count("norm_k") == 3 and "Nothing was loaded" in found


def test_more_blocks_than_the_configuration_has_are_unexpected(tmp_path: Path) -> None:
    assert "27 unexpected" in told(faulty(tmp_path, {}), config=HEADS | {"num_layers": 3})


def test_a_fused_projection_of_a_wrong_height(tmp_path: Path) -> None:
    state = fused(small_state()) | {"blocks.1.self_attn.to_qkv.weight": torch.zeros(70, 24)}
    assert "[70, 24] instead of [72, 24]" in told(save(tmp_path / "model.safetensors", state))


def test_values_that_are_too_large_for_the_dtype(tmp_path: Path) -> None:
    path = faulty(tmp_path, {"blocks.2.self_attn.k.bias": torch.full((24,), 1e5)})
    load(path)
    assert "not finite in float16" in told(path, dtype=torch.float16)


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "vae.safetensors", {"encoder.conv1.weight": torch.zeros(1), "conv1.bias": torch.zeros(1)})
    assert "not a Wan transformer" in told(path)


@pytest.mark.parametrize("blocks", [(0, 5), (2, 2), (-1, 2)])
def test_blocks_that_are_not_there(blocks: tuple[int, int], tmp_path: Path) -> None:
    assert "there are 4" in told(faulty(tmp_path, {}), blocks=blocks)
