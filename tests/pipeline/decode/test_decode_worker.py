"""Wherever latents are decoded, the pictures are the same; what goes wrong there is raised where the head looks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch

from streamdiff.models.autoencoder.picture_decoder import PictureDecoder
from streamdiff.pipeline.decode.decode_worker import (
    DecodeWorker,
    Decoding,
    Piece,
    latents_layout,
    pictures_layout,
)
from streamdiff.pipeline.decode.decoder_memories import TransferStream, decode_chunk
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.distributed.state_exchange import LocalExchange
from tests.pipeline.distributed.local_link import LocalLink
from tests.small import AUTOENCODER, CPU, small_autoencoder, small_decoder, small_model

MODEL = small_model(2)
SPEC = MODEL.spec
LIMIT_S = 240.0
Wake = Callable[[], None]


def local(deliver: Callable[[Piece], None], wake: Wake, at_once: int) -> Iterator[Decoding]:
    assert MODEL.decoder is not None
    decoding = Decoding.here(MODEL.decoder, deliver, wake, at_once=at_once)
    yield decoding
    decoding.close()


def remote(deliver: Callable[[Piece], None], wake: Wake, at_once: int) -> Iterator[Decoding]:
    """The two ends in two threads."""
    assert MODEL.decoder is not None
    there, back = LocalLink(latents_layout(SPEC)), LocalLink(pictures_layout(SPEC))
    exchange = LocalExchange()
    worker = threading.Thread(target=DecodeWorker(MODEL.decoder, there, back, at_once=at_once, exchange=exchange).run)
    worker.start()
    decoding = Decoding.elsewhere(there, back, deliver, wake, exchange)
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
        assert len(pieces) == SPEC.chunk_latents, "a piece per latent frame, however many a call decodes"
        return pieces[0].stream, pieces[0].chunk, np.concatenate([piece.pictures for piece in pieces])


@pytest.fixture(params=[1, 2], ids=["one latent frame a call", "the chunk in a call"])
def at_once(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[local, remote])
def heard(request: pytest.FixtureRequest, at_once: int) -> Iterator[tuple[Decoding, Heard]]:
    heard = Heard()
    for decoding in request.param(heard.pieces.put, lambda: None, at_once):
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


def test_latents_that_are_no_numbers_end_their_stream_and_no_other(heard: tuple[Decoding, Heard]) -> None:
    decoding, out = heard
    bad = latents(1)
    bad[0, 1, 2, 3] = torch.nan
    for stream, given in enumerate((latents(0), bad, latents(0))):
        decoding.submit(stream, 4, given)
    first = out.chunk()[2]
    failed = out.pieces.get(timeout=LIMIT_S)
    assert (failed.stream, failed.chunk, failed.last) == (1, 4, True)
    assert failed.fault == "decoding chunk 4: ArithmeticError: its latents are no numbers (NaN or infinite)"
    assert np.array_equal(out.chunk()[2], first)
    decoding.check()


class Broken:
    """A decoder that fails."""

    temporal = 4
    network = MODEL.decoder.network if MODEL.decoder is not None else None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def new_memory(self) -> None: ...

    def decode(self, latents: torch.Tensor, memory: Any) -> torch.Tensor:
        raise self.error


def test_what_one_stream_alone_meets_is_told_and_a_fault_of_the_program_raised_where_the_head_looks() -> None:
    woken, heard = threading.Event(), Heard()
    decoder = Broken(MemoryError("no memory for this stream"))
    decoding = Decoding.here(decoder, heard.pieces.put, woken.set)  # type: ignore[arg-type]
    decoding.submit(0, 0, latents(0))
    assert heard.pieces.get(timeout=LIMIT_S).fault.endswith("MemoryError: no memory for this stream")
    assert not woken.is_set()
    decoder.error = TypeError("the test's own fault")
    decoding.submit(1, 0, latents(0))
    assert woken.wait(LIMIT_S)
    with pytest.raises(TypeError, match="own fault"):
        decoding.check()
    decoding.close()


def test_a_decoding_rank_that_is_gone_is_noticed() -> None:
    there, back = LocalLink(latents_layout(SPEC)), LocalLink(pictures_layout(SPEC))
    woken = threading.Event()
    decoding = Decoding.elsewhere(there, back, lambda piece: None, woken.set, LocalExchange())
    back.close()
    assert woken.wait(LIMIT_S)
    with pytest.raises(LinkClosed):
        decoding.check()
    decoding.close()


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
def test_a_first_latent_frame_that_shows_less_is_a_piece_of_its_own(at_once: int) -> None:
    """As Wan's: one frame for the first latent frame of a stream, four for each later one."""
    autoencoder = small_autoencoder(3, replace(AUTOENCODER, frames_to_trim=3))
    decoder = PictureDecoder(small_decoder(autoencoder, torch.zeros(4), torch.ones(4)))
    chunks = [torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    whole, memory = decoder.decode(torch.cat(chunks, 1)[None], decoder.new_memory()), decoder.new_memory()
    pieces = [
        each.clone() for chunk in chunks for each in decode_chunk(decoder, chunk, memory, TransferStream(CPU), at_once)
    ]
    assert [len(piece) for piece in pieces] == [1, 4, 4, 4, 4, 4]
    assert torch.equal(torch.cat(pieces), whole)
