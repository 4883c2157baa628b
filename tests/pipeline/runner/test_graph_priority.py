"""The transformer's graphs go before those of the decoder on a busy device, with stand-ins for CUDA's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from streamdiff.pipeline.runner.graphs import CapturedStep, capture_on, graph_cache_on
from tests.small import CPU

CUDA = torch.device("cuda")


class Stream:
    def __init__(self, priority: int = 0) -> None:
        self.priority = priority

    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, Stream]]:
    """Pool and stream of each capture."""
    found: list[tuple[object, Stream]] = []

    @contextmanager
    def graph(made: object, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        found.append((pool, stream))
        yield

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return found


def test_the_transformer_s_graphs_go_before_the_decoder_s(captures: list[tuple[object, Stream]]) -> None:
    """Kernels in a graph keep the priority of the stream that they were captured on; smaller numbers go first."""
    stage: Any = graph_cache_on(CUDA)
    for _ in range(2):
        stage._graph_capture(lambda inputs: (), None)
    decode: Any = capture_on(CUDA)
    CapturedStep(lambda piece, past: (piece, past), torch.zeros(1), {}, decode.keywords["capture"])
    (pool, stream), (again, same), (own_pool, decoder) = captures
    assert stream.priority < decoder.priority == Stream().priority, "decoding has that of any stream, the lowest"
    assert pool is again and stream is same, "or memory of the pool would not be used again"
    assert own_pool is not pool


def test_a_cpu_captures_nothing() -> None:
    assert graph_cache_on(CPU) is None and capture_on(CPU) is None
