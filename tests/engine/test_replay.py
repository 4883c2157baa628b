"""A played session against its log, which makes the same latents on any number of stages; and timelines, likewise.
`generate` plays both, too."""

from __future__ import annotations

import json
import random
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import streamdiff
from streamdiff.cli import main
from streamdiff.core import KV_CONTEXTS
from streamdiff.engine import change_log, messages
from streamdiff.engine.change_log import Log, read_log
from streamdiff.engine.engine import Engine
from streamdiff.engine.timeline import TimedChange, parse_timeline, placed
from streamdiff.errors import ConfigError
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.golden.play import Latents, record
from tests.small import BLUE, CONTROLS, CPU, RED, WHITE, small_model

MODEL = small_model(1, layers=4, heads=2, sink=2, controls=CONTROLS)
CHUNK = MODEL.spec.chunk_frames


class Player:
    """An engine that plays one session over real stages, its latents by chunk, and what its pipeline was given: (chunk,
    conditioning, switch)."""

    def __init__(self, stages: int, keep_bytes: int = 0, **given: Any) -> None:
        self.pipeline = StreamingPipeline(MODEL, CPU, parts=local_parts(MODEL, CPU, stages))
        self.latents: Latents = defaultdict(dict)
        record(self.pipeline, self.latents)
        self.given: list[tuple[int, torch.Tensor, str]] = []
        give = self.pipeline.set_conditioning

        def set_conditioning(session: int, conditioning: torch.Tensor, **how: Any) -> None:
            self.given.append((self.pipeline.next_chunk(session), conditioning, how["switch"]))
            give(session, conditioning, **how)

        self.pipeline.set_conditioning = set_conditioning  # type: ignore[method-assign]
        self.engine = Engine(self.pipeline, 2 * CHUNK, keep_bytes)
        self.events: list[Any] = []
        self.made = 0
        self.tell(messages.Open("s", **({"prompt": RED, "seed": 3} | given)))

    def tell(self, command: Any) -> list[Any]:
        events = self.engine.handle(command)
        assert not any(isinstance(event, messages.Refused) for event in events), events
        self.events += events
        return events

    def step_unshown(self) -> None:
        events = self.engine.step(0.1)
        self.events += events
        self.made += sum(len(event.pictures) for event in events if isinstance(event, messages.FrameBatch))

    def step(self) -> None:
        self.step_unshown()
        self.engine.handle(messages.Shown("s", self.made))

    def until_made(self, chunks: int) -> dict[int, torch.Tensor]:
        while self.made < chunks * CHUNK:
            assert self.engine.busy, "it stands still"
            self.step()
        return {chunk: latents for chunk, latents in self.latents[0].items() if chunk < chunks}

    def log(self, folder: Path) -> Log:
        (path := folder / "log.jsonl").write_bytes(self.tell(messages.GetLog("s", "log"))[0].data)
        return read_log(path)


def replayed(log: Log, stages: int, chunks: int) -> dict[int, torch.Tensor]:
    header = log.header
    begin = {"prompt": header.prompt, "seed": header.seed, "steps": header.steps, "kv_context": header.kv_context}
    player = Player(stages, **begin, changes=log.changes, facts=header.model)
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
            player.tell(messages.SetControls("s", {dice.choice(["x", "pan"]): dice.uniform(-1, 1), "jump": 1.0}))
        case "tap":
            player.tell(messages.SetControls("s", {"jump": 1.0, "pan": 0.5}))
            player.tell(messages.SetControls("s", {"jump": 0.0, "pan": 0.0}))
        case "prompt":
            player.tell(messages.SetPrompt("s", dice.choice([RED, BLUE, WHITE]), "p", dice.choice(switches)))
        case "blend":
            switch = dice.choice([each for each in switches if each != "flush"])
            player.tell(messages.SetPrompt("s", dice.choice([BLUE, WHITE]), "b", switch, over=dice.randrange(2, 5)))
        case "steps":
            player.tell(messages.SetSteps("s", dice.choice([2, 4]), "n"))
        case "pause":
            player.tell(messages.SetPaused("s", True))
            for _ in range(dice.randrange(9)):
                player.step()
            player.tell(messages.SetPaused("s", False))


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
    assert len(log.changes) > 8 and not log.header.cut and log.header.frames >= chunks * CHUNK
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
    player.tell(messages.SetPrompt("s", BLUE, "p", "recache"))
    idle(player)
    player.tell(messages.SetPrompt("s", WHITE, "q"))
    player.engine.handle(messages.Shown("s", player.made))


def blend_replaced(player: Player) -> None:
    """A blend begins where another one is, right after a chunk was admitted that has a share of that."""
    player.tell(messages.SetPrompt("s", BLUE, "p", over=5))
    before = admitted(player)
    while admitted(player) == before:
        player.step()
    player.tell(messages.SetPrompt("s", WHITE, "q", over=3))


def two_at_once(player: Player) -> None:
    """A blend that begins with a prompt which no chunk sees."""
    player.until_made(1)
    player.tell(messages.SetPrompt("s", BLUE, "p"))
    player.tell(messages.SetPrompt("s", WHITE, "q", over=3))


@pytest.mark.parametrize("acts", [past_replaced, blend_replaced, two_at_once])
def test_a_log_has_also_what_no_chunk_shows(tmp_path: Path, acts: Callable[[Player], None]) -> None:
    player = Player(2)
    acts(player)
    played = player.until_made(9)
    log = player.log(tmp_path)
    player.engine.close()
    assert differing(played, replayed(log, 1, 9)) == []


# ---- what is in a log ---------------------------------------------------------------------------------------------


def lines(player: Player) -> list[dict[str, Any]]:
    return [json.loads(line) for line in player.tell(messages.GetLog("s", "log"))[0].data.splitlines()]


def test_a_log_has_what_each_chunk_got_and_begins_anew_with_a_reset() -> None:
    player = Player(1)
    player.until_made(2)
    player.tell(messages.SetControls("s", {"x": 0.1, "jump": 1.0}))
    player.tell(messages.SetControls("s", {"x": 0.25, "jump": 0.0}))
    first = admitted(player)
    player.until_made(4)
    player.tell(messages.SetControls("s", {"x": 0.25}))  # said again, as pages do
    player.tell(messages.SetSteps("s", 2))
    steps_at = admitted(player)
    player.until_made(6)
    player.tell(messages.SetPrompt("s", BLUE, over=2))
    header, *changes = lines(player)
    assert header["prompt"] == RED and header["seed"] == 3 and header["fault"] == "" and header["model"]["weights"]
    assert changes == [{"at": first, "controls": {"x": 0.25}, "taps": {"jump": 1.0}}, {"at": steps_at, "steps": 2}]
    assert (header["chunks"], header["frames"], header["changes"]) == (admitted(player), player.made, 2)
    player.tell(messages.Reset("s", 9))
    player.step()
    header, *changes = lines(player)
    assert (header["prompt"], header["seed"], header["steps"]) == (MODEL.text.read(BLUE, None).text, 9, 2)
    assert changes == [{"at": 0, "controls": {"x": 0.25}}] and header["frames"] == 0
    player.engine.close()


def test_an_hour_of_keys_has_2_mb_a_mouse_10_and_what_is_more_is_cut() -> None:
    """Of chunks of one latent frame, ten a second, each with another value."""
    keys, mouse, more = (change_log.ChangeLog(prompt=RED, seed=1, steps=4, kv_context="clean") for _ in range(3))
    dice = random.Random(1)
    for chunk in range(36_000):
        keys.hold(chunk, {dice.choice(["move_x", "move_y"]): float(dice.randrange(-1, 2))})
        mouse.hold(chunk, {name: dice.uniform(-1, 1) for name in ("move_x", "move_y", "look_x", "look_y")})
        keys.frames = mouse.frames = 4 * chunk
    assert len(keys.content({}, 36_000)) < 2e6 and len(mouse.content({}, 36_000)) < 1e7
    for number in range(30_000):  # a paused session, whose prompts all come at one chunk
        more.add(7, prompt="x" * 2000, switch=str(number))
    assert len(more.content({}, 8)) < 1000 and len(more._open) == 0
    assert json.loads(more.content({}, 8).splitlines()[0])["cut"]


HEADER = {
    "kind": change_log.KIND, "format": 1, "model": {}, "prompt": "x", "seed": 1, "steps": 4, "kv_context": "clean",
    "chunks": 1, "frames": 4, "changes": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("header", "more", "code", "field"),
    [
        (None, "", "log", "line"), (None, "\0\xff\n\n", "log", "line"), (None, "[" * 100_000, "log", "line"),
        ({"format": 2}, "", "format", "format"), ({"kind": "x"}, "", "format", "format"),
        ({"fault": "a camera"}, "", "fault", "fault"), ({"frames": 0}, "", "frames", "frames"),
        ({"steps": 0}, "", "log", "steps"), ({}, "", "changes", "changes"), ({}, "\n" * 12_000_000, "log", "replay"),
        ({"changes": 2}, '{"at":1,"steps":2}\n{"at":0,"steps":4}', "log", "at"),
        ({}, '{"seconds":1,"steps":2}', "log", "at"), ({}, '{"at":1,"shell":"rm"}', "log", "shell"),
        ({}, '{"at":1}', "log", "0.prompt"), ({}, '{"at":1,"controls":{"x":1e999}}', "log", "controls.x"),
        ({}, '{"at":1,"prompt":"x","switch":"reset"}', "log", "0.switch"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_refused(tmp_path: Path, header: Any, more: str, code: str, field: str) -> None:
    (path := tmp_path / "log.jsonl").write_text("" if header is None else json.dumps(HEADER | header) + "\n")
    with path.open("a") as file:
        file.write(more)
    with pytest.raises(ConfigError) as refusal:
        read_log(path)
    assert (refusal.value.code, refusal.value.field) == (code, field)


def test_a_log_of_another_model_or_of_unknown_controls_changes_nothing() -> None:
    player = Player(2)
    facts = player.pipeline.resting.facts()
    for changed, code in (
        ({"name": "other"}, "model"), ({"window_latents": 3}, "model"), ({"weights": ["0"]}, "weights"),
        ({"weights": None}, "weights"), ({"new": 1}, "model"),
    ):  # fmt: skip
        (refused,) = player.engine.handle(messages.Open("other", RED, facts=facts | changed))  # type: ignore[arg-type]
        assert isinstance(refused, messages.Refused) and (refused.code, refused.field) == (code, "log")
    for change, field in (
        ({"controls": {"fly": 1.0}}, "control"), ({"controls": {"jump": 0.5}}, "jump"), ({"steps": 3}, "steps"),
        ({"prompt": " "}, "prompt"), ({"prompt": RED, "switch": "flush", "over": 2}, "over"),
    ):  # fmt: skip
        (refused,) = player.engine.handle(messages.SetTimeline("s", (TimedChange(at=0, **change),), "r"))  # type: ignore[arg-type]
        assert isinstance(refused, messages.Refused) and refused.field == field
    player.until_made(2)
    assert lines(player)[1:] == []
    player.engine.close()


# ---- timelines ----------------------------------------------------------------------------------------------------

CHANGES = [
    {"at": 1, "prompt": BLUE, "over": 2}, {"at": 2, "controls": {"x": 0.5}},
    {"at": 4, "prompt": WHITE, "switch": "recache", "steps": 2}, {"at": 5, "steps": 4, "taps": {"jump": 1}},
    {"at": 6, "loop": True},
]  # fmt: skip


def with_timeline(stages: int, chunks: int, kv_context: str) -> tuple[dict[int, torch.Tensor], Player]:
    player = Player(stages, kv_context=kv_context)
    player.tell(messages.SetTimeline("s", placed(parse_timeline(CHANGES), 0.2), "t", begin=0))
    return player.until_made(chunks), player


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", ["clean", "staircase"])
def test_a_timeline_that_loops_has_the_same_latents_on_1_2_and_4_stages(tmp_path: Path, kv_context: str) -> None:
    one, player = with_timeline(1, 15, kv_context)
    told = [event.text for event in player.events if isinstance(event, messages.Accepted) and not event.request]
    assert told[:4] == [MODEL.text.read(each, None).text for each in (BLUE, WHITE, BLUE, WHITE)]
    log = player.log(tmp_path)
    assert [change.at for change in log.changes if change.steps == 2][:2] == [4, 10] and not log.header.cut
    assert differing(one, replayed(log, 2, 15)) == []
    player.engine.close()
    for stages in (2, 4):
        other, player = with_timeline(stages, 15, kv_context)
        assert differing(one, other) == []
        player.engine.close()


def test_a_live_session_counts_from_the_next_chunk_and_after_a_reset_from_0() -> None:
    player = Player(1)
    player.until_made(3)
    first = admitted(player)
    player.tell(messages.SetTimeline("s", (TimedChange(at=2, controls={"x": 1.0}),), "t"))
    player.until_made(first + 4)
    assert lines(player)[1:] == [{"at": first + 2, "controls": {"x": 1.0}}]
    player.tell(messages.SetControls("s", {"x": 0.0}))
    player.tell(messages.Reset("s"))
    player.until_made(player.made // CHUNK + 4)
    assert lines(player)[1:] == [{"at": 2, "controls": {"x": 1.0}}]
    player.tell(messages.SetTimeline("s", (TimedChange(at=2, controls={"x": 0.5}),), "t"))
    player.tell(messages.SetTimeline("s", (), "none"))
    player.until_made(player.made // CHUNK + 5)
    assert len(lines(player)) == 2
    player.engine.close()


def test_a_chunk_waits_for_the_prompt_of_its_timeline_while_that_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player(1)
    text, begun, may_end = player.pipeline.text, threading.Event(), threading.Event()
    encode = text.encode

    def slow(prompt: str) -> torch.Tensor:
        begun.set()
        assert may_end.wait(60)
        return encode(prompt)

    monkeypatch.setattr(text, "slow", True, raising=False)
    monkeypatch.setattr(text, "encode", slow)
    player.tell(messages.SetTimeline("s", (TimedChange(at=2, prompt=BLUE),), "t", begin=0))
    player.until_made(2)
    assert begun.wait(60) and admitted(player) == 2 and player.engine.busy
    player.step()
    assert admitted(player) == 2
    may_end.set()
    player.until_made(4)
    assert lines(player)[1:] == [{"at": 2, "prompt": MODEL.text.read(BLUE, None).text, "switch": "keep"}]
    player.engine.close()


def test_seconds_are_those_of_the_chunk_that_begins_nearest() -> None:
    changes = parse_timeline([{"seconds": 1.26, "steps": 2}, {"at": 1, "steps": 4}, {"seconds": 2, "loop": True}])
    assert [(change.at, change.seconds) for change in placed(changes, 0.5)] == [(1, None), (3, None), (4, None)]


TOLD = [{"seconds": 0.3, "prompt": BLUE, "over": 2}, {"at": 4, "steps": 2}, {"at": 5, "loop": True}]


def generated_pictures(folder: Path, *options: str) -> np.ndarray:
    """The frames of a command, as pictures."""
    assert main.main(["generate", "--output", str(folder), "--overwrite", *options]) == 0
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))])


@pytest.mark.slow
def test_a_played_stream_has_the_same_pictures_again(tmp_path: Path) -> None:
    with streamdiff.open(RED, seed=5) as stream:
        frames = iter(stream)
        played = list(islice(frames, 5))
        stream.set_prompt(BLUE, over=3)
        played += islice(frames, 40)
        stream.set_prompt(WHITE)
        stream.set_steps(2)
        played += islice(frames, 40)
        (log := tmp_path / "world.jsonl").write_bytes(stream.log())
        stream.replay(log)
        assert np.array_equal(list(islice(iter(stream), len(played))), played)
    again = generated_pictures(tmp_path / "again", "--replay", str(log), "--stages", "2")
    assert len(again) >= len(played) and np.array_equal(again[: len(played)], played)


@pytest.mark.slow
def test_a_timeline_makes_the_same_pictures_from_a_file_and_in_a_program(tmp_path: Path) -> None:
    (path := tmp_path / "timeline.json").write_text(json.dumps(TOLD))
    given = "--prompt", RED, "--seed", "7", "--seconds", "2", "--timeline", str(path)
    ring = generated_pictures(tmp_path / "ring", *given, "--stages", "2")
    with streamdiff.open(RED, seed=7) as stream:
        stream.timeline(TOLD)
        assert np.array_equal(list(islice(iter(stream), 80)), ring)
        log = [json.loads(line) for line in stream.log().splitlines()[1:]]
    assert [(each["at"], "steps" in each) for each in log[:3]] == [(1, False), (4, True), (6, False)]
