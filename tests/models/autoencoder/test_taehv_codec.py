"""TAEHV files in the published layout: against that layout written down plainly, in pieces, with both latent spaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models import catalogue
from streamdiff.models.autoencoder.autoencoder import build, load_autoencoder
from streamdiff.models.autoencoder.taehv import TAEHV, TaehvAutoencoder, TaehvConfig, space_of
from streamdiff.models.autoencoder.wan import Half
from tests.small import CPU
from tests.small_vae import small_wan_autoencoder

pytestmark = pytest.mark.slow

LATENTS = 5
PUBLISHED = TaehvConfig()


@cache
def random_weights(config: TaehvConfig = PUBLISHED) -> dict[str, Tensor]:
    """As large and named as those of taew2_1, and so strong that what goes in is seen in what comes out."""
    generator = torch.Generator().manual_seed(3)
    with torch.device("meta"):
        wanted = TAEHV(config).state_dict()
    last = max(wanted, key=lambda name: (name.startswith("decoder"), int(name.split(".")[1])))

    def draw(name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return torch.rand(shape, generator=generator) * 0.1 + (0.4 if name == f"{last[:-7]}.bias" else 0.0)
        return torch.randn(shape, generator=generator) * (0.8 / shape[1:].numel()) ** 0.5

    return {name: draw(name, tensor.shape) for name, tensor in wanted.items()}


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return dict(random_weights())


@pytest.fixture(scope="module", params=["normalised", "raw"])
def space(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


def loaded(weights: dict[str, Tensor], half: Half, space: str = "normalised") -> TaehvAutoencoder:
    network = build(Path("x.pth"), weights, None, half, space, CPU, torch.float32)
    assert isinstance(network, TaehvAutoencoder)
    return network


def latents_of() -> Tensor:
    return torch.randn(1, 16, LATENTS, 2, 3, generator=torch.Generator().manual_seed(1))


def video_of(frames: int) -> Tensor:
    return torch.rand(1, 3, frames, 16, 8, generator=torch.Generator().manual_seed(2)) * 2 - 1


def conv(weights: dict[str, Tensor], name: str, x: Tensor, **options: int) -> Tensor:
    return F.conv2d(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), **options)


def with_past(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """A residual block over frames `[T, C, h, w]` that also sees the frame before; zeros before the first."""
    past = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    y = conv(weights, f"{name}.conv.0", torch.cat([x, past], 1), padding=1).relu()
    y = conv(weights, f"{name}.conv.2", y, padding=1).relu()
    return (conv(weights, f"{name}.conv.4", y, padding=1) + x).relu()


def plain_decode(weights: dict[str, Tensor], latents: Tensor) -> Tensor:
    """Latents `[T, C, h, w]`, as the network takes them, to frames in [0, 1]; three leading frames are not shown."""
    x = conv(weights, "decoder.1", (latents / 3).tanh() * 3, padding=1).relu()
    for first in (3, 9, 15):
        for index in range(first, first + 3):
            x = with_past(weights, f"decoder.{index}", x)
        x = F.interpolate(x, scale_factor=2)
        channels = x.shape[1]
        x = conv(weights, f"decoder.{first + 4}.conv", x)
        x = x.reshape(-1, channels, *x.shape[2:])
        x = conv(weights, f"decoder.{first + 5}", x, padding=1)
    return conv(weights, "decoder.22", x.relu(), padding=1).clamp(0, 1)[3:]


def plain_encode(weights: dict[str, Tensor], frames: Tensor) -> Tensor:
    """Frames `[T, 3, H, W]` in [0, 1] to latents as the network gives them; the last frame fills the last four up."""
    frames = torch.cat([frames, frames[-1:].repeat(-len(frames) % 4, 1, 1, 1)])
    x = conv(weights, "encoder.0", frames, padding=1).relu()
    for pool, together in ((2, 2), (7, 2), (12, 1)):
        x = conv(weights, f"encoder.{pool}.conv", x.reshape(-1, together * x.shape[1], *x.shape[2:]))
        x = conv(weights, f"encoder.{pool + 1}", x, padding=1, stride=2)
        for index in range(pool + 2, pool + 5):
            x = with_past(weights, f"encoder.{index}", x)
    return conv(weights, "encoder.17", x, padding=1)


def undo(latents: Tensor, space: str) -> Tensor:
    """What the network takes, given normalised latents `[C, T, h, w]`."""
    wan = small_wan_autoencoder().config
    mean, std = (torch.tensor(wan[name]).view(-1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return latents * std + mean if space == "raw" else latents


def test_decoding_is_the_published_networks(weights: dict[str, Tensor], space: str) -> None:
    latents = latents_of()
    expected = plain_decode(weights, undo(latents[0], space).transpose(0, 1)).transpose(0, 1)[None] * 2 - 1
    half = loaded(weights, "decoder", space)
    assert (half.normalisation is not None) == (space == "raw")
    video = half.decode_video(latents, half.new_memory())
    assert video.shape == (1, 3, 1 + 4 * (LATENTS - 1), 16, 24)
    assert expected.std() > 0.1 and (expected.abs() < 1).float().mean() > 0.5, "not all at the limits"
    torch.testing.assert_close(video, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frames", [1, 4, 9])
def test_encoding_is_the_published_networks(weights: dict[str, Tensor], space: str, frames: int) -> None:
    video, half = video_of(frames), loaded(weights, "encoder", space)
    memory = half.new_encode_memory()
    parts = [half.encode(video, memory), half.finish(memory)]
    latents = torch.cat([part for part in parts if part is not None], 2)
    expected = plain_encode(weights, (video[0].transpose(0, 1) + 1) / 2).transpose(0, 1)
    assert latents.shape[2] == half.latents_of(frames) == len(expected[0])
    torch.testing.assert_close(undo(latents[0], space), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=10)
@given(st.sets(st.integers(1, 8)))
def test_encoding_in_any_pieces_equals_the_whole(cuts: set[int]) -> None:
    half, video = loaded(random_weights(), "encoder", "raw"), video_of(9)
    bounds = [0, *sorted(cuts), 9]
    results = []
    for edges in (bounds, [0, 9]):
        memory = half.new_encode_memory()
        parts: list[Tensor | None] = [half.encode(video[:, :, begin:end], memory) for begin, end in pairwise(edges)]
        parts.append(half.finish(memory))
        results.append(torch.cat([part for part in parts if part is not None], 2))
    assert results[0].shape == (1, 16, 3, 2, 1)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["taew2_1.pth", "taew2_1.safetensors", "lighttaew2_1.pth", "lighttaew2_1.safetensors"])
def test_published_names_say_which_latents_they_take(tmp_path: Path, weights: dict[str, Tensor], name: str) -> None:
    stored = {key: tensor.half() for key, tensor in weights.items()}
    path = tmp_path / name
    if path.suffix == ".pth":
        torch.save(stored, path)
    else:
        save_file(stored, path)
    half = load_autoencoder(path, "decoder", CPU)
    assert isinstance(half, TaehvAutoencoder)
    assert (half.normalisation is not None) == name.startswith("light")
    assert (half.latent_channels, half.spatial, half.temporal) == (16, 8, 4)
    for key, tensor in half.autoencoder.state_dict().items():
        assert torch.equal(tensor, stored[key].float()), key
    assert isinstance(load_autoencoder(path, "encoder", CPU), TaehvAutoencoder)


def test_another_name_has_to_be_told(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    path = tmp_path / "mine.pth"
    torch.save(weights, path)
    with pytest.raises(ConfigError):
        load_autoencoder(path, "decoder", CPU)
    half = load_autoencoder(path, "decoder", CPU, latent_space="raw")
    assert isinstance(half, TaehvAutoencoder) and half.normalisation is not None
    assert space_of(Path("lighttaew2_1.pth"), "normalised") == "normalised", "what is said wins over the name"


def test_other_channels_and_patches_come_from_the_shapes(tmp_path: Path) -> None:
    """That of Wan2.2's 5B model: 48 channels, 2 x 2 pixels in a patch."""
    stored = TAEHV(TaehvConfig(latent_channels=48, patch_size=2)).state_dict()
    torch.save(stored, tmp_path / "taew2_2.pth")
    half = load_autoencoder(tmp_path / "taew2_2.pth", "decoder", CPU)
    assert (half.latent_channels, half.spatial, half.temporal) == (48, 16, 4)
    raw = load_autoencoder(tmp_path / "taew2_2.pth", "decoder", CPU, latent_space="raw").normalisation
    known = catalogue.parts().autoencoders["wan2.2"].config
    assert raw is not None and known is not None
    assert raw.mean.flatten().tolist() == pytest.approx(known["latents_mean"])
    torch.save(TAEHV(TaehvConfig(latent_channels=12)).state_dict(), tmp_path / "other.pth")
    with pytest.raises(ConfigError, match="12 latent channels"):
        load_autoencoder(tmp_path / "other.pth", "decoder", CPU, latent_space="raw")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_may_have_the_decoder_alone(tmp_path: Path, weights: dict[str, Tensor], suffix: str) -> None:
    path, alone = tmp_path / f"taew2_1{suffix}", {n: w for n, w in weights.items() if n.startswith("decoder.")}
    if suffix == ".pth":
        torch.save(alone, path)
    else:
        save_file(alone, path)
    half, whole, latents = load_autoencoder(path, "decoder", CPU), loaded(weights, "decoder"), latents_of()
    assert torch.equal(half.decode_video(latents, half.new_memory()), whole.decode_video(latents, whole.new_memory()))
    with pytest.raises(ConfigError):
        load_autoencoder(path, "encoder", CPU)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.pop("decoder.3.conv.0.bias"),
        lambda w: w.update(more=torch.zeros(1)),
        lambda w: w.update({"decoder.22.bias": torch.zeros(4)}),
        lambda w: w["decoder.22.bias"].fill_(float("inf")),
        lambda w: w.pop("decoder.22.weight"),
        lambda w: w.update({"decoder.7.conv.weight": torch.zeros(8, 8, 1, 1)}),
    ],
)
def test_what_is_wrong_with_the_tensors_is_listed(
    tmp_path: Path, weights: dict[str, Tensor], change: Callable[[dict[str, Tensor]], object]
) -> None:
    stored = {name: tensor.clone() for name, tensor in weights.items()}
    change(stored)
    torch.save(stored, tmp_path / "taew2_1.pth")
    with pytest.raises(ConfigError):
        load_autoencoder(tmp_path / "taew2_1.pth", "decoder", CPU)


def test_frames_of_another_shape_are_refused(weights: dict[str, Tensor]) -> None:
    half = loaded(weights, "encoder")
    with pytest.raises(ValueError):
        half.encode(torch.zeros(1, 4, 1, 8, 8), half.new_encode_memory())
    with pytest.raises(ValueError):
        half.encode(torch.zeros(1, 3, 1, 8, 12), half.new_encode_memory())
    with pytest.raises(ConfigError):
        half.latents_of(0)
