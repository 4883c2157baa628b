"""Wherever latents are decoded, the pictures are the same; what goes wrong there is raised where the head looks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from streamdiff.pipeline.decoding import (
    DecodeWorker,
    Decoding,
    LocalDecoding,
    Piece,
    RemoteDecoding,
    latents_wire,
    pictures_wire,
)
from streamdiff.pipeline.links import LinkClosed, LocalLink
from tests.small import small_model

MODEL = small_model(2)
SPEC = MODEL.spec
LIMIT_S = 60.0
Wake = Callable[[], None]


def local(deliver: Callable[[Piece], None], wake: Wake) -> Iterator[Decoding]:
    assert MODEL.decoder is not None
    decoding = LocalDecoding(MODEL.decoder, deliver, wake)
    yield decoding
    decoding.close()


def remote(deliver: Callable[[Piece], None], wake: Wake) -> Iterator[Decoding]:
    """The two ends in two threads."""
    assert MODEL.decoder is not None
    there, back = LocalLink(latents_wire(SPEC)), LocalLink(pictures_wire(SPEC))
    worker = threading.Thread(target=DecodeWorker(MODEL.decoder, there, back).run)
    worker.start()
    decoding = RemoteDecoding(there, back, SPEC, deliver, wake)
    yield decoding
    decoding.close()
    worker.join(LIMIT_S)
    assert not worker.is_alive()


class Heard:
    """What was delivered."""

    def __init__(self) -> None:
        self.pieces: SimpleQueue[Piece] = SimpleQueue()

    def chunk(self) -> tuple[int, int, np.ndarray]:
        """Stream, number and pictures of the next chunk."""
        pieces = [self.pieces.get(timeout=LIMIT_S)]
        while not pieces[-1].last:
            pieces.append(self.pieces.get(timeout=LIMIT_S))
        assert len({(piece.stream, piece.chunk) for piece in pieces}) == 1, "one chunk at a time"
        return pieces[0].stream, pieces[0].chunk, np.concatenate([piece.pictures for piece in pieces])


@pytest.fixture(params=[local, remote])
def heard(request: pytest.FixtureRequest) -> Iterator[tuple[Decoding, Heard]]:
    heard = Heard()
    for decoding in request.param(heard.pieces.put, lambda: None):
        yield decoding, heard


def latents(number: int) -> torch.Tensor:
    return torch.randn(SPEC.chunk_shape, generator=torch.Generator().manual_seed(number))


def test_pictures_are_those_of_the_whole_stream(heard: tuple[Decoding, Heard]) -> None:
    """Two streams in turn; one of them ends and its number is used again, with a fresh memory."""
    decoding, out = heard
    assert MODEL.decoder is not None
    whole = {
        stream: MODEL.decoder.decode(
            torch.cat([latents(10 * stream + chunk) for chunk in range(3)], 1)[None], MODEL.decoder.new_memory()
        ).numpy()
        for stream in (0, 1)
    }
    got: dict[int, list[np.ndarray]] = {0: [], 1: []}
    for chunk in range(3):
        for stream in (0, 1):
            decoding.submit(stream, chunk, latents(10 * stream + chunk))
            *whose, shown = out.chunk()
            assert whose == [stream, chunk]
            got[stream].append(shown)
    for stream in (0, 1):
        assert np.array_equal(np.concatenate(got[stream]), whole[stream])
    decoding.forget(0)
    decoding.submit(0, 0, latents(0))
    assert np.array_equal(out.chunk()[2], got[0][0])
    decoding.check()


class Broken:
    """A decoder that fails."""

    def new_memory(self) -> None: ...

    def decode(self, latents: torch.Tensor, memory: Any) -> torch.Tensor:
        raise ArithmeticError("the test's own fault")


def test_an_error_of_the_decoder_is_raised_where_the_head_looks() -> None:
    woken = threading.Event()
    decoding = LocalDecoding(Broken(), lambda piece: None, woken.set)
    decoding.submit(0, 0, latents(0))
    assert woken.wait(LIMIT_S)
    with pytest.raises(ArithmeticError, match="own fault"):
        decoding.check()
    decoding.close()


def test_a_decoding_rank_that_is_gone_is_noticed() -> None:
    there, back = LocalLink(latents_wire(SPEC)), LocalLink(pictures_wire(SPEC))
    woken = threading.Event()
    decoding = RemoteDecoding(there, back, SPEC, lambda piece: None, woken.set)
    back.close()
    assert woken.wait(LIMIT_S)
    with pytest.raises(LinkClosed):
        decoding.check()
    decoding.close()
