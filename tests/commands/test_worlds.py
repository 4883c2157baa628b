"""Worlds by `streamdiff generate`: a picture as condition and as features, and what is pressed, from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamdiff.cli import main
from streamdiff.models.spec import ActionModules, ActionRows
from streamdiff.models.transformer import actions
from streamdiff.pipeline.kv_cache import over_time
from streamdiff.pipeline.kv_cache.over_time import ActionRow
from streamdiff.pipeline.runner import controls
from tests.commands.conftest import CHUNK, CHUNKS, SIDE, STEPS, Given, checkpoint
from tests.models.layouts import original, prefixed
from tests.pipeline.plain_world import Inputs, PlainWorld
from tests.small import LATENT_CHANNELS, small_transformer

MASKS, FRAMES, FEATURES, KEYS = 4, 7, 20, 4
VIDEO = 1 + 4 * (CHUNKS * CHUNK - 1)
CLOSE = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def condition(folder: Path) -> Tensor:
    """Random condition latents, which are written to a file."""
    latents = torch.randn(LATENT_CHANNELS, FRAMES, SIDE, SIDE, generator=torch.Generator().manual_seed(4))
    save_file({"latents": latents}, folder / "condition.safetensors")
    return latents


def planes(latents: Tensor) -> Tensor:
    """The condition of all latent frames: a mask on the first, and latents whose last one is repeated."""
    mask = torch.zeros(MASKS, CHUNKS * CHUNK, SIDE, SIDE)
    mask[:, 0] = 1
    return torch.cat([mask, latents[:, [min(frame, FRAMES - 1) for frame in range(CHUNKS * CHUNK)]]])


@pytest.fixture
def given(tmp_path: Path) -> Given:
    made = checkpoint(tmp_path, planes=MASKS + LATENT_CHANNELS)
    condition(tmp_path)
    return made


def world(folder: Path, mouse: int = 2, blocks: tuple[int, ...] = (0, 1)) -> Given:
    """A small Matrix-Game 2 as published files have it, with all inputs but a text."""
    draw = torch.Generator().manual_seed(6)
    made = checkpoint(folder, planes=MASKS + LATENT_CHANNELS)  # for its noise
    sizes = ActionModules(blocks, 2, 12, KEYS, mouse, 8, 4, 256.0, ActionRows(12, 4, KEYS + mouse))
    model = small_transformer(5, layers=3, planes=MASKS + LATENT_CHANNELS, features=FEATURES, actions=sizes)
    state = {name: each for name, each in model.state_dict().items() if "text_embedder" not in name}
    unused = {f"blocks.{number}.action_model.key_attn_q_norm.weight": torch.randn(12) for number in blocks}
    torch.save(prefixed(original(state | unused), "model."), folder / "wan.pt")
    own = {"heads_num": 2, "rope_dim_list": [4, 4, 4], "rope_theta": 256, "vae_time_compression_ratio": 4}
    config = {
        "local_attn_size": 6,
        "sink_size": 0,
        "dim": 24,
        "num_heads": 2,
        "in_dim": 12,
        "out_dim": 4,
        "model_type": "i2v",
        "action_config": own,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "text.safetensors").unlink()
    condition(folder)
    save_file({"clip_features": torch.randn(9, FEATURES, generator=draw)}, folder / "clip.safetensors")
    pressed = {"keyboard": torch.randint(2, (VIDEO, KEYS), generator=draw).float()}
    pressed |= {"mouse": 3 * torch.randn(VIDEO, mouse, generator=draw)} if mouse else {}
    save_file(pressed, folder / "controls.safetensors")
    return Given(made.folder, model)


def expected(given: Given, condition: Tensor, window: int = 6) -> Tensor:
    """Latents of the whole stream, in float64."""
    noise, files = load_file(given.folder / "noise.safetensors"), given.folder
    plain = PlainWorld(given.model.state_dict(), given.model.config.num_attention_heads)
    plain.window, track = window, None
    if (files / "controls.safetensors").exists():
        pressed = load_file(files / "controls.safetensors")
        track = torch.cat([pressed[name] for name in ("keyboard", "mouse") if name in pressed], 1)
        context = load_file(files / "clip.safetensors")["clip_features"]
    else:
        context = given.text[0]
    return plain.stream(noise["initial"], noise["renoise"], STEPS, Inputs(context, condition, track))


def test_the_condition_goes_with_each_latent_frame_and_its_last_one_is_repeated(given: Given) -> None:
    """Against float64: mask before latents, chunk by chunk, in each step and in the clean pass."""
    latents = load_file(given.folder / "condition.safetensors")["latents"]
    got, whole = given.latents("--window", "6"), planes(latents)
    CLOSE(got.double(), expected(given, whole))
    assert torch.equal(got, given.latents("--window", "6", "--stages", "3"))
    save_file({"latents": whole[MASKS:].clone(), "mask": whole[:MASKS].clone()}, given.folder / "condition.safetensors")
    assert torch.equal(got, given.latents("--window", "6"))
    whole[0, 4:] = 1
    save_file({"latents": whole[MASKS:].clone(), "mask": whole[:MASKS].clone()}, given.folder / "condition.safetensors")
    other = given.latents("--window", "6")
    assert torch.equal(other[0], got[0]) and (other[1] - got[1]).abs().max() > 1e-3
    CLOSE(other.double(), expected(given, whole))


@pytest.mark.parametrize(("mouse", "blocks", "window"), [(2, (0, 1), 6), (0, (0, 1), 6), (2, (0, 2), 5)])
def test_a_world_equals_its_equations_on_any_number_of_stages(
    tmp_path: Path, mouse: int, blocks: tuple[int, ...], window: int
) -> None:
    given = world(tmp_path, mouse, blocks)
    got = given.latents("--window", str(window))
    CLOSE(got.double(), expected(given, planes(load_file(tmp_path / "condition.safetensors")["latents"]), window))
    for stages in ("2", "3"):
        assert torch.equal(got, given.latents("--window", str(window), "--stages", stages))


FACTORS, ROWS, ATTEND = actions.frame_factors, controls.tracked_rows, over_time.attend_over_time


def stuck(rows: list[ActionRow], *rest: Any) -> Tensor:
    """Always the same slot is written."""
    metadata = [each.metadata for each in rows]
    tensors = [each.tensors._replace(slot=torch.zeros_like(each.tensors.slot)) for each in metadata]
    kept = [each._replace(tensors=own) for each, own in zip(metadata, tensors, strict=True)]
    return ATTEND([row._replace(metadata=own) for row, own in zip(rows, kept, strict=True)], *rest)


@pytest.mark.parametrize(
    ("place", "broken"),
    [
        ("commands.reference.tracked_rows", lambda track, *rest: ROWS(track.roll(1, 0), *rest)),
        ("pipeline.runner.model_runner.frame_factors", lambda first, *rest: FACTORS(0, *rest)),
        ("pipeline.runner.model_runner.attend_over_time", stuck),
        ("models.transformer.actions._unit", lambda x: x),
    ],
    ids=["a control one row late", "positions of the chunk alone", "caches that do not roll", "no norm"],
)
def test_what_is_wrong_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, broken: Callable[..., Tensor]
) -> None:
    given = world(tmp_path)
    plain = given.latents("--window", "6")
    assert torch.equal(plain, given.latents()), "its configuration says the window"
    monkeypatch.setattr(f"streamdiff.{place}", broken)
    assert (given.latents("--window", "6") - plain).abs().max() > 1e-2


def test_files_and_their_model_belong_together(
    given: Given, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(kind: Callable[[Path], Given], **files: dict[str, Tensor]) -> Given:
        """With these files in place of its own, without those that are empty."""
        new = kind(tmp_path_factory.mktemp("made"))
        for name, tensors in files.items():
            (new.folder / f"{name}.safetensors").unlink(missing_ok=True)
            if tensors:
                save_file(tensors, new.folder / f"{name}.safetensors")
        return new

    latents, keys = {"latents": torch.zeros(LATENT_CHANNELS, 2, SIDE + 2, SIDE)}, torch.zeros(VIDEO, KEYS)
    odd = partial(checkpoint, planes=3)
    for wrong, told in (
        (made(world, condition={}), "--condition"),
        (made(world, condition=latents), "expected"),
        (made(checkpoint, condition=latents), "--condition"),
        (made(odd), "channels"),
        (made(world, clip={}), "--image-features"),
        (made(checkpoint, clip={"clip_features": torch.zeros(9, 20)}), "--image-features"),
        (made(world, clip={"clip_features": torch.zeros(9, 7)}), "expected"),
        (made(world, controls={}), "--controls"),
        (made(checkpoint, controls={"keyboard": keys}), "--controls"),
        (made(world, controls={"keyboard": keys}), "mouse is missing"),
        (made(world, controls={"keyboard": keys[1:], "mouse": keys[1:, :2].clone()}), "expected"),
    ):
        assert main.main(wrong.command()) == 2
        assert told in capsys.readouterr().err
    for extra in (["--kv-context", "staircase"], ["--sink", "3"]):
        assert main.main(made(world).command("--window", "6", *extra)) == 2
        assert extra[0][2:].replace("-", "_") in capsys.readouterr().err
    assert main.main(made(world).command("--window", "6", "--kv-context", "staircase", "--untested")) == 0
