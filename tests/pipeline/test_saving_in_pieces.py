"""A session is saved beside others, a piece with each turn: nobody waits for it, and what is saved is of one moment."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.pipeline.decode import decoder_memories
from streamdiff.pipeline.decode.decode_worker import Decoding, Piece
from streamdiff.pipeline.distributed import state_exchange
from streamdiff.pipeline.distributed.message import MessageKind, Outcome, SessionUpdate, StageMessage
from streamdiff.pipeline.distributed.state_exchange import LocalExchange, State
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.snapshot.file import Snapshot
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.test_swapping import CHUNK, CHUNKS, CONTEXTS, MODEL, Streams, alone, opened, stages_of
from tests.small import BLUE, CPU, RED


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_exchange, "_LEAST_BYTES", 1)


class Saving:
    """Two sessions, the first of which is saved once two chunks of both were shown; `between` is called when its parts
    are half copied."""

    def __init__(self, kv_context: str, stages: int, between: Callable[[StreamingPipeline], None] = lambda _: None):
        self.pipeline = StreamingPipeline(MODEL, CPU, parts=local_parts(MODEL, CPU, stages))
        opened(self.pipeline, kv_context)
        self.streams = Streams(self.pipeline)
        self.streams.play(2, 0, 1)
        while not self.pipeline.resting.comes_to_rest(0):
            self.turn()
        self.before = len(self.streams.pictures[0])
        self.ticket = self.pipeline.resting.save(0)
        self.turns = self.made_by_the_other = 0
        saved: list[tuple[int, Any]] = []
        while not saved:
            held, at = self.pipeline.scheduler.session(0).held, self.other_is_at
            self.turns += held
            self.turn()
            self.made_by_the_other += held and self.other_is_at != at
            if self.turns == 2:
                between(self.pipeline)
            saved = self.pipeline.resting.take_done()
        [(ticket, self.saved)] = saved
        assert ticket == self.ticket and self.pipeline.resting.take_done() == []

    @property
    def other_is_at(self) -> tuple[int, list[int]]:
        """Chunks of the other session, and the forwards that entered of those in flight."""
        chunks = self.pipeline.scheduler.session(1).chunks
        return self.pipeline.scheduler.next_chunk(1), [chunk.entered for chunk in chunks]

    def turn(self) -> None:
        for session in (0, 1):
            self.pipeline.set_frame_credit(session, 6 * CHUNK)
        self.streams.take(self.pipeline.step(0.01))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_context", "stages"),
    [
        ("clean", 1),
        *((context, 3) for context in CONTEXTS),
        *(pytest.param(context, 1, marks=pytest.mark.soak) for context in CONTEXTS[1:]),
    ],
)
def test_it_is_copied_by_and_by_while_another_session_plays(kv_context: str, stages: int) -> None:
    """And goes on; from the snapshot the same stream goes on, in mid-chunk."""
    place = Saving(kv_context, stages)
    assert place.turns >= 4, "a piece with each turn"
    assert place.made_by_the_other >= place.turns // 3, "the other one is not held meanwhile"
    streams = place.streams
    streams.play(CHUNKS, 0, 1)
    for session in (0, 1):
        assert np.array_equal(streams.shown(session), alone(kv_context).shown(session)), f"session {session}"
    assert isinstance(place.saved, Snapshot)
    place.pipeline.close_session(0)
    streams.pictures[0] = list(alone(kv_context).shown(0)[: place.before])
    streams.take(place.pipeline.resting.load(0, place.saved))
    streams.play(CHUNKS, 0)
    assert np.array_equal(streams.shown(0), alone(kv_context).shown(0))
    place.pipeline.close()


def changed(pipeline: StreamingPipeline) -> None:
    pipeline.set_conditioning(0, pipeline.text.encode(BLUE), epoch=6, switch="flush")


@pytest.mark.slow
def test_a_prompt_that_comes_while_it_is_copied_is_not_in_it() -> None:
    place = Saving("same_step", 2, changed)
    place.pipeline.close_session(0)
    streams = place.streams
    streams.pictures[0] = list(alone("same_step").shown(0)[: place.before])
    streams.take(place.pipeline.resting.load(0, place.saved))
    streams.play(CHUNKS, 0)
    place.pipeline.close()
    assert np.array_equal(streams.shown(0), alone("same_step").shown(0))


def reset(pipeline: StreamingPipeline) -> None:
    pipeline.reset(0, pipeline.text.encode(RED), seed=3, epoch=6)


def closed(pipeline: StreamingPipeline) -> None:
    pipeline.close_session(0)
    pipeline.open(0, pipeline.text.encode(RED), seed=3, epoch=6, steps=4, kv_context="clean")


@pytest.mark.slow
@pytest.mark.parametrize(("change", "why"), [(reset, "restarted meanwhile"), (closed, "ended meanwhile")])
def test_what_ends_or_begins_afresh_while_it_is_copied_is_not_saved(
    change: Callable[[StreamingPipeline], None], why: str
) -> None:
    """And the stream that is there then is not held, nor another one damaged."""
    place = Saving("clean", 2, change)
    assert isinstance(place.saved, ConfigError) and why in str(place.saved)
    place.streams.pictures[0].clear()
    place.streams.play(CHUNKS, 0, 1)
    for session in (0, 1):
        assert np.array_equal(place.streams.shown(session), alone("clean").shown(session)), f"session {session}"
    assert not place.pipeline.stage.exchange._states, "nothing is left behind"  # type: ignore[attr-defined]
    place.pipeline.close()


def test_a_session_that_is_being_copied_is_not_swapped_out() -> None:
    may: list[bool] = []
    place = Saving("clean", 1, lambda pipeline: may.append(pipeline.resting.can_swap_out(0)))
    assert may and not may[0] and place.pipeline.resting.can_swap_out(0)
    made = threading.Event()
    while not place.pipeline.resting.comes_to_rest(0):
        place.turn()
    ticket = place.pipeline.resting.save(0, lambda snapshot: made.wait())
    while place.pipeline.resting.savings[ticket].made is None:
        place.turn()
    assert not place.pipeline.resting.can_swap_out(0), "what its decoder remembers may still be copied"
    made.set()
    place.pipeline.close()


def test_what_a_decoder_remembers_is_copied_by_and_by_and_what_is_decoded_meanwhile_is_not_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder_memories, "_PIECE", 64)

    def remembered(further: bool) -> dict[str, Tensor]:
        """After one chunk; `further` ones of this stream and another follow at once."""
        pieces = SimpleQueue[Piece]()
        assert MODEL.decoder is not None
        decoding = Decoding.here(MODEL.decoder, pieces.put, lambda: None)
        chunk = torch.ones(MODEL.spec.chunk_shape)
        decoding.submit(0, 0, chunk)
        saved = decoding.save(0)
        for stream in (1, 0, 1) if further else ():
            decoding.submit(stream, 0, 2 * chunk)
        state = saved()
        decoding.close()
        return dict(state[0])

    alone, beside = remembered(False), remembered(True)
    assert alone.keys() == beside.keys() and sum(tensor.nbytes for tensor in alone.values()) > 10 * 64
    assert all(torch.equal(alone[name], beside[name]) for name in alone)


def begun_afresh(stage: ModelRunner) -> None:
    stage.reset(0)


def broken(stage: ModelRunner) -> None:
    stage.guard.broken[0] = "its text is none"
    stage.carry_out(StageMessage(MessageKind.COPY_OUT, (), SessionUpdate(0, 7, saved=True)))


@pytest.mark.parametrize("change", [begun_afresh, broken])
def test_a_copy_that_is_not_wanted_any_more_is_dropped(change: Callable[[ModelRunner], None]) -> None:
    stage = ModelRunner(MODEL, CPU, 0, 1)
    stage.open(0, steps=4, kv_context="clean")
    assert stage.mover.copy_out(SessionUpdate(0, 7, saved=True)) is Outcome.NOT_YET
    copy = stage.mover._copying[0].copy
    assert copy is not None
    kept = weakref.ref(copy)
    del copy
    change(stage)
    gc.collect()
    assert kept() is None


class NoRoom(LocalExchange):
    """What cannot pass on what is saved."""

    def put(self, name: str, state: State) -> None:
        if "broken" not in state[1]:
            raise MemoryError("no room")
        super().put(name, state)


def test_a_part_that_a_stage_cannot_send_is_told_by_name() -> None:
    def full(pipeline: StreamingPipeline) -> None:
        own, exchange = stages_of(pipeline)[1], NoRoom()
        exchange._states = own.exchange._states  # type: ignore[attr-defined]
        own.exchange = exchange

    place = Saving("clean", 2, full)
    assert isinstance(place.saved, ConfigError) and "could not be sent: MemoryError: no room" in str(place.saved)
    place.pipeline.close()
