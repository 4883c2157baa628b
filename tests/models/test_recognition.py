"""Whose weights a file holds, told by its name and its tensors' names: without torch, and without opening a pickle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from streamdiff.api import model_config
from streamdiff.cli import main, parser
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models import resolve
from streamdiff.models.tiny.model import WEIGHTS

NAME = "model.blocks.{}.self_attn.q.weight"


def write(path: Path, blocks: int = 30, *containers: str) -> Path:
    """A file with one tensor a block, in these containers or flat."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {NAME.format(number): torch.zeros(1) for number in range(blocks)}
    if path.suffix == ".safetensors":
        inside = {f"{container}.{name}": t.clone() for container in containers for name, t in tensors.items()}
        save_file(inside or tensors, path)
    else:
        torch.save({container: tensors for container in containers} or tensors, path)
    return path


@pytest.mark.parametrize(
    ("file", "blocks", "containers", "name"),
    [
        ("self_forcing_dmd.pt", 30, ("generator", "generator_ema"), "self-forcing"),
        ("self_forcing_sid.pt", 30, ("generator", "generator_ema"), "self-forcing"),
        ("chunkwise/causal_forcing.pt", 30, ("generator", "generator_ema"), "causal-forcing-chunkwise"),
        ("framewise/causal_forcing.pt", 30, ("generator", "generator_ema"), "causal-forcing-framewise"),
        ("causal_forcing.pt", 30, ("generator",), "causal-forcing-chunkwise"),  # the other one's is `generator_ema`
        ("wan_causal_dmd_v2v/model.pt", 30, (), "streamdiffusionv2-1.3b"),
        ("model.pt", 40, (), "streamdiffusionv2-14b"),
        ("krea-realtime-video-14b.safetensors", 40, (), "krea-realtime-14b"),
        ("self_forcing_dmd.safetensors", 30, (), "self-forcing"),  # somebody wrote it anew
        ("longlive_base.pt", 30, ("generator",), "longlive-1.3b"),
        ("anything.safetensors", 6, (), "tiny"),
        ("self_forcing_dmd.pt", 2, ("generator_ema",), "self-forcing"),  # of a size that nothing published has
    ],
)
def test_a_published_file_is_known(
    tmp_path: Path, file: str, blocks: int, containers: tuple[str, ...], name: str
) -> None:
    assert resolve.entry_of(write(tmp_path / file, blocks, *containers)).name == name


def test_the_embedded_models_own_weights_are_known() -> None:
    for path in (WEIGHTS, WEIGHTS / "transformer"):
        assert resolve.entry_of(path).name == "tiny"


def test_shards_are_known_by_their_index(tmp_path: Path) -> None:
    names = {NAME.format(number): "a.safetensors" for number in range(40)}
    index = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError):
        resolve.entry_of(tmp_path)


@pytest.mark.parametrize(
    ("file", "blocks", "containers"),
    [("causal_forcing.pt", 30, ("generator", "generator_ema")), ("mine.safetensors", 40, ()), ("mine.pt", 0, ())],
)
def test_a_file_that_could_be_several_is_asked_about(
    tmp_path: Path, file: str, blocks: int, containers: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError):
        resolve.entry_of(write(tmp_path / file, blocks, *containers))


def test_what_cannot_be_read_is_asked_about(tmp_path: Path) -> None:
    for name, content in {"a.pt": b"x", "b.safetensors": b"x", "c.pth": b"PK\x03\x04"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            resolve.entry_of(tmp_path / name)
    (folder := tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError):
        resolve.entry_of(folder)


def test_no_pickle_is_opened(tmp_path: Path) -> None:
    """One that would run code when it is loaded."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "ran",)  # type: ignore[return-value]

    tensors = {NAME.format(number): torch.zeros(1) for number in range(30)}
    torch.save({"generator_ema": tensors, "evil": Evil()}, tmp_path / "self_forcing_dmd.pt")
    assert resolve.entry_of(tmp_path / "self_forcing_dmd.pt").name == "self-forcing"
    assert not (tmp_path / "ran").exists()


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
    assert resolve.completed(ModelConfig(weights=str(tmp_path / "nowhere.pt"))).name == "tiny", "told when it is loaded"


def test_weights_that_do_not_tell_are_a_users_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path / "mine.safetensors"))
    assert main.main(["generate", "--weights", path, "--output", str(tmp_path / "out.mp4")]) == main.USER_ERROR
    assert "self-forcing" in (told := capsys.readouterr().err) and "--model NAME" in told
