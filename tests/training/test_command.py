"""The command that trains the embedded model: its options, and a few real steps of all stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from tests.small import CPU, untrained_autoencoder
from training import __main__ as command
from training import autoencoder as stage_one
from training import batches, denoiser
from training.model_folder import save_model
from training.network import Network

VAE = "vae/diffusion_pytorch_model.safetensors"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("training of the embedded model")]


@pytest.fixture
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools and few statistics: encoding the usual ones takes longer than the test."""
    monkeypatch.setattr(batches, "STATISTICS", 1)
    monkeypatch.setitem(denoiser.FILLING, "cpu", denoiser.Filling((1, 1, 1, 1), 3, (1, 1, 1, 1)))
    monkeypatch.setattr(denoiser, "KEPT", 4)


@pytest.mark.usefixtures("few_windows")
def test_a_transformer_that_is_there_is_gone_on_with(tmp_path: Path) -> None:
    autoencoder = untrained_autoencoder()
    torch.manual_seed(3)
    network = Network()
    channels = stage_one.AUTOENCODER.latent_channels
    mean, std = torch.arange(channels) / 10.0, torch.full((channels,), 2.0)
    begin = tmp_path / "begin"
    parts = (network.text, network.finished())
    save_model(begin, autoencoder, mean, std, parts, command.stream_settings())
    arguments = ["--stage", "denoiser", "--begin", str(begin), "--steps", "1", "--batch", "1", "--threads", "1"]
    assert command.main([*arguments, "--rate", "1e-9", "--out", str(tmp_path / "on")]) == 0
    for part in ("transformer", "text_encoder"):
        before, after = (
            load_file(next((folder / part).glob("*.safetensors"))) for folder in (begin, tmp_path / "on" / "model")
        )
        assert before.keys() == after.keys()
        assert all(torch.allclose(before[name].float(), after[name].float(), atol=1e-3) for name in before), part
    state = torch.load(tmp_path / "on" / "denoiser.pt", weights_only=True)
    assert torch.allclose(state["mean"], mean) and torch.allclose(state["std"], std)


def test_a_decoder_is_trained_alone_and_all_else_of_the_model_stays(tmp_path: Path) -> None:
    autoencoder = untrained_autoencoder()
    begin, out = tmp_path / "begin", tmp_path / "run"
    channels = stage_one.AUTOENCODER.latent_channels
    save_model(begin, autoencoder, torch.zeros(channels), torch.full((channels,), 2.0), None, {})
    (begin / "transformer").mkdir()
    (begin / "transformer" / "config.json").write_text("{}")
    arguments = ["--stage", "decoder", "--begin", str(begin), "--steps", "1", "--batch", "1", "--threads", "1"]
    assert command.main([*arguments, "--out", str(out)]) == 0
    old, new = (file_contents(folder) for folder in (begin, out / "model"))
    assert {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)} == {VAE}
    before, after = (load_file(folder / VAE) for folder in (begin, out / "model"))
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("encoder"))
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("decoder"))


def file_contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--steps", "0"], "--steps is 0; it must be more than 0"),
        (["--threads", "-1"], "--threads is -1; it must be at least 1"),
        (["--minutes", "nan"], "--minutes is nan; it must be more than 0"),
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--stage", "denoiser"], "autoencoder.pt; train the autoencoder first"),
        (["--begin", "somewhere"], "--begin goes with --stage denoiser or decoder"),
        (["--stage", "decoder"], "--stage decoder needs --begin"),
        (["--begin", "nowhere", "--stage", "denoiser"], "nowhere, which has no vae/config.json"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_written(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([*arguments, "--out", str(tmp_path / "run")]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_is_not_written_onto_the_one_that_training_begins_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--stage", "decoder", "--begin", str(tmp_path / "model"), "--out", str(tmp_path)]
    assert command.main(arguments) == 2
    assert "which is where --out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("few_windows")
def test_minutes_stop_a_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["--out", str(out), "--stage", "autoencoder", "--batch", "1", "--device", "cpu", "--threads", "1"]
    assert command.main([*arguments, "--minutes", "0.001", "--steps", "1000"]) == 0
    assert torch.load(out / "autoencoder.pt", weights_only=True)["step"] < 100
    assert load_autoencoder(out / "model", "decoder", CPU).config == stage_one.AUTOENCODER
