"""The ring whose sink takes chunks in, on the device: against lists in float64."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from streamdiff.errors import ConfigError
from streamdiff.models.spec import check_spec
from streamdiff.pipeline.kv_cache.attention import RollingAttention
from streamdiff.pipeline.kv_cache.cache import KVCache
from streamdiff.pipeline.kv_cache.geometry import CacheGeometry
from streamdiff.session_state.fields import reset
from tests.pipeline.float64_wan import attend, rotated
from tests.pipeline.test_streamdiffusionv2 import Cache, made_for
from tests.small import CPU

TOKENS = 4


def allocate(plan: CacheGeometry, caches: int = 1) -> KVCache:
    tokens = TOKENS * plan.chunk
    return KVCache.allocate(plan, caches=caches, layers=2, tokens=tokens, heads=2, head_dim=12, like=torch.zeros(1))


def ring(sink: int, window: int, chunk: int = 1) -> CacheGeometry:
    return CacheGeometry(sink, window, absolute=True, chunk=chunk, adaptive=True)


def drawn(count: int, chunk: int = 1) -> torch.Tensor:
    """Queries, keys and values of `count` chunks, more or less like each other: `[count, 3, tokens, H, d]`."""
    generator = torch.Generator().manual_seed(5)
    own = torch.randn(count, 3, 1, 2, 12, generator=generator)
    tokens = torch.randn(count, 3, TOKENS * chunk, 2, 12, generator=generator)
    return own + torch.randn(3, 1, 2, 12, generator=generator) + tokens / 2


@pytest.mark.slow
@pytest.mark.parametrize("flush", [None, 4, 17])
@pytest.mark.parametrize("threshold", [0.5, 1.0])
@pytest.mark.parametrize(("sink", "window", "chunk"), [(3, 6, 1), (1, 4, 1), (2, 6, 2)])
def test_each_layer_writes_and_sees_what_lists_do(
    sink: int, window: int, chunk: int, threshold: float, flush: int | None
) -> None:
    """40 chunks; a flush empties all but the sink, and what waited is forgotten."""
    plan, attention = ring(sink, window, chunk), RollingAttention(chunk, 2, 2, 12, CPU)
    state, slots, kept = allocate(plan), window // chunk, sink // chunk
    keys, values = torch.zeros(2, slots, TOKENS * chunk, 2, 12, dtype=torch.float64)
    lists = Cache(keys, values, list(range(kept, slots)))
    for number, given in enumerate(drawn(40, chunk)):
        if number == flush:
            lists.filled, lists.queue = min(lists.filled, kept), list(range(kept, slots))
        view = attention.row_metadata(
            plan, state, 0, number, flush if flush is not None and number >= flush else 0, threshold
        )
        got = attention.on([view])(1, *given[:, None])[0]
        query, key, value = given.double()
        query, key = (rotated(x, number * chunk, 2, 2) for x in (query, key))
        lists.measure(key, value, kept, threshold)
        lists.write(key, value, kept)
        expected = attend(query, *(x[: lists.filled].flatten(0, 1) for x in (keys, values)))
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state.key[0, 1, : lists.filled].double(), keys[: lists.filled], rtol=1e-5, atol=1e-5)
    assert not state.key[0, 0].any(), "layer 0 was never written"
    if threshold == 0.5 and flush is None:
        assert {"waits", "replaces", "rolls", "sink"} == set(lists.happened)


def test_a_full_ring_is_one_graph_that_asks_the_host_for_nothing() -> None:
    """The same metadata for every chunk, and no number that the host would have to wait for."""
    plan, attention = ring(3, 6), RollingAttention(1, 2, 2, 12, CPU)
    state = allocate(plan)
    views = [attention.row_metadata(plan, state, 0, number, 0, 0.5) for number in range(30)]
    assert len({view.shape for view in views[plan.slots :]}) == 1
    assert views[plan.slots].shape.ranges == ((0, plan.slots),)
    addresses = [each.data_ptr() for each in (state.key, state.value, state.sink_key, state.queue)]
    for number, given in enumerate(drawn(12)):
        attention.on([views[number]])(0, *given[:, None])
    assert [each.data_ptr() for each in (state.key, state.value, state.sink_key, state.queue)] == addresses
    with FakeTensorMode() as fake:
        attention = RollingAttention(1, 2, 2, 12, CPU)
        state = allocate(plan)
        for number in (2, 4, 9):
            given = [torch.empty(1, TOKENS, 2, 12) for _ in range(3)]
            assert fake.fake_tensor_converter is not None
            attention.on([attention.row_metadata(plan, state, 0, number, 0, 0.5)])(0, *given)


def test_queues_go_with_their_caches() -> None:
    """Where steps change, caches change places; what chunks that were made together share is no queue."""
    plan = ring(3, 6)
    state = allocate(plan, caches=3)
    state.queue[1] = 5
    state.share(1, 0)
    assert not state.queue[0].any() and not state.queue[2].any()
    state.rearrange([1, 0])
    assert (state.queue[0] == 5).all() and not state.queue[1:].any()
    reset(state)
    assert not state.queue.any()
    assert state.sink_key.numel() == 0, "its keys stay as they were rotated"


def test_it_holds_whole_chunks() -> None:
    model, _ = made_for(0.2, sink=2, together=1, window=5)
    spec = model.spec.__class__(**{**vars(model.spec), "chunk_latents": 2})
    with pytest.raises(ConfigError):
        check_spec(spec)
