"""Random keys: what a window's controls may be."""

from __future__ import annotations

import torch

from training import keys
from training.keys import PAN, Player, draw_controls
from training.windows import CHUNK
from training.world.tracks import CONTROLS


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_keys_are_held_over_chunks_and_tapped_within_and_some_streams_have_none() -> None:
    drawn = draw_controls(400, 5, dice())
    assert drawn.shape == (400, 5, CHUNK, len(CONTROLS)) and drawn.abs().max() == 1
    played = (drawn != 0).flatten(1).any(1).float().mean()
    assert 0.4 < played < keys.PLAYED, "some play and press nothing"
    assert (drawn[..., PAN] == drawn[:, :, :1, PAN]).all(), "a camera pans for whole chunks"
    inside = (drawn[:, :, 1:] != drawn[:, :, :1]).flatten(2).any(2).float().mean()
    assert 0.02 < inside < 0.2
    held = (drawn[:, 1:, -1] == drawn[:, :-1, -1]).all(-1) & (drawn[:, 1:, -1] != 0).any(-1)
    assert held.any()
    assert {0.5, -0.5} <= set(drawn.unique().tolist())
    assert (drawn[..., CONTROLS.index("stop")] >= 0).all()


def test_a_tap_does_not_stay_and_what_is_held_does() -> None:
    player = Player(torch.tensor([[1.0, 0, 0, 0]]).repeat(200, 1), torch.ones(200, dtype=torch.bool))
    chunk = player.next_chunk(torch.arange(200), dice())
    tapped = (chunk[:, 0] != chunk[:, 1]).any(1) & (chunk[:, 1] == chunk[:, 2]).all(1)
    assert tapped.any() and torch.equal(player.held, chunk[:, -1])
