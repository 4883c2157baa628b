"""Whose weights a file holds, told by its name: no file is opened for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from streamdiff.api import model_config
from streamdiff.cli import main, parser
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models import resolve
from streamdiff.models.tiny.model import WEIGHTS


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"never read")
    return path


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("self_forcing_dmd.pt", "self-forcing"),
        ("self_forcing_sid.pt", "self-forcing"),
        ("chunkwise/causal_forcing.pt", "causal-forcing-chunkwise"),
        ("framewise/causal_forcing.pt", "causal-forcing-framewise"),
        ("wan_causal_dmd_v2v/model.pt", "streamdiffusionv2-1.3b"),
        ("krea-realtime-video-14b.safetensors", "krea-realtime-14b"),
        ("self_forcing_dmd.safetensors", "self-forcing"),  # somebody wrote it anew
        ("longlive_base.pt", "longlive-1.3b"),
    ],
)
def test_a_published_file_is_known(tmp_path: Path, file: str, name: str) -> None:
    assert resolve.entry_of(write(tmp_path / file)).name == name
    assert resolve.entry_of((tmp_path / file).parent).name == name, "the only file of a folder"


def test_the_embedded_models_own_folder_is_known() -> None:
    assert resolve.entry_of(WEIGHTS).name == "tiny"


@pytest.mark.parametrize("file", ["causal_forcing.pt", "model.pt", "mine.safetensors", "a.gguf"])
def test_a_file_that_could_be_several_is_asked_about(tmp_path: Path, file: str) -> None:
    with pytest.raises(ConfigError):
        resolve.entry_of(write(tmp_path / file))
    (folder := tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError):
        resolve.entry_of(folder)


def test_weights_alone_mean_their_own_model(tmp_path: Path) -> None:
    """Not the embedded one with foreign weights: also its rate, and the KV context that it was made for."""
    path = str(write(tmp_path / "wan_causal_dmd_v2v" / "model.pt"))
    config = main._at_native_rate(main._config(parser.parse(["serve", "--weights", path])))
    assert (config.model.name, config.model.kv_context) == ("streamdiffusionv2-1.3b", "same_step")
    assert (config.playback.fps, config.serve.upscale) == (16.0, 1)
    assert model_config({"weights": path}).name == "streamdiffusionv2-1.3b"
    (tmp_path / "c.yaml").write_text(f"model: {{weights: {path}}}")
    read = main._config(parser.parse(["serve", "--config", str(tmp_path / "c.yaml")]))
    assert read.model.name == "streamdiffusionv2-1.3b"
    named = main._config(parser.parse(["serve", "--weights", path, "--model", "self-forcing"]))
    assert named.model.name == "self-forcing"
    with pytest.raises(ConfigError, match="no such file"):
        resolve.completed(ModelConfig(weights=str(tmp_path / "nowhere.pt")))


def test_a_base_is_known_by_its_folder_and_offered_to_nobody(tmp_path: Path) -> None:
    name = "diffusion_pytorch_model.safetensors"
    for folder in ("Wan2.1-T2V-1.3B", "Wan2.1-T2V-1.3B-Diffusers/transformer", "models--Wan-AI--Wan2.1-T2V-1.3B/x/y"):
        assert resolve.entry_of(write(tmp_path / folder / name)).name == "wan2.1-t2v-1.3b"
    for file in (f"fine_tune/{name}", "wan2.1_t2v_1.3B_bf16.safetensors", "Wan2.2-TI2V-5B-Q8_0.gguf"):
        path = write(tmp_path / file)
        path.write_bytes(b"GGUF\3" if path.suffix == ".gguf" else save({"blocks.29.ffn.0.bias": torch.ones(1)}))
        with pytest.raises(ConfigError, match=r"Wan's own base.* bidirectional.*--model NAME: .*self-forcing"):
            resolve.entry_of(path)
