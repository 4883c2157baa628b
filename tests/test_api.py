"""Frames in the user's own process: painted ones, and those of the embedded model, saved and resumed."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import streamdiff
from streamdiff.api import StreamSession
from streamdiff.errors import RequestError, StreamdiffError
from streamdiff.models.autoencoder.autoencoder import ImageEncoder
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.engine.painted import CHUNK_FRAMES, SIZE, PaintedPipeline, checksum
from tests.small import BLUE, RED, small_encoder, small_model


@pytest.fixture
def session() -> StreamSession:
    return StreamSession(PaintedPipeline(), "red", seed=5)


def take(session: StreamSession, count: int) -> list[tuple[int, int, int]]:
    return [tuple(frame[0, 0].tolist()) for frame in itertools.islice(session, count)]


def test_frames_come_in_order_without_end(session: StreamSession) -> None:
    assert (session.width, session.height, session.fps) == (SIZE, SIZE, 20.0)
    assert take(session, 500) == [(n % 256, 5, checksum("red")) for n in range(500)]


def test_a_prompt_shows_two_chunks_later_at_the_most(session: StreamSession) -> None:
    take(session, 7)
    assert session.set_prompt("blue dragon") == "I do not know dragon"
    assert session.text == "blue dragon"
    colours = [blue for _, _, blue in take(session, 3 * CHUNK_FRAMES)]
    change = colours.index(checksum("blue dragon"))
    assert 0 < change <= 2 * CHUNK_FRAMES
    assert set(colours[:change]) == {checksum("red")}
    assert set(colours[change:]) == {checksum("blue dragon")}


def test_a_refused_prompt_changes_nothing(session: StreamSession) -> None:
    take(session, 2)
    for prompt in ("refuse me", "", "x" * 3000):
        with pytest.raises(RequestError) as caught:
            session.set_prompt(prompt)
        assert caught.value.field == "prompt"
    assert session.text == "red"
    assert take(session, 30) == [(n, 5, checksum("red")) for n in range(2, 32)]


def test_a_paused_stream_ends_an_iteration_and_goes_on_later(session: StreamSession) -> None:
    seen = take(session, 4)
    session.pause()
    seen += take(session, 1000)
    assert len(seen) <= 3 * CHUNK_FRAMES
    assert take(session, 1) == []
    session.resume()
    seen += take(session, 20)
    assert [number for number, _, _ in seen] == list(range(len(seen)))


def test_a_reset_starts_afresh(session: StreamSession) -> None:
    take(session, 9)
    session.reset(seed=8)
    assert take(session, 20) == [(n, 8, checksum("red")) for n in range(20)]
    session.reset()
    assert take(session, 1) == [(0, 8, checksum("red"))]
    with pytest.raises(RequestError) as caught:
        session.reset(seed=-1)
    assert caught.value.field == "seed"


def test_a_picture_comes_first_and_again_after_a_reset_until_it_is_taken_away(session: StreamSession) -> None:
    grey, white = np.full((30, 50, 3), 40, np.uint8), np.full((5, 5, 3), 255, np.uint8)
    session.restart("red", seed=5, image=grey)
    assert take(session, CHUNK_FRAMES + 1) == [(40, 40, 40)] * CHUNK_FRAMES + [(CHUNK_FRAMES, 5, checksum("red"))]
    session.reset(image=white)
    assert take(session, 1) == [(255, 255, 255)]
    session.reset(seed=6)
    assert take(session, CHUNK_FRAMES + 1)[::CHUNK_FRAMES] == [(255, 255, 255), (CHUNK_FRAMES, 6, checksum("red"))]
    session.reset(image=None)
    assert take(session, 1) == [(0, 6, checksum("red"))]
    for image, fit, field in ((b"no picture", "cover", "image"), ("missing.png", "cover", "image"), (grey, "x", "fit")):
        with pytest.raises(RequestError) as caught:
            session.reset(image=image, fit=fit)
        assert caught.value.field == field


def test_a_stream_follows_video_that_is_fed_as_much_as_there_is() -> None:
    model = small_model(4)
    pictures = ImageEncoder(lambda: small_encoder(4), model.spec)
    with StreamSession(StreamingPipeline(model, torch.device("cpu"), pictures=pictures), RED) as session:
        before = len(list(itertools.islice(session, session.chunk_frames)))
        session.video(0.5)
        list(session)  # what was made ahead
        video = np.random.default_rng(1).integers(0, 256, (2 * session.chunk_frames, 40, 30, 3), np.uint8)
        session.feed(video[: session.chunk_frames])
        first = list(session)
        session.feed(video[session.chunk_frames : -1])
        assert before == len(first) == session.chunk_frames and list(session) == []
        session.feed(video[-1])
        assert len(list(session)) == session.chunk_frames
        for wrong in (np.zeros((2, 4, 4, 3)), video[0, 0]):
            with pytest.raises(RequestError):
                session.feed(wrong)
        session.video(None)
        with pytest.raises(RequestError):
            session.feed(video)
        assert len(list(itertools.islice(session, 50))) == 50
        for strength in (0.0, 2.0):
            with pytest.raises(RequestError) as caught:
                session.video(strength)
            assert caught.value.field == "strength"


def test_closing_ends_everything() -> None:
    pipeline = PaintedPipeline()
    with StreamSession(pipeline, "red") as session:
        frames = iter(session)
        next(frames)
    assert pipeline.closed and not pipeline.streams
    assert list(frames) == []
    session.close()
    for act in (session.pause, session.resume, session.reset, lambda: session.set_prompt("blue")):
        with pytest.raises(StreamdiffError) as caught:
            act()
        assert caught.value.code == "closed"


def test_an_unusable_start_frees_the_pipeline() -> None:
    pipeline = PaintedPipeline()
    with pytest.raises(RequestError) as caught:
        StreamSession(pipeline, " ")
    assert caught.value.field == "prompt" and pipeline.closed


def test_steering_from_another_thread(session: StreamSession) -> None:
    seen: list[int] = []
    stop = threading.Event()

    def steer() -> None:
        for number in itertools.count():
            if stop.is_set():
                break
            session.set_prompt(("red", "blue", "green")[number % 3])

    steering = threading.Thread(target=steer)
    steering.start()
    seen = [number for number, _, _ in take(session, 2000)]
    stop.set()
    steering.join()
    assert seen == [n % 256 for n in range(2000)]


@pytest.mark.slow
def test_the_embedded_model_streams(capfd: pytest.CaptureFixture[str]) -> None:
    frames = list(streamdiff.stream("a red circle moving left", seconds=1, seed=3))
    with streamdiff.open("a red circle moving left", seed=3) as session:
        assert len(frames) == round(session.fps)
        again = list(itertools.islice(session, 8))
        assert session.text
    assert frames[0].shape == (session.height, session.width, 3) and frames[0].dtype == np.uint8
    assert np.array_equal(frames[:8], again), "the same seed gives the same frames"
    assert len({frame.tobytes() for frame in frames}) > len(frames) // 2, "they move"
    assert "streamdiff:" not in capfd.readouterr().err, "a library is quiet"


def test_importing_the_package_is_light() -> None:
    code = "import sys, streamdiff; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert set(streamdiff.__all__) <= {*dir(streamdiff), *streamdiff.__all__}
    with pytest.raises(AttributeError):
        streamdiff.nonsense  # noqa: B018


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
