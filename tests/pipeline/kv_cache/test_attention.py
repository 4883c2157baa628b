"""Geometry of the ring, and the caches that follow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamdiff.models.transformer import rope
from streamdiff.models.transformer.wan import attend
from streamdiff.pipeline.kv_cache.attention import RollingAttention
from streamdiff.pipeline.kv_cache.cache import KVCache
from streamdiff.pipeline.kv_cache.geometry import CacheGeometry
from streamdiff.session_state import walk

CPU = torch.device("cpu")


@st.composite
def plans(draw: st.DrawFn) -> CacheGeometry:
    window = draw(st.integers(1, 9))
    return CacheGeometry(draw(st.integers(0, window - 1)), window, draw(st.integers(0, 5)))


chunks = st.one_of(st.integers(0, 40), st.integers(0, 10**9))


@given(plans(), chunks)
def test_a_chunk_sees_the_sink_and_the_newest_chunks_up_to_itself(plan: CacheGeometry, chunk: int) -> None:
    seen = plan.visible(chunk)
    everything = chunk + 1 <= plan.window
    expected = (
        range(chunk + 1) if everything else [*range(plan.sink), *range(chunk + 1 - plan.window + plan.sink, chunk + 1)]
    )
    assert seen == list(expected)


@given(plans(), chunks)
def test_every_slot_is_needed(plan: CacheGeometry, chunk: int) -> None:
    """No slot is spare by mistake: one chunk more in flight would overwrite what the oldest sees."""
    late = chunk + plan.slots
    assert plan.slot(late + plan.spare + 1) in {plan.slot(seen) for seen in plan.visible(late)}


@st.composite
def uneven(draw: st.DrawFn) -> CacheGeometry:
    chunk, sink = draw(st.integers(1, 4)), draw(st.integers(0, 7))
    return CacheGeometry(sink, sink + chunk + draw(st.integers(0, 9)), draw(st.integers(0, 4)), chunk=chunk)


@given(uneven(), chunks, st.integers(0, 12))
def test_frames_in_sight_are_those_of_the_sink_and_the_newest(plan: CacheGeometry, chunk: int, back: int) -> None:
    """Frame by frame, also where window and sink are no whole chunks, and after a flush `back` chunks ago."""
    since, end = max(0, chunk - back), (chunk + 1) * plan.chunk
    near = range(max(plan.sink, end - plan.window - plan.chunk), end)
    window = {f for f in near if f >= end - (plan.window - plan.sink) and f >= since * plan.chunk}
    sink, first = plan.frames(chunk, since)
    assert sink == min(plan.sink, end)
    assert set(range(first, end)) == window
    assert plan.visible(chunk, since) == sorted({f // plan.chunk for f in [*range(sink), *window]} | {chunk})
    if since == 0:
        assert sink + len(window) == min(plan.window, end)


@given(uneven(), chunks)
def test_uneven_rings_keep_what_is_in_sight_too(plan: CacheGeometry, chunk: int) -> None:
    slots = [plan.slot(seen) for seen in plan.visible(chunk)]
    assert len(set(slots)) == len(slots) <= plan.slots - plan.spare
    assert all(0 <= slot < plan.slots for slot in slots)
    for ahead in range(1, plan.spare + 1):
        newer = chunk + ahead
        assert plan.slot(newer) not in slots or newer in plan.visible(chunk)
    if chunk >= plan.pinned:
        assert plan.slot(chunk) >= plan.pinned


def allocate(plan: CacheGeometry, caches: int = 1, layers: int = 2) -> KVCache:
    return KVCache.allocate(plan, caches=caches, layers=layers, tokens=4, heads=2, head_dim=12, like=torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize(("sink", "spare"), [(0, 0), (1, 3)])
def test_attention_through_the_ring_equals_attention_over_explicit_keys_and_is_allocated_once(
    sink: int, spare: int
) -> None:
    """1,000 chunks: what a chunk gets is plain attention over the chunks it sees, at positions 0, 1, 2, ..."""
    plan = CacheGeometry(sink, 4, spare)
    state = allocate(plan)
    attention = RollingAttention(1, 2, 2, 12, CPU)
    generator = torch.Generator().manual_seed(5)
    addresses = (state.key.data_ptr(), state.value.data_ptr())
    size = walk.nbytes(state)
    past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for chunk in range(1000):
        query, key, value = torch.randn(3, 4, 2, 12, generator=generator)
        past[chunk] = (key, value)
        seen = plan.visible(chunk)
        got = attention.on([attention.row_metadata(plan, state, 0, chunk)])(1, query[None], key[None], value[None])
        if chunk < 12 or chunk % 97 == 0:
            table = rope.table(torch.arange(len(seen)), 2, 2, 12)
            keys = rope.rotate(torch.cat([past[c][0] for c in seen]), table)
            own = rope.table(torch.tensor([len(seen) - 1]), 2, 2, 12)
            values = torch.cat([past[c][1] for c in seen])
            expected = attend(rope.rotate(query, own)[None], keys[None], values[None])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        past = {c: kv for c, kv in past.items() if c < sink or c > chunk - 8}
    assert (state.key.data_ptr(), state.value.data_ptr()) == addresses
    assert walk.nbytes(state) == size
    assert not state.key[:, 0].any(), "layer 0 was never written"


def test_absolute_positions_do_not_lead_further_apart_than_a_model_knows() -> None:
    """Up to 6 latent frames to the letter; from there on the sink, of 3 that are no whole chunks, follows."""
    plan = CacheGeometry(3, 5, absolute=True, chunk=2, positions=6)
    state, attention = allocate(plan), RollingAttention(2, 1, 2, 12, CPU)
    generator = torch.Generator().manual_seed(5)
    keys, values = torch.zeros(0, 2, 12), torch.zeros(0, 2, 12)
    for chunk in range(9):
        query, key, value = torch.randn(3, 4, 2, 12, generator=generator)
        keys, values, end = torch.cat([keys, key]), torch.cat([values, value]), 2 * chunk + 2
        for _ in range(2):  # a second step finds the sink in its place
            view = attention.row_metadata(plan, state, 0, chunk)
            got = attention.on([view])(1, query[None], key[None], value[None])
        seen = list(range(end)) if end <= 5 else [0, 1, 2, end - 2, end - 1]
        places = [frame + max(0, end - 6) if frame < 3 else frame for frame in seen]
        tokens = [token for frame in seen for token in (2 * frame, 2 * frame + 1)]
        asking, turned = (rope.table(torch.tensor(at), 1, 2, 12) for at in ([end - 2, end - 1], places))
        expected = attend(
            rope.rotate(query, asking)[None], rope.rotate(keys[tokens], turned)[None], values[tokens][None]
        )
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spare", [0, 2])
def test_what_leaves_the_ring_is_folded_into_the_sink(spare: int) -> None:
    """A sink of one chunk: what chunks see of it is the running average of all that left before them."""
    keep, plan = 0.9, CacheGeometry(1, 4, spare)
    state, attention = allocate(plan), RollingAttention(1, 2, 2, 12, CPU)
    generator = torch.Generator().manual_seed(5)
    past: list[tuple[torch.Tensor, torch.Tensor]] = []
    sink = (torch.zeros(0), torch.zeros(0))
    for chunk in range(30):
        query, key, value = torch.randn(3, 4, 2, 12, generator=generator)
        past.append((key, value))
        if chunk == 0:
            sink = (key, value)
        if (gone := chunk - 3 - spare) >= 1:
            key_gone, value_gone = past[gone]
            sink = (keep * sink[0] + 0.1 * key_gone, keep * sink[1] + 0.1 * value_gone)
        for fold in (keep, None):  # once per chunk, whatever its later steps write
            view = attention.row_metadata(plan, state, 0, chunk, fold=fold)
            got = attention.on([view])(1, query[None], key[None], value[None])
        seen = [sink, *(past[c] for c in range(max(1, chunk - 2), chunk + 1))] if chunk else [sink]
        table = rope.table(torch.arange(len(seen)), 2, 2, 12)
        keys = rope.rotate(torch.cat([each[0] for each in seen]), table)
        expected = attend(rope.rotate(query, table[-4:])[None], keys[None], torch.cat([each[1] for each in seen])[None])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("spare", [0, 2], ids=["as in clean", "as in staircase"])
def test_a_sink_that_has_taken_a_chunk_in_is_seen_as_it_is_now(spare: int, absolute: bool) -> None:
    """A chunk's clean pass is compared with the sink, its denoise steps are not; both see the chunks that are in the
    sink by then, in the places of those that left."""
    plan = CacheGeometry(2, 6, spare, absolute)
    state, attention = allocate(plan), RollingAttention(1, 2, 2, 12, CPU)
    generator = torch.Generator().manual_seed(6)
    past: list[tuple[torch.Tensor, torch.Tensor]] = []
    sink: list[tuple[torch.Tensor, torch.Tensor]] = []
    taken = 0
    for chunk in range(20):
        query, key, value = torch.randn(3, 4, 2, 12, generator=generator)
        past.append((key, value))
        sink += [(key, value)] if chunk < 2 else []
        window = range(max(2, chunk - 3), chunk + 1)
        seen = [*sink, *(past[each] for each in window)]
        for adapt in (None, 0.0):
            view = attention.row_metadata(plan, state, 0, chunk, adapt=adapt)
            got = attention.on([view])(1, query[None], key[None], value[None])
            places = [*range(len(sink)), *(window if absolute else range(len(sink), len(seen)))]
            table = rope.table(torch.tensor(places), 2, 2, 12)
            keys = rope.rotate(torch.cat([each[0] for each in seen]), table)
            values = torch.cat([each[1] for each in seen])
            expected = attend(rope.rotate(query, table[-4:])[None], keys[None], values[None])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        alike = [
            sum(
                float(torch.cosine_similarity(one.mean(0).flatten(), other.mean(0).flatten(), dim=0))
                for one, other in zip(kept, (key, value), strict=True)
            )
            for kept in sink
        ]
        if chunk >= 2 and min(alike) < 0:
            sink[alike.index(min(alike))] = (key, value)
            taken += 1
    assert 5 < taken < 18


def test_what_was_flushed_is_not_folded_in() -> None:
    plan = CacheGeometry(1, 3)
    state, attention = allocate(plan), RollingAttention(1, 2, 2, 12, CPU)
    assert attention.row_metadata(plan, state, 0, 6, visible_from_chunk=4, fold=0.9).shape.fold is not None
    assert attention.row_metadata(plan, state, 0, 6, visible_from_chunk=5, fold=0.9).shape.fold is None
    assert attention.row_metadata(plan, state, 0, 2, fold=0.9).shape.fold is None, "nothing leaves yet"


class Reads(TorchDispatchMode):
    """Notes what anything but attention reads of a cache: bytes of `key` and `value`, and of `sink_key`."""

    def __init__(self, state: KVCache) -> None:
        super().__init__()
        self.window, self.sink = 0, 0
        self._window = {each.untyped_storage().data_ptr() for each in (state.key, state.value)}
        self._sink = state.sink_key.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        unread = func.is_view or "attention" in name or name == "_fused_sdp_choice"
        read = [] if unread else [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if name in ("copy_", "index_copy_"):
            read = read[1:]
        for tensor in read:
            memory = tensor.untyped_storage().data_ptr()
            self.window += tensor.nbytes * (memory in self._window)
            self.sink += tensor.nbytes * (tensor.numel() > 0 and memory == self._sink)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("window", [4, 5])
@pytest.mark.parametrize(("chunk", "sink"), [(1, 0), (1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("spare", [0, 3])
def test_nothing_copies_the_window(spare: int, chunk: int, sink: int, window: int, absolute: bool) -> None:
    """With and without spare slots, as in `staircase`; where windows and sinks cut chunks; after a flush; and where an
    older chunk is run again behind newer ones, as for a new prompt. The sink's keys are rotated once per chunk."""
    plan = CacheGeometry(sink, window + chunk, spare, absolute, chunk)
    tokens = 4 * chunk
    state = KVCache.allocate(plan, caches=1, layers=2, tokens=tokens, heads=2, head_dim=12, like=torch.zeros(1))
    attention = RollingAttention(chunk, 2, 2, 12, CPU)
    given = torch.randn(3, 1, tokens, 2, 12, generator=torch.Generator().manual_seed(5))

    def run(number: int, since: int = 0) -> Reads:
        with torch.inference_mode(), Reads(state) as reads:
            rows = attention.on([attention.row_metadata(plan, state, 0, number, since)])
            for layer in range(2):
                rows(layer, *given)
        return reads

    for number in range(18):
        steps = [run(number, 12 if number >= 12 else 0) for _ in range(4)]
        assert [each.window for each in steps] == [0] * 4, number
        assert [each.sink for each in steps[1:]] == [0] * 3
        assert not steps[0].sink or not absolute or number * chunk < sink, "which stays where it is"
    assert run(15).window == 0, "again, behind newer ones"
