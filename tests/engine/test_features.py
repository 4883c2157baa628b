"""Features that were made elsewhere: the same frames as of what they stand for, no encoder asked, kept over resets,
swaps and snapshots, and never another session's. Start pictures: encoded beside the loop, kept over resets, refused
without harm."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from streamdiff.commands.convert import encode_clip
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import (
    Accepted,
    Close,
    Command,
    Event,
    FrameBatch,
    InputFrames,
    LoadFigures,
    Open,
    Opened,
    Pictures,
    Refused,
    Reset,
    SetActive,
    SetInput,
    SetPrompt,
    Shown,
    Swapped,
)
from streamdiff.models.autoencoder.autoencoder import ImageEncoder
from streamdiff.models.headers import MOTION, NORMALISED
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from streamdiff.session_state.swap_store import SwapStore
from tests.engine.painted import CHUNK_FRAMES, SIZE, PaintedPipeline, checksum
from tests.engine.test_prompt_queue import tell
from tests.saving import saved
from tests.small import BLUE, CPU, RED, WHITE, small_encoder, small_model

MODEL = small_model(4, sink=2, window=8)
SPEC = MODEL.spec
FRAMES = SPEC.chunk_frames
CHUNKS = 4


def embeds(text: str) -> bytes:
    """A file of a text's embeddings, without the rows of zeros behind them."""
    rows = MODEL.text.encode(text)
    used = int(rows.abs().sum(1).nonzero().max()) + 1
    return save({"prompt_embeds": rows[:used].clone()})


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (1, SPEC.height, SPEC.width, 3), np.uint8)


def noise(seed: int, chunks: int = 1) -> Tensor:
    return 2 * torch.randn((chunks, *SPEC.chunk_shape), generator=torch.Generator().manual_seed(seed))


def picture_latents(seed: int) -> bytes:
    return save({"latents": noise(seed)}, NORMALISED)


def video_latents(seed: int, chunks: int = 3) -> bytes:
    return save({"latents": noise(seed, chunks)}, NORMALISED)


class Place:
    """An engine, and what its sessions have shown."""

    def __init__(self, stages: int = 1) -> None:
        parts = local_parts(MODEL, CPU, stages)
        for stage in (parts.stage, *(worker.stage for worker in parts.local)):
            stage.swaps = SwapStore(CPU, None, None)
        encoder = ImageEncoder(lambda: small_encoder(4), SPEC)
        self.pipeline = StreamingPipeline(MODEL, CPU, parts=parts, pictures=encoder)
        self.engine = Engine(self.pipeline, 2 * FRAMES)
        self.shown: dict[str, list[np.ndarray]] = {}
        self.encodings: tuple[int, ...] = (0, 0, 0)
        self.made: dict[str, int] = {}
        self.held: set[str] = set()

    def hold(self, session: str, held: bool) -> None:
        """Watch a session no longer, so that it is swapped out, or watch it again. Mutates: self."""
        (self.held.add if held else self.held.discard)(session)
        self.take(self.engine.handle(SetActive(session, not held, swap_out=held)))
        if not held:
            self.engine.handle(Shown(session, self.made.get(session, 0)))

    def take(self, events: list[Event]) -> list[Event]:
        """Answers; frames are shown at once. Mutates: self."""
        for event in events:
            if isinstance(event, FrameBatch):
                self.shown.setdefault(event.session, []).extend(event.pictures)
                self.made[event.session] = event.first + len(event.pictures)
                if event.session not in self.held:
                    self.engine.handle(Shown(event.session, self.made[event.session]))
            elif isinstance(event, LoadFigures):
                self.encodings = event.encodings
        return [event for event in events if not isinstance(event, FrameBatch | LoadFigures)]

    def ask(self, *commands: Command) -> list[Event]:
        answers = [answer for command in commands for answer in self.take(self.engine.handle(command))]
        while encodings := self.engine.encodings():
            futures.wait(encodings, 60)
            answers += self.take(self.engine.settle())
        return answers

    def play(self, session: str, chunks: int = CHUNKS) -> np.ndarray:
        """The session's next chunks; what others show meanwhile is kept."""
        begin = len(self.shown.setdefault(session, []))
        while len(self.shown[session]) < begin + chunks * FRAMES:
            self.take(self.engine.step(0.1))
        return np.stack(self.shown[session][begin : begin + chunks * FRAMES])

    def alone(self, command: Open, chunks: int = CHUNKS) -> np.ndarray:
        """What a session shows from its beginning; it is closed then."""
        assert [type(event) for event in self.ask(command)] == [Opened]
        self.shown.pop(command.session, None)
        frames = self.play(command.session, chunks)
        self.ask(Close(command.session))
        return frames


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.engine.close()


def differ(one: np.ndarray, other: np.ndarray) -> bool:
    return not np.array_equal(one, other)


@pytest.mark.slow
def test_a_prompts_embeddings_show_what_the_prompt_shows_and_no_text_is_encoded(place: Place) -> None:
    given = place.alone(Open("a", "", seed=3, kv_context="staircase", prompt_embeds=embeds(RED)))
    assert place.encodings == (0, 0, 0)
    assert np.array_equal(given, place.alone(Open("a", RED, seed=3, kv_context="staircase")))
    assert place.encodings == (1, 0, 0)
    assert differ(given, place.alone(Open("a", "", seed=3, kv_context="staircase", prompt_embeds=embeds(BLUE))))


@pytest.mark.slow
def test_a_pictures_latents_begin_the_stream_as_the_picture_does(place: Place) -> None:
    latents = place.pipeline.encode_picture(pixels(1)[0])
    file = save({"latents": latents}, NORMALISED)
    given = place.alone(Open("a", RED, image_latents=file))
    assert place.encodings[1] == 0
    assert np.array_equal(given, place.alone(Open("a", RED, image=pixels(1))))
    assert place.encodings[1] == 1
    assert differ(given, place.alone(Open("a", RED)))


def test_a_videos_latents_are_followed_as_the_video_itself_is(place: Place) -> None:
    """The file says how its pixels move, as `streamdiff encode` writes it."""
    video = np.random.default_rng(2).integers(0, 256, (3 * FRAMES, SPEC.height, SPEC.width, 3), np.uint8)
    clip = torch.from_numpy(video).movedim(3, 0).float() / 127.5 - 1
    latents, moved = encode_clip(small_encoder(4), iter([clip]), tqdm(disable=True))
    file = save({"latents": latents.contiguous()}, {**NORMALISED, MOTION: moved})
    given = place.alone(Open("a", RED, seed=5, video_latents=file, strength=0.5), 3)
    assert place.encodings[2] == 0

    place.ask(Open("b", RED, seed=5), SetInput("b", 0.5))
    shown = []
    for chunk in range(3):
        place.ask(InputFrames("b", video[chunk * FRAMES : (chunk + 1) * FRAMES]))
        shown.append(place.play("b", 1))
    assert place.encodings[2] > 0
    fed = np.concatenate(shown)
    assert np.abs(given.astype(int) - fed).max() <= 1, "motion is written with nine digits"
    assert differ(given, place.alone(Open("a", RED, seed=5), 3))


@pytest.mark.slow
def test_behind_the_videos_end_chunks_start_from_noise_and_a_reset_begins_it_again(place: Place) -> None:
    opened = Open("a", RED, seed=5, kv_context="staircase", video_latents=video_latents(1, 2))
    whole = place.alone(opened, 5)
    longer = place.alone(Open("a", RED, seed=5, kv_context="staircase", video_latents=video_latents(1, 3)), 5)
    two = 2 * FRAMES
    assert np.array_equal(whole[:two], longer[:two]) and differ(whole[two : two + FRAMES], longer[two : two + FRAMES])
    place.ask(opened)
    place.play("a", 3)
    place.ask(Reset("a"))
    place.shown["a"].clear()
    assert np.array_equal(place.play("a", 5), whole)


@pytest.mark.slow
def test_a_prompt_takes_the_place_of_embeddings_and_a_picture_that_of_a_video(place: Place) -> None:
    place.ask(Open("a", "", prompt_embeds=embeds(RED), video_latents=video_latents(1)), SetPrompt("a", BLUE))
    place.ask(Reset("a", 7))
    place.shown["a"] = []
    assert np.array_equal(place.play("a"), place.alone(Open("b", BLUE, seed=7, video_latents=video_latents(1))))
    place.ask(Reset("a", 7, image=pixels(1)))
    place.shown["a"] = []
    assert np.array_equal(place.play("a"), place.alone(Open("b", BLUE, seed=7, image=pixels(1))))


def test_a_live_input_takes_the_place_of_a_video(place: Place) -> None:
    place.ask(Open("a", RED, video_latents=video_latents(1)), SetInput("a", 0.5))
    place.take(place.engine.step(0.0))
    place.ask(SetInput("a", None), Reset("a", 7))
    place.shown["a"] = []
    assert np.array_equal(place.play("a"), place.alone(Open("b", RED, seed=7)))


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", ["staircase", "same_step"])
def test_a_snapshot_has_them(place: Place, kv_context: str) -> None:
    """Taken in mid-stream while the video lasts; it goes on elsewhere to the bit, and begins there as it began here."""
    opened = Open("a", "", seed=4, kv_context=kv_context, prompt_embeds=embeds(RED), video_latents=video_latents(1, 4))
    whole = place.alone(opened, 6)
    place.ask(opened)
    place.shown["a"] = []
    place.play("a", 2)
    snapshot = saved(place.engine, "a", place.take)
    begin = place.shown["a"][: snapshot.about["session"]["made_frames"]]
    other = Place(2)
    try:
        other.take(other.engine.handle(Open("b", "", snapshot=snapshot.to_bytes(), kv_context=None)))
        other.shown["b"] = list(begin)
        other.play("b", 3)
        assert np.array_equal(np.stack(other.shown["b"][: 5 * FRAMES]), whole[: 5 * FRAMES])
        other.ask(Reset("b"))
        other.shown["b"] = []
        assert np.array_equal(other.play("b", 2), whole[: 2 * FRAMES])
        assert other.encodings == (0, 0, 0)
        picture = np.zeros((1, SPEC.height, SPEC.width, 3), np.uint8)
        other.ask(Close("b"), Open("c", "", snapshot=snapshot.to_bytes(), kv_context=None, image=picture))
        assert other.engine._prompt_queue.texts_encoded == 0, "there is no text"
    finally:
        other.engine.close()


def test_a_snapshot_has_a_pictures_latents_for_resets(place: Place) -> None:
    opened = Open("a", "", seed=4, prompt_embeds=embeds(WHITE), image_latents=picture_latents(3))
    whole = place.alone(opened)
    place.ask(opened)
    place.play("a", 1)
    snapshot = saved(place.engine, "a")
    place.ask(Close("a"), Open("b", "", snapshot=snapshot.to_bytes()), Reset("b"))
    place.shown["b"] = []
    assert np.array_equal(place.play("b"), whole)


COMPARED = 4
"""Chunks of each session."""
KINDS: dict[str, dict[str, Any]] = {
    "embeds": {"prompt_embeds": embeds(BLUE)},
    "text": {"prompt": WHITE},
    "image": {"prompt": RED, "image_latents": picture_latents(5)},
    "video": {"prompt_embeds": embeds(RED), "video_latents": video_latents(6, 40), "strength": 0.4},
    "another video": {"prompt": RED, "video_latents": video_latents(7, 40)},
}


def opening(name: str, kind: str, seed: int) -> Open:
    return Open(name, **({"prompt": ""} | KINDS[kind]), seed=seed)


@pytest.mark.slow
def test_they_are_never_mixed_between_sessions(place: Place) -> None:
    """Sessions of all kinds are opened, closed, swapped out and in and begun afresh in a random order, in few slots
    that are used again and again; each shows what it shows alone."""
    wanted = {kind: place.alone(opening("alone", kind, 3), COMPARED) for kind in KINDS}
    rng, names, open_ = random.Random(1), iter(range(10_000)), dict[str, str]()
    acts = checked = places = 0

    def check(name: str) -> int:
        frames = place.shown[name][: COMPARED * FRAMES]
        same = not frames or np.array_equal(np.stack(frames), wanted[open_[name]][: len(frames)])
        assert same, f"{name}, {open_[name]}"
        return len(frames)

    while acts < 35 or checked <= 100 or places <= 5:  # how soon a swap is done depends on the machine
        acts += 1
        act = rng.choice(("open", "close", "swap", "swap", "reset"))
        name = rng.choice(list(open_)) if open_ else ""
        if (act == "open" and len(open_) < 4) or not open_:
            name, kind = f"s{next(names)}", rng.choice(list(KINDS))
            place.ask(opening(name, kind, 3))
            open_[name], place.shown[name] = kind, []
        elif act == "close":
            checked += check(name)
            place.ask(Close(name))
            place.held.discard(name)
            del open_[name]
        elif act == "swap":
            place.hold(name, name not in place.held)
        elif act == "reset" and name not in place.held:
            checked += check(name)
            place.ask(Reset(name))
            place.shown[name] = []
        for _ in range(12):
            places += sum(isinstance(event, Swapped) for event in place.take(place.engine.step(0.0)))
    for name in open_:
        check(name)


def test_what_cannot_be_together_or_does_not_fit_is_refused_by_name(place: Place) -> None:
    bad = save({"latents": noise(1)[:, :, :, :2].contiguous()})
    for opened, field, words in (
        (Open("a", RED, prompt_embeds=embeds(RED)), "prompt_embeds", "stand for the prompt"),
        (Open("a", RED, image=pixels(1), image_latents=picture_latents(1)), "image_latents", "stand for the picture"),
        (Open("a", RED, image=pixels(1), video_latents=video_latents(1)), "video_latents", "not both"),
        (Open("a", RED, video_latents=video_latents(1), strength=0.0), "strength", "above 0"),
        (Open("a", RED, image_latents=bad), "image_latents", f"got {[1, *SPEC.chunk_shape[:2], 2, 4]}"),
        (Open("a", RED, image_latents=save({"latents": noise(1) / 0})), "image_latents", "finite"),
        (Open("a", "", prompt_embeds=b"x"), "prompt_embeds", "expected tensors"),
    ):
        [refused] = place.ask(opened)
        assert isinstance(refused, Refused) and refused.field == field and words in refused.reason, refused
        assert not place.engine._sessions
    assert place.alone(Open("a", RED)).size


def picture(value: int) -> Pictures:
    return np.full((1, SIZE, SIZE, 3), value, np.uint8)


class Held(PaintedPipeline):
    """Encodes no picture before it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.let = threading.Event(), threading.Event()

    def encode_picture(self, picture: Pictures) -> Pictures:
        self.begun.set()
        assert self.let.wait(240)
        return super().encode_picture(picture)


def first_frames(
    engine: Engine, session: str, count: int = 2 * CHUNK_FRAMES, answers: list[Event] | None = None
) -> list[np.ndarray]:
    """The next frames of a session, shown at once; answers that come meanwhile are added to `answers`."""
    frames: list[np.ndarray] = []
    while len(frames) < count:
        for event in engine.step():
            if answers is not None and isinstance(event, Opened | Accepted):
                answers.append(event)
            if isinstance(event, FrameBatch):
                engine.handle(Shown(event.session, event.first + len(event.pictures)))
                if event.session == session:
                    frames += list(event.pictures)
    return frames


@pytest.fixture
def engine() -> Engine:
    return Engine(PaintedPipeline(), 2 * CHUNK_FRAMES)


def test_other_sessions_go_on_while_a_picture_is_encoded_and_its_own_requests_wait() -> None:
    pipeline = Held()
    engine = Engine(pipeline, 2 * CHUNK_FRAMES)
    engine.handle(Open("other", "red"))
    assert engine.handle(Open("a", "red", image=picture(77))) == []
    assert pipeline.begun.wait(240)
    assert len(first_frames(engine, "other", 5 * CHUNK_FRAMES)) >= 5 * CHUNK_FRAMES
    assert engine.handle(SetPrompt("a", "blue", "p")) == []
    pipeline.let.set()
    answers: list[Event] = []
    frames = first_frames(engine, "a", answers=answers)
    while len(answers) < 2:  # a text is read beside the stream
        frames += first_frames(engine, "a", answers=answers)
    frames += first_frames(engine, "a", 4 * CHUNK_FRAMES)
    assert [type(event) for event in answers] == [Opened, Accepted]
    assert (frames[0] == 77).all() and frames[-1][0, 0, 2] == checksum("blue")


def test_a_picture_that_cannot_be_encoded_refuses_the_request_alone(engine: Engine) -> None:
    [refused] = tell(engine, Open("a", "red", image=picture(13)))
    assert isinstance(refused, Refused) and refused.field == "image"
    assert refused.reason == "the picture could not be encoded: the painter cannot look at this"
    tell(engine, Open("a", "red", image=picture(77)))
    [refused] = tell(engine, Reset("a", None, "r", picture(13)))
    assert isinstance(refused, Refused) and (refused.field, refused.request) == ("image", "r")
    assert (first_frames(engine, "a")[0] == 77).all(), "the stream goes on"


@pytest.mark.parametrize("shape", [(1, 8, 8, 3), (SIZE, SIZE, 3), (2, SIZE, SIZE, 3)])
def test_a_picture_of_another_size_is_refused(engine: Engine, shape: tuple[int, ...]) -> None:
    [refused] = engine.handle(Open("a", "red", image=np.zeros(shape, np.uint8)))
    assert isinstance(refused, Refused) and refused.field == "image"
    assert f"[1, {SIZE}, {SIZE}, 3]" in refused.reason
