"""A stream that is saved goes on from its file with the next frame, to the bit."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import streamdiff
from streamdiff.errors import RequestError
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
