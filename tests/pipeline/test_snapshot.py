"""A session that was saved goes on from the file, to the bit, as if it had never been away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load

from streamdiff.core import Frames
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.model import Model
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.snapshot.file import Snapshot, mapped
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.snapshot_header import OpenedWith, check_signature, signed
from tests.saving import save
from tests.small import BLUE, CPU, RED, small_model

MODEL = small_model(4, layers=4, sink=2)
CHUNK = MODEL.spec.chunk_frames
CHUNKS, SAVED_AT = 7, 3


def started(stages: int, model: Model = MODEL) -> StreamingPipeline:
    return StreamingPipeline(model, CPU, parts=local_parts(model, CPU, stages))


def opened(stages: int, kv_context: str, session: int = 0) -> StreamingPipeline:
    pipeline = started(stages)
    pipeline.open(session, pipeline.text.encode(RED), seed=3, epoch=5, steps=4, kv_context=kv_context)
    return pipeline


def drawn(frames: list[Frames], session: int = 0) -> list[np.ndarray]:
    return [picture for each in frames if each.session == session for picture in each.pictures]


def play(pipeline: StreamingPipeline, pictures: list[np.ndarray], count: int, session: int = 0) -> None:
    """Go on until there are so many pictures; the ring runs ahead of them. Mutates: pictures."""
    while len(pictures) < count:
        pipeline.set_frame_credit(session, 6 * CHUNK)
        pictures += drawn(pipeline.step(0.1), session)


def saved(pipeline: StreamingPipeline, path: Path) -> list[np.ndarray]:
    """Write session 0 to `path`; pictures that came before it was taken."""
    snapshot, frames = save(pipeline, 0)
    snapshot.write(path)
    return drawn(frames)


def change(pipeline: StreamingPipeline, session: int = 0) -> None:
    pipeline.set_conditioning(session, pipeline.text.encode(BLUE), epoch=6, switch="flush")


def test_a_signature_covers_every_byte_of_header_and_tensors() -> None:
    tensors = {"a": torch.arange(5), "b": torch.tensor(2.0), "c": torch.zeros(0, 3), "d": torch.ones(3, 2).T}
    opened = OpenedWith(1, 4, 0, "clean")
    data = Snapshot({}, opened, {}, {}, tensors=tensors).to_bytes()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load(data).items())
    header, rest = signed(data, b"key")
    file = header + rest
    check_signature(file, b"key")
    assert Snapshot.from_bytes(file).session == opened
    for wrong, code in ((data, "unsigned"), (signed(data, b"other")[0] + rest, "signature")):
        with pytest.raises(ConfigError) as refusal:
            check_signature(wrong, b"key")
        assert refusal.value.code == code
    for at in [*range(8, len(header.rstrip()), 37), *range(len(header), len(file))]:
        changed = file[:at] + bytes([file[at] ^ 1]) + file[at + 1 :]
        with pytest.raises((ConfigError, ValueError)):  # ValueError: no JSON, which `read_header` refuses
            check_signature(changed, b"key")


@pytest.mark.slow
def test_a_change_of_steps_and_a_prompt_that_wait_are_saved_too(tmp_path: Path) -> None:
    """Between a change that has been asked for and the chunk that it holds from."""

    def asked() -> tuple[StreamingPipeline, list[np.ndarray]]:
        pipeline, pictures = opened(2, "staircase"), list[np.ndarray]()
        pipeline.set_frame_credit(0, 100 * CHUNK)
        while pipeline.scheduler.next_chunk(0) < 5:  # however far decoding is
            pictures += drawn(pipeline.step())
        pipeline.set_steps(0, 2, epoch=6)
        change(pipeline)
        assert pipeline.changes, "it waits for what is in flight"
        return pipeline, pictures

    plain, expected = asked()
    play(plain, expected, CHUNKS * CHUNK)
    plain.close()
    pipeline, pictures = asked()
    pictures += saved(pipeline, tmp_path / "s")
    pipeline.close()
    other = started(1)
    pictures += drawn(other.resting.load(2, Snapshot.from_bytes(mapped(tmp_path / "s"))), 2)
    play(other, pictures, CHUNKS * CHUNK, 2)
    other.close()
    assert np.array_equal(np.stack(pictures[: CHUNKS * CHUNK]), np.stack(expected[: CHUNKS * CHUNK]))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snapshot]:
    path = tmp_path_factory.mktemp("snapshot") / "session.safetensors"
    pipeline = opened(1, "same_step")
    play(pipeline, [], CHUNK)
    saved(pipeline, path)
    pipeline.close()
    yield Snapshot.from_bytes(mapped(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (replace(MODEL, spec=replace(MODEL.spec, width=64)), "width is 16 in the snapshot, but 64 here"),
        (replace(MODEL, spec=replace(MODEL.spec, window_latents=8)), "window_latents is 6 in the snapshot, but 8 here"),
        (
            replace(small_model(5, layers=4, sink=2), spec=MODEL.spec),
            "the snapshot is of other weights than those that are loaded",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(snapshot: Snapshot, model: Model, reason: str) -> None:
    pipeline = started(2, model)
    with pytest.raises(RequestError) as refusal:
        pipeline.resting.load(0, snapshot)
    assert refusal.value.field == "snapshot" and reason in str(refusal.value)
    pipeline.open(0, pipeline.text.encode(RED), seed=1, epoch=9, steps=4, kv_context="clean")
    play(pipeline, [], CHUNK)  # the slot is free, and the ring goes on
    pipeline.close()
