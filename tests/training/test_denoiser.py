"""The denoiser's training: attention written out in bfloat16 is the attention that streams run with."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamdiff.models.transformer.wan import add_controls, attend
from tests.small import untrained_autoencoder
from training import embedded as model
from training.__main__ import stream_settings
from training.autoencoder import AUTOENCODER
from training.batches import Pool, TrackEncoder
from training.denoiser import lesson_of
from training.model_folder import save_model
from training.network import TRANSFORMER, Network, _attend
from training.world.tracks import CONTROLS, KEYBOARD


@pytest.fixture(scope="module")
def pool() -> Pool:
    made = Pool(TrackEncoder(untrained_autoencoder().eval(), torch.zeros(16), torch.ones(16), Network().tokens), 2)
    made.grow(2, torch.Generator().manual_seed(1))
    return made


@pytest.fixture(autouse=True)
def two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are alike."""
    monkeypatch.setitem(TRANSFORMER, "num_layers", 2)


@pytest.mark.parametrize("seen", [48, 240])
def test_attention_in_bfloat16_is_attention_forwards_and_backwards(seen: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 48, 6, 32), (2, seen, 6, 32), (2, seen, 6, 32))
    plain = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    written_out = [tensor.detach().clone().requires_grad_() for tensor in plain]
    expected = attend(*plain)
    with torch.autocast("cpu", torch.bfloat16):
        found = _attend(*written_out)
    assert found.dtype == torch.bfloat16, "without autocast it is `attend` itself"
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0)
    weights = torch.randn(expected.shape, generator=generator)
    (expected * weights).sum().backward()
    (found.float() * weights).sum().backward()
    for own, theirs in zip(written_out, plain, strict=True):
        assert own.grad is not None and theirs.grad is not None
        torch.testing.assert_close(own.grad, theirs.grad, atol=0.05, rtol=0)


@pytest.mark.slow
def test_the_finished_model_is_steered_as_the_network_in_training_and_begins_it_again(
    pool: Pool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network = Network().eval()
    torch.nn.init.normal_(network.transformer.proj_out.weight, std=0.1)
    windows = pool.sample(1, torch.Generator().manual_seed(0))
    zero, keys = torch.zeros(5, 3, len(CONTROLS)), torch.rand(5, 3, len(CONTROLS))
    given = windows.latents[0], torch.full((5, 3), 500.0)
    before = network.denoiser.embed(*given)

    def hidden(controls: Tensor) -> Tensor:
        return add_controls(before.hidden, controls, network.control.weight)

    assert torch.equal(hidden(keys), before.hidden), "it begins with nothing"
    torch.nn.init.normal_(network.control.weight)
    channels = AUTOENCODER.latent_channels
    parts = network.text, network.finished()
    save_model(tmp_path, pool.encode.autoencoder, torch.zeros(channels), torch.ones(channels), parts, stream_settings())
    made = model.load_model(tmp_path, torch.device("cpu"))
    assert made.spec.controls == KEYBOARD and torch.equal(hidden(zero), before.hidden)
    torch.testing.assert_close(made.denoiser.embed(*given, keys).hidden, hidden(keys), atol=0.02, rtol=0.01)
    again = Network()
    again.load_model(made)
    torch.testing.assert_close(again.control.weight, network.control.weight, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(
        again.transformer.patch_embedding.weight, network.transformer.patch_embedding.weight, atol=1e-3, rtol=1e-3
    )


@pytest.mark.slow
def test_kinds_of_windows_in_one_pass_have_the_flows_of_each_alone(pool: Pool) -> None:
    torch.manual_seed(0)
    network = Network()
    torch.nn.init.normal_(network.transformer.proj_out.weight, std=0.1)
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    drawn = {"clean": pool.sample(2, generator), "next": pool.sample(3, generator).cut(torch.tensor([0, 2, 3]), 2)}
    asked = [lesson_of(windows, kind, chance, generator) for kind, windows in drawn.items()]
    with torch.no_grad():
        together, alone = network.flows(asked), [network.flow(each) for each in asked]
    for one, other in zip(together, alone, strict=True):
        assert one.std() > 0.01
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
