"""`streamdiff generate` to the letter: another implementation's tensors in, latents out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamdiff.cli import main
from streamdiff.models.model import Model
from streamdiff.models.spec import ModelSpec, TextEncoder
from streamdiff.models.transformer.wan import WanDenoiser
from tests.commands.conftest import CHUNK, CHUNKS, SIDE, STEPS, TOKENS, Given
from tests.pipeline.reference import Reference
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
@pytest.mark.parametrize("kv_context", ["clean", "staircase", "same_step"])
@pytest.mark.parametrize(("window", "sink"), [(0, 0), (9, 3), (8, 2)])
def test_a_stream_equals_the_uncached_reference(given: Given, window: int, sink: int, kv_context: str) -> None:
    extra = ["--window", str(window), "--sink", str(sink), "--kv-context", kv_context]
    got = given.latents(*extra)
    spec = ModelSpec(
        **{"name": "", "latent_channels": LATENT_CHANNELS, "latent_height": SIDE, "latent_width": SIDE},
        **{"chunk_latents": CHUNK, "window_latents": window or CHUNKS * CHUNK, "sink_latents": sink},
        **{"frames_per_latent": 4, "width": 32, "height": 32, "native_fps": 16.0, "shift": 1.0, "steps": ()},
        text_shape=(TOKENS, given.model.config.text_dim),
    )
    model = Model(spec, WanDenoiser(given.model), Embeddings(given.text[0]), None)
    reference = Reference(model, lambda chunk: "", seed=3, steps=4, kv_context=kv_context)
    reference.steps, reference.sigmas = 3, [step / 1000 for step in STEPS] + [0.0]
    reference.first_sigmas = reference.sigmas
    expected = torch.stack(reference.chunks(CHUNKS))
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@dataclass
class Embeddings(TextEncoder):
    """A text encoder that knows one text."""

    rows: Tensor

    def encode(self, text: str) -> Tensor:
        return self.rows


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
        (["--context-noise", "1001"], "--context-noise is 1001.0, but must be less than or equal to 1000"),
        (["--stages", "4"], "3"),
        (["--shift", "5"], "--shift is for lists that are meant before it: add --warp"),
        (["--size", "64x64"], "--size is 64x64, but"),
        (["--adaptive-sink", "0.2"], "goes with a --sink"),
        (["--adaptive-sink", "0.2", "--window", "9", "--sink", "2"], "--sink, which is 2, must be a multiple of"),
        (["--first-chunk-steps", "1000,500"], "the first chunk has 2 steps and the others 3"),
        (["--averaged-sink", "0.9", "--window", "9", "--sink", "2"], "sink one chunk, 3 latent frames"),
        (["--averaged-sink", "0.9", "--adaptive-sink", "0", "--window", "9", "--sink", "3"], "two ways to change"),
        (["--dtype", "int8"], "--dtype is 'int8', but must be"),
        (["--prompt-switch", "2:/nowhere:forget"], "POLICY can be keep, recache, recache-causal, flush, reset"),
        (["--model", "/nowhere/wan.pt"], "there is no such file or folder"),
        (["--container", "critic"], "critic"),
        (["--output", "x.mp4"], "--no-decode makes latents only"),
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
