"""Which rows of a forward see and predict what."""

from __future__ import annotations

import random

import pytest
import torch

from training import rows as shown
from training.windows import CHUNK, CHUNKS, Windows
from training.world.tracks import CONTROLS

KINDS = {
    "staircase": CHUNKS, "clean": CHUNKS, "anchored": CHUNKS, "first": 1, "next": 2, "again": 2, "own": 3,
    "own_staircase": CHUNKS, "video": 2,
    "single": 9,
}  # fmt: skip


def drawn(chunks: int = CHUNKS) -> Windows:
    """Six windows, two of which begin a stream."""
    latents, place = torch.zeros(6, chunks, 16, CHUNK, 16, 16), torch.zeros(6, chunks, CHUNK, 2, 2)
    start, words = torch.arange(6) < 2, torch.zeros(6, chunks, 15, dtype=torch.int64)
    controls = torch.zeros(6, chunks, CHUNK, len(CONTROLS))
    return Windows(latents, words, start, place, latents, words, controls)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_see_the_past_only_and_predict_only_noisy_chunks_whose_past_is_there(kind: str) -> None:
    for seed in range(20):
        part = drawn(KINDS[kind])
        rows = shown.ROWS[kind](part, random.Random(seed), torch.Generator().manual_seed(seed))
        count = len(rows.chunk)
        assert rows.sigma.shape == rows.target.shape == (6, count) and len(rows.visible) == count
        assert rows.target.any() and (rows.sigma[rows.target] >= 0.02).all() and (rows.sigma <= 1).all()
        for row, seen in enumerate(rows.visible):
            assert seen[-1] == row
            if kind == "video" and len(seen) == 1:
                continue
            assert [rows.chunk[other] for other in seen[:-1]] == list(range(rows.chunk[row]))
        if kind in ("staircase", "clean", "anchored"):
            for window in (~part.start).nonzero().flatten().tolist():
                assert not rows.target[window, [chunk == 0 for chunk in rows.chunk]].any(), "its past is not there"
        if kind in ("clean", "next", "again"):
            past = [row for row in range(count) if any(row in seen[:-1] for seen in rows.visible)]
            assert (rows.sigma[:, past] <= 0.3).all() and not rows.target[:, past].any()


def test_a_staircase_gets_noisier_from_chunk_to_chunk() -> None:
    rows = shown.staircase_rows(drawn(), random.Random(0), torch.Generator().manual_seed(0))
    clean = rows.sigma.where(rows.sigma > 0.3, 0.0)  # a finished chunk has up to 0.3
    assert (clean.diff(dim=1) >= 0).all()
    levels = {round(level, 4) for steps in (4, 2) for level in shown.LEVELS[steps]}
    assert {round(level, 4) for level in rows.sigma[rows.target].tolist()} <= levels


def test_the_newest_of_own_chunks_sees_the_others_one_step_further_each() -> None:
    seen = set()
    for seed in range(20):
        rows = shown.newest_on_stairs_rows(drawn(), random.Random(seed), torch.Generator().manual_seed(seed))
        assert rows.target.tolist() == 6 * [[False] * (CHUNKS - 1) + [True]], "the others show what is there already"
        for sigma in rows.sigma.tolist():
            noisy = tuple(round(level, 4) for level in reversed(sigma) if level > 0.3)
            stairs = [tuple(round(level, 4) for level in shown.LEVELS[steps]) for steps in (4, 2)]
            assert any(noisy == levels[len(levels) - len(noisy) :] for levels in stairs)
            seen.add(noisy)
    assert len(seen) == 6, "each of four steps and of two"
