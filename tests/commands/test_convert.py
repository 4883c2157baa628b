"""`streamdiff decode` and `streamdiff encode` through the command line's own `main`: tensors in, tensors out."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamdiff.cli import main
from streamdiff.models.autoencoder.taehv import TAEHV, TaehvConfig
from tests.small import bare_sky
from tests.small_vae import original_layout, relative_error, small_wan_autoencoder

WAN = small_wan_autoencoder().config
MEAN, STD = (torch.tensor(WAN[name]).view(-1, 1, 1, 1) for name in ("latents_mean", "latents_std"))


@pytest.fixture(scope="module")
def autoencoder() -> AutoencoderKLWan:
    return small_wan_autoencoder()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autoencoder: AutoencoderKLWan) -> Path:
    """A folder to work in, with an autoencoder file, and latents and a video for it."""
    monkeypatch.chdir(tmp_path)
    torch.save(original_layout(autoencoder), "vae.pth")
    generator = torch.Generator().manual_seed(0)
    save_file({"latents": torch.randn(2, 16, 3, 2, 3, generator=generator)}, "latents.safetensors")
    save_file({"video": torch.rand(3, 9, 16, 24, generator=generator) * 2 - 1}, "video.safetensors")
    return tmp_path


def tensor(path: str, name: str) -> Tensor:
    """The only tensor of a file."""
    stored = load_file(path)
    assert list(stored) == [name]
    return stored[name]


def run(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """Carry out a command line that is right; what it says."""
    assert main.main(line.split()) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert "frame/s" in err, "a progress bar"
    return out


def expected_video(autoencoder: AutoencoderKLWan) -> Tensor:
    """What diffusers decodes the latents file to: chunks laid end to end."""
    chunks = tensor("latents.safetensors", "latents")
    with torch.no_grad():
        video: Tensor = autoencoder.decode((torch.cat(list(chunks), 1) * STD + MEAN)[None]).sample[0]
    return video


@pytest.mark.slow
@pytest.mark.parametrize("chunk", ["", "--chunk-frames 1", "--chunk-frames 4", "--chunk-frames 99"])
def test_decode_gives_diffusers_tensor(
    place: Path, capsys: pytest.CaptureFixture[str], autoencoder: AutoencoderKLWan, chunk: str
) -> None:
    said = run(capsys, f"decode --vae vae.pth --latents latents.safetensors --out out.safetensors {chunk}")
    assert said == "out.safetensors: 21 frames, 24 x 16, from 6 latent frames\n"
    video = tensor("out.safetensors", "video")
    assert (video.dtype, tuple(video.shape)) == (torch.float32, (3, 21, 16, 24))
    assert relative_error(video, expected_video(autoencoder)) <= 1e-5


@pytest.mark.slow
def test_decode_writes_pictures_and_videos(
    place: Path, capsys: pytest.CaptureFixture[str], autoencoder: AutoencoderKLWan
) -> None:
    run(capsys, "decode --vae vae.pth --latents latents.safetensors --out frames")
    wanted = ((expected_video(autoencoder) + 1) * 127.5).permute(1, 2, 3, 0)
    names = sorted(path.name for path in (place / "frames").iterdir())
    assert names == [f"{number:05d}.png" for number in range(21)]
    pictures = np.stack([np.asarray(Image.open(place / "frames" / name)) for name in names])
    assert np.abs(pictures - wanted.numpy()).max() <= 0.51
    for line, rate in (("--out out.mp4", 16), ("--out out.webm --fps 25", 25)):
        run(capsys, f"decode --vae vae.pth --latents latents.safetensors {line}")
        with av.open(line.split()[1]) as video:
            assert video.streams.video[0].average_rate == rate
            assert len(list(video.decode(video=0))) == 21


@pytest.mark.parametrize("chunk", ["", "--chunk-frames 1"])
def test_encode_gives_diffusers_means(
    place: Path, capsys: pytest.CaptureFixture[str], autoencoder: AutoencoderKLWan, chunk: str
) -> None:
    said = run(capsys, f"encode --vae vae.pth --video video.safetensors --out out.safetensors {chunk}")
    assert said == "out.safetensors: `latents` [16, 3, 2, 3], from 9 frames, 24 x 16\n"
    with torch.no_grad():
        raw = autoencoder.encode(tensor("video.safetensors", "video")[None]).latent_dist.mode()[0]
    latents = tensor("out.safetensors", "latents")
    assert latents.dtype == torch.float32
    assert relative_error(latents, (raw - MEAN) / STD) <= 1e-5


@pytest.mark.slow
def test_raw_latents_are_the_networks_own_and_decode_as_the_others_do(
    place: Path, capsys: pytest.CaptureFixture[str], autoencoder: AutoencoderKLWan
) -> None:
    encode = "encode --vae vae.pth --video video.safetensors --out"
    run(capsys, f"{encode} plain.safetensors")
    said = run(capsys, f"{encode} raw.safetensors --raw")
    assert said == "raw.safetensors: `latents` [16, 3, 2, 3], not normalised, from 9 frames, 24 x 16\n"
    with torch.no_grad():
        raw = autoencoder.encode(tensor("video.safetensors", "video")[None]).latent_dist.mode()[0]
    assert relative_error(tensor("raw.safetensors", "latents"), raw) <= 1e-5
    for name, space in (("plain", "model"), ("raw", "no")):
        with safe_open(place / f"{name}.safetensors", "pt") as file:
            assert file.metadata().keys() == {"normalised", "motion"} and file.metadata()["normalised"] == space
        run(capsys, f"decode --vae vae.pth --latents {name}.safetensors --out {name}-video.safetensors")
    plain, seen = (tensor(f"{name}-video.safetensors", "video") for name in ("plain", "raw"))
    assert relative_error(seen, plain) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("vae", "lengths"), [("vae.pth", [1, 4, 4]), ("taew2_1.pth", [4, 4, 1])])
@pytest.mark.parametrize("chunk", ["", "--chunk-frames 1"])
def test_encode_notes_how_the_pixels_move(
    place: Path, capsys: pytest.CaptureFixture[str], vae: str, lengths: list[int], chunk: str
) -> None:
    """Of each latent frame the largest step between two of its frames, or from the frame before it."""
    torch.save(TAEHV(TaehvConfig()).state_dict(), "taew2_1.pth")
    run(capsys, f"encode --vae {vae} --video video.safetensors --out out.safetensors {chunk}")
    video = tensor("video.safetensors", "video").double()
    steps = [0.0] + [float((video[:, n] - video[:, n - 1]).square().mean().sqrt()) for n in range(1, 9)]
    expected = [max(steps[sum(lengths[:k]) : sum(lengths[: k + 1])]) for k in range(3)]
    with safe_open(place / "out.safetensors", "pt") as file:
        got = [float(each) for each in file.metadata()["motion"].split()]
    assert got == pytest.approx(expected, rel=1e-6) and len(set(got)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("source", ["frames", "clip.mp4", "clip.webm"])
def test_encode_reads_pictures_and_videos(place: Path, capsys: pytest.CaptureFixture[str], source: str) -> None:
    """The frames of a lossy video are what a reader sees, so it is compared with them as a tensor."""
    pieces = "decode --vae vae.pth --latents latents.safetensors --out"
    run(capsys, f"{pieces} {source}")
    if source == "frames":
        frames = [np.asarray(Image.open(path)) for path in sorted((place / source).iterdir())]
    else:
        with av.open(source) as video:
            frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    seen = torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2).contiguous() / 127.5 - 1
    save_file({"video": seen}, "seen.safetensors")
    run(capsys, f"encode --vae vae.pth --video {source} --out a.safetensors")
    run(capsys, "encode --vae vae.pth --video seen.safetensors --out b.safetensors")
    assert relative_error(tensor("a.safetensors", "latents"), tensor("b.safetensors", "latents")) <= 1e-5


@pytest.mark.slow
def test_the_embedded_model_there_and_back(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture of its own world comes back, as near as a small autoencoder comes."""
    video = bare_sky()[:, None].repeat(1, 8, 1, 1) * 2 - 1
    save_file({"video": video}, "world.safetensors")
    said = run(capsys, "encode --vae tiny --video world.safetensors --out latents.safetensors --overwrite")
    assert "`latents` [16, 2, 16, 16], from 8 frames" in said
    said = run(capsys, "decode --vae tiny --latents latents.safetensors --out again.safetensors")
    assert "8 frames, 256 x 256, from 2 latent frames" in said
    assert (tensor("again.safetensors", "video") - video).abs().mean() < 0.05
    run(capsys, "decode --vae tiny --latents latents.safetensors --out again.mp4")
    with av.open("again.mp4") as made:
        assert made.streams.video[0].average_rate == 40, "the embedded model's own"


def test_what_the_autoencoder_cannot_take_leaves_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a length that shows only at the end, as a webm file does not say it. Others are in tests/messages.txt."""
    save_file({"latents": torch.zeros(16, 1, 2, 2)}, "small.safetensors")
    run(capsys, "decode --vae tiny --latents small.safetensors --out four.webm")
    save_file({"video": torch.zeros(3, 8, 16, 16)}, "even.safetensors")
    before = sorted(path.name for path in place.iterdir())
    assert main.main(["encode", "--vae", "vae.pth", "--video", "even.safetensors", "--out", "out.safetensors"]) == 2
    assert "8 frames cannot be encoded: the Wan autoencoder takes one frame, then" in capsys.readouterr().err
    told = ["--latent-space", "raw", "--latents", "latents.safetensors", "--out", "out.mp4"]
    assert main.main(["decode", "--vae", "vae.pth", *told]) == 2
    assert "--latent-space is for TAEHV files" in capsys.readouterr().err
    assert main.main(["encode", "--vae", "vae.pth", "--video", "four.webm", "--out", "out.safetensors"]) == 2
    assert "3 frames are left over at the end, but 4 make a latent frame" in capsys.readouterr().err
    assert sorted(path.name for path in place.iterdir()) == before


def test_a_tensor_is_float32_whatever_the_network_computes_in(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "decode --vae vae.pth --latents latents.safetensors --out out.safetensors --dtype bfloat16")
    with safe_open(place / "out.safetensors", "np") as file:
        assert file.get_tensor("video").dtype == np.float32
