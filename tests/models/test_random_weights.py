"""Models without a file: the real loaders, sizes as said, values that depend on names alone, nothing fetched."""

from __future__ import annotations

import pytest
import torch

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue, loader
from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.models.catalogue import Architecture
from streamdiff.models.loader import ModelLoader
from streamdiff.models.resolve import resolve_model
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.load_plan import plan_load

CPU = torch.device("cpu")
SMALL = Architecture(width=96, ffn_dim=64, heads=2, blocks=3, in_channels=16, out_channels=16, freq_dim=16)


@pytest.fixture(autouse=True)
def small_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = catalogue.parts()
    parts = parts.model_copy(update={"architectures": {**parts.architectures, "small": SMALL}})
    monkeypatch.setattr(catalogue, "parts", lambda: parts)


@pytest.mark.slow
def test_real_sizes_are_those_of_the_published_models() -> None:
    for name, billions in (("random:wan2.1-1.3b", 1.419), ("random:wan2.1-14b", 14.288)):
        checkpoint = ModelLoader(ModelConfig(name=name), CPU).checkpoint.checkpoint
        count = sum(torch.Size(checkpoint.entries[key].shape).numel() for key in checkpoint.names)
        assert count / 1e9 == pytest.approx(billions, abs=0.001)


@pytest.mark.slow
def test_a_stream_comes_out_in_any_number_of_steps() -> None:
    config = ModelConfig(name="random:small", vae="random:taew2_1", size="32x32", device="cpu", steps=1)
    runtime = build_pipeline(config)
    try:
        assert runtime.model.spec.steps == (4, 2, 1)
        assert (runtime.model.spec.window_latents, runtime.model.spec.sink_latents) == (12, 3)
        runtime.open(0, runtime.text.encode("x"), seed=0, epoch=0, steps=1, kv_context="clean")
        runtime.set_frame_credit(0, 2 * runtime.info.chunk_frames)
        shapes = [made.pictures.shape for _ in range(40) for made in runtime.step(1.0)]
        assert shapes[0][1:] == (32, 32, 3) and sum(shape[0] for shape in shapes) == 21
    finally:
        runtime.close()


def test_parts_of_the_model_are_parts_of_the_same_model() -> None:
    loader = ModelLoader(ModelConfig(name="random:small"), CPU)
    whole = loader.transformer()
    last = loader.transformer((2, 3))
    assert torch.equal(whole.blocks[2].attn1.to_q.weight, last.blocks[0].attn1.to_q.weight)
    assert not torch.equal(whole.blocks[1].attn1.to_q.weight, last.blocks[0].attn1.to_q.weight)
    assert 0.5 < whole.blocks[0].attn1.to_q.weight.detach().std().item() * 96**0.5 < 1.5


@pytest.mark.slow
def test_the_full_autoencoder_has_a_decoder_and_no_encoder() -> None:
    decoder = load_autoencoder("random:wan2.1", "decoder", CPU)
    pictures = PictureDecoder(decoder).decode(torch.zeros(1, 16, 2, 2, 2), decoder.new_memory())
    assert pictures.shape == (5, 16, 16, 3)
    assert decoder.autoencoder.encoder.conv_in.weight.is_meta


def test_texts_have_embeddings_of_their_own() -> None:
    text = loader.RandomText((4, 8), CPU)
    assert torch.equal(text.encode("a"), text.encode("a")) and not torch.equal(text.encode("a"), text.encode("b"))
    assert "noise" in text.read("a", None).notice


def test_nothing_is_read_or_fetched() -> None:
    configs = ModelConfig(name="random:wan2.1-14b", vae="random:taew2_1"), ModelConfig(name="random:wan2.1-1.3b")
    large, small = (ModelLoader(config, CPU).digest() for config in configs)
    assert large == small
    loader = plan_load(ModelConfig(name="random:wan2.1-14b", size="512x512", steps=2), CPU)
    assert loader.spec.chunk_shape == (16, 3, 64, 64) and loader.sizes.blocks == 40


@pytest.mark.parametrize("name", ["random:tiny", "random:wan3", "random:"])
def test_an_unknown_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        resolve_model(ModelConfig(name=name))
    with pytest.raises(ConfigError):
        load_autoencoder(name, "decoder", CPU)
