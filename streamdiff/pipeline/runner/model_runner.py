"""Runs one stage: a contiguous run of transformer blocks, with the KV caches of those blocks for every open session;
and the loop that every rank runs it in.

Does what stage messages say; never decides anything itself. Knows nothing about noise or sampling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import groupby, product

import torch
from torch import Tensor, nn

from streamdiff.core import PER_STEP, MicroStep, cache_count, most_steps
from streamdiff.models.model import StageModel
from streamdiff.models.sampling import nearest_steps
from streamdiff.models.transformer.actions import ACTION_MODEL, frame_factors
from streamdiff.models.transformer.lora import BlockFactors, Branch
from streamdiff.models.transformer.wan import KeyValue, SelfAttention, SteeredText, TokenStates, concat_rows
from streamdiff.models.transformer.weights import weights_digest
from streamdiff.pipeline.device_timer import DeviceTimer, StreamTimer
from streamdiff.pipeline.distributed.context_parallel import ContextGroup
from streamdiff.pipeline.distributed.heartbeat import RankLoop
from streamdiff.pipeline.distributed.link import Receiver, Sender
from streamdiff.pipeline.distributed.message import MessageKind, SessionUpdate, StageMessage
from streamdiff.pipeline.distributed.state_exchange import LocalExchange, StateMover, lora_key, stage_key
from streamdiff.pipeline.kv_cache.attention import AttentionMetadata, RollingAttention
from streamdiff.pipeline.kv_cache.cache import CachePool, CacheSizes, KVCache
from streamdiff.pipeline.kv_cache.geometry import CacheGeometry, cache_geometry
from streamdiff.pipeline.kv_cache.over_time import ActionCaches, ActionRow, attend_over_time
from streamdiff.pipeline.planner.kv_budget import PreallocatedCaches, RankMemory
from streamdiff.pipeline.row_faults import ROW_ERRORS, StageGuard
from streamdiff.pipeline.runner.compiled_stage import CompiledStage
from streamdiff.pipeline.runner.graphs import Tensors, Texts
from streamdiff.session_state import walk
from streamdiff.session_state.fields import BY_LAYER, BY_SHARE, DERIVED, KEPT, STATE, reset, session_state
from streamdiff.session_state.swap_store import SwapStore

_TRIAL = -1
"""The first session that graphs are made with; others have smaller numbers."""


@session_state("stage")
@dataclass
class StageState:
    """A session's state on one stage: its KV cache, its steps per chunk (without the first chunk's extra ones), and by
    epoch still in use the cross-attention keys and values, and the first chunk that is visible outside the sink."""

    geometry: CacheGeometry = field(metadata=KEPT)
    state: KVCache = field(metadata=BY_SHARE)
    steps: int = field(metadata=KEPT)
    same_step: bool = field(metadata=KEPT)
    """Whether each step has a cache of its own: `same_step`."""
    cached_steps: int = field(metadata=KEPT)
    """If `same_step`: the step count that the caches are laid out for."""
    actions: ActionCaches | None = field(metadata=BY_SHARE)
    """Of a model with action modules."""
    newest: int = field(default=-1, metadata=STATE)
    """The newest chunk that has written; read only if not `same_step`."""
    text: dict[int, list[KeyValue]] = field(default_factory=dict, metadata=BY_LAYER)
    visible_from_chunk: dict[int, int] = field(default_factory=dict, metadata=STATE)
    loras: dict[int, dict[int, float]] = field(default_factory=dict, metadata=STATE)
    """By epoch that has some: scales of its LoRAs, by id."""
    steered: dict[tuple[int, int], list[SteeredText]] = field(default_factory=dict, metadata=DERIVED)
    """By (chunk, epoch) in flight: the text with what the chunk's cameras do to each block, where that is kept."""

    def derive(self) -> None:
        """What cameras do is made again. Mutates: self."""
        self.steered.clear()

    def forget_epochs(self, oldest: int) -> None:
        """Drop epochs before `oldest`. Mutates: self."""
        for epoch in [each for each in self.text if each < oldest]:
            del self.text[epoch], self.visible_from_chunk[epoch]
            self.loras.pop(epoch, None)


class ModelRunner:
    """Stage `index` of `stages`: the blocks of `model.denoiser`, which are its own only. The first one embeds too, the
    last one has the output layer. Where `group` shares the stage, a forward runs on all its ranks together, and caches
    hold this rank's heads only."""

    def __init__(
        self, model: StageModel, device: torch.device, index: int = 0, stages: int = 1,
        group: ContextGroup | None = None,
    ) -> None:  # fmt: skip
        self.denoiser, self.spec, self.device = model.denoiser, model.spec, device
        self.index, self.stages = index, stages
        spec, patch = model.spec, model.denoiser.patch
        if patch[0] != 1:
            raise ValueError(f"a patch has {patch[0]} latent frames; it must have 1, as windows count latent frames")
        self.group, self.grid = group, spec.chunk_shape[1:]
        self.first, self.last = index == 0, index == stages - 1
        self.shares, share = (1, 0) if group is None else (group.size, group.index)
        self.heads, self.exchange_key = self.denoiser.heads // self.shares, stage_key(index, share)
        all_heads = None if group is None else group.all_heads
        patches = (spec.latent_height // patch[1], spec.latent_width // patch[2])
        self.attention = RollingAttention(
            spec.chunk_latents, *patches, self.denoiser.head_dim, device, self.denoiser.attend_parts(), all_heads
        )
        self._frame_factors = lru_cache(maxsize=32)(self._make_frame_factors)
        self._folded = self.denoiser.fold_position_planes(*self.grid[1:]) if self.first else None
        self.compiled: CompiledStage | None = None
        self.sessions: dict[int, StageState] = {}
        self.guard = StageGuard(self)
        self.exchange = LocalExchange()
        """Where states are left for the head, and found."""
        self.swaps = SwapStore(device)
        """Where sessions lie that are swapped out."""
        self.mover = StateMover(self)
        self.loras: dict[int, list[BlockFactors]] = {}
        """LoRAs that are loaded: branches of the stage's blocks, by id."""
        self.keeps_cameras = True
        """Whether what cameras do to the blocks is made once per chunk, not step by step: it takes two numbers of each
        token and width in every block (5.1 GB of a 14B at 480x832)."""
        self._arriving: set[int] = set()  # sessions whose caches are still copied to the device
        self._pool: CachePool | None = None  # caches that have graphs of CUDA
        self._pooled_actions: dict[int, ActionCaches] = {}  # by number in the pool

    @torch.inference_mode()
    def carry_out(self, message: StageMessage) -> StageMessage:
        """Execute a stage message; returns the message for the next rank. Mutates: self."""
        update = message.update
        sessions = {row.session for row in message.rows} if update is None else {update.session}
        if self._arriving & sessions:  # what follows uses their caches: on the device it waits for what comes back
            self._arriving -= sessions
            self.swaps.copies.follow()
        if update is not None:
            return self.guard.apply_update(message)
        rows, failed = message.rows, None
        if not self.guard.broken:
            try:
                return StageMessage(message.kind, rows, None, self.forward(rows, message.tensors))
            except ROW_ERRORS as error:
                failed = error
        return StageMessage(message.kind, rows, None, self.guard.forward(rows, message.tensors, failed))

    def apply_update(self, kind: MessageKind, update: SessionUpdate, tensors: Tensors) -> SessionUpdate:
        """Make a change to a session, see `MessageKind`; returns it for the next rank. Mutates: self."""
        match kind:
            case MessageKind.OPEN:
                self.open(update.session, steps=update.steps, kv_context=update.kv_context)
            case MessageKind.TEXT:
                how = update.oldest, update.visible_from_chunk, dict(update.loras)
                self.set_text(update.session, update.epoch, tensors[0], *how)
            case MessageKind.LORA:
                self.set_lora(update.epoch, update.saved)
            case MessageKind.RESET if update.session in self.sessions:
                self.reset(update.session)
            case MessageKind.RESET:  # it is swapped out, and what it was is not needed any more
                self.mover.forget(update.session)
                self.open(update.session, steps=update.steps, kv_context=update.kv_context)
            case MessageKind.STEPS:
                self.set_steps(update.session, update.epoch, update.steps, update.oldest)
            case MessageKind.CLOSE:
                self.close(update.session)
            case MessageKind.COPY_OUT:
                return replace(update, outcome=max(update.outcome, self.mover.copy_out(update)))
            case MessageKind.PUT_BACK:
                return replace(update, outcome=max(update.outcome, self.mover.put_back(update)))
        return update

    def nan_outputs(self, rows: int, given: Tensors) -> Tensors:
        """What `forward` would return for so many rows, with NaN for numbers; where no other rank shares the stage."""
        like = given[0]
        if self.last:
            return (like.new_full((rows, *self.spec.chunk_shape), torch.nan),)
        tokens, onward = self.denoiser.tokens(self.grid), given[1 : 2 + (self.spec.action_rows is not None)]
        hidden = like.new_full((rows, tokens, self.denoiser.width), torch.nan)
        return hidden, *(each.clone() for each in onward)

    def zeros(self, rows: int) -> Tensors:
        """Zeros in the shape of what `forward` is given for so many rows."""
        like, width = torch.empty(0, dtype=self.denoiser.dtype, device=self.device), self.denoiser.width
        time, spec = like.new_zeros(rows, self.grid[0], width), self.spec
        steering = () if spec.steering_shape is None else (like.new_zeros(rows, *spec.steering_shape),)
        onward = tuple(each.float() for each in steering) if spec.action_rows is not None else ()
        if self.first:
            return like.new_zeros(rows, *spec.input_shape), time, *(onward or steering)
        return like.new_zeros(rows, self.denoiser.tokens(self.grid) // self.shares, width), time, *onward

    def forget_sinks(self, session: int) -> None:
        """Have the sink of a session's caches rotated again. Mutates: its caches."""
        if session in self.sessions:
            self.sessions[session].state.sink_at.clear()

    @torch.inference_mode()
    def open(self, session: int, *, steps: int, kv_context: str) -> None:
        """Allocate the session's caches, or take some of the pool, those that have graphs. Mutates: self."""
        self.swaps.copies.follow()  # caches that are taken over may still be copied
        geometry, caches = self._cache_kind(steps, kv_context)
        state = self._pool and self._pool.take(geometry, caches)
        state = state or KVCache.allocate(geometry, caches=caches, **self._cache_sizes(self.device))
        number = None if self._pool is None else self._pool.number_of(state.layers(0))
        actions = None if number is None else self._pooled_actions.get(number)
        if actions is not None:  # graphs are bound to them too
            reset(actions)
        elif (actions := self._action_caches(geometry, caches, self.device)) is not None and number is not None:
            self._pooled_actions[number] = actions
        self.sessions[session] = StageState(geometry, state, steps, kv_context in PER_STEP, steps, actions)

    def _action_caches(self, geometry: CacheGeometry, caches: int, device: torch.device) -> ActionCaches | None:
        """Empty caches of the stage's action modules; None: the model has none."""
        if (sizes := self.spec.actions) is None:
            return None
        layers = max((at + 1 for at, each in enumerate(self.denoiser.blocks) if hasattr(each, ACTION_MODEL)), default=0)
        tokens, like = self.denoiser.tokens(self.grid) // self.grid[0], self._cache_sizes(device)["like"]
        return ActionCaches.allocate(geometry, sizes, caches, layers, tokens // self.shares, like)

    def _cache_kind(self, steps: int, kv_context: str) -> tuple[CacheGeometry, int]:
        """Geometry and number of a session's caches."""
        most = most_steps(steps, self.spec.steps)
        return cache_geometry(self.spec, kv_context, steps=steps), cache_count(kv_context, steps=most)

    def _cache_sizes(self, device: torch.device) -> CacheSizes:
        return {
            "layers": len(self.denoiser.blocks),
            "tokens": self.denoiser.tokens(self.grid),
            "heads": self.heads,
            "head_dim": self.denoiser.head_dim,
            "like": torch.empty(0, dtype=self.denoiser.dtype, device=device),  # weights may be quantised
        }

    def _make_frame_factors(self, chunk: int) -> Tensor:
        """Rotary factors of a chunk's latent frames for action modules: few chunks are in flight at once."""
        assert self.spec.actions is not None
        frames = self.grid[0]
        return frame_factors(chunk * frames, frames, self.spec.actions, self.device)

    def close(self, session: int) -> None:
        """Free the session's KV cache, or give it back to the pool. Mutates: self."""
        self.mover.forget(session)
        self._arriving.discard(session)
        gone = self.sessions.pop(session, None)
        if gone is not None and self._pool is not None:
            self._pool.give_back(gone.state)

    @torch.inference_mode()
    def reset(self, session: int) -> None:
        """Empty the session's caches, in place. Mutates: self."""
        self.mover.spoil(session, "it has restarted meanwhile")
        reset(self.sessions[session])

    @torch.inference_mode()
    def set_text(
        self, session: int, epoch: int, embeddings: Tensor, oldest: int, visible_from_chunk: int = 0,
        loras: Mapping[int, float] | None = None,
    ) -> None:  # fmt: skip
        """Project text embeddings `[T, text_dim]` for `epoch`, whose chunks see none before `visible_from_chunk` but
        the sink, and have `loras` at these scales; epochs before `oldest` are dropped. Mutates: self."""
        kept, branches = self.sessions[session], self._branches([loras]) if loras else ()
        kept.text[epoch] = self.denoiser.text(embeddings[None].to(self.device, self.denoiser.dtype), branches)
        kept.visible_from_chunk[epoch] = visible_from_chunk
        if loras:
            kept.loras[epoch] = dict(loras)
        kept.forget_epochs(oldest)

    def set_lora(self, lora: int, there: bool) -> None:
        """Take a LoRA from the exchange, or drop it. Mutates: self."""
        self.loras.pop(lora, None)
        if there:
            self.loras[lora] = walk.restored(*self.exchange.take(lora_key(self.exchange_key, lora)), self.device)

    @torch.inference_mode()
    def set_steps(self, session: int, epoch: int, steps: int, oldest: int) -> None:
        """Chunks from now on have `steps` of the model's own steps, and belong to `epoch`, which begins with the text
        of the one before; epochs before `oldest` are dropped. Mutates: self."""
        kept = self.sessions.get(session)
        if kept is None:  # it is swapped out, and a reset that follows says them
            return
        latest = max(kept.text)
        kept.text.setdefault(epoch, kept.text[latest])
        kept.visible_from_chunk.setdefault(epoch, kept.visible_from_chunk[latest])
        if latest in kept.loras:
            kept.loras.setdefault(epoch, kept.loras[latest])
        kept.forget_epochs(oldest)
        kept.steps = steps

    def follow_copies(self, session: int) -> None:
        """What next uses the session's caches waits on the device for the copies so far. Mutates: self."""
        self._arriving.add(session)

    @cached_property
    def weights(self) -> list[str]:
        """Digests of its blocks."""
        return [weights_digest(block) for block in self.denoiser.blocks]

    def _fit_caches(self, session: StageState) -> None:
        """Where each step has a cache: after a change of step count, give each step the cache of the old step with the
        nearest timestep. Runs on the first row that needs it. Mutates: session."""
        if session.same_step and session.cached_steps != session.steps:
            before, now = self.spec.schedule(session.cached_steps), self.spec.schedule(session.steps)
            session.cached_steps = 0  # what fails half way is not begun again: there is no schedule of 0 steps
            session.state.rearrange(sources := nearest_steps(before, now))
            if session.actions is not None:
                session.actions.rearrange(sources)
            session.cached_steps = session.steps

    @torch.inference_mode()
    def forward(self, rows: Sequence[MicroStep], given: Tensors) -> Tensors:
        """Run this stage for `rows`. With graphs of CUDA what it returns is overwritten by the next forward: anyone who
        keeps it copies it. Mutates: the rows' caches.

        Args:
            given: on the first stage latents `[R, C, F, h, w]`, with their condition behind them, the time embedding
                `[R, F, D]` and control vectors `[R, F, K]`, or rows of actions `[R, rows, K]`, where the model has
                some, else `TokenStates`.

        Returns:
            On the last stage the flow `[R, C, F, h, w]` alone, and where ranks share it that on the first of them only;
            else `TokenStates`. Where ranks share the stage, hidden states are this rank's tokens only.
        """
        metadata: list[AttentionMetadata] = []
        for index, row in enumerate(rows):
            metadata.append(self._row_metadata(row, self._visible_later_rows(rows, index), metadata))
        texts, camera = self._block_texts(rows, given)
        branches = self._branches([self.sessions[row.session].loras.get(row.epoch, {}) for row in rows])
        acting = () if self.spec.actions is None else self._action_rows(rows, metadata)
        compiled = None if camera is not None or branches else self.compiled
        done = None if compiled is None else compiled.run(given, texts, metadata, acting)
        if done is None:
            text = map(concat_rows, zip(*texts, strict=True))  # layer by layer: what cameras do is large
            attention = self.attention.on(metadata)
            if self.group is not None:
                attention = partial(shared_attention, self.group, attention)
            entered = self.enter(given)
            act = None if entered.actions is None or not acting else partial(self.act, acting, entered.actions)
            done = self.leave(self.denoiser.run_blocks(entered, text, attention, act, camera, branches))
        for row in rows:
            if row.clean or (row.last and self.sessions[row.session].same_step):
                self.sessions[row.session].steered.pop((row.chunk, row.epoch), None)
            if row.chunk < self.spec.first_chunks > 1:
                self._share(row)
        return done

    def _branches(self, rows: Sequence[Mapping[int, float]]) -> list[list[Branch]]:
        """What the LoRAs of rows, scales by id, are to each block; empty where none has any. Rows next to each other
        that have the same go together."""
        found, first = list[tuple[int, int, int, float]](), 0
        for own, group in groupby(rows if self.loras else ()):
            end = first + sum(1 for _ in group)
            found += [(first, end, lora, scale) for lora, scale in own.items() if scale]
            first = end
        layers = range(len(self.denoiser.blocks) if found else 0)
        return [
            [Branch(first, end, self.loras[lora][layer], scale) for first, end, lora, scale in found]
            for layer in layers
        ]

    def _block_texts(self, rows: Sequence[MicroStep], given: Tensors) -> tuple[Texts, Tensor | None]:
        """Of each row what its blocks are given beside hidden states; and the rows' camera embedding `[R, L, D]`, where
        blocks make their own of it step by step. Mutates: the rows' sessions, where it is made once per chunk."""
        texts = [self.sessions[row.session].text[row.epoch] for row in rows]
        if not self.denoiser.has_camera:
            return texts, None
        if not self.keeps_cameras:
            return texts, self._camera_embedding(given[2])
        return [self._steered(row, texts[i], given[2][i : i + 1]) for i, row in enumerate(rows)], None

    def _steered(self, row: MicroStep, text: Sequence[KeyValue], camera: Tensor) -> list[SteeredText]:
        """The text of a row with what its chunk's cameras do to each block. Mutates: the row's session."""
        kept, key = self.sessions[row.session].steered, (row.chunk, row.epoch)
        if key not in kept:
            embedding, denoiser = self._camera_embedding(camera), self.denoiser
            kept[key] = [denoiser.steered(denoiser.weights(i), own, embedding) for i, own in enumerate(text)]
        return kept[key]

    def _camera_embedding(self, cameras: Tensor) -> Tensor:
        """That of this rank's tokens."""
        embedding = self.denoiser.camera_embedding(cameras, *self.grid[1:])
        return embedding if self.group is None else self.group.own_tokens(embedding)

    def _action_rows(self, rows: Sequence[MicroStep], metadata: Sequence[AttentionMetadata]) -> Sequence[ActionRow]:
        """What action modules attend with."""
        found = []
        for row, own in zip(rows, metadata, strict=True):
            session = self.sessions[row.session]
            assert session.actions is not None, "the model has action modules"
            cache = self._cache(session, row)
            found.append(ActionRow(own, session.actions, cache, self._frame_factors(row.chunk)))
        return found

    @staticmethod
    def act(rows: Sequence[ActionRow], actions: Tensor, layer: int, block: nn.Module, hidden: Tensor) -> Tensor:
        """See `wan.Act`. Mutates: the rows' caches."""
        module = getattr(block, ACTION_MODEL, None)
        if module is None:
            return hidden
        result: Tensor = module(layer, hidden, actions, partial(attend_over_time, rows))
        return result

    def enter(self, given: Tensors) -> TokenStates:
        """The stage's input as `TokenStates` for its first block."""
        first, time, *steering = given
        if not self.first:
            return TokenStates(first, time, *steering)
        onward = steering if self.spec.action_rows is not None else []
        hidden = self.denoiser.patches(first, self._folded, *([] if onward else steering))
        return TokenStates(hidden if self.group is None else self.group.own_tokens(hidden), time, *onward)

    def leave(self, tokens: TokenStates) -> Tensors:
        """The stage's output from its last block's `TokenStates`."""
        if not self.last:
            return tuple(each for each in tokens if each is not None)
        if self.group is None:
            return (self.denoiser.output_layer(tokens, self.grid),)
        return self.unite(self.denoiser.output(tokens), self.group)

    def unite(self, output: Tensor, group: ContextGroup) -> Tensors:
        """The flow from the output layer's result for own tokens, and that of the other ranks of `group`; nothing on
        these, since the first sends it on."""
        whole = group.tokens_on_first(output)
        return () if whole is None else (self.denoiser.unpatch(whole, self.grid),)

    @torch.inference_mode()
    def compile(
        self, kept: PreallocatedCaches, *, memory: RankMemory | None = None, max_rows: int = 1,
        on_progress: Callable[[int, int], None] = lambda made, of: None,
    ) -> None:  # fmt: skip
        """Make graphs for the forwards that a session of the kind of `kept` meets for ever once its window is full: of
        a chunk alone, and of 2 to `max_rows` sessions.
        Until then, and after a `flush`, it runs the plain path. Takes from seconds to minutes; `on_progress` is called
        with the number of kinds of forward whose graphs are made, and how many there are.

        On CUDA graphs are captured, for a pool of caches: of as many sessions as `kept` wants and fit into `memory`, at
        least one. Mutates: self.
        """
        kept = kept._replace(steps=most_steps(kept.steps, self.spec.steps))
        steps, kv_context = kept.steps, kept.kv_context
        self.compiled = CompiledStage(self)
        self.attention.rotate_sinks = self.compiled.rotate_sinks
        trials = self._try_out(kept, memory, max_rows)
        # From here on every chunk takes the slot of another. Where slots are spare, what is seen lies otherwise with
        # each of them.
        geometry = self.sessions[_TRIAL].geometry
        full = max(geometry.slots, self.spec.first_chunks)
        chunks = range(full, full + geometry.period)
        self.compiled.learning = True
        kinds = min(max_rows, len(trials))
        on_progress(0, kinds)
        for trial, chunk in product(trials if self._pool is not None else trials[:1], chunks):
            for step in range(steps) if kv_context in PER_STEP else (0, steps):
                self.forward([MicroStep(trial, chunk, step, steps, 0)], self.zeros(1))
        on_progress(1, kinds)
        if kinds > 1 and self._pool is not None:
            self.compiled.try_paged(kinds, self.spec.window(kv_context))
        for count in range(2, kinds + 1):
            rows = [MicroStep(trial, full, 0, steps, 0) for trial in trials[:count]]
            self.forward(rows, self.zeros(count))
            on_progress(count, kinds)
        self.compiled.learning = False
        for trial in trials:
            self.close(trial)

    def _try_out(self, kept: PreallocatedCaches, memory: RankMemory | None, max_rows: int) -> list[int]:
        """Open trial sessions whose forwards are compiled: all of the pool, where there is one. Mutates: self."""
        assert self.compiled is not None
        geometry, caches = self._cache_kind(kept.steps, kept.kv_context)
        one = walk.nbytes(KVCache.allocate(geometry, caches=caches, **self._cache_sizes(walk.META)))
        one += walk.nbytes(self._action_caches(geometry, caches, walk.META))
        if self.compiled.captures:
            sessions = kept.sessions if memory is None else memory.preallocates(kept, one)
            self._pool = CachePool(geometry, sessions, caches=caches, **self._cache_sizes(self.device))
            self.compiled.pool = self._pool
        else:
            sessions = max_rows if memory is None else max(1, memory.holds(max_rows, one))
            if self.group is not None:  # all of them run the same forwards, as many as the least can
                sessions = -self.group.highest(-sessions)
        for trial in (trials := [_TRIAL - number for number in range(sessions)]):
            self.open(trial, steps=kept.steps, kv_context=kept.kv_context)
            self.set_text(trial, 0, torch.zeros(self.spec.text_shape), 0)
        return trials

    def _visible_later_rows(self, rows: Sequence[MicroStep], index: int) -> int:
        """Number of later rows in this forward that row `index` may attend to: chunks that are made together."""
        row, count = rows[index], self.spec.first_chunks
        if row.recaches:
            return len(rows) - 1 - index
        if row.chunk + 1 >= count:  # as good as always
            return 0
        return sum(
            row.chunk < other.chunk < count and (row.session, row.step) == (other.session, other.step)
            for other in rows[index + 1 :]
        )

    def _share(self, row: MicroStep) -> None:
        """What was made together is seen by every step as its last one left it (StreamDiffusionV2's start: it runs
        through all steps on one cache, which is copied then). Mutates: the row's caches."""
        session = self.sessions[row.session]
        if session.same_step and row.last:
            session.state.share(self._cache(session, row), session.geometry.slot(row.chunk))

    def _cache(self, session: StageState, row: MicroStep) -> int:
        """A first chunk may have more steps: those before the others' first write where that one will."""
        return min(max(0, row.step - (row.steps - session.steps)), session.steps - 1) if session.same_step else 0

    def _row_metadata(self, row: MicroStep, later: int, before: Sequence[AttentionMetadata]) -> AttentionMetadata:
        """Attention metadata of a row, which sees so many `later` ones of its forward. Mutates: its session."""
        session = self.sessions[row.session]
        self._fit_caches(session)
        cache = self._cache(session, row)
        # Where there is a clean pass, only what that writes stays.
        adapt = self.spec.adaptive_sink if session.same_step or row.clean else None
        if session.geometry.adaptive and row.chunk < self.spec.first_chunks > 1:
            adapt = None  # published: chunks that are made together are not compared with the sink
        # A chunk leaves when the one that takes its slot first writes there.
        fold = self.spec.averaged_sink if session.same_step or row.chunk > session.newest else None
        session.newest = max(session.newest, row.chunk)
        visible_from = session.visible_from_chunk[row.epoch]
        if row.recaches:
            # All see each other. A sink that the window has moved on from keeps the keys that it has.
            geometry, end = session.geometry, row.recache_end
            return self.attention.row_metadata(
                geometry, session.state, cache, row.chunk, visible_from, visible_later_rows=later, before=before,
                end_chunk=end, keep_sink=geometry.full(end),
            )  # fmt: skip
        if row.clean and self.spec.context_alone:
            visible_from = max(visible_from, row.chunk)
        return self.attention.row_metadata(
            session.geometry, session.state, cache, row.chunk, visible_from, adapt, fold, later, before
        )


def shared_attention(
    group: ContextGroup, attention: SelfAttention, layer: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """A `SelfAttention` over this rank's tokens: all-to-all, `attention` over all tokens of own heads, back."""
    return group.to_tokens(attention(layer, *group.to_heads(query, key, value)))


class Worker(RankLoop):
    """The loop of a rank that has a stage."""

    def __init__(
        self,
        receiver: Receiver,
        stage: ModelRunner,
        sender: Sender,
        timer: DeviceTimer | None = None,
        timed: StreamTimer | None = None,
    ) -> None:
        """`timer` is that of the device, `timed` that of the stream that the stage computes on; None: made here."""
        super().__init__(receiver, sender, timer or DeviceTimer.on(stage.device))
        self.stage, self._timed = stage, timed or self.timer.stream()
        self._received_rows: list[StageMessage] = []  # rows of a long forward, until all are received
        self._rest: deque[StageMessage] = deque()  # those that are still to be sent on

    @property
    def awaits_others(self) -> bool:
        return self.stage.heads < self.stage.denoiser.heads

    @property
    def sending(self) -> bool:
        """Whether rows of a long forward are still to be sent: `step` does nothing else before they are."""
        return bool(self._rest)

    def step(self, wait_s: float | None = 0.0) -> StageMessage | None:
        """Receive one message, execute it, send the result on; returns the message, or None if there was none.

        A link carries few rows at once. A forward with more of them (`MicroStep.recaches`) travels row by row, which
        are executed together when all have come; of its result, which nobody needs, the last stage sends one."""
        if self._rest:
            self.sender.send(self._rest.popleft())
            return None
        message = self.receiver.receive(wait_s)
        if message is not None:
            self.execute(message)
        return message

    def execute(self, message: StageMessage) -> None:
        """Execute a message, and send the result on, of a long forward the first row. Mutates: self, the stage."""
        self.done += 1
        if (whole := self._assembled(message)) is not None:
            self.now = whole
            if not (whole.is_long or whole.kind.is_answered):  # whose record tells what became of it
                self.sender.announce(whole)
            with self._timed.work(whole.bare):
                result = self.stage.carry_out(whole)
            self.now, self.last = None, whole
            last = self.stage.index == self.stage.stages - 1
            first, *rest = result.as_sent[-1:] if last else result.as_sent
            self._rest.extend(rest)
            self.sender.send(first)

    def _assembled(self, message: StageMessage) -> StageMessage | None:
        """The complete message that `message` is or completes; None while rows of it are missing. Mutates: self."""
        rows = message.rows
        if not message.is_long or len(rows) > 1:
            return message
        # The link's buffers are written again before the last row has come.
        self._received_rows.append(replace(message, tensors=tuple(tensor.clone() for tensor in message.tensors)))
        if rows[-1].chunk != rows[-1].recache_end:
            return None
        received, self._received_rows = self._received_rows, []
        tensors = tuple(torch.cat(parts) for parts in zip(*(each.tensors for each in received), strict=True))
        return replace(message, rows=tuple(row for each in received for row in each.rows), tensors=tensors)

    def run(self) -> None:
        while (message := self.step(None)) is None or message.kind is not MessageKind.STOP:
            pass
        self.close_links()

    def where(self) -> str:
        if self.now is not None:
            return f"at {self.now}"
        return f"after {self.last}" if self.last is not None else "before its first message"
