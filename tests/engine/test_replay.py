"""A played session against its log, which makes the same latents on any number of stages; and timelines, likewise."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamdiff.core import KV_CONTEXTS
from streamdiff.engine import change_log
from streamdiff.engine.change_log import Log, read_log
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import (
    Accepted,
    FrameBatch,
    GetLog,
    Open,
    Refused,
    Reset,
    Saved,
    SetControls,
    SetPaused,
    SetPrompt,
    SetSteps,
    SetTimeline,
    Shown,
)
from streamdiff.engine.timeline import TimedChange, parse_timeline, placed
from streamdiff.errors import ConfigError, RequestError
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.golden.play import Latents, record
from tests.small import BLUE, CONTROLS, CPU, RED, WHITE, small_model

MODEL = small_model(1, layers=4, heads=2, sink=2, controls=CONTROLS)
CHUNK = MODEL.spec.chunk_frames


class Player:
    """An engine that plays one session over real stages, and its latents by chunk."""

    def __init__(self, stages: int, **given: Any) -> None:
        self.pipeline = StreamingPipeline(MODEL, CPU, parts=local_parts(MODEL, CPU, stages))
        self.latents: Latents = defaultdict(dict)
        record(self.pipeline, self.latents)
        self.engine = Engine(self.pipeline, 2 * CHUNK)
        self.events: list[Any] = []
        self.made = 0
        self.tell(Open("s", **({"prompt": RED, "seed": 3} | given)))

    def tell(self, command: Any) -> list[Any]:
        events = self.engine.handle(command)
        assert not any(isinstance(event, Refused) for event in events), events
        self.events += events
        return events

    def step_unshown(self) -> None:
        events = self.engine.step(0.1)
        self.events += events
        self.made += sum(len(event.pictures) for event in events if isinstance(event, FrameBatch))

    def step(self) -> None:
        self.step_unshown()
        self.engine.handle(Shown("s", self.made))

    def until_made(self, chunks: int) -> dict[int, torch.Tensor]:
        while self.made < chunks * CHUNK:
            assert self.engine.busy, "it stands still"
            self.step()
        return {chunk: self.latents[0][chunk] for chunk in range(chunks)}

    def log(self, folder: Path) -> Log:
        (saved,) = self.tell(GetLog("s", "log"))
        assert isinstance(saved, Saved)
        (path := folder / "log.jsonl").write_bytes(saved.data)
        return read_log(path)


def replayed(log: Log, stages: int, chunks: int) -> dict[int, torch.Tensor]:
    header = log.header
    player = Player(stages, prompt=header.prompt, seed=header.seed, steps=header.steps, kv_context=header.kv_context)
    player.engine.check_log(header)
    player.tell(SetTimeline("s", log.changes, "r", begin=0, as_read=True))
    latents = player.until_made(chunks)
    player.engine.close()
    return latents


def differing(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> list[int]:
    return [chunk for chunk in one if not torch.equal(one[chunk], other[chunk])]


def act(player: Player, dice: random.Random, kv_context: str) -> None:
    """Something that a client may do at any moment."""
    switches = ["keep", "flush"] + ["recache", "recache-causal"] * (kv_context != "same_step")
    match dice.choice(["keys", "keys", "tap", "prompt", "prompt", "blend", "steps", "pause"]):
        case "keys":
            values = {dice.choice(["x", "pan"]): round(dice.uniform(-1, 1), dice.choice([1, 17])), "jump": 1.0}
            player.tell(SetControls("s", values))
        case "tap":
            player.tell(SetControls("s", {"jump": 1.0, "pan": 0.5}))
            player.tell(SetControls("s", {"jump": 0.0, "pan": 0.0}))
        case "prompt":
            player.tell(SetPrompt("s", dice.choice([RED, BLUE, WHITE]), "p", dice.choice(switches)))
        case "blend":
            switch = dice.choice([each for each in switches if each != "flush"])
            player.tell(SetPrompt("s", dice.choice([BLUE, WHITE]), "b", switch, over=dice.randrange(2, 5)))
        case "steps":
            player.tell(SetSteps("s", dice.choice([2, 4]), "n"))
        case "pause":
            player.tell(SetPaused("s", True))
            for _ in range(dice.randrange(9)):
                player.step()
            player.tell(SetPaused("s", False))


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", KV_CONTEXTS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_log_makes_the_same_latents_on_1_2_and_4_stages(tmp_path: Path, kv_context: str, seed: int) -> None:
    """Whatever was done, at whatever moment, several things at one chunk included."""
    dice = random.Random(seed)
    player = Player(dice.choice([1, 2, 4]), kv_context=kv_context)
    for _ in range(24):
        for _ in range(dice.choice([0, 0, 1, 3, 9])):
            player.step()
        act(player, dice, kv_context)
    player.until_made(chunks := player.made // CHUNK + 3)
    log = player.log(tmp_path)
    assert len(log.changes) > 12 and not log.cut and log.frames >= chunks * CHUNK
    played = {chunk: player.latents[0][chunk] for chunk in range(chunks)}
    player.engine.close()
    for stages in (1, 2, 4):
        assert differing(played, replayed(log, stages, chunks)) == [], f"{stages} stages"


def idle(player: Player) -> None:
    """Step until nothing is to do: nobody takes frames."""
    player.step_unshown()
    while player.engine.busy:
        player.step_unshown()


def admitted(player: Player) -> int:
    return player.pipeline.next_chunk(0)


def past_replaced(player: Player) -> None:
    """The past runs again under a prompt that no chunk sees."""
    player.until_made(4)
    idle(player)
    player.tell(SetPrompt("s", BLUE, "p", "recache"))
    idle(player)
    player.tell(SetPrompt("s", WHITE, "q"))
    player.engine.handle(Shown("s", player.made))


def blend_replaced(player: Player) -> None:
    """A blend begins where another one is, right after a chunk was admitted that has a share of that."""
    player.tell(SetPrompt("s", BLUE, "p", over=5))
    before = admitted(player)
    while admitted(player) == before:
        player.step()
    player.tell(SetPrompt("s", WHITE, "q", over=3))


def two_at_once(player: Player) -> None:
    """A blend that begins with a prompt which no chunk sees."""
    player.until_made(1)
    player.tell(SetPrompt("s", BLUE, "p"))
    player.tell(SetPrompt("s", WHITE, "q", over=3))


@pytest.mark.parametrize("acts", [past_replaced, blend_replaced, two_at_once])
def test_a_log_has_also_what_no_chunk_shows(tmp_path: Path, acts: Callable[[Player], None]) -> None:
    player = Player(2)
    acts(player)
    played = player.until_made(9)
    log = player.log(tmp_path)
    player.engine.close()
    assert differing(played, replayed(log, 1, 9)) == []
