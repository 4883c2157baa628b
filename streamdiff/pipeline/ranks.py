"""Ranks over real processes: who is linked to whom.

Edge i leads from stage i to stage i + 1, the last one back to the head. All ranks of a ring build the same edges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from streamdiff.models.base import Model, ModelSpec, Trunk
from streamdiff.pipeline.decoding import latents_wire, pictures_wire
from streamdiff.pipeline.links_gloo import GlooInbox, GlooOutbox
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.stage import Stage
from streamdiff.pipeline.work import Wire
from streamdiff.pipeline.worker import LinkSource, Worker

_LATENTS_TAG, _PICTURES_TAG = 1_000_001, 1_000_002  # beyond those of any ring's edges


@dataclass(frozen=True)
class Place:
    """Rank `rank` of a ring of `stages`; `ring` tells rings over the same processes apart."""

    rank: int
    stages: int
    ring: int = 0

    @property
    def edge_in(self) -> int:
        return (self.rank - 1) % self.stages

    @property
    def edge_out(self) -> int:
        return self.rank

    def tag(self, edge: int) -> int:
        return self.ring * self.stages + edge


def connect(
    trunk: Trunk, place: Place, device: torch.device, max_rows: int, group: dist.ProcessGroup | None = None
) -> tuple[GlooOutbox, GlooInbox]:
    """This rank's ends of its two edges. Needs an initialised group."""

    def wire(edge: int) -> Wire:
        back = edge == place.stages - 1
        return Wire.back_to_head(trunk, max_rows) if back else Wire.between_stages(trunk, max_rows)

    after, before = (place.rank + 1) % place.stages, (place.rank - 1) % place.stages
    outbox = GlooOutbox(wire(place.edge_out), after, place.tag(place.edge_out), group)
    inbox = GlooInbox(wire(place.edge_in), before, place.tag(place.edge_in), device, group)
    return outbox, inbox


def head_ring(model: Model, place: Place, device: torch.device, max_rows: int = 1) -> Ring:
    """The ring, for rank 0. `model` has the blocks of rank 0 only."""
    if place.stages == 1:
        return Ring(model, device, max_rows)
    links = connect(model, place, device, max_rows)
    return Ring(model, device, max_rows, stage=Stage(model, device, place.rank, place.stages), links=links)


def follower(trunk: Trunk, place: Place, device: torch.device, max_rows: int = 1) -> Worker:
    """The loop of any other rank. `trunk` has this rank's blocks only."""
    outbox, inbox = connect(trunk, place, device, max_rows)
    return Worker(LinkSource(inbox), Stage(trunk, device, place.rank, place.stages), outbox)


def decode_links(
    spec: ModelSpec, rank: int, decode_rank: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[GlooOutbox, GlooInbox]:
    """The ends, on the head or on the rank that decodes, of the edges between the two: latents there, pictures back."""
    there, back = latents_wire(spec), pictures_wire(spec)
    if rank == 0:
        outbox = GlooOutbox(there, decode_rank, _LATENTS_TAG, group)
        return outbox, GlooInbox(back, decode_rank, _PICTURES_TAG, torch.device("cpu"), group)
    return GlooOutbox(back, 0, _PICTURES_TAG, group), GlooInbox(there, 0, _LATENTS_TAG, device, group)
