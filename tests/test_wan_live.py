"""A published model, small: facts from the catalogue, parts from files in their real layouts, live and exact."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import load_file, save_file

import streamdiff
from streamdiff.cli import main
from streamdiff.config import ModelConfig
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import Close, FrameBatch, Open
from streamdiff.errors import ConfigError
from streamdiff.models import sampling
from streamdiff.models.loader import ModelLoader, load_text_encoder
from streamdiff.models.transformer.wan import KeyValue
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.load_plan import plan_load
from tests.commands.conftest import last_of_each
from tests.hub_cache import lay
from tests.models.layouts import original
from tests.models.text_encoder import umt5
from tests.pipeline.reference import Explicit
from tests.small import with_camera
from tests.small_vae import small_wan_autoencoder

pytestmark = pytest.mark.slow
PROMPT = "a red fox trots through fresh snow"
CAUSAL = "causal-forcing-framewise"
KREA = "krea-realtime-14b"
VIDEO_TO_VIDEO = "streamdiffusionv2-1.3b"
FRAMES = 9 + 12  # the first latent frame of a stream is one picture, each later one four


@dataclass
class Files:
    """Parts of a small model of Self-Forcing's kind."""

    weights: Path
    vae: Path
    text: Path

    @property
    def options(self) -> dict[str, str]:
        return {"weights": str(self.weights), "vae": str(self.vae), "text_encoder": str(self.text), "size": "64x32"}

    @property
    def flags(self) -> list[str]:
        said = [part for name, value in self.options.items() for part in (f"--{name.replace('_', '-')}", value)]
        return [*said, "--overwrite"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("wan")
    autoencoder = small_wan_autoencoder(num_res_blocks=1)
    autoencoder.save_pretrained(folder / "vae")
    umt5.write(folder / "text")
    channels = autoencoder.config.z_dim
    torch.manual_seed(4)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=1,
        attention_head_dim=128,
        in_channels=channels,
        out_channels=channels,
        text_dim=umt5.WIDTH,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
    )
    state = {f"model.{name}": tensor for name, tensor in original(model.state_dict()).items()}
    torch.save({"generator_ema": state, "generator": {}}, folder / "self_forcing_dmd.pt")
    return Files(folder / "self_forcing_dmd.pt", folder / "vae", folder / "text")


@pytest.fixture(scope="module")
def live(files: Files) -> np.ndarray:
    """What Self-Forcing's kind shows, with nothing said."""
    return shown_live(files, "self-forcing", FRAMES)


def test_it_streams_and_equals_the_way_over_files(files: Files, live: np.ndarray, tmp_path: Path) -> None:
    """The live stream's frames are those of latents that were written and decoded by themselves."""
    made = Made(files, tmp_path, "self-forcing", 2)
    made()
    assert live.shape == (FRAMES, 32, 64, 3) and live.std() > 5 and made.is_shown(live)


class Made:
    """`generate` of a model's latents by its files, into a file of its own."""

    def __init__(self, files: Files, folder: Path, model: str, chunks: int, *more: str) -> None:
        self.path, self.vae = folder / "latents.safetensors", files.vae
        self.command = ["generate", "--model", model, *files.flags, "--prompt", PROMPT, "--seed", "3"]
        self.command += ["--chunks", str(chunks), "--no-decode", "--latents-out", str(self.path), *more]

    def __call__(self, *more: str) -> torch.Tensor:
        """The latents, with options that are not given otherwise."""
        assert main.main(last_of_each([*self.command, *more])) == 0
        return load_file(self.path)["latents"]

    def is_shown(self, live: np.ndarray) -> bool:
        """Whether pictures are those of the latents made last."""
        pictures = decoded(self.vae, self.path)
        return live.shape == pictures.shape and bool(np.abs(live.astype(int) - pictures.astype(int)).max() <= 1)


def shown_live(files: Files, model: str, frames: int, **options: Any) -> np.ndarray:
    with streamdiff.open(PROMPT, model=model, seed=3, **files.options, **options) as session:
        return np.stack(list(islice(session, frames)))


def decoded(vae: Path, latents: Path) -> np.ndarray:
    """Pictures uint8 `[n, H, W, 3]` of a file of latents."""
    video = latents.with_name("video.safetensors")
    video.unlink(missing_ok=True)
    assert main.main(["decode", "--vae", str(vae), "--latents", str(latents), "--out", str(video)]) == 0
    frames = load_file(video)["video"].permute(1, 2, 3, 0)
    pictures: np.ndarray = ((frames + 1) / 2 * 255).round().clamp(0, 255).to(torch.uint8).numpy()
    return pictures


def test_a_model_is_not_itself_without_its_lora(files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LongLive's base alone is another model: the LoRA is fetched, or given, and merged."""
    lora, second = tmp_path / "lora.pt", tmp_path / "style.safetensors"
    generator = torch.Generator().manual_seed(1)
    factors = {"lora_A": torch.randn(2, 128, generator=generator), "lora_B": torch.randn(128, 2, generator=generator)}
    prefix = "base_model.model.blocks.0.self_attn.q"
    save_file({f"{prefix}.{name}.weight": factor for name, factor in factors.items()}, second)
    torch.save({"generator_lora": load_file(second)}, lora)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    base = torch.load(files.weights, weights_only=True)
    torch.save({"generator": base["generator_ema"]}, tmp_path / "longlive_base.pt")
    parts = {**files.options, "weights": str(tmp_path / "longlive_base.pt")}
    with pytest.raises(ConfigError):
        streamdiff.open(PROMPT, model="longlive-1.3b", **parts)  # type: ignore[arg-type]
    lay(tmp_path, "Efficient-Large-Model/LongLive-1.3B", {"models/lora.pt": lora})
    pictures = []
    for given in ((), ("none",), (f"{second}:0",), (f"{second}:1",)):
        with streamdiff.open(PROMPT, model="longlive-1.3b", lora=given, **parts) as session:  # type: ignore[arg-type]
            pictures.append(np.stack(list(islice(session, FRAMES))))
    own, without, same, both = pictures
    assert np.array_equal(own, same) and not np.array_equal(own, without)
    assert not np.array_equal(both, own) and not np.array_equal(both, without)


@pytest.mark.parametrize(("name", "steps"), [("self-forcing", 4), (f"{CAUSAL}-1step", 1)])
def test_a_model_runs_in_the_steps_it_was_made_for(
    files: Files, name: str, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing says how many, and everybody reads the same number; another one is refused with those there are."""
    runtime = build_pipeline(ModelConfig(name=name, **files.options))  # type: ignore[arg-type]
    try:
        assert runtime.info.steps == steps and runtime.info.steps_known == (steps,)
        engine = Engine(runtime, 2 * runtime.info.chunk_frames)
        assert engine.ready().steps == steps
        films = []
        for asked in (Open("a", PROMPT, 3), Open("b", PROMPT, 3, steps)):
            events = engine.handle(asked)
            while not (pictures := [each.pictures for each in events if isinstance(each, FrameBatch)]):
                events = engine.step(0.05)
            films.append(np.concatenate(pictures))
            engine.handle(Close(asked.session))
        assert np.array_equal(*films)
    finally:
        runtime.close()
    command = ["generate", "--model", name, *files.flags, "--prompt", PROMPT, "--seconds", "0.3", "--output"]
    assert main.main([*command, str(tmp_path / "frames")]) == 0
    assert len(list((tmp_path / "frames").iterdir())) == 5
    assert main.main([*command, str(tmp_path / "more"), "--steps", "3"]) == main.USER_ERROR
    assert f"--steps is 3; model {name} has {steps} (without --steps: {steps})" in capsys.readouterr().err


def test_a_first_chunk_has_its_own_steps_live_and_in_files(files: Files, tmp_path: Path) -> None:
    """Causal-Forcing++ by name, of whose chunks the first takes four steps and the others two."""
    made = Made(files, tmp_path, f"{CAUSAL}-2step", 3)
    by_name = made()
    assert made.is_shown(shown_live(files, f"{CAUSAL}-2step", 9))
    lists = ["--steps", "1000,500", "--first-chunk-steps", "1000,750,500,250", "--warp", "--shift", "5"]
    torch.testing.assert_close(made(*lists), by_name, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(made(*lists[:2], *lists[4:])[0], by_name[0], atol=1e-2)


@pytest.mark.parametrize("name", ["causal-rcm-chunkwise", "causal-rcm-framewise-2step"])
def test_scaled_noise_and_rounded_timesteps_live_and_in_files(files: Files, tmp_path: Path, name: str) -> None:
    """Causal-rCM by name is its schedule and its noise by hand; noise from a file is taken as it is."""
    chunks, noise, made = 3, tmp_path / "noise.safetensors", Made(files, tmp_path, name, 3)
    by_name = made()
    assert made.is_shown(shown_live(files, name, 1 + 4 * (chunks * by_name.shape[2] - 1)))
    shape, scale = tuple(by_name.shape[1:]), 1600 / 1601
    drawn = [[sampling.noise(shape, seed=3, chunk=chunk, step=step) for step in range(4)] for chunk in range(chunks)]
    initial = torch.stack([chunk[0] for chunk in drawn])
    save_file({"initial": initial * scale, "renoise": torch.stack([torch.stack(c[1:]) for c in drawn])}, noise)
    assert torch.equal(made("--noise", str(noise)), by_name)
    if name == "causal-rcm-chunkwise":  # the others are the same, or have a first chunk that lists cannot say
        told, sigmas = "1000,936,832,624", f"{scale},0.9375,{5 / 6},0.625"
        assert torch.equal(made("--noise", str(noise), "--steps", told, "--sigmas", sigmas), by_name)


def test_what_a_chunk_sees_may_be_changed_live_and_in_files(files: Files, tmp_path: Path) -> None:
    """Infinity-RoPE's way with a file of Self-Forcing's kind: the stream is that of the way over files."""
    made, sizes = Made(files, tmp_path, "self-forcing", 3), {"window": 4, "sink": 1, "rope": "relative"}
    changed = made(*(part for name, value in sizes.items() for part in (f"--{name}", str(value))))
    assert made.is_shown(shown_live(files, "self-forcing", FRAMES + 12, **sizes))
    (tmp_path / "c.yaml").write_text("model: {window: 4, sink: 1, rope: relative}\n")
    assert torch.equal(made("--config", str(tmp_path / "c.yaml")), changed)
    assert not torch.allclose(made()[2], changed[2], atol=1e-3)


def test_a_step_that_is_told_0_is_run_and_may_be_left_out(files: Files, tmp_path: Path) -> None:
    """Krea's fifth, by name and by lists; a stream may leave it out while it plays."""
    made = Made(files, tmp_path, KREA, 2)
    told, low = "1000,937,833,625", "0.00498007968"
    four = ",".join(map(str, sampling.published((1000, 937, 833, 625), shift=5.0, nearest=True).sigmas))
    by_name, without = made(), made("--steps", "4")
    assert (by_name[0] - without[0]).abs().max() > 1e-4
    torch.testing.assert_close(made("--steps", f"{told},0", "--sigmas", f"{four},{low}"), by_name, rtol=0, atol=1e-5)
    assert torch.equal(made("--steps", told, "--sigmas", four), without)
    with streamdiff.open(PROMPT, model=KREA, seed=3, **files.options) as session:  # type: ignore[arg-type]
        session.set_steps(4)
        session.reset(3)
        live = np.stack(list(islice(session, 9 + 12)))
    assert made.is_shown(live), "the last file is without it"


def test_a_past_that_is_seen_again_from_its_pictures_live_and_in_files(files: Files, tmp_path: Path) -> None:
    """Krea by name. The reference: no cache, each step one forward over the chunk before, as it is shown by diffusers'
    own autoencoder on whole clips, and the chunk."""
    make = Made(files, tmp_path, KREA, 4)
    made = make()
    assert make.is_shown(shown_live(files, KREA, 9 + 3 * 12))
    context = shown(files, made, 2)
    assert not torch.allclose(context[:, 0], made[2][:, 0], atol=1e-2) and torch.equal(context[:, 1:], made[2][:, 1:])
    torch.testing.assert_close(made[3], after(files, context, 3), rtol=1e-4, atol=1e-4)  # a picture aside: 1e-3
    without = make("--no-context-pictures")
    assert torch.equal(without[:2], made[:2]), "chunk 0 begins with one picture anyway"
    assert (without[2] - made[2]).abs().max() > 1e-3
    torch.testing.assert_close(without[3], after(files, without[2], 3), rtol=1e-4, atol=1e-4)
    assert torch.equal(make("--no-context-pictures", "--stages", "2"), without)
    assert torch.equal(make("--stages", "2"), made)


@torch.inference_mode()
def shown(files: Files, made: torch.Tensor, chunk: int) -> torch.Tensor:
    """Latents `[C, F, h, w]` of a chunk, the first encoded from the last picture that it decodes to, by itself."""
    vae = AutoencoderKLWan.from_pretrained(files.vae)
    mean, std = (torch.tensor(vae.config[f"latents_{word}"]).view(1, -1, 1, 1, 1) for word in ("mean", "std"))
    clip = made[: chunk + 1].transpose(0, 1).flatten(1, 2)[None]
    video = vae.decode(clip * std + mean).sample.clamp(-1, 1)
    last = 4 * 3 * chunk  # of latent frame n the pictures 4 n - 3 to 4 n
    first = (vae.encode(video[:, :, last : last + 1]).latent_dist.mean - mean) / std
    return torch.cat([first[0], made[chunk][:, 1:]], 1)


@torch.inference_mode()
def after(files: Files, context: torch.Tensor, chunk: int) -> torch.Tensor:
    """Latents of `chunk` with nothing before it but `context`, which sees itself alone."""
    parts = {"weights": str(files.weights), "vae": str(files.vae), "text_encoder": str(files.text)}
    config = ModelConfig(name=KREA, size="64x32", **parts)  # type: ignore[arg-type]
    loader = ModelLoader(config, torch.device("cpu"))
    spec, denoiser = loader.spec, loader.transformer()
    encoded = load_text_encoder(loader.model, config, spec.text_shape, loader.device).encode(PROMPT)
    text = [KeyValue(*layer) for layer in denoiser.text(encoded[None].expand(2, -1, -1))]
    schedule = spec.schedule(5)
    assert schedule.timesteps[-1] == 0 and schedule.sigmas[-1] == pytest.approx(0.00498, abs=1e-5)
    x0 = torch.zeros(spec.chunk_shape)
    for step, (told, sigma) in enumerate(zip(schedule.timesteps, schedule.sigmas, strict=True)):
        noise = sampling.noise(spec.chunk_shape, seed=3, chunk=chunk, step=step)
        x_t = sampling.add_noise(x0, noise, sigma)
        level = torch.tensor([0.0, told])[:, None].expand(-1, spec.chunk_latents)
        tokens = denoiser.embed(torch.stack([context, x_t]), level)
        grid = (spec.latent_height // 2, spec.latent_width // 2)
        tokens = denoiser.run_blocks(tokens, text, Explicit([[0], [0, 1]], spec.chunk_latents, grid))
        x0 = sampling.clean_from_flow(x_t, denoiser.output_layer(tokens, spec.chunk_shape[1:])[-1], sigma)
    return x0


def test_a_longer_first_chunk_live_and_in_files(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """StreamDiffusionV2 by name, which begins with two latent frames and goes on with one, in the KV context that it
    was made for; nothing but the name says so."""
    with streamdiff.open(PROMPT, model=VIDEO_TO_VIDEO, seed=3, **files.options) as session:  # type: ignore[arg-type]
        assert session.chunk_frames == 4
        live = np.stack(list(islice(session, FRAMES)))
    assert "was made to change a video, and noise alone is nothing that it knows" in caplog.text
    made = Made(files, tmp_path, VIDEO_TO_VIDEO, 6)
    by_name = made()
    assert "was made to change a video" in capsys.readouterr().err
    assert by_name.shape[2] == 1 and made.is_shown(live)
    assert torch.equal(made("--kv-context", "same_step", "--first-chunk-frames", "2"), by_name)
    for other in (["--first-chunk-frames", "1"], ["--kv-context", "clean"]):
        assert not torch.allclose(made(*other)[2:], by_name[2:], atol=1e-3)
    assert main.main(last_of_each([*made.command, "--chunks", "1"])) == main.USER_ERROR
    assert "--chunks is 1, but the first chunk, of 2 latent frames" in capsys.readouterr().err


def test_latents_that_are_not_normalised_are_for_who_was_made_with_them(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `encode --raw` writes them: used as they are, with a note, or refused by name."""
    video, raw, normalised = (tmp_path / f"{name}.safetensors" for name in ("video", "raw", "normalised"))
    save_file({"video": torch.rand(3, 9, 32, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1}, video)
    for path, flag in ((raw, ["--raw"]), (normalised, [])):
        assert main.main(["encode", "--vae", str(files.vae), "--video", str(video), "--out", str(path), *flag]) == 0
    unmarked, latents = tmp_path / "unmarked.safetensors", tmp_path / "latents.safetensors"
    save_file(load_file(raw), unmarked)
    command = ["generate", "--prompt", PROMPT, "--chunks", "3", "--no-decode", "--latents-out", str(latents)]
    command += [*files.flags, "--strength", "0.8", "--video-latents"]
    made = []
    for path in (raw, unmarked, normalised):
        capsys.readouterr()
        assert main.main(last_of_each([*command, str(path), "--model", VIDEO_TO_VIDEO])) == 0
        assert ("not normalised, and are used as they are" in capsys.readouterr().err) == (path == raw)
        made.append(load_file(latents)["latents"])
    assert torch.equal(made[0], made[1]) and (made[0] - made[2]).abs().max() > 1e-2
    before = latents.read_bytes()
    for name in ("self-forcing", KREA):
        assert main.main(last_of_each([*command, str(raw), "--model", name, "--chunks", "1"])) == main.USER_ERROR
        assert f"not normalised, and {name} knows normalised ones; encode it without --raw" in capsys.readouterr().err
    assert latents.read_bytes() == before


@pytest.mark.parametrize(
    "options",
    [
        {"size": "60x32"},
        {"window": 3, "sink": 1},
        {"window": 0},
        {"model": "wan2.1-t2v-1.3b"},
        {"steps": 3},
        {"steps": (1000, 500)},
        {"weights": "/nowhere.pt"},
        {"vae": "/nowhere.pth"},
    ],
)
def test_what_cannot_be_is_refused(files: Files, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        streamdiff.open(PROMPT, **{"model": "self-forcing", **files.options, **options})  # type: ignore[arg-type]


def test_parts_that_are_in_the_hubs_cache_are_used(
    files: Files, live: np.ndarray, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Laid out as the hub lays out its cache, and no way to the network: name alone is enough."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    lay(tmp_path, "gdhe17/Self-Forcing", {"checkpoints/self_forcing_dmd.pt": files.weights})
    text = {str(path.relative_to(files.text)): path for path in files.text.rglob("*") if path.is_file()}
    lay(tmp_path, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", text)
    with streamdiff.open(PROMPT, model="self-forcing", vae=str(files.vae), size="64x32", seed=3) as session:
        assert np.array_equal(np.stack(list(islice(session, FRAMES))), live)


TOLD: dict[str, Any] = {
    **{"steps": (1000.0, 937.5, 833.33, 625.0), "chunk_latents": 3, "window": 12, "sink": 3, "rope": "relative"},
    "size": "64x32",
}


@pytest.fixture(scope="module")
def in_diffusers_layout(files: Files) -> Path:
    """The same model as a folder, as diffusers' pipelines are saved; it brings its text encoder and autoencoder."""
    folder = files.weights.parent / "pipeline"
    denoiser = ModelLoader(ModelConfig(name=str(files.weights)), torch.device("cpu")).transformer()
    denoiser.model.save_pretrained(folder / "transformer")
    shutil.copytree(files.vae, folder / "vae")
    for part in ("text_encoder", "tokenizer"):
        shutil.copytree(files.text / part, folder / part)
    (folder / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    return folder


def test_a_folder_or_a_repository_runs_live_once_everything_is_said_of_it(
    in_diffusers_layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its stream is that of the way over files."""
    folder = str(in_diffusers_layout)
    with streamdiff.open(PROMPT, model=folder, seed=3, **TOLD) as session:
        assert (session.width, session.height, session.chunk_frames, session.fps) == (64, 32, 12, 16.0)
        live = np.stack(list(islice(session, FRAMES)))
    assert "nobody says in which KV context" in caplog.text
    latents = tmp_path / "latents.safetensors"
    command = ["generate", "--model", folder, "--prompt", PROMPT, "--seed", "3", "--chunks", "2", "--no-decode"]
    command += ["--steps", "1000,937.5,833.33,625", "--chunk-frames", "3", "--window", "12", "--sink", "3"]
    command += ["--rope", "relative", "--size", "64x32", "--latents-out", str(latents)]
    assert main.main(command) == 0
    expected = decoded(in_diffusers_layout / "vae", latents)
    assert live.std() > 5 and np.abs(live.astype(int) - expected.astype(int)).max() <= 1

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    paths = [path for path in in_diffusers_layout.rglob("*") if path.is_file()]
    lay(tmp_path / "hub", "someone/Wan", {str(path.relative_to(in_diffusers_layout)): path for path in paths})
    with streamdiff.open(PROMPT, model="someone/Wan", seed=3, **TOLD) as session:
        assert np.array_equal(np.stack(list(islice(session, FRAMES))), live)


def test_what_the_catalogue_does_not_know_is_asked_for_by_name(in_diffusers_layout: Path) -> None:
    options = {"steps": "--steps ", "chunk_latents": "--chunk-frames N", "window": "--window N", "sink": "--sink N"}
    for left_out in ({"rope"}, {"steps", "window"}, set(TOLD) - {"size"}):
        given = {name: value for name, value in TOLD.items() if name not in left_out}
        with pytest.raises(ConfigError) as caught:
            streamdiff.open(PROMPT, model=str(in_diffusers_layout), **given)
        asked = {name for name, flag in {**options, "rope": "--rope "}.items() if flag in str(caught.value)}
        assert asked == left_out and "--model NAME --weights FILE" in str(caught.value)


def test_a_world_begins_with_a_picture_and_obeys_keys(files: Files, tmp_path: Path) -> None:
    """LingBot-World by its catalogue name: what is seen changes with a key, and not before."""
    channels = small_wan_autoencoder(num_res_blocks=1).config.z_dim
    torch.manual_seed(4)
    sizes = {"num_attention_heads": 1, "attention_head_dim": 128, "in_channels": 2 * channels + 4, "ffn_dim": 64}
    sizes |= {
        "out_channels": channels,
        "text_dim": umt5.WIDTH,
        "freq_dim": 32,
        "num_layers": 2,
        "cross_attn_norm": True,
    }
    save_file(original(with_camera(WanTransformer3DModel(**sizes)).state_dict()), tmp_path / "world.safetensors")
    picture = np.random.default_rng(0).integers(0, 255, (32, 64, 3), dtype=np.uint8)
    options = {**files.options, "weights": str(tmp_path / "world.safetensors")}
    seen = []
    for key in (0.0, 1.0):
        with streamdiff.open(PROMPT, model="lingbot-world-v2-14b", image=picture, seed=3, **options) as session:
            frames = list(islice(session, 5))
            session.control(forward=key)
            seen.append(np.stack([*frames, *islice(session, 40)]).astype(int))
    same = (seen[0] == seen[1]).all((1, 2, 3))
    assert seen[0].std() > 5 and same[:13].all() and not same[-8:].any()
    plan = plan_load(ModelConfig(name="lingbot-world-v2-14b", dtype="float32", **options), torch.device("cpu"))
    once = 4 * (2 * 2 * 4 * (4 * 2) * 128)  # scale and shift, blocks, latent frames of 4 x 2 tokens, width
    least = plan.demand.memory()[0].caches + once
    assert [plan.kept_cameras(free) for free in (least, least - 1)] == [once, 0]
