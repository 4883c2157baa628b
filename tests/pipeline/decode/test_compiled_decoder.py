"""A compiled decoder makes the pictures of the plain one, and nothing that happens to a stream compiles again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, Step, VideoAutoencoder
from streamdiff.models.autoencoder.wan import WanAutoencoder
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS, Decoding, Piece
from streamdiff.pipeline.runner.graphs import one_graph
from tests.pipeline.compiling import COMPILED, TRACED, compiled_by
from tests.pipeline.decode.draining import drain
from tests.small import AUTOENCODER, CPU, small_autoencoder, small_decoder
from tests.small_vae import small_wan_autoencoder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("compiled decoder"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]

TOLERANCE = 1e-5
"""Of what the layers remember, in float32, relative to the largest; the next latent frame moves it by more than 0.1."""
LIMIT_S = 240.0


def taehv() -> tuple[VideoAutoencoder, tuple[int, ...], int]:
    """Published layout's first call: leading frames that are not shown; chunks of 3 in calls of 2 and 1."""
    autoencoder = small_autoencoder(3, type(AUTOENCODER)(**{**vars(AUTOENCODER), "frames_to_trim": 3}))
    return small_decoder(autoencoder, torch.full((4,), 0.2), torch.ones(4)), (4, 3, 4, 4), 2


def wan() -> tuple[VideoAutoencoder, tuple[int, ...], int]:
    """Two levels, one of which stretches time."""
    autoencoder = small_wan_autoencoder(2, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True])
    return WanAutoencoder(autoencoder), (16, 3, 4, 4), 3


class Both(NamedTuple):
    """A decoder, compiled on a thread like that of decoding, and as it is; a chunk's shape, and latent frames in a
    call."""

    compiled: PictureDecoder
    plain: VideoAutoencoder
    shape: tuple[int, ...]
    at_once: int


@pytest.fixture(
    scope="module",
    params=[
        (taehv, TRACED),
        (wan, TRACED),
        pytest.param((taehv, COMPILED), marks=pytest.mark.soak),
        pytest.param((wan, COMPILED), marks=pytest.mark.soak),
    ],
    ids=["taehv", "wan", "taehv-compiled", "wan-compiled"],
)
def both(request: pytest.FixtureRequest) -> Both:
    made, backend = request.param
    plain, shape, at_once = made()
    compiled = PictureDecoder(plain)

    def prepare() -> None:
        torch.set_num_threads(DECODE_THREADS)
        compiled.compile(torch.empty(shape), at_once, one_graph)

    with compiled_by(backend):
        thread = threading.Thread(target=prepare)
        thread.start()
        thread.join()
    return Both(compiled, plain, shape, at_once)


@contextmanager
def nothing_compiled() -> Iterator[None]:
    before = dict(counters["stats"])
    torch.compiler.set_stance("fail_on_recompile")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")
    assert dict(counters["stats"]) == before


def chunks(shape: tuple[int, ...], number: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for _ in range(number)]


def remembered(memory: Any) -> list[torch.Tensor]:
    return list(memory.past.values()) if hasattr(memory, "past") else [f for f in memory.features if f is not None]


def test_after_its_beginning_a_stream_runs_graphs(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def noting(graph: Step) -> Step:
        return lambda piece, past: (ran.append(piece.shape[2]), graph(piece, past))[1]

    assert both.compiled._graphs is not None
    noted = {key: noting(graph) for key, graph in both.compiled._graphs.items()}
    monkeypatch.setattr(both.compiled, "_graphs", noted)
    memory = both.compiled.new_memory()
    with nothing_compiled():
        for chunk in chunks(both.shape):
            for group in chunk.split(both.at_once, 1):
                both.compiled.decode(group[None], memory)
    assert ran == ([3] * 3 if isinstance(both.plain, WanAutoencoder) else [2, 1] * 4)


def test_pictures_and_what_is_remembered_are_those_of_the_plain_decoder(both: Both) -> None:
    """Two streams in turn, both from their beginning."""
    compiled, plain, shape, at_once = both
    memories = [compiled.new_memory(), compiled.new_memory()], [plain.new_memory(), plain.new_memory()]
    differ = total = 0
    with nothing_compiled():
        for chunk in chunks(shape):
            for stream, latents in enumerate((chunk, -chunk)):
                for group in latents.split(at_once, 1):
                    got = compiled.decode(group[None], memories[0][stream]).int()
                    expected = PictureDecoder(plain).decode(group[None], memories[1][stream]).int()
                    assert got.shape == expected.shape and expected.float().std() > 5
                    assert (got - expected).abs().max() <= 1, "a value between two levels may go either way"
                    differ, total = differ + int((got != expected).sum()), total + got.numel()
                own, other = (remembered(each[stream]) for each in memories)
                assert len(own) == len(other) >= 3
                for one, two in zip(own, other, strict=True):
                    assert float((one - two).abs().max()) <= TOLERANCE * float(two.abs().max())
    assert differ <= total / 1000


def test_a_decoding_thread_meets_nothing_that_is_compiled_again(both: Both) -> None:
    """As in the product: latents from outside of inference mode, a stream that ends, and another after it."""
    compiled, plain, shape, at_once = both
    pieces: list[Piece] = []
    decoding = Decoding.here(compiled, pieces.append, lambda: None, CPU, at_once)
    given = chunks(shape)
    with nothing_compiled():
        for stream in (0, 1):
            for number, chunk in enumerate(given):
                decoding.submit(stream, number, chunk)
            decoding.forget(stream)
        drain(decoding)
    decoding.close()
    memory = plain.new_memory()
    expected = [part for chunk in given for part in PictureDecoder(plain).decode(chunk[None], memory).int().numpy()]
    for stream in (0, 1):
        got = [picture for piece in pieces if piece.stream == stream for picture in piece.pictures]
        assert len(got) == len(expected)
        assert max(int(np.abs(one - two).max()) for one, two in zip(got, expected, strict=True)) <= 1


def test_what_no_graph_was_made_for_is_decoded_the_plain_way(both: Both) -> None:
    compiled, plain, shape, _ = both
    larger = torch.randn(1, shape[0], 3, shape[2] + 1, shape[3] + 2, generator=torch.Generator().manual_seed(1))
    with nothing_compiled():
        got = compiled.decode(larger, compiled.new_memory())
    assert torch.equal(got, PictureDecoder(plain).decode(larger, plain.new_memory()))
