"""A prompt that comes over several chunks: each has its mix of embeddings, on any number of stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from streamdiff.engine.messages import Accepted, Applied, Refused, Save, Saved, SetPrompt
from streamdiff.models.sampling import blended
from streamdiff.snapshot_header import read_saved_session
from tests.engine.test_replay import MODEL, Player, differing
from tests.small import BLUE, RED, WHITE

RED_TEXT, BLUE_TEXT, WHITE_TEXT = map(MODEL.text.encode, (RED, BLUE, WHITE))


@pytest.fixture
def played() -> Iterator[Player]:
    played = Player(1)
    yield played
    played.engine.close()


def test_each_chunk_has_its_share_and_the_last_one_the_whole(played: Player) -> None:
    played.until_made(2)
    (accepted,) = played.tell(SetPrompt("s", BLUE, "r", over=4))
    assert isinstance(accepted, Accepted)
    played.until_made(12)
    first = played.given[0][0]
    assert [chunk for chunk, _, _ in played.given] == list(range(first, first + 4))
    for number, (_, conditioning, switch) in enumerate(played.given, 1):
        torch.testing.assert_close(conditioning, RED_TEXT.lerp(BLUE_TEXT, number / 4))
        assert switch == "keep"
    assert torch.equal(played.given[-1][1], BLUE_TEXT)
    applied = [event for event in played.events if isinstance(event, Applied)]
    assert [event.chunk for event in applied] == [0, *range(first, first + 4)] and applied[1].epoch == accepted.epoch


def test_the_same_blend_gives_the_same_latents_on_one_stage_and_three() -> None:
    latents = []
    for stages in (1, 3):
        played = Player(stages)
        # Nothing is ahead: the prompt holds from the same chunk on.
        played.tell(SetPrompt("s", BLUE, "r", over=3, along="sphere"))
        latents.append(played.until_made(8))
        played.engine.close()
    assert differing(*latents) == []


def test_a_recache_runs_once_after_the_last_chunk_of_the_blend(played: Player) -> None:
    played.until_made(3)
    played.tell(SetPrompt("s", BLUE, "r", "recache", over=3))
    played.until_made(9)
    assert [switch for _, _, switch in played.given] == ["keep", "keep", "recache"]


def test_a_prompt_in_the_middle_of_a_blend_begins_where_that_is(played: Player) -> None:
    played.tell(SetPrompt("s", BLUE, "r", over=100))
    played.until_made(3)
    played.tell(SetPrompt("s", WHITE, "q", over=2))
    played.until_made(9)
    *_, (begun, mixed, _), (chunk, first, _), (_, last, _) = played.given
    assert begun == chunk, "as the chunk would have been without the new prompt"
    torch.testing.assert_close(first, mixed.lerp(WHITE_TEXT, 0.5))
    assert torch.equal(last, WHITE_TEXT)


def test_a_session_that_is_resumed_in_the_middle_of_a_blend_has_the_whole_prompt(played: Player) -> None:
    played.tell(SetPrompt("s", BLUE, "r", over=100))
    played.until_made(3)
    assert played.tell(Save("s", "save")) == []
    while not any(isinstance(event, Saved) for event in played.events):
        played.events += played.engine.step(0.1)
    data = next(event.data for event in played.events if isinstance(event, Saved))
    saved = read_saved_session(data)
    assert saved.blending and saved.text == MODEL.text.read(BLUE, None).text
    again = Player(1, prompt="", snapshot=bytes(data), kv_context=None)
    again.until_made(2)
    assert torch.equal(again.given[0][1], BLUE_TEXT) and len(again.given) == 1
    again.engine.close()


@pytest.mark.parametrize(
    ("blend", "field"),
    [({"over": 0}, "over"), ({"over": 257}, "over"), ({"along": "curve"}, "along"), ({"switch": "flush"}, "over")],
)
def test_what_cannot_be_blended_is_refused(played: Player, blend: dict[str, Any], field: str) -> None:
    (refused,) = played.engine.handle(SetPrompt("s", BLUE, "r", **{"over": 2} | blend))
    assert isinstance(refused, Refused) and refused.field == field
    played.until_made(2)
    assert not played.given


def test_the_sphere_keeps_lengths_and_turns_evenly() -> None:
    before, after = (
        torch.tensor([[2.0, 0.0], [0.0, 0.0], [1.0, 0.0]]),
        torch.tensor([[0.0, 4.0], [1.0, 0.0], [3.0, 0.0]]),
    )
    mixed = blended(before, after, 1 / 3, "sphere")
    torch.testing.assert_close(mixed[0], torch.tensor([math.cos(math.pi / 6), math.sin(math.pi / 6)]) * (2 + 2 / 3))
    torch.testing.assert_close(mixed[1:], before[1:].lerp(after[1:], 1 / 3))
    assert torch.isfinite(mixed).all() and torch.equal(blended(before, after, 1.0, "line"), after)
