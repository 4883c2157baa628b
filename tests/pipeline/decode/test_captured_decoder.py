"""A captured decoder makes the pictures of the plain one, for streams that take turns. Its graphs are stand-ins: they
compute what a graph of CUDA does, on the very tensors that they were made with, and leave it in one place, which is
scribbled over before the next replay. Nothing is compiled here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from streamdiff.models.autoencoder.picture_decoder import DecoderState, PictureDecoder, VideoAutoencoder
from streamdiff.pipeline.runner.graphs import CapturedStep, one_graph
from tests.pipeline.decode.test_compiled_decoder import taehv, wan

Given = tuple[Tensor, DecoderState]


def tensors(results: Given) -> list[Tensor]:
    return [each for each in (results[0], *results[1].values()) if isinstance(each, Tensor)]


@dataclass
class StandIn:
    """See the module."""

    step: Callable[[Given], Given]
    given: Given
    result: Given

    def replay(self) -> None:
        for there, here in zip(tensors(self.result), tensors(self.step(self.given)), strict=True):
            there.copy_(here)


@dataclass
class StandIns:
    """Makes them, and spoils what they have left."""

    made: list[StandIn] = field(default_factory=list)

    def record(self, step: Callable[[Given], Given], given: Given) -> tuple[StandIn, Given]:
        frames, past = step(given)
        result = frames.clone(), {k: v.clone() if isinstance(v, Tensor) else v for k, v in past.items()}
        self.made.append(StandIn(step, given, result))
        return self.made[-1], result

    def spoil(self) -> None:
        for graph in self.made:
            for tensor in (*tensors(graph.result), *tensors(graph.given)):
                tensor.fill_(77)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("parts", [taehv, wan])
def test_streams_that_take_turns_get_the_plain_decoders_pictures(
    parts: Callable[[], tuple[VideoAutoencoder, tuple[int, ...], int]],
) -> None:
    graphs = StandIns()
    plain, shape, _ = parts()
    decoder, alone = PictureDecoder(plain), PictureDecoder(plain)
    decoder.compile(torch.empty(shape), 3, one_graph, partial(CapturedStep, capture=graphs.record))
    captured = list(decoder._graphs.values()) if decoder._graphs else []
    assert captured and all(isinstance(step, CapturedStep) for step in captured)
    generator = torch.Generator().manual_seed(5)
    streams: dict[str, list[Any]] = {name: [decoder.new_memory(), alone.new_memory()] for name in ("one", "other")}
    replayed = len(graphs.made)
    for _ in range(4):
        for own, plainly in streams.values():
            latents = torch.randn(1, *shape, generator=generator)
            got, expected = decoder.decode(latents, own), alone.decode(latents, plainly)
            kept = got.clone()
            graphs.spoil()
            assert torch.equal(got, kept), "pictures are not where the next ones will be"
            assert torch.equal(got, expected)
    assert len(graphs.made) == replayed, "nothing is captured while streams run"
