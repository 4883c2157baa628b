"""Saves sessions of a pipeline as snapshots, and loads them again, on all ranks.

A session is saved beside everything else. It is held until nothing of it is under way, and while each stage copies its
part, a piece at a time (`StageSaving`); then it continues, and a thread puts the parts together. Decision 0045.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamdiff.core import Chunk, Frames
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.autoencoder.picture_decoder import memory_outlines
from streamdiff.models.model import Model
from streamdiff.pipeline.decode.decode_worker import SavedMemory
from streamdiff.pipeline.distributed.message import MessageKind, Outcome, SessionUpdate
from streamdiff.pipeline.distributed.state_exchange import State, stage_key, ticket_key
from streamdiff.pipeline.runner.init_latents import GivenVideo
from streamdiff.pipeline.runner.model_runner import StageState
from streamdiff.pipeline.snapshot.checks import HeadState, load_head, unfinished
from streamdiff.pipeline.snapshot.file import Snapshot, check_model, model_facts
from streamdiff.pipeline.snapshot.swapping import occupied
from streamdiff.session_state import walk
from streamdiff.session_state.swap_store import HostCopy
from streamdiff.snapshot_header import OpenedWith

if TYPE_CHECKING:
    from streamdiff.pipeline.ring import Ring
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

_REST_WAIT_S = 0.1
"""How long a step waits for frames while a session comes to rest."""
_LOOK_S = 0.002


@dataclass(frozen=True)
class SavedParts:
    """What all ranks have of a session, in host memory: by stage, first to last, the parts of the ranks that share it;
    digests of the weights of all blocks; and what the head and the decoder have."""

    stages: Sequence[Sequence[StageState]]
    weights: Sequence[str]
    head: State
    decoder: State

    @property
    def whole(self) -> StageState:
        """The stages' parts as one with all layers and heads."""
        return walk.joined([walk.joined(shares, "heads") for shares in self.stages], "layers")

    def cut(self, whole: StageState) -> list[list[StageState]]:
        """A state with all layers and heads as parts for the same stages and ranks: views."""
        first, stages = 0, []
        for shares in self.stages:
            last, heads = first + shares[0].state.key.shape[1], shares[0].state.key.shape[4]
            layers = walk.cut(whole, "layers", first, last)
            stages.append([walk.cut(layers, "heads", at * heads, (at + 1) * heads) for at in range(len(shares))])
            first = last
        return stages


def head_state(ring: Ring, session: int) -> HeadState:
    """The head's own state of a session, not a copy."""
    return HeadState(ring.scheduler.session(session), ring.sampler.sessions[session], ring.changes.get(session))


def _keys(ring: Ring) -> list[list[str]]:
    """Exchange keys of the ranks, by stage and share."""
    return [[stage_key(stage, share) for share in range(ring.stage.shares)] for stage in range(ring.stage.stages)]


def _remembered(model: Model) -> list[Any]:
    """What the autoencoder that encodes the past again may remember, as outlines."""
    if (reencoder := model.first_frame_reencoder) is None:
        return [None]
    latents = torch.zeros(model.spec.chunk_shape, device=reencoder.decoder.device)
    decode = reencoder.decoder.decode_video
    outlines = memory_outlines(
        reencoder.new_memory, lambda memory: decode(latents[None], memory), model.spec.chunk_latents
    )
    return [None, *outlines]


@dataclass
class _Saving:
    """A session that is being saved: a copy of the head's part, and the future result in `made`, which `finish` makes
    of the parts. `blank`: only the outline of the stages' parts counts, and it stays held; `forgotten`: it has ended or
    restarted."""

    session: int
    head: HostCopy
    decoder: SavedMemory
    finish: Callable[[SavedParts], Any]
    blank: bool
    forgotten: bool = False
    made: Future[Any] | None = None


class RingSaving:
    """Saves sessions of a pipeline as snapshots, and restores them, on all ranks."""

    def __init__(self, pipeline: StreamingPipeline) -> None:
        self._pipeline = pipeline
        self.savings: dict[int, _Saving] = {}
        """By ticket; while there are any, `advance` has work."""
        self._ended = threading.Event()
        self._together = ThreadPoolExecutor(1, "snapshots", initializer=lambda: torch.set_num_threads(1))

    # ---- saving -------------------------------------------------------------------------------------------------

    def comes_to_rest(self, session: int) -> bool:
        """Hold a session; whether nothing of it is under way, so that `begin` may be called. Until then it makes
        nothing new."""
        self._pipeline.scheduler.hold(session, True)
        swapping = self._pipeline.swapping
        return swapping.at_rest(session) and not swapping.is_coming(session)

    def begin(self, session: int, finish: Callable[[Snapshot], Any] = lambda snapshot: snapshot) -> int:
        """Save a session that `comes_to_rest` as it is now; it continues once it is copied. Returns a number under
        which `take_done` will give what `finish`, on a thread, makes of the snapshot.

        Raises:
            ConfigError: its noise was given as tensors; it continues.
        """
        video = self._pipeline.sampler.sessions[session].video
        try:
            opened = head_state(self._pipeline, session).opened_with
        except ConfigError:
            self._let_go(session)
            raise
        return self._copy(session, lambda parts: finish(self._snapshot(parts, opened, video)))

    def take_done(self) -> list[tuple[int, Any]]:
        """What has been saved, by the numbers of `begin`; a ConfigError where it ended or restarted before it
        was copied. Told once."""
        done = [ticket for ticket, saving in self.savings.items() if saving.made is not None and saving.made.done()]
        return [(ticket, self._taken(ticket)) for ticket in done]

    def copies(self, session: int) -> bool:
        """Whether a session is being saved, and not done."""
        own = [each.made for each in self.savings.values() if each.session == session]
        return not all(made is not None and made.done() for made in own)

    def advance(self) -> bool:
        """Have the next pieces copied; whether any are still to be. Mutates: self, ring."""
        more = False
        for answer in self._pipeline.take_answers(MessageKind.SAVE):
            ticket, saving = answer.epoch, self.savings[answer.epoch]
            if answer.outcome is Outcome.NOT_YET:
                self._pipeline.tell(MessageKind.SAVE, SessionUpdate(answer.session, ticket))
                more = True
                continue
            saving.made = self._together.submit(self._put_together, ticket, saving)
            saving.made.add_done_callback(lambda _: self._pipeline.wake())
            if not (saving.blank or saving.forgotten):
                self._let_go(saving.session)
        return more

    def forget(self, session: int) -> None:
        """The session ends, or restarts. Mutates: self."""
        for saving in self.savings.values():
            saving.forgotten = saving.forgotten or saving.session == session

    def close(self) -> None:
        """The pipeline ends."""
        self._ended.set()
        self._pipeline.stage.exchange.close()
        self._together.shutdown(wait=False, cancel_futures=True)

    def _copy(self, session: int, finish: Callable[[SavedParts], Any], blank: bool = False) -> int:
        """Have a session at rest copied on all ranks; returns its ticket. Mutates: self, ring."""
        ring = self._pipeline
        ticket, copies = next(ring.swapping.tickets), ring.stage.swaps.copies
        head = HostCopy(copies, head_state(ring, session), "head")
        head.go_on()
        copies.follow()
        decoder = self._pipeline.decoding.save(self._pipeline.streams[session].number)
        self.savings[ticket] = _Saving(session, head, decoder, finish, blank)
        ring.tell(MessageKind.SAVE, SessionUpdate(session, ticket))
        return ticket

    def _put_together(self, ticket: int, saving: _Saving) -> Any:
        """On the thread. Raises ConfigError where a stage has no such session any more."""
        exchange = self._pipeline.stage.exchange
        keys = [[ticket_key(key, ticket) for key in shares] for shares in _keys(self._pipeline)]
        decoder = None
        while decoder is None or not all(exchange.holds(key) for shares in keys for key in shares):
            decoder = saving.decoder() if decoder is None else decoder  # gone once it is taken
            if self._ended.wait(_LOOK_S):
                raise ConfigError("the engine ends")
        taken = [[exchange.take(key) for key in shares] for shares in keys]
        trees = [decoder[1], *(tree for shares in taken for _, tree in shares)]
        if broken := [tree["broken"] for tree in trees if "broken" in tree]:
            raise ConfigError(broken[0])
        device = walk.META if saving.blank else walk.CPU
        stages = [[walk.restored(tensors, tree["state"], device) for tensors, tree in shares] for shares in taken]
        weights = [digest for shares in taken for digest in shares[0][1]["weights"]]
        return saving.finish(SavedParts(stages, weights, saving.head.result(), decoder))

    def _snapshot(self, parts: SavedParts, opened: OpenedWith, video: GivenVideo | None) -> Snapshot:
        """The snapshot of a session, of its parts at one moment."""
        model = self._pipeline.model
        states = {
            "stages": walk.save(parts.whole, "stages", Tensor.contiguous),
            "head": parts.head,
            "decoder": walk.save(walk.restored(*parts.decoder), "decoder", Tensor.contiguous),
        }
        snapshot = Snapshot(
            model_facts(model.spec, model.denoiser.dtype) | {"weights": parts.weights},
            opened,
            {name: tree for name, (_, tree) in states.items()},
            about={},
            tensors={name: tensor for tensors, _ in states.values() for name, tensor in tensors.items()},
        )
        if video is None:
            return snapshot
        levels = torch.tensor(video.levels, dtype=torch.float64)
        return snapshot.with_loose(video=video.latents, video_levels=levels)

    def _taken(self, ticket: int) -> Any:
        made = self.savings.pop(ticket).made
        assert made is not None
        error = made.exception()
        if error is not None and not isinstance(error, ConfigError):
            raise error
        return error or made.result()

    def _let_go(self, session: int) -> None:
        self._pipeline.scheduler.hold(session, self._pipeline.swapping.is_away(session))

    # ---- loading ------------------------------------------------------------------------------------------------

    def read_snapshot(self, data: bytes | memoryview) -> Snapshot:
        """The snapshot in a file's content. Raises ConfigError for what is none."""
        return Snapshot.from_bytes(data)

    def load(self, session: int, snapshot: Snapshot) -> list[Frames]:
        """Open a session that continues, to the bit, where a snapshot was taken, on any number of stages. Returns
        frames of other sessions that came meanwhile.

        Raises:
            RequestError: it is of another model, other weights or sizes, or does not fit in; nothing is open then.
            EngineFailure: as `step`.
        """
        pipeline, opened = self._pipeline, snapshot.session
        spec, frames = pipeline.model.spec, list[Frames]()
        try:
            check_model(snapshot.model, model_facts(spec, pipeline.model.denoiser.dtype))
            pipeline.open(
                session, torch.zeros(spec.text_shape), seed=opened.seed, epoch=opened.epoch, steps=opened.steps,
                kv_context=opened.kv_context,
            )  # fmt: skip
            while not self.comes_to_rest(session):
                frames += pipeline.step(_REST_WAIT_S)
            saving = self.savings[ticket := self._copy(session, lambda parts: parts, blank=True)]
            while saving.made is None or not saving.made.done():
                frames += pipeline.step(_REST_WAIT_S)
            if isinstance(blank := self._taken(ticket), ConfigError):
                raise blank
            self._put_back(session, snapshot, blank)
            pipeline.tell(MessageKind.LOAD, SessionUpdate(session))
            while occupied(pipeline, session):
                frames += pipeline.step(_REST_WAIT_S)
            if session in pipeline.faults.failed_sessions:
                raise ConfigError("the session has failed meanwhile")
        except (ConfigError, RequestError, RecursionError) as error:
            pipeline.undelivered += frames
            if session in pipeline.streams:
                pipeline.close_session(session)
            if isinstance(error, RequestError):
                raise
            raise RequestError("snapshot", str(error)) from error
        pipeline.scheduler.hold(session, False)
        return frames

    def _put_back(self, session: int, snapshot: Snapshot, blank: SavedParts) -> None:
        """Put a snapshot into a session that was opened as it says, of which `blank` was saved: the head's and the
        decoder's part now, and those of the stages into the exchange. Mutates: ring, the session's stream.

        Raises:
            ConfigError: other weights, sizes, or anything else that cannot be; nothing is left for the stages then.
        """
        pipeline, model = self._pipeline, self._pipeline.model
        if snapshot.model.get("weights") != blank.weights:
            raise ConfigError(
                "the snapshot is of other weights than those that are loaded, though of the same kind of model; load "
                "it into those that it was saved with"
            )
        head, stream, tensors = head_state(pipeline, session), pipeline.streams[session], snapshot.tensors
        decoder = pipeline.decoding.outlines(model.spec.chunk_shape)
        load_head(snapshot, model.spec, head, blank.whole, _remembered(model), decoder, pipeline.stage.device)
        trees = snapshot.trees
        for keys, parts in zip(_keys(pipeline), blank.cut(walk.restored(tensors, trees["stages"])), strict=True):
            for key, part in zip(keys, parts, strict=True):
                pipeline.stage.exchange.put(key, walk.save(part, fetch=Tensor.contiguous))
        if head.pending is not None:
            pipeline.changes[session] = head.pending
        if (video := snapshot.video) is not None:
            pipeline.sampler.sessions[session].video = video.on(pipeline.sampler.device)
        pipeline.decoding.load(stream.number, (tensors, trees["decoder"]))
        scheduled = head.scheduled
        for number, epoch in unfinished(scheduled).items():
            cost = (scheduled.steps + scheduled.extra(number) + 1) / (pipeline.info.steps + 1)
            stream.chunks[number] = Chunk(epoch, cost)
            stream.ahead_frames += pipeline.info.chunk_frames

    def progress(self, session: int) -> tuple[int, int, int, bool]:
        """Of a session that was loaded: the last chunk whose frames have come, the epoch of the next one that comes,
        the latest epoch that it knows, and whether it is paused."""
        scheduled, chunks = self._pipeline.scheduler.session(session), self._pipeline.streams[session].chunks
        change = self._pipeline.changes.get(session)
        latest = scheduled.epoch if change is None else max(scheduled.epoch, change.epoch)
        oldest = min((chunk.epoch for chunk in chunks.values()), default=latest)
        return min(chunks, default=scheduled.next_chunk) - 1, oldest, latest, scheduled.paused
