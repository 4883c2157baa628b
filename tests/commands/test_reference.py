"""`streamdiff generate` to the letter: another implementation's tensors in, latents out; what files say (levels by
chunk and latent frame, latents to go on from) against float64, and wrong files refused before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamdiff.cli import main
from streamdiff.models.loader import ModelLoader
from tests.commands.conftest import CHUNK, CHUNKS, SIDE, STEPS, Given
from tests.pipeline.float64_wan import PlainWan
from tests.pipeline.plain_wan import PlainStream
from tests.small import LATENT_CHANNELS, RED


@torch.inference_mode()
def test_one_chunk_over_a_whole_clip_equals_diffusers(given: Given) -> None:
    """x0 of one step is what diffusers' own transformer says, at the clip's own length."""
    shape = (1, LATENT_CHANNELS, 7, 6, 4)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(8))
    save_file({"initial": noise}, given.folder / "noise.safetensors")
    got = given.latents("--sigmas", "0.9", steps="900,0", chunks=1)
    flow = given.model(noise, torch.tensor([900.0]), given.text, return_dict=False)[0]
    torch.testing.assert_close(got, noise - 0.9 * flow, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_prompt_switch_changes_what_comes_after_it(given: Given) -> None:
    plain, other = given.latents(), str(given.folder / "other.safetensors")
    results = {}
    for policy in ("", ":keep", ":flush", ":recache", ":recache-causal", ":reset"):
        results[policy] = given.latents("--prompt-switch", f"2:{other}{policy}")
        assert torch.equal(results[policy][:2], plain[:2]) and not torch.equal(results[policy][2], plain[2])
    assert torch.equal(results[""], results[":keep"])
    distinct = [results[policy][2] for policy in (":keep", ":flush", ":recache", ":recache-causal")]
    assert all(not torch.equal(a, b) for i, a in enumerate(distinct) for b in distinct[:i])
    flushed, fresh = results[":flush"], results[":reset"]
    torch.testing.assert_close(flushed, fresh, rtol=1e-4, atol=1e-5, msg="without a sink both see nothing")


@pytest.mark.slow
def test_context_noise_and_positions_are_used(given: Given) -> None:
    plain = given.latents("--window", "9", "--sink", "3")
    noisy = given.latents("--window", "9", "--sink", "3", "--context-noise", "200")
    assert torch.equal(noisy[0], plain[0]) and not torch.equal(noisy[1], plain[1])
    absolute = given.latents("--window", "9", "--sink", "3", "--rope", "absolute")
    torch.testing.assert_close(absolute[:3], plain[:3], rtol=1e-5, atol=1e-5)
    assert (absolute[3] - plain[3]).abs().max() > 1e-5


@pytest.mark.slow
def test_motion_is_that_of_pixels_where_the_file_says_it(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    draw = torch.randn(LATENT_CHANNELS, CHUNKS * CHUNK, SIDE, SIDE, generator=torch.Generator().manual_seed(2))
    path = given.folder / "video.safetensors"
    options = ["--video-latents", str(path), "--chunk-frames", str(CHUNK), "--strength", "0.9", "--motion-noise"]
    made, steps = {}, "700,500,400"
    for motion in ("", " ".join(["0"] * CHUNKS * CHUNK), " ".join(["0", "2", "0"] * CHUNKS)):
        save_file({"latents": draw}, path, {"motion": motion} if motion else None)
        made[motion] = given.latents(*options, steps=steps, chunks=2)
        assert ("does not say how its pixels move" in capsys.readouterr().err) == (not motion)
    unknown, still, moving = made.values()
    assert torch.equal(unknown, moving), "the motion of these latents is the most, too"
    assert torch.equal(still[0], moving[0]) and (still[1] - moving[1]).abs().max() > 1e-3
    nearest = given.latents(*options, "--nearest", "--shift", "8", steps=steps, chunks=2)
    assert 0 < (nearest - moving).abs().max() < 0.05
    for wrong in ("1 1", " ".join(["3"] * CHUNKS * CHUNK), " ".join(["much"] * CHUNKS * CHUNK)):
        save_file({"latents": draw}, path, {"motion": wrong})
        assert main.main(given.command(*options, steps=steps, chunks=2)) == 2
        assert "`motion` in its header must be a number from 0 to 2 for each of its 18" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", ["clean", "staircase", "same_step"])
def test_an_averaged_sink_takes_in_what_leaves(given: Given, kv_context: str) -> None:
    parts = ["--window", "6", "--sink", "3", "--kv-context", kv_context]
    plain, whole = given.latents(*parts), given.latents(*parts, "--averaged-sink", "1")
    torch.testing.assert_close(whole, plain, rtol=1e-5, atol=1e-5)
    mixed = given.latents(*parts, "--averaged-sink", "0.5")
    if kv_context == "clean":  # a slot for the sink and one for the rest: chunk 2 is the first to push one out
        assert torch.equal(mixed[:2], plain[:2]) and (mixed[2] - plain[2]).abs().max() > 1e-3
    assert torch.equal(mixed, given.latents(*parts, "--averaged-sink", "0.5", "--stages", "3"))


@pytest.mark.slow
def test_an_adaptive_sink_takes_in_what_is_unlike_it(given: Given) -> None:
    parts = ["--window", "9", "--sink", "3"]
    plain, never = given.latents(*parts), given.latents(*parts, "--adaptive-sink", "-1")
    assert torch.equal(plain, never)
    always = given.latents(*parts, "--adaptive-sink", "1")
    assert torch.equal(always[:2], plain[:2]), "chunk 1 changes what chunk 2 sees as the sink"
    assert not torch.equal(always[2], plain[2])
    assert torch.equal(always, given.latents(*parts, "--adaptive-sink", "1", "--stages", "3"))


def test_a_warped_list_is_what_it_becomes(given: Given) -> None:
    told = given.latents(steps="1000,937.5,833.3333333333334")
    assert torch.equal(told, given.latents("--shift", "5", "--warp", steps="1000,750,500"))


@pytest.mark.slow
def test_the_embedded_model_writes_latents_and_video(tmp_path: Path) -> None:
    latents, video = tmp_path / "l.safetensors", tmp_path / "video.mp4"
    command = ["generate", "--chunks", "2", "--latents-out", str(latents), "--output", str(video), "--seed", "4"]
    assert main.main([*command, "--prompt", RED]) == 0
    assert load_file(latents)["latents"].shape == (2, 16, 3, 16, 16)
    assert video.stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--window", "4", "--sink", "2"], "must leave room for the chunk itself, 3 latent frames"),
        (["--first-chunk-frames", "4"], "--first-chunk-frames is 4; a first chunk is made of chunks"),
        (["--first-chunk-frames", "6", "--first-chunk-steps", "1000,900,833,500"], "a model with both is not built"),
        (["--stages", "4"], "3"),
        (["--size", "64x64"], "--size is 64x64, but"),
        (["--adaptive-sink", "0.2"], "goes with a --sink"),
        (["--adaptive-sink", "0.2", "--window", "9", "--sink", "2"], "--sink, which is 2, must be a multiple of"),
        (["--first-chunk-steps", "1000,500"], "the first chunk has 2 steps and the others 3"),
        (["--averaged-sink", "0.9", "--window", "9", "--sink", "2"], "sink one chunk, 3 latent frames"),
        (["--averaged-sink", "0.9", "--adaptive-sink", "0", "--window", "9", "--sink", "3"], "two ways to change"),
        (["--model", "/nowhere/wan.pt"], "there is no such file or folder"),
        (["--container", "critic"], "critic"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    given: Given, extra: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(given.folder.iterdir())
    assert main.main(given.command(*extra)) == 2
    assert words in capsys.readouterr().err
    assert sorted(given.folder.iterdir()) == before


@pytest.mark.slow
def test_in_8_bits_too_the_bits_do_not_depend_on_the_stages(given: Given) -> None:
    plain, whole, split = (
        given.latents(*extra) for extra in ((), ("--quantize", "int8"), ("--quantize", "int8", "--stages", "3"))
    )
    assert torch.equal(whole, split)
    assert 1e-4 < float((whole - plain).norm() / plain.norm()) < 0.1


@dataclass
class Files:
    """First steps, encoded video and latents to go on from, as files; and what they say."""

    options: list[str]
    told: Tensor
    sigmas: Tensor
    noise_level: Tensor
    video: Tensor
    given: Tensor


def files_for(given: Given, shape: tuple[int, ...]) -> Files:
    """Timesteps and sigmas of `shape`, with or without latent frames, with or without steps."""
    draw = torch.Generator().manual_seed(4)
    sigmas = 0.4 + 0.5 * torch.rand(shape, generator=draw)
    level = 0.5 + 0.4 * torch.rand(shape[:1] + shape[-1:] if len(shape) > 1 else shape, generator=draw)
    video = torch.randn(CHUNKS, LATENT_CHANNELS, CHUNK, SIDE, SIDE, generator=draw)
    known = torch.randn(LATENT_CHANNELS, 2 * CHUNK, SIDE, SIDE, generator=draw)
    tensors = {"timesteps": sigmas * 900, "sigmas": sigmas, "noise_level": level}
    save_file(tensors, given.folder / "first.safetensors")
    save_file({"latents": video}, given.folder / "video.safetensors")
    save_file({"latents": known}, given.folder / "known.safetensors")
    options = []
    for option, name in (("--first-steps", "first"), ("--video-latents", "video"), ("--given-latents", "known")):
        options += [option, str(given.folder / f"{name}.safetensors")]
    by_frame = (
        sigmas if len(shape) == 3 else (sigmas if len(shape) == 2 else sigmas[:, None].expand(-1, CHUNK))[:, None]
    )
    by_chunk = torch.stack(known.split(CHUNK, 1))
    return Files(options, 900 * by_frame, by_frame, level.view(CHUNKS, -1).expand(-1, CHUNK), video, by_chunk)


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", ["clean", "staircase", "same_step"])
@pytest.mark.parametrize("shape", [(CHUNKS,), (CHUNKS, CHUNK), (CHUNKS, 3, CHUNK)])
def test_levels_video_and_given_latents_from_files_equal_float64(
    given: Given, shape: tuple[int, ...], kv_context: str
) -> None:
    """All at once, in numbers that no product code made."""
    said, noise = files_for(given, shape), load_file(given.folder / "noise.safetensors")
    told = torch.tensor(STEPS)[None, :, None].expand(CHUNKS, -1, CHUNK).clone()
    sigmas, count = told / 1000, said.told.shape[1]
    told[:, :count], sigmas[:, :count] = said.told, said.sigmas
    level = said.noise_level[:, None, :, None, None].double()
    start = (1 - level) * said.video + level * noise["initial"]
    plain = PlainStream(
        PlainWan(given.model.state_dict(), given.model.config.num_attention_heads),
        given.text[0],
        len(STEPS),
        kv_context,
        window=2,
        sink=1,
        levels={(c, s): (told[c, s], sigmas[c, s]) for c in range(CHUNKS) for s in range(3)},
        start=dict(enumerate(start)),
        noise={
            (c, s): (noise["renoise"][c, s - 1] if s else noise["initial"][c]) for c in range(CHUNKS) for s in range(3)
        },
        given=tuple(said.given),
    )
    extra = ["--window", "9", "--sink", "3", "--kv-context", kv_context]
    got = given.latents(*said.options, *extra)
    expected = torch.stack([plain.latents(chunk) for chunk in range(CHUNKS)])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_noise_levels_are_timesteps_over_1000_where_the_file_has_none(given: Given) -> None:
    said = files_for(given, (CHUNKS, 3, CHUNK))
    first = given.folder / "first.safetensors"
    save_file({"timesteps": said.told.contiguous(), "sigmas": (said.told / 1000).contiguous()}, first)
    both = given.latents("--first-steps", str(first))
    save_file({"timesteps": said.told.contiguous()}, first)
    assert torch.equal(given.latents("--first-steps", str(first)), both)
    plain = given.latents()
    assert not torch.allclose(both, plain, atol=1e-2)
    schedule = torch.tensor(STEPS)[None, :, None].expand(CHUNKS, -1, CHUNK).contiguous()
    save_file({"timesteps": schedule}, first)
    torch.testing.assert_close(given.latents("--first-steps", str(first)), plain, rtol=1e-5, atol=1e-5)


def test_where_noise_levels_are_looked_up_those_of_a_file_without_them_are_too(given: Given) -> None:
    said, first = files_for(given, (CHUNKS, CHUNK)), given.folder / "first.safetensors"
    flat = torch.arange(1, 1001, dtype=torch.float64) / 1000
    table = 8 * flat / (1 + 7 * flat)
    told = said.told[:, 0].contiguous()
    sigmas = table[(table - told[..., None].double() / 1000).abs().argmin(-1)].float()
    assert 1e-5 < (sigmas - told / 1000).abs().max() < 4e-3
    options = ["--first-steps", str(first), "--nearest", "--shift", "8"]
    save_file({"timesteps": told, "sigmas": sigmas}, first)
    both = given.latents(*options)
    save_file({"timesteps": told}, first)
    assert torch.equal(given.latents(*options), both)


def first_steps(**changed: Tensor | None) -> dict[str, Tensor]:
    """A file of first steps that is right, but for what is changed."""
    right = {"timesteps": torch.full((CHUNKS,), 900.0), "noise_level": torch.full((CHUNKS,), 0.9)}
    return {name: tensor for name, tensor in (right | changed).items() if tensor is not None}


def told(*shape: int) -> Tensor:
    return torch.full(shape, 900.0)


def clean(chunks: int = 2, channels: int = LATENT_CHANNELS) -> Tensor:
    return torch.zeros(chunks, channels, CHUNK, SIDE, SIDE)


FIRST, GIVEN = "--first-steps", "--given-latents"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "tensors", "words"),
    [
        (FIRST, first_steps(timesteps=None), "timesteps is missing; expected timesteps [chunks (at least 6)] or"),
        (FIRST, first_steps(noise_level=None), "noise_level is missing"),
        (FIRST, first_steps(timesteps=told(5)), "[chunks (at least 6), 3, 3], got [5]"),
        (FIRST, first_steps(timesteps=told(6, 2, 3)), "got [6, 2, 3]"),
        (FIRST, first_steps(timesteps=told(6) + 101), "expected values from 0 to 1000, got 1001 at [0] (6 of 6 are"),
        (FIRST, first_steps(noise_level=-told(6, 3)), "noise_level: expected values from 0 to 1, got -900 at [0, 0]"),
        (FIRST, first_steps(sigmas=told(6)), "sigmas: expected values from 0 to 1, got 900 at [0]"),
        (FIRST, first_steps(sigmas=told(6, 3)), "sigmas: expected shape [6], as timesteps have, got [6, 3]"),
        (GIVEN, {"latents": clean(channels=5)}, "expected shape [4, F, 4, 4] or [chunks, 4, 3, 4, 4]"),
        (GIVEN, {"latents": clean()[0, :, :2].contiguous()}, "but a stream continues from whole chunks"),
        (GIVEN, {"latents": clean(chunks=6)}, "chunks is 6, and the first 6 are given, so there is none to make"),
        (GIVEN, None, "does not exist"),
        ("--prompt-embeds", {"prompt_embeds": told(5)}, "expected shape [L ("),
        ("--video-latents", {"latents": clean()}, "the input video has 2 chunks, but 6 are to be made"),
        ("--video-latents", {"latents": clean()[0, :, :2].contiguous()}, "the input video has 0 chunks, but 6"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_before_anything_is_loaded(
    given: Given,
    option: str,
    tensors: dict[str, Tensor] | None,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, video = given.folder / "wrong.safetensors", given.folder / "video.safetensors"
    save_file({"latents": clean(CHUNKS)}, video)
    if tensors is not None:
        save_file(tensors, path)
    monkeypatch.setattr(ModelLoader, "transformer", lambda *parts: pytest.fail("weights are loaded"))
    assert main.main(given.command("--video-latents", str(video), option, str(path))) == 2
    said = capsys.readouterr().err
    assert words in said and (str(path) in said or "chunks" in words)
