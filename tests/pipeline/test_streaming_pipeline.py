"""What the engine drives: frames in order, room respected, nothing of the past after a reset, errors in the open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamdiff.config import Config, ModelConfig, ServeConfig, ServedModel
from streamdiff.core import Frames
from streamdiff.errors import EngineFailure
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, yuv420p
from streamdiff.pipeline.build import build_pipeline
from streamdiff.pipeline.row_faults import MOST_IN_A_ROW
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.small import (
    AUTOENCODER,
    BLUE,
    CPU,
    RED,
    WHITE,
    save_model,
    small_autoencoder,
    small_decoder,
    small_model,
    small_parts,
)

MODEL = small_model(4)
CHUNK = MODEL.spec.chunk_frames
CONTEXTS = ("clean", "staircase", "same_step")


@pytest.fixture
def runtime() -> Iterator[StreamingPipeline]:
    made = StreamingPipeline(MODEL, CPU)
    yield made
    made.close()


def open_session(
    runtime: StreamingPipeline, session: int = 0, text: str = RED, kv_context: str = "clean", seed: int = 1
) -> None:
    runtime.open(session, runtime.text.encode(text), seed=seed, epoch=0, steps=4, kv_context=kv_context)


def take(runtime: StreamingPipeline, session: int, chunks: int, room: int = 10 * CHUNK) -> list[Frames]:
    """Pieces until `chunks` more chunks of the session are out, or more: one look may find several decoded. Other
    sessions' pieces are dropped."""
    pieces: list[Frames] = []
    while sum(piece.last for piece in pieces) < chunks:
        runtime.set_frame_credit(session, room)
        pieces += [piece for piece in runtime.step(wait_s=5.0) if piece.session == session]
    return pieces


def drain(runtime: StreamingPipeline) -> list[Frames]:
    """Run until nothing is left to do."""
    pieces: list[Frames] = []
    while runtime.busy:
        pieces += runtime.step(wait_s=5.0)
    return pieces


def pictures(pieces: list[Frames]) -> np.ndarray:
    return np.concatenate([piece.pictures for piece in pieces])


def alone(chunks: int, text: str = RED, kv_context: str = "clean", seed: int = 1) -> np.ndarray:
    """The pictures of a session on a pipeline of its own."""
    with closing(StreamingPipeline(MODEL, CPU)) as pipeline:
        open_session(pipeline, 0, text, kv_context, seed)
        return pictures(take(pipeline, 0, chunks))[: chunks * CHUNK]


def test_the_frames_are_the_decoded_latents(runtime: StreamingPipeline) -> None:
    """Piecewise decoding on the decoding thread gives the pictures of decoding the finished latents whole."""
    from training.judges.rollout import rollout

    open_session(runtime, seed=6)
    got = pictures(take(runtime, 0, 3))[: 3 * CHUNK]
    latents = rollout(MODEL, [RED], chunks=3, steps=4, kv_context="clean", seed=6)
    clip = torch.cat([latents[chunk] for chunk in range(3)], 2)
    expected = MODEL.decoder.decode(clip, MODEL.decoder.new_memory()).numpy()
    assert np.abs(got.astype(int) - expected.astype(int)).max() <= 1
    assert expected.std() > 1


def test_no_room_no_frames_and_room_counts_what_is_under_way(runtime: StreamingPipeline) -> None:
    open_session(runtime)
    assert runtime.step() == [] and not runtime.busy
    runtime.set_frame_credit(0, CHUNK - 1)
    assert not runtime.busy and drain(runtime) == []
    runtime.set_frame_credit(0, 2 * CHUNK + 1)
    runtime.step()
    runtime.set_frame_credit(0, 2 * CHUNK + 1)  # said again while a chunk is under way: still two chunks in all
    pieces = drain(runtime)
    assert sum(len(piece.pictures) for piece in pieces) == 2 * CHUNK
    runtime.set_frame_credit(0, CHUNK)
    assert {piece.chunk for piece in drain(runtime)} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", CONTEXTS)
@pytest.mark.parametrize("trimmed", [0, 3])
def test_exactly_the_minimum_lead_keeps_the_stream_going(kv_context: str, trimmed: int) -> None:
    """Frames are shown one by one, and frames made but not shown never exceed the lead."""
    autoencoder = small_autoencoder(0, replace(AUTOENCODER, frames_to_trim=trimmed))
    parts = small_parts(4)
    runtime = StreamingPipeline(
        replace(MODEL, decoder=PictureDecoder(small_decoder(autoencoder, parts.mean, parts.std))), CPU
    )
    open_session(runtime, kv_context=kv_context)
    lead = runtime.min_ahead_frames(steps=4, kv_context=kv_context)
    made = shown = 0
    while shown < 6 * CHUNK:
        runtime.set_frame_credit(0, lead - (made - shown))
        made += sum(len(piece.pictures) for piece in runtime.step(wait_s=5.0))
        assert made - shown <= lead
        if made > shown:
            shown += 1
        else:
            assert runtime.busy, f"the stream stands still after {shown} frames"
    if kv_context != "staircase":  # whose chunks in flight wait for followers
        # What the trimmed first chunk did not show must not stay booked as frames under way.
        drain(runtime)
        runtime.set_frame_credit(0, CHUNK)
        assert runtime.busy
    runtime.close()


def test_a_closed_session_gives_no_more_frames_even_in_the_middle_of_decoding(runtime: StreamingPipeline) -> None:
    open_session(runtime, 0)
    open_session(runtime, 1, BLUE)
    while not runtime._pending:  # the thread that decodes may be faster than one look
        runtime.set_frame_credit(0, CHUNK)
        runtime._collect(0.0)
        runtime.step()
    runtime.close_session(0)
    assert all(piece.session != 0 for piece in drain(runtime))
    assert {piece.session for piece in take(runtime, 1, 1)} == {1}
    open_session(runtime, 0, WHITE, seed=3)  # the slot can be used again
    reopened = pictures(take(runtime, 0, 1))[:CHUNK]  # one look may find more than one chunk decoded
    assert np.array_equal(reopened, alone(1, WHITE, seed=3))


@pytest.mark.slow
@pytest.mark.parametrize("steps_before", [0, 1, 4, 6, 9])
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_after_a_reset_come_the_frames_of_a_fresh_stream(
    runtime: StreamingPipeline, kv_context: str, steps_before: int
) -> None:
    open_session(runtime, text=RED, kv_context=kv_context)
    for _ in range(steps_before):
        runtime.set_frame_credit(0, 10 * CHUNK)
        runtime.step()
    runtime.reset(0, runtime.text.encode(BLUE), seed=9, epoch=4)
    assert not runtime.scheduler.has_work, "a reset session waits for room"
    pieces = take(runtime, 0, 3)
    assert {piece.epoch for piece in pieces} == {4} and pieces[0].chunk == 0
    assert np.array_equal(pictures(pieces)[: 3 * CHUNK], alone(3, BLUE, kv_context, seed=9))


def test_a_session_that_cannot_be_decoded_is_told_and_one_after_the_other_ends_the_pipeline() -> None:
    """A decoder for other latents than the model's: real parts that do not fit together."""
    lost: dict[int, str] = {}
    wrong = small_autoencoder(0, replace(AUTOENCODER, latent_channels=5))
    runtime = StreamingPipeline(
        replace(MODEL, decoder=PictureDecoder(small_decoder(wrong, torch.zeros(5), torch.ones(5)))), CPU
    )
    runtime.on_fault = lost.__setitem__
    open_session(runtime)
    runtime.set_frame_credit(0, 4 * CHUNK)
    while not lost:
        runtime.step(1.0)
    assert "decoding chunk 0: ValueError" in lost[0] and "expected [B, 5, n, height, width]" in lost[0]
    for _ in range(3):
        runtime.step(1.0)
    assert list(lost) == [0], "once"
    with pytest.raises(EngineFailure, match=r"one session after the other fails.*expected \[B, 5, n, height, width\]"):
        for session in range(1, MOST_IN_A_ROW + 1):
            runtime.close_session(session - 1)
            open_session(runtime, session)
            runtime.set_frame_credit(session, CHUNK)
            while session not in lost:
                runtime.step(1.0)
    assert list(lost) == list(range(MOST_IN_A_ROW)), "each but the last, which ended all"
    runtime.close()


def spoil_first_steps(runtime: StreamingPipeline) -> None:
    """Of every chunk the first step is without numbers, once. Mutates: runtime's stage."""
    forward, struck = runtime.stage.forward, set[int]()

    def spoilt(rows: Any, given: Any) -> Any:
        done = forward(rows, given)
        if rows[0].step > 0 or rows[0].chunk in struck:
            return done
        struck.add(rows[0].chunk)
        return tuple(tensor * torch.nan for tensor in done)

    runtime.stage.forward = spoilt  # type: ignore[method-assign]


def test_a_first_step_that_runs_once_more_takes_no_more_of_the_lead(runtime: StreamingPipeline) -> None:
    open_session(runtime)
    spoil_first_steps(runtime)
    taken = pictures(take(runtime, 0, 5, room=CHUNK))[: 5 * CHUNK]
    runtime.close_session(0)
    assert np.array_equal(taken, alone(5))


@pytest.mark.parametrize("way", ["close", "reset"])
def test_a_first_step_that_was_to_run_once_more_goes_with_its_stream(runtime: StreamingPipeline, way: str) -> None:
    open_session(runtime)
    runtime.set_frame_credit(0, CHUNK)
    spoil_first_steps(runtime)
    runtime.step()
    assert runtime.stage.sessions and list(runtime.queued), "it waits to run once more"
    text = runtime.text.encode(RED)
    if way == "close":
        runtime.close_session(0)
        drain(runtime)
        open_session(runtime)
    else:
        runtime.reset(0, text, seed=1, epoch=1)
    assert np.array_equal(pictures(take(runtime, 0, 3, room=CHUNK))[: 3 * CHUNK], alone(3))


@pytest.mark.slow
def test_a_server_may_have_yuv420_of_the_same_pictures(tmp_path: Path) -> None:
    """Over the product's own way from its configuration; nobody else gets it."""
    save_model(tmp_path)
    model = ModelConfig(name=str(tmp_path), device="cpu")
    made = []
    for config in (
        model,
        Config(model=model, serve=ServeConfig(upscale=1)).served_model(),
        ServedModel(**{**dict(model), "pictures": "yuv420"}),
    ):
        runtime = build_pipeline(config)
        open_session(runtime)
        made.append(pictures(take(runtime, 0, 2))[: 2 * CHUNK])  # the next chunk's first may have come with them
        runtime.close()
    rgb, automatic, planes = made
    assert np.array_equal(rgb, automatic), "RGB on a CPU"
    frames = torch.from_numpy(rgb).permute(0, 3, 1, 2).float()
    assert planes.shape == (len(rgb), rgb.shape[1] * 3 // 2, rgb.shape[2]) and planes.std() > 5
    assert np.abs(planes.astype(int) - yuv420p(frames).numpy()).max() <= 1


def test_a_background_chunk_is_decoded_only_when_no_other_waits(
    runtime: StreamingPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a job's chunks decodes; its next ones stay behind a live chunk that is finished after them."""
    kinds: dict[int, str] = {}
    submitted: list[str] = []
    held: list[tuple[int, int, torch.Tensor]] = []

    def submit(stream: int, chunk: int, latents: torch.Tensor) -> None:
        submitted.append(f"{kinds[stream]} {chunk}")
        held.append((stream, chunk, latents))

    decode = runtime.decoding.submit
    monkeypatch.setattr(runtime.decoding, "submit", submit)
    runtime.open(0, runtime.text.encode(RED), seed=1, epoch=0, steps=4, kv_context="clean", background=True)
    kinds[runtime.streams[0].number] = "job"
    runtime.set_frame_credit(0, 3 * CHUNK)
    while runtime.has_work:
        runtime.step()
    assert submitted == ["job 0"], "its other chunks wait, though they are finished"
    open_session(runtime, 1)
    kinds[runtime.streams[1].number] = "live"
    runtime.set_frame_credit(1, CHUNK)
    while runtime.has_work:
        runtime.step()
    assert submitted == ["job 0", "live 0"]
    while len(submitted) < 4 or held:
        for each in held:
            decode(*each)
        held.clear()
        runtime.step(wait_s=0.05)
    assert submitted == ["job 0", "live 0", "job 1", "job 2"]
    drain(runtime)
    assert not runtime.busy
