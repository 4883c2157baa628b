"""`generate` plays a log and a timeline, in one process and in a ring, as a program would."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import streamdiff
from streamdiff.cli import main
from tests.small import BLUE, RED, WHITE

pytestmark = pytest.mark.slow
CHANGES = [{"seconds": 0.3, "prompt": BLUE, "over": 2}, {"at": 4, "steps": 2}, {"at": 5, "loop": True}]


def generated(folder: Path, *options: str) -> np.ndarray:
    """The frames of a command, as pictures."""
    assert main.main(["generate", "--output", str(folder), "--overwrite", *options]) == 0
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))])


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
    again = generated(tmp_path / "again", "--replay", str(log), "--stages", "2")
    assert len(again) >= len(played) and np.array_equal(again[: len(played)], played)


def test_a_timeline_makes_the_same_pictures_from_a_file_and_in_a_program(tmp_path: Path) -> None:
    (path := tmp_path / "timeline.json").write_text(json.dumps(CHANGES))
    given = "--prompt", RED, "--seed", "7", "--seconds", "2", "--timeline", str(path)
    ring = generated(tmp_path / "ring", *given, "--stages", "2")
    with streamdiff.open(RED, seed=7) as stream:
        stream.timeline(CHANGES)
        assert np.array_equal(list(islice(iter(stream), 80)), ring)
        log = [json.loads(line) for line in stream.log().splitlines()[1:]]
    assert [(each["at"], "steps" in each) for each in log[:3]] == [(1, False), (4, True), (6, False)]
