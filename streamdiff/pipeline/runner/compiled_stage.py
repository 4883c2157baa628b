"""A stage as graphs: one block compiled for all blocks, for a window that is full; on CUDA also whole forwards replayed
as CUDA graphs.

Beside it stands the plain path, `StageForward` as it is written; `ModelRunner` falls back on it for a shape that no
graph was made for, as while a window fills. A *key* is what graphs are made for: how many rows, and what each sees.
Whatever else changes from chunk to chunk and block to block (slots, positions, prompts, weights) comes in tensors, so
nothing is ever compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from streamdiff.models.transformer.wan import BlockWeights, KeyValue, Tokens
from streamdiff.pipeline.kv_cache.attention import AttentionMetadata, StaticMetadata, TensorMetadata, attend_rows
from streamdiff.pipeline.runner.cuda_graph_cache import GraphCache
from streamdiff.pipeline.runner.stage_forward import StageForward, Tensors
from streamdiff.pipeline.runner.torch_compile import one_graph

Caches = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Keys and values of each layer of one session."""
Texts = Sequence[Sequence[KeyValue]]
"""Of each row, of each layer."""


class Key(NamedTuple):
    """What a graph is made for: for each row, which of the forward's sessions it belongs to and what it sees; for each
    session, the slots of its caches."""

    sessions: tuple[int, ...]
    shapes: tuple[StaticMetadata, ...]
    slots: tuple[int, ...]


class RowInputs(NamedTuple):
    """What of a row changes from chunk to chunk, see `TensorMetadata`."""

    slot: Tensor
    gather_index: Tensor | None
    query_rope: Tensor
    sink_rope: Tensor | None
    inverse_rope: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> RowInputs:
        """The same with `change` of each tensor."""
        return RowInputs(*(change(each) if each is not None else None for each in self))  # type: ignore[arg-type]


class Inputs(NamedTuple):
    """Everything that a forward reads and, of `caches`, writes; caches of one session are in it once."""

    given: Tensors
    texts: tuple[tuple[KeyValue, ...], ...]
    caches: tuple[Caches, ...]
    rows: tuple[RowInputs, ...]


Run = Callable[[Inputs], Tensors]


class CompiledStage:
    """The graphs of one stage. While it is `learning`, a key that is new gets graphs, which takes long."""

    def __init__(self, forward: StageForward, device: torch.device, live: bool) -> None:
        """`live`: whether forwards of sessions that are opened later may be captured, see `Captured`."""
        self._forward = forward
        self._graphs: dict[Key, Run] = {}
        self._captured = captured_on(device, live)
        self.learning = False

    @property
    def keys(self) -> frozenset[Key]:
        """What there are graphs for."""
        return frozenset(self._graphs)

    @property
    def captured_sessions(self) -> int:
        """Of how many sessions' caches there are captured graphs."""
        return len(self._captured.kept.homes) if self._captured is not None else 0

    def captured_of(self, caches: Tensor) -> int:
        """How many captured graphs a session has, whose caches' keys are `caches`."""
        return self._captured.kept.count(home_of(caches)) if self._captured is not None else 0

    def forget(self, caches: Tensor) -> None:
        """Drop the captured graphs of a session whose caches are given up. Mutates: self."""
        if self._captured is not None:
            self._captured.forget(home_of(caches))

    def run(self, given: Tensors, texts: Texts, views: Sequence[AttentionMetadata]) -> Tensors | None:
        """What the plain path computes, or None where there is no graph for it. Mutates: the rows' caches."""
        key, inputs = _sort(given, texts, views)
        if key not in self._graphs:
            if not self.learning:
                return None
            self._graphs[key] = compiled(self._forward, key)
        run = self._graphs[key]
        if self._captured is not None:
            return self._captured.run(key, run, inputs, texts, self.learning)
        return run(inputs)


def compiled(forward: StageForward, key: Key) -> Run:
    """The stage for one key, by graphs that are compiled when they are called first: of one block, which does for all
    of them as its weights are arguments, of what stands before the blocks and of what stands behind."""
    sessions, shapes, _ = key
    denoiser, attend = forward.denoiser, forward.denoiser.attend

    def begin(given: Tensors) -> tuple[Tensor, ...]:
        tokens = denoiser.embed(*given) if forward.first else Tokens(*given)
        modulation = denoiser.modulation(tokens.time).float()
        return (*tokens, modulation) if forward.first else (modulation,)

    def block(
        weights: BlockWeights,
        hidden: Tensor,
        modulation: Tensor,
        texts: tuple[KeyValue, ...],
        caches: tuple[tuple[Tensor, Tensor], ...],
        rows: tuple[RowInputs, ...],
    ) -> Tensor:
        views = []
        for session, shape, row in zip(sessions, shapes, rows, strict=True):
            keys, values = caches[session]
            tensors = TensorMetadata((keys,), (values,), *row)
            views.append(AttentionMetadata(shape, tensors))
        mix = partial(attend_rows, views, 0, attend=attend)
        own_modulation = weights.block.scale_shift_table + modulation
        return denoiser.run_block(weights, hidden, own_modulation, beside(texts), mix, attend)

    def end(hidden: Tensor, time: Tensor) -> Tensor:
        return denoiser.head(Tokens(hidden, time), forward.grid)

    begin, block, end = one_graph(begin), one_graph(block), one_graph(end)

    def run(inputs: Inputs) -> Tensors:
        given = tuple(map(_of_this_mode, inputs.given))
        *tokens, modulation = begin(given)
        hidden, time = tokens or given
        for layer in range(len(denoiser.blocks)):
            texts = tuple(text[layer] for text in inputs.texts)
            caches = tuple((keys[layer], values[layer]) for keys, values in inputs.caches)
            hidden = block(denoiser.weights(layer), hidden, modulation, texts, caches, inputs.rows)
        return (end(hidden, time),) if forward.last else (hidden, time)

    return run


def beside(texts: Sequence[KeyValue]) -> KeyValue:
    """One layer's text keys and values of several rows, side by side; those of one row as they are, without a copy."""
    return texts[0] if len(texts) == 1 else KeyValue(*(torch.cat(parts) for parts in zip(*texts, strict=True)))


def side_by_side(texts: Texts) -> list[KeyValue]:
    """The same for all layers."""
    return [beside(layer) for layer in zip(*texts, strict=True)]


def _sort(given: Tensors, texts: Texts, views: Sequence[AttentionMetadata]) -> tuple[Key, Inputs]:
    """What holds for many forwards, and what is this one's.

    A graph must not find out that two of its inputs happen to be the same tensor, which would be another graph: rows of
    one session share its caches always, and everything else is handed over as a tensor object of its own.
    """
    caches: list[Caches] = []
    sessions = []
    for view in views:
        own = view.tensors.keys, view.tensors.values
        place = next((i for i, each in enumerate(caches) if each[0] is own[0]), len(caches))
        caches[place:] = caches[place:] or [own]
        sessions.append(place)
    rows = tuple(RowInputs(*view.tensors[2:]).map(_another) for view in views)
    others = tuple(tuple(KeyValue(_another(kv.key), _another(kv.value)) for kv in text) for text in texts)
    key = Key(tuple(sessions), tuple(view.shape for view in views), tuple(len(keys[0]) for keys, _ in caches))
    return key, Inputs(given, others, tuple(caches), rows)


def _another(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape)


def home_of(caches: Tensor) -> int:
    """The memory that all keys of a session's caches are in, see `cuda_graph_cache`."""
    return caches.untyped_storage().data_ptr()


def _of_this_mode(tensor: Tensor) -> Tensor:
    """Links hand over tensors that were made outside of inference mode, which would be another graph."""
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
    one leaves is used up before the next begins."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

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
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run(inputs)
        return graph, result


def captured_on(device: torch.device, live: bool) -> Captured | None:
    """Where there are graphs of CUDA; `live` as `Captured` has it."""
    return Captured(CudaRecord(), live) if device.type == "cuda" else None


@dataclass
class TextPlace:
    """Where graphs look for the text of a row, and `whose` copy is there."""

    layers: tuple[KeyValue, ...]
    whose: object = None

    def put(self, text: Sequence[KeyValue]) -> None:
        """Copy the text there, if it is another one. Mutates: self."""
        if self.whose is text:
            return
        for to_layer, layer in zip(self.layers, text, strict=True):
            to_layer.key.copy_(layer.key)
            to_layer.value.copy_(layer.value)
        self.whose = text


class Replayed(NamedTuple):
    """A captured graph, where it looks for what it reads, and where it puts its result."""

    graph: Recorded
    static: Inputs
    texts: tuple[TextPlace, ...]
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
        self._kept: GraphCache[Replayed] = GraphCache()
        self._texts: dict[tuple[int, int], TextPlace] = {}  # by the session's home, and row
        self._given: dict[tuple[int, torch.Size], Tensor] = {}  # by place among what is given, and shape

    @property
    def kept(self) -> GraphCache[Replayed]:
        """What is captured for whom."""
        return self._kept

    def forget(self, home: int) -> None:
        """Drop what there is for caches that are about to be freed. Mutates: self."""
        self._kept.forget(home)
        self._texts = {place: text for place, text in self._texts.items() if place[0] != home}

    def run(self, key: Key, run: Run, inputs: Inputs, texts: Texts, learning: bool) -> Tensors:
        """`run(inputs)`, replayed where there is a graph: then it lies where the next replay puts its own. `texts` are
        those of `inputs`, the objects that they are known by. Mutates: the caches."""
        place = key, tuple((keys[0].data_ptr(), values[0].data_ptr()) for keys, values in inputs.caches)
        found = self._kept.find(place)
        if found is None:
            homes = tuple(home_of(keys[0]) for keys, _ in inputs.caches)
            if not (learning or self._live) or not self._kept.is_due(place, homes, learning=learning):
                return run(inputs)
            found = self._capture(run, inputs, [homes[session] for session in key.sessions], learning)
            self._kept.keep(place, homes, found)
        for row, text in zip(found.texts, texts, strict=True):
            row.put(text)
        _hand_over(found.static, inputs)
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
        """Where all graphs look for what is given at this place in this shape; it is there. Mutates: self."""
        return self._given.setdefault((index, tensor.shape), torch.empty_like(tensor)).copy_(tensor)

    def _text(self, place: tuple[int, int], text: tuple[KeyValue, ...]) -> TextPlace:
        """Where all graphs of a session look for the text of this row. Mutates: self."""
        if place not in self._texts:
            self._texts[place] = TextPlace(tuple(KeyValue(kv.key.clone(), kv.value.clone()) for kv in text))
        return self._texts[place]


def _hand_over(static: Inputs, inputs: Inputs) -> None:
    """Copy what changes from forward to forward. Mutates: static."""
    for there, here in zip((static.given, *static.rows), (inputs.given, *inputs.rows), strict=True):
        for to, source in zip(there, here, strict=True):
            if to is not None and source is not None:
                to.copy_(source)
