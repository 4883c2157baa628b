"""Sessions that are rewound, and branches of them, against the latents of the first time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamdiff.core import KV_CONTEXTS
from streamdiff.engine import messages, resting
from tests.engine import rewind_process
from tests.engine.test_replay import CHUNK, MODEL, Player, act, admitted, differing, replayed
from tests.pipeline.processes import run_ranks
from tests.small import BLUE

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
        second = play_on(player, max(1, len(first) - chunk))  # at least until it is there
        assert differing({each: first[each] for each in first if each >= chunk and each in second}, second) == []
        assert len(second) >= len(first) - chunk
    played, again = {**first, **second}, player.log(tmp_path)
    player.engine.close()
    assert differing(played, replayed(again, 1, len(played))) == []


@pytest.mark.slow
def test_a_ring_of_three_processes_goes_back_and_branches_off_as_one_stage_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python; frames come from the same latents."""
    monkeypatch.setattr(resting, "KEEP_S", rewind_process.CHUNK_S)
    one = rewind_process.played()
    run_ranks("tests.engine.rewind_process", [str(tmp_path)], 3, 200)
    with np.load(tmp_path / "played.npz") as three:
        for frames in (one["again"], one["branch"], *(three[name] for name in one)):
            assert np.array_equal(frames, one["first"])


def test_what_is_kept_is_bounded_and_ends_with_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "KEEP_S", 0.1)
    player = Player(1, keep_bytes=ROOM)
    play_on(player, 3)
    size = len(player.engine._resting.kept._kept[0].snapshot)
    player.engine.close()
    player = Player(1, keep_bytes=4 * size)
    play_on(player, 12)
    first, last = kept(player)
    assert last > first > 2 and sum(len(each.snapshot) for each in player.engine._resting.kept._kept) <= 4 * size
    for chunk in (first - 1, admitted(player) + 1):
        (refused,) = player.engine.handle(messages.Rewind("s", chunk, request="r"))
        assert isinstance(refused, messages.Refused) and refused.field == "chunk", "and nothing has changed"
    (refused,) = player.engine.handle(messages.Open("b", "", source="nobody", chunk=first, request="r"))
    assert isinstance(refused, messages.Refused) and refused.field == "session"
    play_on(player, 1)
    player.tell(messages.Reset("s"))
    player.step()
    assert [event for event in player.events if isinstance(event, messages.Kept)][-1].chunks is None
    player.engine.close()
    player = Player(1, keep_bytes=1000)
    play_on(player, 6)
    assert not any(isinstance(event, messages.Kept) for event in player.events), "one alone is too large"
    player.engine.close()


def test_what_is_asked_for_while_chunks_are_made_again_holds_from_the_chunk_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting, "KEEP_S", 0.6)
    player = Player(1, keep_bytes=ROOM)
    play_on(player, 10)
    player.tell(messages.SetControls("s", {"x": 1.0}))
    chunk = kept(player)[0] + 2
    rewind(player, chunk)
    assert player.engine.catches_up("s")
    for command in (messages.SetPrompt("s", BLUE, "p"), messages.SetControls("s", {"x": 0.0, "jump": 1.0}, "c")):
        player.tell(command)
    for command, code in ((messages.Save("s", "save"), "encoding"), (messages.Rewind("s", chunk, request="r"), "busy")):
        (refused,) = player.engine.handle(command)
        assert isinstance(refused, messages.Refused) and refused.code == code
    before = len(player.events)
    play_on(player, 3)
    assert next(event.chunk for event in player.events[before:] if isinstance(event, messages.FrameBatch)) == chunk
    changes = [(change.at, change.prompt, change.controls, change.taps) for change in player.log(tmp_path).changes]
    text = MODEL.text.read(BLUE, None).text
    assert changes == [(chunk, text, {}, {}), (chunk, None, {"jump": 1.0}, {})], "x was let go before"
    told = {event.request for event in player.events if isinstance(event, messages.Accepted)}
    assert told >= {"back", "p", "c"}
    player.engine.close()
