"""A stage as graphs: what stands between two self-attentions compiled once for all blocks; on CUDA also whole forwards
replayed as CUDA graphs.

Self-attention stays as it is: it reads and writes the caches where they lie, whatever a row sees, which no compiled
code has to know. Beside it stands the plain path, `ModelRunner.forward` as it is written, which is taken for
what no graph was made for, as while a window fills. A *key* is what graphs are captured for: how many rows, and what
each sees. Whatever else changes from chunk to chunk and block to block (slots, positions, prompts, weights) comes in
tensors, so nothing is ever compiled again.

Graphs of CUDA are captured at the start alone, for the caches of a pool (`CachePool`), which sessions have in turns.
Rows of several sessions find theirs by slot numbers, so there is one graph for so many rows, whosever they are. Rows of
one session are attended to where they lie, which spares a copy of the window: one graph for each cache of the pool
(docs/decisions/0020-compilation-and-graphs.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from streamdiff.pipeline.runner.model_runner import ModelRunner

from streamdiff.models.transformer import attention_backend, rope
from streamdiff.models.transformer.actions import ACTION_MODEL
from streamdiff.models.transformer.attention_backend import AttendPaged, AttendParts, AttentionShape, try_paged
from streamdiff.models.transformer.wan import BlockText, BlockWeights, TokenStates, block_modulation, concat_rows
from streamdiff.pipeline.kv_cache import attention
from streamdiff.pipeline.kv_cache.attention import AttentionMetadata, PooledRow, StaticMetadata, TensorMetadata
from streamdiff.pipeline.kv_cache.cache import CachePool, LayerCaches
from streamdiff.pipeline.kv_cache.over_time import ActionRow
from streamdiff.pipeline.runner import graphs
from streamdiff.pipeline.runner.graphs import GraphKey, Inputs, RowInputs, Run, Tensors, Texts, graph_cache_on

logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """Key of a compiled forward. `sessions`: of each row, the index of its session in the forward; `shapes`: of each
    row, what it sees; `slots`: of each session, the slots of its KV cache."""

    sessions: tuple[int, ...]
    shapes: tuple[StaticMetadata, ...]
    slots: tuple[int, ...]

    @property
    def alone(self) -> set[Key]:
        """Keys of the rows, each in a forward of its own."""
        return {
            Key((0,), (shape,), (self.slots[session],))
            for session, shape in zip(self.sessions, self.shapes, strict=True)
        }


class CompiledStage:
    """The compiled forwards of one stage, by key. While `learning` is true, a new key is compiled, which is slow."""

    def __init__(self, stage: ModelRunner) -> None:
        self._stage = stage
        self._graphs: dict[Key, Run] = {}
        self._parts: dict[tuple[int, bool], CompiledParts] = {}  # by the number of rows, and what they keep
        self._attend = stage.denoiser.attend_parts(graphs.one_graph(attention_backend.merge_attention_states))
        self._rotate_sinks = graphs.one_graph(_rotate_all_sinks)
        self._sinks: set[tuple[torch.Size, tuple[int, ...]]] = set()
        # With an exchange in it a replay would have to be met by one of every other rank; compiled parts need not.
        self._graph_cache = graph_cache_on(stage.device) if stage.group is None else None
        self.pool: CachePool | None = None
        """Where graphs of CUDA find caches; sessions that have others run compiled, not captured."""
        self.paged: AttendPaged | None = None
        """What attends for rows of several sessions at once; None: one after the other."""
        self._pooled_row = lru_cache(maxsize=1024)(self._make_pooled_row)
        self.replayed: set[int] = set()
        """Numbers of caches whose rows' forwards were replayed."""
        self.learning = False

    @property
    def captures(self) -> bool:
        """Whether forwards are captured, which needs a pool."""
        return self._graph_cache is not None

    def try_paged(self, rows: int, window: int) -> None:
        """Have rows of several sessions, which see `window` latent frames, attend at once where that is faster.
        Mutates: self."""
        denoiser, device = self._stage.denoiser, self._stage.device
        chunk = denoiser.tokens(self._stage.grid)
        tokens = chunk // self._stage.grid[0]
        shape = AttentionShape(denoiser.heads, denoiser.head_dim, chunk, window * tokens)
        self.paged, reason = try_paged(shape, rows, tokens, denoiser.attend_parts(), device, denoiser.dtype)
        logger.debug("Attention of several sessions' rows is computed %s", reason)

    def run(
        self, given: Tensors, texts: Texts, metadata: Sequence[AttentionMetadata], acting: Sequence[ActionRow]
    ) -> Tensors | None:
        """The result of the plain path by a compiled forward, or None if there is none for this key; `acting`: of a
        model with action modules. Mutates: the rows' caches."""
        key, inputs = _split(given, texts, metadata, acting)
        if (run := self._compiled(key)) is None:
            return None
        if self._graph_cache is None or (bound := self._bound(key, run, inputs, metadata)) is None:
            return run(inputs)
        numbers, graph_key, captured, own = bound
        if not self.learning:
            if graph_key not in self._graph_cache.graphs:
                return run(inputs)
            self.replayed |= numbers
        return self._graph_cache.run(graph_key, captured, own, texts)

    def _compiled(self, key: Key) -> Run | None:
        """What computes a forward; None: nothing was compiled for it. Of several sessions it may be any whose rows each
        have a graph alone. Mutates: self, while learning."""
        if key in self._graphs:
            return self._graphs[key]
        kind = len(key.shapes), any(shape.keeps_unrotated for shape in key.shapes)
        several = len(key.slots) > 1
        if self.learning:
            self._parts[kind] = self._parts.get(kind) or compiled(self._stage, kind[1])
        elif not several or kind not in self._parts or not self._graphs.keys() >= key.alone:
            return None
        run = partial(run_parts, self._stage, self._parts[kind], self._attend, key)
        if not several:
            self._graphs[key] = run
        return run

    def _bound(
        self, key: Key, run: Run, inputs: Inputs, metadata: Sequence[AttentionMetadata]
    ) -> tuple[set[int], GraphKey, Run, Inputs] | None:
        """Numbers of the caches in the pool, and key, function and inputs of the captured graph of such a forward;
        None: it has no graph."""
        assert self.pool is not None
        found = [self.pool.number_of(row.tensors.caches) for row in metadata]
        numbers = [number for number in found if number is not None]
        if len(numbers) < len(found):
            return None
        if len(key.slots) == 1:
            return set(numbers), (key, numbers[0]), run, inputs
        if inputs.acting or not all(shape.plain for shape in key.shapes):  # action modules' caches are in no pool
            return None
        shapes = tuple(replace(each, ranges=((0, each.sink + each.window_frames),)) for each in key.shapes)
        rows = tuple(
            row._replace(base=pooled.slot, seen=pooled.seen)
            for row, pooled in zip(inputs.rows, map(self._pooled_row, numbers, key.shapes), strict=True)
        )
        own = inputs._replace(caches=(self.pool.whole,), rows=rows)
        paged = self.paged if len(key.slots) == len(shapes) else None
        parts = self._parts[len(shapes), any(shape.keeps_unrotated for shape in shapes)]
        pooled = partial(run_parts, self._stage, parts, self._attend, key, paged=paged)
        return set(numbers), (key.sessions, shapes), pooled, own

    def _make_pooled_row(self, number: int, shape: StaticMetadata) -> PooledRow:
        """Of cache `number` of the pool its first slot, and the frames that a row of this shape sees."""
        assert self.pool is not None
        first = number * self.pool.slots
        seen = [first * shape.chunk + frame for begin, end in shape.ranges for frame in range(begin, end)]
        return PooledRow(*(attention.index_tensor(each, self._stage.device) for each in ((first,), seen)))

    def rotate_sinks(self, kept: Tensor, rotated: Tensor, factors: Tensor) -> None:
        """As `kv_cache.attention.rotate_sinks`, all layers by one kernel for sinks of sizes that it was learned for.
        Mutates: rotated."""
        size = kept.shape, rotated.stride()
        if self.learning:
            self._sinks.add(size)
        (self._rotate_sinks if size in self._sinks else attention.rotate_sinks)(kept, rotated, factors)


def run_parts(
    stage: ModelRunner,
    parts: CompiledParts,
    attend: AttendParts,
    key: Key,
    inputs: Inputs,
    paged: AttendPaged | None = None,
) -> Tensors:
    """The stage's forward by its compiled parts, and self-attention, by the kernel `attend`, between them, with the
    exchanges of ranks that share the stage, and action modules as they are written. In a pool several rows attend by
    `paged`. Mutates: the caches."""
    denoiser, metadata, group = stage.denoiser, _metadata(key, inputs), stage.group
    acting = [
        ActionRow(own, *there, row.factors)
        for own, there, row in zip(metadata, inputs.acting, inputs.rows, strict=False)
        if row.factors is not None
    ]
    in_pool = [
        PooledRow(row.slot + row.base, row.seen) for row in inputs.rows if row.base is not None and row.seen is not None
    ]
    weights = [denoiser.weights(layer) for layer in range(len(denoiser.blocks))]
    ropes = tuple(row.query_rope for row in inputs.rows)
    # Links deliver other tensors than inference ones, which would compile to another graph.
    given = tuple(tensor if tensor.is_inference() else tensor.clone() for tensor in inputs.given)
    made = parts.begin(ropes, weights[0], given)
    hidden, (modulation, *projected) = (made[0], made[1:]) if stage.first else (given[0], made)
    time, last = given[1], len(weights) - 1
    for layer, own in enumerate(weights):
        if in_pool:
            chunk = key.shapes[0].chunk
            query, rotated, value = projected[:3]
            own_cache = inputs.caches[0]
            mixed = attention.attend_pooled(own_cache, layer, in_pool, chunk, query, rotated, value, attend, paged)
        elif group is None:
            query, rotated, value = projected[:3]
            unrotated = projected[3] if len(projected) > 3 else rotated
            mixed = attention.attend_rows(metadata, attend, None, layer, query, unrotated, value, rotated)
        else:
            shared = attention.attend_rows(metadata, attend, group.all_heads, layer, *group.to_heads(*projected))
            mixed = group.to_tokens(shared)
        rest: Tensor | None = mixed
        texts = tuple(text[layer] for text in inputs.texts)
        if acting and hasattr(own.block, ACTION_MODEL):
            crossed = parts.cross(own, hidden, modulation, texts, mixed)
            hidden, rest = stage.act(acting, given[2], layer, own.block, crossed), None
        if layer < last:
            hidden, *projected = parts.between(ropes, own, weights[layer + 1], hidden, modulation, texts, rest)
    result = parts.end(weights[last], hidden, time, modulation, texts, rest)
    if stage.last and group is not None:
        return stage.unite(result[0], group)
    return result if stage.last else (*result, *given[1 : 2 + (stage.spec.action_rows is not None)])


def _metadata(key: Key, inputs: Inputs) -> list[AttentionMetadata]:
    """The rows' attention metadata, put together again; of rows in a pool none."""
    if len(inputs.caches) < len(key.slots):
        return []
    return [
        AttentionMetadata(shape, TensorMetadata(inputs.caches[session], *row[:4]))
        for session, shape, row in zip(key.sessions, key.shapes, inputs.rows, strict=True)
    ]


def _rotate_all_sinks(kept: Tensor, rotated: Tensor, factors: Tensor) -> None:
    """`rotate_sinks` for a compiler, which makes no copies. Mutates: rotated."""
    rotated.copy_(rope.rotate(kept, factors))


def _split(
    given: Tensors, texts: Texts, metadata: Sequence[AttentionMetadata], acting: Sequence[ActionRow]
) -> tuple[Key, Inputs]:
    """The key of a forward, and its tensor inputs.

    A graph must not find out that two of its inputs happen to be the same tensor, which would be another graph: rows of
    one session share its caches always, and everything else is handed over as a tensor object of its own.
    """
    caches: list[LayerCaches] = []
    sessions = []
    for row in metadata:
        own = row.tensors.caches
        index = next((i for i, each in enumerate(caches) if each is own), len(caches))
        caches[index:] = caches[index:] or [own]
        sessions.append(index)
    factors: Sequence[Tensor | None] = [each.factors for each in acting] or [None] * len(metadata)
    rows = tuple(
        RowInputs(*row.tensors[1:], factors=own).map(_fresh_view) for row, own in zip(metadata, factors, strict=True)
    )
    others = tuple(tuple(type(own)(*map(_fresh_view, own)) for own in text) for text in texts)
    key = Key(tuple(sessions), tuple(row.shape for row in metadata), tuple(len(each.keys[0]) for each in caches))
    return key, Inputs(given, others, tuple(caches), rows, tuple((each.caches, each.cache) for each in acting))


def _fresh_view(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape)


# ---- the compiled parts: the pieces of `WanDenoiser` between its self-attentions -----------------------------------

Ropes = tuple[Tensor, ...]
"""Of each row the rotary factors of its queries and keys, as `rope.matrices` has them."""


class CompiledParts(NamedTuple):
    """A stage's forward as graphs around its self-attentions, compiled at first call: `begin` up to the first one,
    `between` from one to the next, `end` after the last; `cross` from one to its block's action module, from where the
    others go on if they are given None for what self-attention returned. Queries, keys and values are `[R, L, H, d]`,
    queries and keys rotated; un-rotated keys follow if rows keep them. Where ranks share the stage: this rank's tokens,
    nothing rotated yet."""

    begin: Callable[[Ropes, BlockWeights, Tensors], tuple[Tensor, ...]]
    cross: Callable[..., Tensor]
    between: Callable[..., tuple[Tensor, ...]]
    end: Callable[..., Tensors]


def compiled(stage: ModelRunner, keeps_unrotated: bool) -> CompiledParts:
    """The stage for one number of rows. Weights of blocks are arguments, so one graph does for all of them."""
    denoiser, attend = stage.denoiser, stage.denoiser.attend

    def before(ropes: Ropes, weights: BlockWeights, hidden: Tensor, modulation: Tensor) -> tuple[Tensor, ...]:
        own = block_modulation(weights.block.scale_shift_table, modulation)
        query, key, value = denoiser.before_attention(weights, hidden, own)
        if stage.group is not None:  # positions are those of all tokens, which come with the exchange
            return query, key, value
        factors = ropes[0] if len(ropes) == 1 else torch.stack(ropes, 1)
        turned = rope.rotate(query, factors), rope.rotate(key, factors), value
        return (*turned, key) if keeps_unrotated else turned

    def cross(
        weights: BlockWeights, hidden: Tensor, modulation: Tensor, texts: tuple[BlockText, ...], mixed: Tensor
    ) -> Tensor:
        own = block_modulation(weights.block.scale_shift_table, modulation)
        return denoiser.to_cross_attention(weights, hidden, own, concat_rows(texts), mixed, attend)

    def after(
        weights: BlockWeights, hidden: Tensor, modulation: Tensor, texts: tuple[BlockText, ...], mixed: Tensor | None
    ) -> Tensor:
        own = block_modulation(weights.block.scale_shift_table, modulation)
        if mixed is None:
            return denoiser.feed_forward(weights, hidden, own)
        return denoiser.after_attention(weights, hidden, own, concat_rows(texts), mixed, attend)

    def begin(ropes: Ropes, weights: BlockWeights, given: Tensors) -> tuple[Tensor, ...]:
        tokens = stage.enter(given)
        modulation = denoiser.modulation(tokens.time).float()
        made = (tokens.hidden,) if stage.first else ()  # what is given is not handed back
        return (*made, modulation, *before(ropes, weights, tokens.hidden, modulation))

    def between(
        ropes: Ropes,
        weights: BlockWeights,
        following: BlockWeights,
        hidden: Tensor,
        modulation: Tensor,
        texts: tuple[BlockText, ...],
        mixed: Tensor | None,
    ) -> tuple[Tensor, ...]:
        hidden = after(weights, hidden, modulation, texts, mixed)
        return hidden, *before(ropes, following, hidden, modulation)

    def end(
        weights: BlockWeights, hidden: Tensor, time: Tensor, modulation: Tensor, texts: tuple[BlockText, ...],
        mixed: Tensor | None,
    ) -> Tensors:  # fmt: skip
        hidden = after(weights, hidden, modulation, texts, mixed)
        if not stage.last:
            return (hidden,)
        tokens = TokenStates(hidden, time)
        return (denoiser.output_layer(tokens, stage.grid) if stage.group is None else denoiser.output(tokens),)

    one_graph = graphs.one_graph
    return CompiledParts(one_graph(begin), one_graph(cross), one_graph(between), one_graph(end))
