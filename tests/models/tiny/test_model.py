"""The model's folder: written, read back, and refused when something is missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from streamdiff.core import Control
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.tiny import prompts
from streamdiff.session_state import walk
from tests.small import AUTOENCODER, CPU, LATENT_CHANNELS, LATENT_SIDE, RED, small_parts, small_text
from training import embedded
from training.embedded import PAD, TEXT_TOKENS, UNKNOWN, WIDTH
from training.model_folder import build_tokenizer, save_model

STREAM: dict[str, object] = {
    "latent_height": LATENT_SIDE,
    "latent_width": LATENT_SIDE,
    "chunk_latents": 3,
    "window_latents": 15,
    "sink_latents": 3,
    "native_fps": 24.0,
    "shift": 5.0,
    "steps": [4, 2],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("saved") / "model"
    parts = small_parts(5)
    save_model(where, parts.autoencoder, parts.mean, parts.std, (parts.text, parts.transformer), STREAM)
    return where


def test_a_saved_model_loads_as_it_was_up_to_half_precision(folder: Path) -> None:
    parts, loaded = small_parts(5), embedded.load_model(folder, CPU, "mine")
    spec = loaded.spec
    assert (spec.name, spec.chunk_latents, spec.window_latents, spec.sink_latents) == ("mine", 3, 15, 3)
    assert (spec.native_fps, spec.shift, spec.steps) == (24.0, 5.0, (4, 2))
    assert (spec.width, spec.height) == (LATENT_SIDE * AUTOENCODER.spatial,) * 2
    assert spec.chunk_frames == 3 * AUTOENCODER.temporal
    assert spec.chunk_shape == (LATENT_CHANNELS, 3, LATENT_SIDE, LATENT_SIDE)
    written = {name: weight.half().float() for name, weight in parts.transformer.state_dict().items()}
    read = loaded.denoiser.model.state_dict()
    assert written.keys() == read.keys()
    assert all(torch.equal(read[name], weight) for name, weight in written.items())
    assert {weight.dtype for weight in read.values()} == {torch.float32}
    torch.testing.assert_close(loaded.text.encode(RED), parts.text.encode(RED), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_a_saved_stream_goes_on_on_a_cpu_that_decodes_in_another_dtype(first: torch.dtype) -> None:
    """And shows what it would have shown, but for the last bits of bfloat16."""
    latents = torch.randn(2, 1, 16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    kinds = [
        PictureDecoder(load_autoencoder(embedded.WEIGHTS / "vae", "decoder", CPU, dtype))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    here, there = kinds if first == torch.float32 else kinds[::-1]
    memory, other = here.new_memory(), there.new_memory()
    here.decode(latents[0], memory)
    there.decode(latents[1], other)
    assert walk.outline(memory) == walk.outline(other)
    assert sum(tensor.nbytes for tensor in memory.past.values()) == here.stream_bytes(16, 16)
    moved = walk.load(other, *walk.save(memory))
    one, same = here.decode(latents[1], memory), there.decode(latents[1], moved)
    assert (one.float() - same.float()).square().mean().sqrt() < 1
    assert (one.float() - here.decode(latents[1], here.new_memory()).float()).square().mean().sqrt() > 3, "it remembers"


@pytest.mark.parametrize(
    "missing",
    [
        "model_index.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
        "vae",
        "vae/diffusion_pytorch_model.safetensors",
    ],
)
def test_a_missing_part_is_named_with_the_way_out(folder: Path, tmp_path: Path, missing: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    target = broken / missing
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    with pytest.raises(ConfigError) as caught:
        embedded.load_model(broken, CPU)
    message = str(caught.value)
    assert str(broken) in message and missing in message and "--model tiny" in message


def rewritten(folder: Path, to: Path, **stream: object) -> Path:
    """A copy of a model's folder with other stream settings."""
    shutil.copytree(folder, to)
    index = json.loads((to / "model_index.json").read_text())
    index["stream"] |= stream
    (to / "model_index.json").write_text(json.dumps(index))
    return to


def test_a_model_names_its_controls_and_one_without_has_none(folder: Path, tmp_path: Path) -> None:
    assert embedded.load_model(folder, CPU).spec.controls == ()
    named = [{"name": "x", "keys": ["KeyA", "KeyD"]}, {"name": "jump", "kind": "button"}]
    loaded = embedded.load_model(rewritten(folder, tmp_path / "m", controls=named), CPU)
    assert loaded.spec.controls == (Control("x", keys=("KeyA", "KeyD")), Control("jump", "button"))
    assert loaded.denoiser.controls == 2
    assert loaded.denoiser.extra_channels == embedded.load_model(folder, CPU).denoiser.extra_channels - 2


@pytest.mark.parametrize(
    "names", ["x", [1], [{"name": ""}], [{"name": "x"}] * 2, [{"name": f"x{i}"} for i in range(99)]]
)
def test_controls_that_cannot_be_are_refused(folder: Path, tmp_path: Path, names: object) -> None:
    with pytest.raises(ConfigError):
        embedded.load_model(rewritten(folder, tmp_path / "m", controls=names), CPU)


def test_the_tokenizer_knows_every_word_of_the_captions_and_nothing_else() -> None:
    assert set(build_tokenizer().get_vocab()) == {PAD, UNKNOWN, *prompts.known_words()}


def test_padding_is_zero_and_words_are_not() -> None:
    text = small_text(0)
    ids = text.tokens([RED])[0]
    words = len(RED.split())
    assert ids.shape == (TEXT_TOKENS,) and (ids[:words] > 1).all() and not ids[words:].any()
    embedded = text.encode(RED)
    assert embedded.shape == (TEXT_TOKENS, WIDTH) and embedded.dtype == torch.float32
    assert not embedded[words:].any()
    assert (embedded[:words].norm(dim=1) > 0).all()


def test_padding_does_not_reach_the_words() -> None:
    """What stands in the padded places of a batch has no influence: one text alone and among longer ones agree."""
    text = small_text(0)
    short = "a blue star"
    together = text.embed(text.tokens([short, RED]))[0]
    torch.testing.assert_close(together, text.encode(short), rtol=1e-5, atol=1e-6)


def test_a_text_that_is_too_long_is_cut() -> None:
    text = small_text(0)
    long = " ".join(["red", "circle"] * 20)
    assert text.encode(long).shape == (TEXT_TOKENS, WIDTH)
    assert torch.equal(text.encode(long), text.encode(" ".join(long.split()[:TEXT_TOKENS])))
