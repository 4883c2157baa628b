"""A stream that is saved goes on from its file with the next frame, to the bit."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import streamdiff
from streamdiff import api
from streamdiff.config import ModelConfig
from streamdiff.engine.messages import Open, Save, Saved, SetPaused
from streamdiff.errors import RequestError
from tests.engine.test_saving import CHUNK, Driven
from tests.small import BLUE, RED


@pytest.mark.slow
def test_a_loaded_stream_has_the_frames_of_the_one_that_was_saved(tmp_path: Path) -> None:
    """Saved with frames that are made and not taken, right after a prompt; then both begin afresh alike."""
    path = tmp_path / "stream.safetensors"
    with streamdiff.open(RED, seed=4) as stream:
        frames = iter(stream)
        for _ in islice(frames, stream.chunk_frames + 1):
            pass
        stream.set_prompt(BLUE)
        stream.save(path)
        expected = list(islice(frames, 2 * stream.chunk_frames))
        stream.reset(7)
        expected += islice(frames, stream.chunk_frames)
    with streamdiff.load(path) as stream:
        assert stream.text == BLUE
        shown = list(islice(iter(stream), 2 * stream.chunk_frames))
        stream.reset(7)
        shown += islice(iter(stream), stream.chunk_frames)
        assert np.array_equal(np.stack(shown), np.stack(expected))
        assert not np.array_equal(shown[0], shown[-1])
    with pytest.raises(RequestError):
        streamdiff.load(path, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("paused", [False, True])
def test_what_a_server_saved_goes_on_after_the_frames_that_it_had_made(paused: bool, tmp_path: Path) -> None:
    """Frames that were made ahead and not shown are not in its file."""
    path = tmp_path / "stream.safetensors"
    driven = Driven(api.load_model(ModelConfig()))
    try:
        driven.tell(Open("a", RED, 4))
        while max(driven.frames.get("a", {-1: None})) < 2 * CHUNK:
            driven._take(driven.engine.step(0.01))
        driven.tell(*([SetPaused("a", True)] if paused else []), Save("a", "s"))
        while not isinstance(event := driven.events[-1], Saved):
            driven._take(driven.engine.step(0.01))
        path.write_bytes(event.data)
        made = max(driven.frames["a"]) + 1
        driven.tell(SetPaused("a", False))
        driven.frames_to("a", made + 2 * CHUNK)
    finally:
        driven.engine.close()
    with streamdiff.load(path) as stream:
        shown = list(islice(iter(stream), 2 * CHUNK))
    assert np.array_equal(np.stack(shown), np.stack([driven.frames["a"][made + n] for n in range(2 * CHUNK)]))
