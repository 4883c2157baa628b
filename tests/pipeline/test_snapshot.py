"""A session that was saved goes on from the file, to the bit, as if it had never been away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

from streamdiff.core import Frames
from streamdiff.device import embedded_autoencoder_dtype
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import FrameBatch, Open, Reset
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.autoencoder.autoencoder import ImageEncoder
from streamdiff.models.model import Model
from streamdiff.models.tiny.model import WEIGHTS, load_model
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.snapshot.file import Snapshot
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.snapshot_header import check_signature, signed
from tests.pipeline import snapshot_process as process
from tests.pipeline.processes import run_ranks
from tests.small import BLUE, CPU, RED, WHITE, small_encoder, small_model

MODEL = small_model(4, layers=4, sink=2)
CHUNK = MODEL.spec.chunk_frames
CONTEXTS = ("clean", "staircase", "same_step")
CHUNKS, SAVED_AT = 7, 3


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
    snapshot, frames = pipeline.saving.save(0)
    snapshot.write(path)
    return drawn(frames)


def change(pipeline: StreamingPipeline, session: int = 0) -> None:
    pipeline.set_conditioning(session, pipeline.text.encode(BLUE), epoch=6, switch="flush")


def test_a_signature_covers_every_byte_of_header_and_tensors() -> None:
    tensors = {"a": torch.arange(5), "b": torch.tensor(2.0), "c": torch.zeros(0, 3), "d": torch.ones(3, 2).T}
    opened = {"seed": 1, "steps": 4, "next_steps": 4, "epoch": 0, "next_chunk": 0, "kv_context": "clean"}
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
@pytest.mark.parametrize(
    ("kv_context", "stages", "then"),
    [
        ("clean", 1, 3),
        *((context, 4, 1) for context in CONTEXTS),
        *(pytest.param(context, 1, 3, marks=pytest.mark.soak) for context in CONTEXTS[1:]),
    ],
)
def test_a_stream_goes_on_from_its_file(kv_context: str, stages: int, then: int, tmp_path: Path) -> None:
    """In mid-chunk, with micro-steps in the ring; also on another number of stages, beside another session, and the
    session that was saved goes on as well."""
    pipeline, pictures = opened(stages, kv_context), list[np.ndarray]()
    play(pipeline, pictures, SAVED_AT * CHUNK)
    if stages > 1:
        assert pipeline.waiting
    pictures += saved(pipeline, tmp_path / "session.safetensors")
    before = len(pictures)
    play(pipeline, pictures, CHUNKS * CHUNK)
    pipeline.close()
    expected = list[np.ndarray]()
    never = opened(1, kv_context)
    play(never, expected, CHUNKS * CHUNK)
    never.close()
    assert np.array_equal(np.stack(pictures[: CHUNKS * CHUNK]), np.stack(expected[: CHUNKS * CHUNK])), "it was saved"

    snapshot = Snapshot.read(tmp_path / "session.safetensors")
    assert snapshot.session["kv_context"] == kv_context
    other = started(then)
    other.open(1, other.text.encode(WHITE), seed=1, epoch=0, steps=4, kv_context="clean")
    other.set_frame_credit(1, 2 * CHUNK)
    resumed = drawn(other.saving.load(0, snapshot))
    play(other, resumed, CHUNKS * CHUNK - before)
    other.close()
    assert np.array_equal(np.stack(resumed[: CHUNKS * CHUNK - before]), np.stack(expected[before : CHUNKS * CHUNK]))


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
    pictures += drawn(other.saving.load(2, Snapshot.read(tmp_path / "s")), 2)
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
    yield Snapshot.read(path)


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
        pipeline.saving.load(0, snapshot)
    assert refusal.value.field == "snapshot" and reason in str(refusal.value)
    pipeline.open(0, pipeline.text.encode(RED), seed=1, epoch=9, steps=4, kv_context="clean")
    play(pipeline, [], CHUNK)  # the slot is free, and the ring goes on
    pipeline.close()


@pytest.mark.slow
def test_tensors_of_another_size_are_refused_before_any_stage_has_them(snapshot: Snapshot) -> None:
    name = next(name for name in snapshot.tensors if name.endswith("state.value"))
    broken = replace(snapshot, tensors={**snapshot.tensors, name: snapshot.tensors[name][:, :, :1]})
    pipeline = started(2)
    with pytest.raises(RequestError, match=r"StageState\.state\.value is float32 .* in the snapshot, but float32"):
        pipeline.saving.load(0, broken)
    play_after = list[np.ndarray]()
    pipeline.saving.load(0, snapshot)
    play(pipeline, play_after, CHUNK)
    pipeline.close()


def test_a_reset_after_it_begins_with_the_picture_of_before() -> None:
    """In another engine, from the file alone."""
    half = small_encoder(4)
    picture = np.random.default_rng(2).integers(0, 256, (1, MODEL.spec.height, MODEL.spec.width, 3), np.uint8)

    def engine() -> Engine:
        return Engine(StreamingPipeline(MODEL, CPU, pictures=ImageEncoder(lambda: half, MODEL.spec)), 2 * CHUNK)

    def first_frames(engine: Engine) -> np.ndarray:
        """Of the stream after a reset."""
        engine.handle(Reset("a", 7, "reset"))
        made: list[np.ndarray] = []
        while len(made) < CHUNK:
            for event in engine.step(0.1):
                made += list(event.pictures) if isinstance(event, FrameBatch) else []
        engine.close()
        return np.stack(made[:CHUNK])

    one, other = engine(), engine()
    one.handle(Open("a", RED, seed=3, image=picture))
    while not any(isinstance(event, FrameBatch) for event in one.step(0.1)):
        pass
    data = one.save("a")[0].to_bytes()
    other.handle(Open("a", "", snapshot=data))
    assert torch.equal(other._sessions["a"].start, one._sessions["a"].start)
    assert np.array_equal(first_frames(one), first_frames(other))


@pytest.mark.parametrize(
    "metadata",
    [
        None, {"kind": "streamdiff session", "format": "1", "header": "{}"},
        {"kind": "streamdiff session", "format": "2", "header": "{"},
    ],
)  # fmt: skip
def test_a_file_that_is_no_snapshot_is_refused(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(ConfigError):
        Snapshot.read(path)
    path.write_bytes(b"\x80\x04" * 40)
    with pytest.raises(ConfigError):
        Snapshot.read(path)
    save_file({"a": torch.ones(1)}, path, metadata)
    with pytest.raises(ConfigError):
        Snapshot.read(path)


def test_what_cannot_be_written_leaves_nothing(snapshot: Snapshot, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "file", tmp_path):
        with pytest.raises(ConfigError):
            snapshot.write(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "shares", "decode"),
    [
        pytest.param(3, 1, "dedicated", marks=pytest.mark.soak),
        (1, 2, "dedicated"),
    ],
)
def test_between_one_process_and_a_ring_of_processes(tmp_path: Path, stages: int, shares: int, decode: str) -> None:
    """Both ways, with micro-steps in flight; what is saved in the one goes on in the other. Also where ranks share a
    stage, and each has the caches of its own heads."""
    with torch.inference_mode():
        model = load_model(WEIGHTS, CPU, decoder_dtype=embedded_autoencoder_dtype(CPU))
    pipeline, alone = StreamingPipeline(model, CPU), list[np.ndarray]()
    process.opened(pipeline)
    process.play(pipeline, alone, 1)
    alone += saved(pipeline, tmp_path / "alone")
    saved_at, chunk = len(alone), pipeline.info.chunk_frames
    process.play(pipeline, alone, 2 * process.CHUNKS)
    arguments = [str(tmp_path), str(stages), str(shares), decode]
    run_ranks("tests.pipeline.snapshot_process", arguments, stages * shares + (decode == "dedicated"), 200)
    there = np.load(tmp_path / "shown.npz")
    for name, begin in (("first", 0), ("second", saved_at)):
        shown = there[name][: process.CHUNKS * chunk]
        check_alike(shown, np.stack(alone)[begin : begin + len(shown)], shares, name)
    snapshot = Snapshot.read(tmp_path / "ring")
    caches = Snapshot.read(tmp_path / "alone").outline["stages.state.key"].shape
    assert snapshot.outline["stages.state.key"].shape == caches, "all heads are in it"
    here: list[np.ndarray] = process.shown(pipeline.saving.load(7, snapshot), 7)
    process.play(pipeline, here, process.CHUNKS - 2, 7)
    pipeline.close()
    begin = int(there["saved_at"])
    check_alike(np.stack(here), np.stack(alone)[begin : begin + len(here)], shares, "here")


def check_alike(one: np.ndarray, other: np.ndarray, shares: int, name: str) -> None:
    """To the bit; where ranks share sums, within the last one of a picture's bytes."""
    assert len(one) == len(other) > 0
    worst = int(np.abs(one.astype(int) - other.astype(int)).max())
    assert worst <= (shares > 1), f"{name} is {worst} off"
