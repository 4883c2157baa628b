"""The parts of a session on all ranks, and the snapshot that they are together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from streamdiff.models.autoencoder.picture_decoder import memory_outlines
from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.state_exchange import State, stage_key, ticket_key
from streamdiff.pipeline.runner.init_latents import GivenVideo
from streamdiff.pipeline.runner.model_runner import StageState
from streamdiff.pipeline.snapshot.checks import HeadState
from streamdiff.pipeline.snapshot.file import Snapshot, model_facts
from streamdiff.session_state import walk
from streamdiff.snapshot_header import OpenedWith

if TYPE_CHECKING:
    from streamdiff.pipeline.ring import Ring


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
        """The stages' parts as one with all layers, heads and tokens."""
        return walk.joined([walk.joined(shares, "shares") for shares in self.stages], "layers")

    def cut(self, whole: StageState) -> list[list[StageState]]:
        """A state with all layers, heads and tokens as parts for the same stages and ranks: views."""
        first, stages = 0, []
        for shares in self.stages:
            last, count = first + shares[0].state.key.shape[1], len(shares)
            layers = walk.cut(whole, "layers", first, last)
            stages.append([walk.cut(layers, "shares", at, at + 1, count) for at in range(count)])
            first = last
        return stages


def head_state(ring: Ring, session: int) -> HeadState:
    """The head's own state of a session, not a copy."""
    return HeadState(ring.scheduler.session(session), ring.sampler.sessions[session], ring.changes.get(session))


def exchange_keys(ring: Ring, ticket: int) -> list[list[str]]:
    """Exchange keys of the ranks' parts that are copied out or put back under a ticket, by stage and share."""
    shares, stages = range(ring.stage.shares), range(ring.stage.stages)
    return [[ticket_key(stage_key(stage, share), ticket) for share in shares] for stage in stages]


def remembered(model: Model) -> list[Any]:
    """What the autoencoder that encodes the past again may remember, as outlines."""
    if (reencoder := model.first_frame_reencoder) is None:
        return [None]
    latents = torch.zeros(model.spec.chunk_shape, device=reencoder.device)
    decode = reencoder.decode_video
    outlines = memory_outlines(
        reencoder.new_memory, lambda memory: decode(latents[None], memory), model.spec.chunk_latents
    )
    return [None, *outlines]


def snapshot_of(model: Model, parts: SavedParts, opened: OpenedWith, video: GivenVideo | None) -> Snapshot:
    """The snapshot of a session, of its parts at one moment."""
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
