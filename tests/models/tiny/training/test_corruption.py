"""Worn pasts: only the shape wears, alike in a whole window, and what is left of the picture is the background."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamdiff.models.autoencoder.autoencoder import load_decoder
from streamdiff.models.tiny import world
from streamdiff.models.tiny.training import batches as shown
from streamdiff.models.tiny.training import corruption, denoiser
from streamdiff.models.tiny.training.batches import CHUNK, LatentEncoder, Windows
from tests.small import CPU

BATCH, CHUNKS = 64, 2


@pytest.fixture
def windows() -> Windows:
    """Latents are 1 everywhere; the backgrounds' are 0, so a latent says how much of it is left."""
    generator = torch.Generator().manual_seed(0)
    place = torch.randint(world.CELLS, (BATCH, CHUNKS, CHUNK, 2), generator=generator) * float(world.LATTICE)
    scenes = torch.zeros(BATCH, CHUNKS, 4, dtype=torch.int64)
    return Windows(torch.ones(BATCH, CHUNKS, 8, CHUNK, 16, 16), scenes, torch.zeros(BATCH, dtype=torch.bool), place)


@pytest.fixture
def empty() -> Tensor:
    return torch.zeros(len(world.BACKGROUNDS), 8, 16, 16)


def test_a_share_of_the_windows_is_worn_and_the_others_are_untouched(windows: Windows, empty: Tensor) -> None:
    left = corruption.corrupt_shapes(windows, empty, torch.Generator().manual_seed(1))
    untouched = (left == 1).flatten(1).all(1)
    assert 0.5 < untouched.float().mean() < 0.9
    assert (left >= 0).all() and (left <= 1).all()


def test_wear_belongs_to_the_shape_and_goes_where_it_goes(windows: Windows, empty: Tensor) -> None:
    """What is left around the centre of the shape is the same picture in every chunk and frame."""
    left = corruption.corrupt_shapes(windows, empty, torch.Generator().manual_seed(1))
    for window in (left != 1).flatten(1).any(1).nonzero().flatten().tolist():
        centred = []
        for chunk in range(CHUNKS):
            for frame in range(CHUNK):
                y, x = (int(v) // world.LATTICE for v in windows.place[window, chunk, frame].tolist())
                centred.append(left[window, chunk, 0, frame].roll((-y, -x), (0, 1)))
        assert all(torch.equal(picture, centred[0]) for picture in centred)


def test_every_background_stands_in_for_the_shape_of_its_own_scene(windows: Windows) -> None:
    empty = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 8, 16, 16) + 10
    scenes = windows.scenes.clone()
    scenes[:, 1, 3] = 3
    left = corruption.corrupt_shapes(replace(windows, scenes=scenes), empty, torch.Generator().manual_seed(1))
    gone = (left >= 10).flatten(2).any(2).all(1)
    assert gone.any(), "some shapes are cut or shrunk"
    assert (left[gone, 0].amax((1, 2, 3, 4)) == 10).all() and (left[gone, 1].amax((1, 2, 3, 4)) == 13).all()


@pytest.mark.parametrize("past", [1, 4])
def test_after_nothing_comes_the_first_chunk(windows: Windows, empty: Tensor, past: int) -> None:
    starts = windows.cut(torch.zeros(BATCH, dtype=torch.int64), 1)
    all_of_it = corruption.after_nothing(starts, empty, past)
    assert (all_of_it.latents[:, :past] == 0).all() and torch.equal(all_of_it.latents[:, past:], starts.latents)
    assert all_of_it.scenes.shape == (BATCH, past + 1, 4) and all_of_it.place.shape == (BATCH, past + 1, CHUNK, 2)
    assert not all_of_it.start.any()
    rows = shown.next_rows(all_of_it, random.Random(0), torch.Generator().manual_seed(0))
    drawn = [row for row, chunk in enumerate(rows.chunk) if chunk == past]
    assert rows.target.any(0).nonzero().flatten().tolist() == drawn, "only what comes after is learnt"
    assert all(rows.visible[row] == [*range(past), row] for row in drawn)


def test_only_what_has_no_target_is_worn(windows: Windows, empty: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss compares with intact shapes, adds noise to intact shapes, and shows corrupted ones."""
    monkeypatch.setattr(corruption, "SHARE", 1.0)
    network = denoiser.TinyNetwork()
    monkeypatch.setattr(torch, "randn", lambda shape, generator: torch.zeros(shape))
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    lesson = denoiser.lesson_of(network, windows, empty, "next", chance, generator)
    sigma, rows = lesson.sigma, lesson.rows
    latents = lesson.latents.unflatten(0, sigma.shape)
    level = (1 - sigma).view(*sigma.shape, 1, 1, 1, 1)
    assert torch.equal(latents[rows.target], level.expand_as(latents)[rows.target])
    assert (latents[:, 0] < level[:, 0]).flatten(1).any(1).all()


@pytest.mark.slow
@torch.inference_mode()
def test_empty_latents_are_those_of_the_bare_backgrounds() -> None:
    from streamdiff.models.tiny.model import WEIGHTS

    decoder = load_decoder(WEIGHTS, CPU)
    normalisation = decoder.normalisation
    assert normalisation is not None
    mean, std = normalisation.mean.flatten(), normalisation.std.flatten()
    latents = corruption.empty_latents(LatentEncoder(decoder.autoencoder, mean, std))
    video = decoder.decode_video(latents[:, :, None].expand(-1, -1, CHUNK, -1, -1), decoder.new_memory())
    frames = (video[:, :, -1] + 1) / 2
    truth = world.empty(torch.arange(len(world.BACKGROUNDS)))
    assert (frames - truth).abs().mean() < 0.02
