"""What the embedded model is trained on: clips, windows, and losses."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from streamdiff.models.tiny.scene import MOTIONS, THING_TABLES, Scene
from tests.small import dice, untrained_autoencoder
from training import autoencoder as clips
from training import denoiser as train_denoiser
from training.batches import Pool, TrackEncoder
from training.network import Network
from training.scene_rows import COLUMN, FIELDS, from_row, row_of
from training.video_windows import VideoPool
from training.windows import MOST_MOVING, PLAIN_CHANGE, Windows
from training.world.scenes import random_scene
from training.world.tracks import PARTS, SIZE, Track, homes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("training of the embedded model")]


@pytest.fixture(scope="module")
def pool() -> Pool:
    channels = clips.AUTOENCODER.latent_channels
    tokens = Network().tokens
    made = Pool(TrackEncoder(untrained_autoencoder(), torch.zeros(channels), torch.ones(channels), tokens), capacity=6)
    made.grow(6, dice(1))
    return made


def pick(windows: Windows, rows: torch.Tensor) -> Windows:
    parts = {field.name: getattr(windows, field.name) for field in fields(Windows)}
    return Windows(**{name: part if part is None else part[rows] for name, part in parts.items()})


def to_be_worn(windows: Windows) -> torch.Tensor:
    """Which windows are kept without their things as well, bool `[B]`."""
    return (windows.latents != windows.bare).flatten(1).any(1)


def test_the_pool_holds_a_share_of_the_windows_without_their_things_too(pool: Pool) -> None:
    every = pool.sample(40, dice())
    assert 0 < to_be_worn(every).sum() < 40
    some = pick(every, to_be_worn(every).nonzero()[:4, 0])
    assert some.latents.shape == some.bare.shape == (4, 5, 16, 3, 16, 16)
    differs = (some.latents - some.bare).abs().mean(2)
    near, far = some.reach().amin(3) < 1.0, some.reach().amin(3) > 4.0
    far[..., 12:, :] = False  # where shadows lie
    assert differs[near].mean() > 5 * differs[far].mean()
    last = some.cut(torch.tensor([3, 3, 0, 0]), 2)
    assert torch.equal(last.latents[0], some.latents[0, 3:]) and not last.start[:2].any()


class NotedTracks(TrackEncoder):
    """Keeps what it should draw and encode."""

    def __init__(self) -> None:
        super().__init__(untrained_autoencoder(), torch.zeros(16), torch.ones(16), lambda scenes: scenes)
        self.noted: list[tuple[Track, bool]] = []

    def latents_of(self, track: Track, things: bool = True) -> torch.Tensor:
        self.noted.append((track, things))
        return torch.full((len(track.scroll), track.scroll.shape[1] // 4, 16, 16, 16), float(len(self.noted)))


def test_what_is_missing_begins_again_as_in_a_new_stream() -> None:
    encode = NotedTracks()
    lost = Pool(encode, 40, chunks=2, starts=0.0, lost=1.0)
    lost.grow(40, dice())
    (track, _), (shown, things), (bare, no_things) = encode.noted[:3]
    before, after = (track.each(lambda part, at=at: part[:, at : at + 12]) for at in (0, 12))
    alone = before.scenes[:, 0, COLUMN["second"]] == 0
    assert not no_things and len(bare.scroll) == alone.sum() > 3, "of one thing nothing is shown"
    latents = lost.parts["latents"]
    assert (latents[alone, :3] == 3).all() and (latents[~alone, :3] == 2).all() and (latents[:, 3:] == 1).all()
    home = (after.place[:, 0] == homes(after.scenes[:, 0]) // PARTS).all(2)
    assert home[alone, 0].all()
    assert things and (shown.scenes[..., COLUMN["second"]] == 0).all(), "of two things one"
    still_two = ~alone & (after.scenes[:, 0, COLUMN["second"]] == 1)
    shown, said, after = (each.rows(still_two) for each in (shown, before, after))
    begun = home[still_two]
    assert 0 < begun[:, 0].sum() < len(begun) and 0 < begun[:, 1].sum() < len(begun)
    for row, (first, second) in enumerate(begun.tolist()):
        assert first or second
        if first != second:
            prefix = "second_" if first else ""
            for name in THING_TABLES:
                assert shown.scenes[row, 0, COLUMN[name]] == said.scenes[row, 0, COLUMN[prefix + name]], name
            goes_on = (after.place[row, 0, int(first)] - shown.place[row, -1, 0] + SIZE // 2) % SIZE - SIZE // 2
            assert goes_on.abs().max() <= 6, "the other one goes on: at most 64 pixels in 12 frames"


def test_a_video_says_where_things_are_and_how_they_move_and_the_prompt_how_they_look() -> None:
    encode = NotedTracks()
    videos = VideoPool(encode, 40)
    videos.grow(40, dice())
    (went, _), (after, _), (film, _) = encode.noted[1:]
    assert 0 < len(went.scroll) < 20, "in a quarter of them the stream was elsewhere"
    for field in ("place", "scroll"):
        assert torch.equal(getattr(film, field), getattr(after, field)), field
    windows = videos.sample(40, dice())
    assert windows.video is not None and windows.video.shape == (40, 16, 3, 16, 16)
    prompt = videos.parts["scenes"][:, 1]
    for name in FIELDS:
        shown, comes, told = (each[:, COLUMN[name]] for each in (film.scenes[:, 0], after.scenes[:, 0], prompt))
        if name == "second":
            assert torch.equal(shown, comes) and torch.equal(comes, told)
        elif name.endswith(("motion", "speed", "camera")):
            assert torch.equal(shown, comes) and not torch.equal(comes, told), name
        else:
            assert torch.equal(comes, told) and not torch.equal(shown, told), name


def test_the_flow_leads_from_what_a_video_shows_to_what_is_to_come_of_it() -> None:
    videos = VideoPool(NotedTracks(), 4)
    videos.grow(4, dice())
    windows = replace(videos.sample(4, dice()), video=torch.randn(4, 16, 3, 16, 16, generator=dice()))
    lesson = train_denoiser.lesson_of(windows, "video", random.Random(0), dice())
    level, target = lesson.sigma.view(4, -1, 1, 1, 1, 1), lesson.rows.target
    comes = (lesson.latents - level.flatten(0, 1) * lesson.wanted).unflatten(0, target.shape)
    assert torch.allclose(comes[target], windows.latents[:, lesson.rows.chunk][target], atol=1e-5)
    noise = lesson.latents.unflatten(0, target.shape) - (1 - level) * windows.video[:, None]
    assert (noise / level)[target].std() == pytest.approx(1.0, abs=0.05), "what is shown is the video, with noise"


@pytest.mark.parametrize(
    ("change", "expected"), [(1.0, 1.0), (0.05, math.sqrt(PLAIN_CHANGE / 0.05)), (1e-4, MOST_MOVING)]
)
def test_scenery_that_moves_weighs_more_the_less_that_changes_it(pool: Pool, change: float, expected: float) -> None:
    some = pool.sample(3, dice())
    scenes = torch.tensor([row_of(Scene(camera="left")), row_of(Scene(hour="passing")), row_of(Scene())])
    scenes = scenes[:, None].expand(-1, some.scenes.shape[1], -1)
    steps = math.sqrt(change) * torch.arange(some.bare.shape[1]).view(1, -1, 1, 1, 1, 1)
    still = torch.zeros_like(some.controls)
    weight = replace(some, scenes=scenes, bare=steps.expand_as(some.bare), controls=still).weight().amin((2, 3, 4, 5))
    assert torch.allclose(weight[:2], torch.full_like(weight[:2], expected)), "under a camera that pans, as time passes"
    assert (weight[2] == 1).all(), "what stands still weighs what it did"


def test_a_staircase_has_a_loss_that_trains_the_network(pool: Pool) -> None:
    torch.manual_seed(0)
    network = Network()
    some = pool.sample(2, dice())
    some = replace(some, start=torch.ones_like(some.start))
    (loss,) = network.losses({"": train_denoiser.lesson_of(some, "staircase", random.Random(0), dice())}).values()
    loss.backward()
    assert loss.isfinite() and loss > 0.1
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.transformer.proj_out.parameters())


def test_reading_asks_only_for_what_the_sentence_says() -> None:
    rows = torch.stack([torch.tensor(row_of(random_scene(random.Random(seed)))) for seed in range(60)])
    for column, name in enumerate(FIELDS):
        told = train_denoiser.is_said(rows, column)
        for row, says in zip(rows.tolist(), told.tolist(), strict=True):
            scene = from_row(row)
            owner = scene.second if name.startswith("second_") else scene.first
            silent = owner is None or (name.endswith("speed") and owner.motion == MOTIONS[4])
            assert says != silent
    network = Network()
    assert train_denoiser.reading_loss(network, dice(), batch=8).isfinite()


def test_windows_of_single_latent_frames_hold_each_with_what_it_shows_and_what_steered_it(pool: Pool) -> None:
    whole = pool.sample(3, dice())
    single = whole.singles()
    assert single.latents.shape == single.bare.shape == (3, 15, 16, 1, 16, 16)
    assert torch.equal(single.latents[:, 7, :, 0], whole.latents[:, 2, :, 1])
    assert torch.equal(single.controls[:, 7, 0], whole.controls[:, 2, 1])
    assert torch.equal(single.place[:, 14, 0], whole.place[:, 4, 2]) and single.weight().shape == (3, 15, 1, 1, 16, 16)
    for name in ("scenes", "ids"):
        assert torch.equal(getattr(single, name)[:, 6:9], getattr(whole, name)[:, 2, None].expand(-1, 3, -1))


def test_a_pool_goes_on_with_the_windows_of_another(pool: Pool, tmp_path: Path) -> None:
    pool.save(tmp_path / "windows.pt")
    other = Pool(pool.encode, capacity=6)
    other.load(tmp_path / "windows.pt")
    one, same = (each.sample(4, dice()) for each in (pool, other))
    assert all(torch.equal(getattr(one, name), getattr(same, name)) for name in ("start", *Windows.by_chunk))
    assert other.written == pool.written
