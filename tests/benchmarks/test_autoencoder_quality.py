"""The autoencoder's figures mean what they say: perfect for a perfect one, and each fault shows where it should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import autoencoder_quality as quality
from benchmarks import world_clips
from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.tiny import world
from streamdiff.models.tiny.training.autoencoder import AUTOENCODER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def clips() -> quality.Clips:
    return quality.draw_clips(8, torch.Generator().manual_seed(0))


def test_clips_are_two_chunks_and_every_second_one_changes_its_scene(clips: quality.Clips) -> None:
    assert clips.film.frames.shape == (8, 2 * quality.CHUNK_FRAMES, 3, world.SIZE, world.SIZE)
    same = (clips.scenes[:, 0] == clips.scenes[:, 1]).all(1)
    assert same.tolist() == [True, False] * 4
    seam = clips.film.step[:, quality.CHUNK_FRAMES - 1]
    assert (seam == world.velocities()[clips.scenes[:, 0, 2]]).all()


def test_truth_is_perfect(clips: quality.Clips) -> None:
    part, _ = quality.measure(clips, clips.film.frames + 1e-3)
    found = quality.summary([part])
    assert found["psnr_db"] == pytest.approx(60, abs=0.1)
    assert all(found[name] == 1.0 for name in (*world_clips.ATTRIBUTES, "all")) and not found["wrong"]
    assert found["displacement_px"] < 0.05
    assert found["step_px_by_phase"] == pytest.approx([2.0] * 4, abs=0.05)
    assert all(quality.bars_met(found).values())


def test_latent_frames_that_stand_still_and_then_jump_are_found_out(clips: quality.Clips) -> None:
    """What the first, undertrained autoencoder did: the four frames of a latent frame all alike."""
    judder = clips.film.frames[:, :: world.FRAMES_PER_LATENT].repeat_interleave(world.FRAMES_PER_LATENT, 1)
    found = quality.summary([quality.measure(clips, judder)[0]])
    assert found["step_px_by_phase"] == pytest.approx([0.0, 0.0, 0.0, 8.0], abs=0.1)
    assert found["displacement_px"] > 1
    assert not quality.bars_met(found)["displacement error < 0.3 px"]


def test_an_untrained_autoencoder_fails_every_bar(clips: quality.Clips, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save({"model": TAEHV(AUTOENCODER).state_dict()}, tmp_path / "new.pt")
    few = quality.Clips(clips.scenes[:2], world_clips.Film(clips.film.frames[:2], clips.film.position[:2]))
    parts, strips = quality.measure_all(quality.load_weights(tmp_path / "new.pt"), few)
    assert not any(quality.bars_met(quality.summary(parts)).values())
    assert [strip.good for strip in strips] == [True, False] * 2  # truth above reconstruction


def test_a_missing_autoencoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no autoencoder at .*nowhere.*ending in \.pt"):
        quality.load_weights(tmp_path / "nowhere")
