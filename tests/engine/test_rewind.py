"""Sessions that are rewound, and branches of them, against the latents of the first time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from streamdiff.core import KV_CONTEXTS
from streamdiff.engine import messages, resting
from tests.engine.test_replay import CHUNK, Player, act, differing, replayed

FRAMES = 10**9  # of credit: as many as are taken
ROOM = 10**9


def kept(player: Player) -> tuple[int, int]:
    chunks = [event for event in player.events if isinstance(event, messages.Kept)][-1].chunks
    assert chunks is not None
    return chunks


def rewind(player: Player, chunk: int, **given: Any) -> None:
    """What is recorded from now on are the latents of the second time."""
    player.tell(messages.Rewind("s", chunk, request="back", **given))
    player.latents.clear()


def play_on(player: Player, chunks: int) -> dict[int, torch.Tensor]:
    """The latents of the present stream, until so many chunks more are seen."""
    player.until_made(player.made // CHUNK + chunks)
    return dict(player.latents[0])


@pytest.mark.parametrize("kv_context", KV_CONTEXTS)
@pytest.mark.parametrize("stages", [1, 3])
def test_chunks_after_a_rewind_are_those_of_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_context: str, stages: int
) -> None:
    """Whatever had steered it, at whatever moment; and its log makes what was played last."""
    monkeypatch.setattr(resting, "KEEP_S", 0.5)
    dice = random.Random(stages)
    player = Player(stages, kv_context=kv_context, keep_bytes=ROOM)
    for _ in range(16):
        for _ in range(dice.choice([0, 1, 3, 9])):
            player.step()
        act(player, dice, kv_context)
    first = play_on(player, 3)
    log = player.log(tmp_path)
    for chunk in (kept(player)[1], kept(player)[0] + 1, kept(player)[0]):
        held = {}
        for change in log.changes:
            held |= change.controls if change.at < chunk else {}
        player.tell(messages.SetControls("s", {name: held.get(name, 0.0) for name in ("x", "pan", "jump")}))
        rewind(player, chunk)
        ahead = tuple(change for change in log.changes if change.at >= chunk)
        player.tell(messages.SetTimeline("s", ahead, "t", begin=0))
        second = play_on(player, len(first) - chunk)
        assert differing({each: first[each] for each in first if each >= chunk and each in second}, second) == []
        assert len(second) >= len(first) - chunk
    played, again = {**first, **second}, player.log(tmp_path)
    player.engine.close()
    assert differing(played, replayed(again, 1, len(played))) == []
