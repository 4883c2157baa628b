"""Models of Wan2.2-TI2V-5B's shape, 48 latent channels of 16 x 16 pixels, in small: against diffusers' own modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from streamdiff.cli import main
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models import catalogue, resolve
from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.autoencoder.wan import WanAutoencoder
from streamdiff.models.loader import ModelLoader
from streamdiff.models.spec import with_size
from streamdiff.pipeline.planner.model_sizes import entry_sizes
from tests.models.layouts import original, save
from tests.small import CPU
from tests.small_vae import original_layout, relative_error, small_wan_autoencoder

CONFIG = catalogue.parts().autoencoders["wan2.2"].config
assert CONFIG is not None
VAE = small_wan_autoencoder(3, **CONFIG | {"base_dim": 4, "decoder_base_dim": 8})
FRAMES, HEIGHT, WIDTH = 3, 2, 4


def small(channels: int = 48) -> WanTransformer3DModel:
    torch.manual_seed(5)
    sizes = {"num_attention_heads": 1, "attention_head_dim": 128, "num_layers": 2, "ffn_dim": 64, "text_dim": 16}
    return WanTransformer3DModel(**sizes, freq_dim=32, in_channels=channels, out_channels=channels).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Transformer and autoencoder as the original repository has them, a prompt's embeddings, and noise of a chunk."""
    folder = tmp_path_factory.mktemp("wan22")
    save(folder / "model.safetensors", original(dict(small().state_dict())))
    torch.save(original_layout(VAE), folder / "Wan2.2_VAE.pth")
    generator = torch.Generator().manual_seed(1)
    save_file({"prompt_embeds": torch.randn(1, 512, 16, generator=generator)}, folder / "text.safetensors")
    noise = torch.randn(1, 48, FRAMES, HEIGHT, WIDTH, generator=generator)
    save_file({"initial": noise, "renoise": torch.zeros(1, 0, *noise.shape[1:])}, folder / "noise.safetensors")
    return folder


@torch.inference_mode()
def test_a_chunk_is_what_diffusers_makes(files: Path, tmp_path: Path) -> None:
    """One chunk in one step, its first latent frame told to be clean, as a picture is: latents are those of
    WanTransformer3DModel, which is told a timestep of each token, and pictures those of AutoencoderKLWan."""
    told = torch.tensor([0.0, 1000, 1000])
    save_file({"timesteps": told[None], "sigmas": told[None] / 1000}, tmp_path / "first.safetensors")
    options = "--steps 1000,0 --chunk-frames 3 --window 3 --sink 0 --rope absolute --chunks 1 --size 64x32 --device cpu"
    given = [f"--{key}={files / value}" for key, value in (
        ("model", "model.safetensors"), ("prompt-embeds", "text.safetensors"), ("noise", "noise.safetensors"),
        ("vae", "Wan2.2_VAE.pth"),
    )]  # fmt: skip
    out = [f"--latents-out={tmp_path / 'latents.safetensors'}", f"--output={tmp_path / 'out.mp4'}"]
    assert (
        main.main(["generate", *options.split(), *given, *out, f"--first-steps={tmp_path / 'first.safetensors'}"]) == 0
    )
    latents = load_file(tmp_path / "latents.safetensors")["latents"]
    noise, text = (load_file(files / f"{name}.safetensors") for name in ("noise", "text"))
    tokens = told.repeat_interleave(HEIGHT * WIDTH // 4)[None]
    flow = small()(noise["initial"], tokens, text["prompt_embeds"], return_dict=False)[0]
    expected = noise["initial"] - told.view(-1, 1, 1) / 1000 * flow
    assert flow.std() > 0.1 and relative_error(latents, expected) < 1e-4
    loaded = load_autoencoder(files / "Wan2.2_VAE.pth", "decoder", CPU)
    assert isinstance(loaded, WanAutoencoder) and (loaded.spatial, loaded.temporal) == (16, 4)
    mean, std = (torch.tensor(VAE.config[name]).view(-1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    whole, memory = VAE.decode(latents * std + mean).sample, loaded.new_memory()
    parts = [loaded.decode_video(piece, memory) for piece in latents.split([1, 2], 2)]
    assert whole.shape == (1, 3, 9, 32, 64) and relative_error(torch.cat(parts, 2), whole) < 1e-4


def test_what_belongs_to_it_is_known(files: Path) -> None:
    """Of a file that the catalogue does not know too."""
    config = ModelConfig(name=str(files / "model.safetensors"), vae=str(files / "Wan2.2_VAE.pth"), size="64x32")
    loader = ModelLoader(config, CPU)
    loader.check_files("vae")
    assert loader.spec.chunk_shape[2:] == (2, 4) and loader.model.autoencoder(48) == "wan2.2"
    assert catalogue.small_autoencoder("wan2.2-ti2v-5b") == "taew2_2"
    base, drawn = catalogue.find("wan2.2-ti2v-5b"), resolve.resolve_model(ModelConfig(name="random:wan2.2-5b"))
    assert drawn.vae == "random:wan2.2" and drawn.entry is not None and drawn.entry.autoencoder == "wan2.2"
    spec = entry_sizes(base).spec
    assert (spec.latent_channels, spec.latent_height, spec.latent_width) == (48, 44, 80)
    with pytest.raises(ConfigError, match="multiples of 32"):
        with_size(spec, 848, 480)
    with pytest.raises(ConfigError, match="48 channels in"):
        ModelLoader(config.model_copy(update={"name": "self-forcing", "weights": config.name}), CPU).check_files("vae")


def test_its_small_decoder() -> None:
    drawn = load_autoencoder("random:taew2_2", "decoder", CPU)
    sizes = entry_sizes(catalogue.find("wan2.2-ti2v-5b"), vae="taew2_2").decoder
    assert (drawn.latent_channels, drawn.spatial, drawn.temporal) == (48, 16, 4)
    assert sum(each.numel() for each in drawn.layers.parameters()) == sizes.weights
    assert drawn.decode_video(torch.zeros(1, 48, 2, 2, 2), drawn.new_memory()).shape == (1, 3, 5, 32, 32)
