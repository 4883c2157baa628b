"""What the transformer is trained on: windows of chunks, and which rows of a forward see and predict what."""

from __future__ import annotations

import random

import pytest
import torch

from streamdiff.models.autoencoder.taehv import TAEHV
from streamdiff.models.tiny import world
from streamdiff.models.tiny.training import autoencoder as train_autoencoder
from streamdiff.models.tiny.training import batches, denoiser, video_windows
from streamdiff.models.tiny.training import batches as shown
from streamdiff.models.tiny.training.batches import CHUNK, CHUNKS, LatentEncoder, Pool, Starts, Windows

KINDS = {
    "staircase": CHUNKS, "clean": CHUNKS, "anchored": CHUNKS, "first": 1, "next": 2, "again": 2, "own": 3, "video": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def autoencoder() -> TAEHV:
    torch.manual_seed(0)
    made = TAEHV(train_autoencoder.AUTOENCODER)
    train_autoencoder.initialise(made)
    return made.eval()


@pytest.fixture(scope="module")
def encode(autoencoder: TAEHV) -> LatentEncoder:
    return LatentEncoder(autoencoder, torch.zeros(8), torch.ones(8))


@pytest.fixture(scope="module")
def pool(encode: LatentEncoder) -> Pool:
    made = Pool(encode, 5)
    made.grow(3, torch.Generator().manual_seed(1))
    return made


def drawn(pool: Pool, count: int) -> Windows:
    return pool.sample(count, torch.Generator().manual_seed(2))


@pytest.mark.slow
def test_a_cut_holds_the_same_chunks_and_is_a_start_only_from_chunk_zero(pool: Pool) -> None:
    whole = drawn(pool, 4)
    whole = Windows(whole.latents, whole.scenes, torch.ones(4, dtype=torch.bool), whole.place)
    first = torch.tensor([0, 1, 3, 0])
    part = whole.cut(first, 2)
    assert part.start.tolist() == [True, False, False, True]
    for row, offset in enumerate(first.tolist()):
        for name in ("latents", "scenes", "place"):
            assert torch.equal(getattr(part, name)[row], getattr(whole, name)[row, offset : offset + 2])


def test_the_pool_replaces_its_oldest(encode: LatentEncoder) -> None:
    pool = Pool(encode, 2)
    pool.grow(2, torch.Generator().manual_seed(1))
    kept = pool.parts["latents"].clone()
    pool.grow(1, torch.Generator().manual_seed(5))
    assert (pool.filled, pool.written) == (2, 3)
    latents = pool.parts["latents"]
    assert not torch.equal(latents[0], kept[0]) and torch.equal(latents[1], kept[1])


def test_weights_are_high_where_the_shape_is_also_across_the_border() -> None:
    place = torch.tensor([[4.0, 64.0]]).expand(1, 1, CHUNK, 2)
    one = Windows(torch.zeros(1, 1, 8, CHUNK, 16, 16), torch.zeros(1, 1, 4), torch.ones(1), place)
    weight = one.weight(near=6.0, reach_px=20.0)[0, 0, 0, 0]
    assert weight[0, 8] == weight[15, 8] == 6.0 and weight[8, 8] == weight[0, 0] == 1.0


@pytest.mark.slow
def test_starts_are_the_first_chunks_of_all_scenes(encode: LatentEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    few = world.all_scenes()[::97]
    monkeypatch.setattr(world, "all_scenes", lambda: few)
    starts = Starts(encode)
    assert [tuple(row) for row in starts.scenes[:, 0].tolist()] == [scene.indices() for scene in few]
    origin = torch.full((1, 2), world.SIZE // 2)
    with torch.inference_mode():
        frames, place = batches.render_windows(starts.scenes[3:4], origin)
        latents = encode(frames)
    torch.testing.assert_close(starts.latents[3, 0], latents[0].transpose(0, 1))
    torch.testing.assert_close(starts.place[3, 0], place[0])
    assert starts.sample(6, torch.Generator().manual_seed(0)).start.all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_see_the_past_only_and_predict_only_noisy_chunks_whose_past_is_there(kind: str, pool: Pool) -> None:
    for seed in range(20):
        part = drawn(pool, 6).cut(torch.zeros(6, dtype=torch.int64), KINDS[kind])
        rows = shown.ROWS[kind](part, random.Random(seed), torch.Generator().manual_seed(seed))
        count = len(rows.chunk)
        assert rows.sigma.shape == rows.target.shape == (6, count) and len(rows.visible) == count
        assert rows.target.any() and (rows.sigma[rows.target] >= 0.02).all() and (rows.sigma <= 1).all()
        for row, seen in enumerate(rows.visible):
            assert seen[-1] == row
            assert [rows.chunk[other] for other in seen[:-1]] == list(range(rows.chunk[row]))
        if kind in ("staircase", "clean", "anchored"):
            for window in (~part.start).nonzero().flatten().tolist():
                assert not rows.target[window, [chunk == 0 for chunk in rows.chunk]].any(), "its past is not there"
        if kind in ("clean", "next", "again"):
            past = [row for row in range(count) if any(row in seen[:-1] for seen in rows.visible)]
            assert (rows.sigma[:, past] <= 0.3).all() and not rows.target[:, past].any()


def test_a_staircase_gets_noisier_from_chunk_to_chunk(pool: Pool) -> None:
    rows = shown.staircase_rows(drawn(pool, 6), random.Random(0), torch.Generator().manual_seed(0))
    clean = rows.sigma.where(rows.target, 0.0)
    assert (clean.diff(dim=1) >= 0).all()
    levels = {round(level, 4) for steps in (4, 2) for level in shown.LEVELS[steps]}
    assert {round(level, 4) for level in rows.sigma[rows.target].tolist()} <= levels


def test_all_of_an_anchored_window_is_at_one_level_but_for_what_is_seen_clean(pool: Pool) -> None:
    ages = set()
    for seed in range(40):
        rows = shown.anchored_rows(drawn(pool, 6), random.Random(seed), torch.Generator().manual_seed(seed))
        noisy = range(CHUNKS - 1, len(rows.chunk))
        assert len(rows.sigma[:, noisy].unique()) == 1, "one step of a ring that is full"
        assert (rows.sigma[:, : CHUNKS - 1] <= 0.3).all()
        clean = {rows.chunk[row] - other for row in noisy for other in rows.visible[row] if other < CHUNKS - 1}
        ages |= clean or {0}
    assert ages == set(range(CHUNKS)), "anchors of every age, and none at all"


@pytest.mark.parametrize("alike", [True, False])
def test_a_video_sets_the_place_and_the_prompt_the_look(
    alike: bool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_windows, "ALIKE", float(alike))
    windows = video_windows.video_windows(pool.encode, 5, 0, torch.Generator().manual_seed(0))
    assert windows.video is not None
    same = [torch.equal(video, wanted) for video, wanted in zip(windows.video, windows.latents[:, 0], strict=True)]
    assert same == [alike] * 5, "in its place, with another look unless that is the prompt's own"
    color, shape, _, background = windows.scenes[:, 0].unbind(1)
    place = windows.place[:, 0]
    speed = (place[:, 1] - place[:, 0] + world.SIZE / 2).remainder(world.SIZE) - world.SIZE / 2
    moves = [(world.velocities() * world.FRAMES_PER_LATENT == each).all(1).nonzero().item() for each in speed]
    for row, move in enumerate(moves):
        begin = (place[row, 0] - speed[row] * 1.5 / world.FRAMES_PER_LATENT).round().long()
        scene = torch.stack([color[row], shape[row], torch.tensor(move), background[row]])[None, None]
        frames, _ = shown.render_windows(scene, begin[None])
        wanted = pool.encode(frames).transpose(1, 2)
        torch.testing.assert_close(windows.latents[row, 0], wanted[0], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", ["next", "video"])
def test_a_flow_that_leads_to_what_is_wanted_has_no_loss(kind: str, pool: Pool) -> None:
    chance, generator = random.Random(0), torch.Generator().manual_seed(0)
    windows = drawn(pool, 3).cut(torch.zeros(3, dtype=torch.int64), 2)
    if kind == "video":
        windows = video_windows.video_windows(pool.encode, 3, 1, generator)
    network = denoiser.TinyNetwork()

    def loss(error: float) -> float:
        empty = torch.zeros(len(world.BACKGROUNDS), 8, 16, 16)
        lesson = denoiser.lesson_of(network, windows, empty, kind, chance, generator)
        level = lesson.sigma.flatten().view(-1, 1, 1, 1, 1).clamp(min=1e-3)
        clean = windows.latents[:, lesson.rows.chunk].flatten(0, 1)
        return float(lesson.loss(error + (lesson.latents - clean) / level))  # x0 = noisy - level * flow

    assert (loss(0.0), loss(0.5)) == pytest.approx((0.0, 0.25), abs=1e-6)


@pytest.mark.slow
def test_the_encoder_can_learn_to_read() -> None:
    """The reading loss falls below that of the best guess without reading."""
    torch.manual_seed(0)
    network = denoiser.TinyNetwork()
    parameters = [*network.encoder.parameters(), *network.reader.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    losses = []
    for step in range(60):
        generator = torch.Generator().manual_seed(step)
        loss = denoiser.reading_loss(network, random.Random(step), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0]


def test_one_step_draws_every_kind(pool: Pool) -> None:
    starts = Starts.__new__(Starts)
    chunk = drawn(pool, 4).cut(torch.zeros(4, dtype=torch.int64), 1)
    starts.latents, starts.scenes, starts.place = chunk.latents, chunk.scenes, chunk.place
    chance = random.Random(0)
    empty = torch.zeros(len(world.BACKGROUNDS), 8, 16, 16)
    kinds = [denoiser.draw(pool, starts, empty, 4, chance, torch.Generator().manual_seed(i)) for i in range(12)]
    assert {kind for drawn in kinds for kind in drawn} == set(KINDS) - {"own"}, "the network plays those"
    for drawn_ in kinds:
        assert len(drawn_) == 5
        for kind, part in drawn_.items():
            chunks = part.latents.shape[1]
            assert (part.video is not None) == (kind == "video")
            several = {"again": [gone + 1 for gone in denoiser.GONE], "video": [1, 2, 3]}
            assert chunks in several.get(kind, [KINDS[kind]])
