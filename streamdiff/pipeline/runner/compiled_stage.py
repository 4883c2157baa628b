"""A stage as graphs: what stands between two self-attentions compiled once for all blocks; on CUDA also whole forwards
replayed as CUDA graphs.

Self-attention stays as it is: it reads and writes the caches where they lie, whatever a row sees, which no compiled
code has to know. Beside it stands the plain path, `StageForward` as it is written; `ModelRunner` falls back on it for
what no graph was made for, as while a window fills. A *key* is what graphs are captured for: how many rows, and what
each sees. Whatever else changes from chunk to chunk and block to block (slots, positions, prompts, weights) comes in
tensors, so nothing is ever compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from streamdiff.models.transformer import rope
from streamdiff.models.transformer.attention_backend import AttendParts, merged
from streamdiff.models.transformer.wan import KeyValue
from streamdiff.pipeline.kv_cache.attention import (
    AttentionMetadata,
    Projected,
    StaticMetadata,
    TensorMetadata,
    attend_rows,
    rotate_sinks,
    rotated_rows,
)
from streamdiff.pipeline.kv_cache.cache import LayerCaches
from streamdiff.pipeline.runner.compiled_parts import CompiledParts, compiled, concat_rows
from streamdiff.pipeline.runner.cuda_graph_cache import GraphCache
from streamdiff.pipeline.runner.stage_forward import StageForward, Tensors
from streamdiff.pipeline.runner.torch_compile import one_graph
from streamdiff.pipeline.scheduler.kv_context import PER_STEP
from streamdiff.pipeline.scheduler.step import MicroStep

Texts = Sequence[Sequence[KeyValue]]
"""Of each row, of each layer."""


class Key(NamedTuple):
    """Key of a compiled forward. `sessions`: of each row, the index of its session in the forward; `shapes`: of each
    row, what it sees; `slots`: of each session, the slots of its KV cache."""

    sessions: tuple[int, ...]
    shapes: tuple[StaticMetadata, ...]
    slots: tuple[int, ...]


class RowInputs(NamedTuple):
    """Tensor inputs of a row that change from chunk to chunk, see `TensorMetadata`."""

    slot: Tensor
    query_rope: Tensor
    sink_rope: Tensor | None
    inverse_rope: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> RowInputs:
        """The same with `change` of each tensor."""
        return RowInputs(*(change(each) if each is not None else None for each in self))  # type: ignore[arg-type]


class Inputs(NamedTuple):
    """All tensors that a forward reads; `caches`, once per session, are also written."""

    given: Tensors
    texts: tuple[tuple[KeyValue, ...], ...]
    caches: tuple[LayerCaches, ...]
    rows: tuple[RowInputs, ...]


Run = Callable[[Inputs], Tensors]


class CompiledStage:
    """The compiled forwards of one stage, by key. While `learning` is true, a new key is compiled, which is slow."""

    def __init__(self, forward: StageForward, device: torch.device, live: bool) -> None:
        """`live`: whether forwards of sessions that are opened later may be captured, see `Captured`."""
        self._forward = forward
        self._graphs: dict[Key, Run] = {}
        self._parts: dict[tuple[int, bool], CompiledParts] = {}  # by the number of rows, and what they keep
        self._attend = forward.denoiser.attend_parts(one_graph(merged))
        self._rotate_sinks = one_graph(_rotate_all_sinks)
        self._sinks: set[tuple[torch.Size, tuple[int, ...]]] = set()
        # With an exchange in it a replay would have to be met by one of every other rank; compiled parts need not.
        self._captured = captured_on(device, live) if forward.group is None else None
        self.learning = False

    @property
    def keys(self) -> frozenset[Key]:
        """Keys of the compiled forwards."""
        return frozenset(self._graphs)

    @property
    def captured_sessions(self) -> int:
        """Number of sessions whose caches have captured CUDA graphs."""
        return len(self._captured.kept.homes) if self._captured is not None else 0

    def captured_of(self, caches: Tensor) -> int:
        """Number of captured CUDA graphs of the session whose cache keys are `caches`."""
        return self._captured.kept.count(home_of(caches)) if self._captured is not None else 0

    def forget(self, caches: Tensor) -> None:
        """Drop the captured CUDA graphs of a session before its caches are freed. Mutates: self."""
        if self._captured is not None:
            self._captured.forget(home_of(caches))

    def run(self, given: Tensors, texts: Texts, views: Sequence[AttentionMetadata]) -> Tensors | None:
        """The result of the plain path by a compiled forward, or None if there is none for this key. Mutates: the rows'
        caches."""
        key, inputs = _split(given, texts, views)
        if key not in self._graphs:
            if not self.learning:
                return None
            kind = len(key.shapes), any(shape.keeps_unrotated for shape in key.shapes)
            self._parts[kind] = self._parts.get(kind) or compiled(self._forward, kind[1])
            self._graphs[key] = partial(run_parts, self._forward, self._parts[kind], self._attend, key)
        run = self._graphs[key]
        if self._captured is not None:
            return self._captured.run(key, run, inputs, texts, self.learning)
        return run(inputs)

    def rotate_sinks(self, kept: Tensor, rotated: Tensor, factors: Tensor) -> None:
        """As `kv_cache.attention.rotate_sinks`, all layers by one kernel for sinks of sizes that it was learned for.
        Mutates: rotated."""
        size = kept.shape, rotated.stride()
        if self.learning:
            self._sinks.add(size)
        (self._rotate_sinks if size in self._sinks else rotate_sinks)(kept, rotated, factors)


def run_parts(forward: StageForward, parts: CompiledParts, attend: AttendParts, key: Key, inputs: Inputs) -> Tensors:
    """The stage's forward by its compiled parts, and self-attention, by the kernel `attend`, between them, with the
    exchanges of ranks that share the stage. Mutates: the caches."""
    denoiser, views, group = forward.denoiser, _views(key, inputs), forward.group
    weights = [denoiser.weights(layer) for layer in range(len(denoiser.blocks))]
    ropes = tuple(row.query_rope for row in inputs.rows)
    given = tuple(map(_as_inference_tensor, inputs.given))
    made = parts.begin(ropes, weights[0], given)
    hidden, (modulation, *projected) = (made[0], made[1:]) if forward.first else (given[0], made)
    time, last = given[1], len(weights) - 1
    for layer, own in enumerate(weights):
        if group is None:
            mixed = attend_rows(views, layer, _projected(projected), attend)
        else:
            shared = rotated_rows(views, *group.to_heads(*projected))
            mixed = group.to_tokens(attend_rows(views, layer, shared, attend, group.all_heads))
        texts = tuple(text[layer] for text in inputs.texts)
        if layer < last:
            hidden, *projected = parts.between(ropes, own, weights[layer + 1], hidden, modulation, texts, mixed)
    result = parts.end(weights[last], hidden, time, modulation, texts, mixed)
    if forward.last and group is not None:
        return forward.unite(result[0], group)
    return result if forward.last else (*result, time)


def _projected(tensors: Sequence[Tensor]) -> Projected:
    """Queries, keys, values and, if any, un-rotated keys `[R, L, H, d]`, row by row."""
    query, key, value, *unrotated = (each.unbind() for each in tensors)
    return Projected(query, key, value, unrotated[0] if unrotated else key)


def _views(key: Key, inputs: Inputs) -> list[AttentionMetadata]:
    """The rows' attention metadata, put together again."""
    return [
        AttentionMetadata(shape, TensorMetadata(inputs.caches[session], *row))
        for session, shape, row in zip(key.sessions, key.shapes, inputs.rows, strict=True)
    ]


def _rotate_all_sinks(kept: Tensor, rotated: Tensor, factors: Tensor) -> None:
    """`rotate_sinks` for a compiler, which makes no copies. Mutates: rotated."""
    rotated.copy_(rope.rotate(kept, factors))


def concat_layers(texts: Texts) -> list[KeyValue]:
    """`concat_rows` for every layer."""
    return [concat_rows(layer) for layer in zip(*texts, strict=True)]


def _split(given: Tensors, texts: Texts, views: Sequence[AttentionMetadata]) -> tuple[Key, Inputs]:
    """The key of a forward, and its tensor inputs.

    A graph must not find out that two of its inputs happen to be the same tensor, which would be another graph: rows of
    one session share its caches always, and everything else is handed over as a tensor object of its own.
    """
    caches: list[LayerCaches] = []
    sessions = []
    for view in views:
        own = view.tensors.caches
        place = next((i for i, each in enumerate(caches) if each is own), len(caches))
        caches[place:] = caches[place:] or [own]
        sessions.append(place)
    rows = tuple(RowInputs(*view.tensors[1:]).map(_fresh_view) for view in views)
    others = tuple(tuple(KeyValue(_fresh_view(kv.key), _fresh_view(kv.value)) for kv in text) for text in texts)
    key = Key(tuple(sessions), tuple(view.shape for view in views), tuple(len(each.keys[0]) for each in caches))
    return key, Inputs(given, others, tuple(caches), rows)


def _fresh_view(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape)


def home_of(caches: Tensor) -> int:
    """Address of the storage that holds all keys of a session's caches, see `cuda_graph_cache`."""
    return caches.untyped_storage().data_ptr()


def _as_inference_tensor(tensor: Tensor) -> Tensor:
    """`tensor` as an inference tensor: links deliver others, which would compile to another graph."""
    return tensor if tensor.is_inference() else tensor.clone()


class Recorded(Protocol):
    """A captured graph, as `torch.cuda.CUDAGraph`: does again what was done while it was captured, at the same
    addresses."""

    def replay(self) -> None: ...


Record = Callable[[Run, Inputs, bool], tuple[Recorded, Tensors]]
"""Captures `run(inputs)` without carrying it out; returns the graph and where it puts the result. If told so, first
carries it out by itself, so that everything is compiled and at hand."""


class CudaRecord:
    """The `Record` of CUDA. All graphs share a pool of memory, since they are replayed one after the other, and what
    one leaves is used up before the next begins. Their kernels have the priority of the stream that they were captured
    on, whatever stream they are replayed on (torch instantiates graphs so)."""

    def __init__(self, priority: int = 0) -> None:
        """`priority` is as of `torch.cuda.Stream`: 0 is the lowest, that of streams for which none is given."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(priority=priority)  # one: memory of the pool is used again by stream

    def __call__(self, run: Run, inputs: Inputs, warm_up: bool) -> tuple[Recorded, Tensors]:
        if warm_up:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    run(inputs)
            torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The thread that decodes goes on meanwhile: what it allocates and waits for is no fault of this capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run(inputs)
        return graph, result


def captured_on(device: torch.device, live: bool) -> Captured | None:
    """The CUDA graph cache for a CUDA device, else None; `live` as in `Captured`. Its graphs go before decoding, which
    is captured without a priority and has time until pictures are due."""
    return Captured(CudaRecord(priority=-1), live) if device.type == "cuda" else None


@dataclass
class TextBuffer:
    """Static buffers of a row's text keys and values; `whose` is the object that was copied there last."""

    layers: tuple[KeyValue, ...]
    whose: object = None

    def put(self, text: Sequence[KeyValue]) -> None:
        """Copy `text` into the buffers unless it is there already. Mutates: self."""
        if self.whose is text:
            return
        for to_layer, layer in zip(self.layers, text, strict=True):
            to_layer.key.copy_(layer.key)
            to_layer.value.copy_(layer.value)
        self.whose = text


class Replayed(NamedTuple):
    """A captured CUDA graph with its static input buffers and its output tensors."""

    graph: Recorded
    static: Inputs
    texts: tuple[TextBuffer, ...]
    result: Tensors


class Captured:
    """Caches CUDA graphs by key and KV-cache addresses (`GraphCache`): a replayed forward is one launch, not thousands.

    While learning, a forward is captured at once. In `live` sessions the first call runs eagerly; the second captures,
    which computes nothing, and replays. Each forward runs exactly once, since sink updates are not idempotent. Inputs
    other than caches are copied to static buffers: shared by all graphs, except the text keys and values, which each
    session has, and which are copied only when the prompt changes. A replay allocates nothing.
    """

    def __init__(self, record: Record, live: bool) -> None:
        """`live` is False where a capture, for which the device is waited for, could wait for another rank."""
        self._record, self._live = record, live
        self.kept: GraphCache[Replayed] = GraphCache()
        self._texts: dict[tuple[int, int], TextBuffer] = {}  # by the session's home, and row
        self._given: dict[tuple[int, torch.Size], Tensor] = {}  # by place among what is given, and shape

    def forget(self, home: int) -> None:
        """Drop graphs and buffers of caches that are about to be freed. Mutates: self."""
        self.kept.forget(home)
        self._texts = {place: text for place, text in self._texts.items() if place[0] != home}

    def run(self, key: Key, run: Run, inputs: Inputs, texts: Texts, learning: bool) -> Tensors:
        """`run(inputs)`, replayed where there is a graph: then it lies where the next replay puts its own. `texts` are
        those of `inputs`, the objects that they are known by. Mutates: the caches."""
        place = key, tuple((each.keys[0].data_ptr(), each.values[0].data_ptr()) for each in inputs.caches)
        found = self.kept.find(place)
        if found is None:
            homes = tuple(home_of(each.keys[0]) for each in inputs.caches)
            if not (learning or self._live) or not self.kept.should_capture(place, homes, learning=learning):
                return run(inputs)
            found = self._capture(run, inputs, [homes[session] for session in key.sessions], learning)
            self.kept.keep(place, homes, found)
        for row, text in zip(found.texts, texts, strict=True):
            row.put(text)
        _copy_inputs(found.static, inputs)
        found.graph.replay()
        return found.result

    def _capture(self, run: Run, inputs: Inputs, homes: Sequence[int], learning: bool) -> Replayed:
        """A graph of `run`, whose rows belong to sessions of these `homes`. Mutates: self."""
        rows = tuple(row.map(torch.clone) for row in inputs.rows)
        given = tuple(self._place(index, tensor) for index, tensor in enumerate(inputs.given))
        texts = tuple(
            self._text((home, row), text) for row, (home, text) in enumerate(zip(homes, inputs.texts, strict=True))
        )
        static = Inputs(given, tuple(text.layers for text in texts), inputs.caches, rows)
        graph, result = self._record(run, static, learning)
        return Replayed(graph, static, texts, result)

    def _place(self, index: int, tensor: Tensor) -> Tensor:
        """The static buffer for input `index` of this shape, shared by all graphs, with `tensor` copied into it.
        Mutates: self."""
        return self._given.setdefault((index, tensor.shape), torch.empty_like(tensor)).copy_(tensor)

    def _text(self, place: tuple[int, int], text: tuple[KeyValue, ...]) -> TextBuffer:
        """The text buffer of a row of a session, shared by its graphs. Mutates: self."""
        if place not in self._texts:
            self._texts[place] = TextBuffer(tuple(KeyValue(kv.key.clone(), kv.value.clone()) for kv in text))
        return self._texts[place]


def _copy_inputs(static: Inputs, inputs: Inputs) -> None:
    """Copy a forward's inputs into the static buffers. Mutates: static."""
    for there, here in zip((static.given, *static.rows), (inputs.given, *inputs.rows), strict=True):
        for to, source in zip(there, here, strict=True):
            if to is not None and source is not None:
                to.copy_(source)


def forwards_met(
    trial: int, chunk: int, steps: int, kv_context: str, anchor: bool, with_next: bool
) -> Iterator[list[MicroStep]]:
    """Rows of the forwards of one of the session's chunks: the first step, and the clean pass; where each step has a
    cache of its own every step, and an `anchor`'s clean pass. Or of that which takes the next chunk's first step with
    it."""
    if with_next:
        yield [MicroStep(trial, chunk, steps, steps, 0), MicroStep(trial, chunk + 1, 0, steps, 0)]
        return
    for step in range(steps + anchor) if kv_context in PER_STEP else (0, steps):
        yield [MicroStep(trial, chunk, step, steps, 0)]
