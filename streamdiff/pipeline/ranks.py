"""Ranks over real processes: who is linked to whom.

Edge i leads from stage i to stage i + 1, the last one back to the head. All ranks of a ring build the same edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.base import Model
from streamdiff.pipeline.links import Inbox, Outbox
from streamdiff.pipeline.links_gloo import GlooInbox, GlooOutbox
from streamdiff.pipeline.links_nccl import NcclInbox, NcclOutbox, edge_groups, warm_up
from streamdiff.pipeline.ring import Ring, split
from streamdiff.pipeline.stage import Stage
from streamdiff.pipeline.work import Wire
from streamdiff.pipeline.worker import LinkSource, Worker

Link = Literal["gloo", "nccl"]


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


def stage_of(model: Model, place: Place, device: torch.device) -> Stage:
    """This rank's stage, of a model that has all blocks."""
    first, last = split(model.blocks, place.stages)[place.rank]
    return Stage(model.part(first, last), device, place.rank, place.stages)


def connect(
    model: Model,
    place: Place,
    device: torch.device,
    max_rows: int,
    text: Tensor,
    group: dist.ProcessGroup | None = None,
    link: Link = "gloo",
) -> tuple[Outbox, Inbox]:
    """This rank's ends of its two edges. `text` is an example of text embeddings; `group` is one of gloo, the default
    one when it is None. With `nccl` all ranks of the default group have to call this, and it returns when the
    neighbours have."""

    def wire(edge: int) -> Wire:
        back = edge == place.stages - 1
        return Wire.back_to_head(model, max_rows) if back else Wire.between_stages(model, max_rows, text)

    if link == "nccl":
        return _connect_nccl(place, device, wire(place.edge_out), wire(place.edge_in), group)
    after, before = (place.rank + 1) % place.stages, (place.rank - 1) % place.stages
    outbox = GlooOutbox(wire(place.edge_out), after, place.tag(place.edge_out), group)
    inbox = GlooInbox(wire(place.edge_in), before, place.tag(place.edge_in), device, group)
    return outbox, inbox


def _connect_nccl(
    place: Place, device: torch.device, wire_out: Wire, wire_in: Wire, records: dist.ProcessGroup | None
) -> tuple[NcclOutbox, NcclInbox]:
    """Communicators of all edges, this rank's ends, and a message each way before anything depends on one."""
    groups = edge_groups(place.stages, device)
    out, into = groups[place.edge_out], groups[place.edge_in]
    assert out is not None and into is not None
    after, before = (place.rank + 1) % place.stages, (place.rank - 1) % place.stages
    outbox = NcclOutbox(wire_out, after, place.tag(place.edge_out), device, out, records)
    inbox = NcclInbox(wire_in, before, place.tag(place.edge_in), device, into, records)
    warm_up(outbox, inbox)
    return outbox, inbox


def pick_link(wanted: str, device: torch.device, shared_device: bool = False) -> Link:
    """The kind of link for `wanted` (`auto`, `gloo` or `nccl`) between ranks on devices like `device`.

    `auto` is NCCL between CUDA devices where torch has it, unless ranks share a device (`shared_device`), which NCCL
    refuses before 2.30; else gloo.

    Raises:
        ConfigError: NCCL is asked for and cannot be, or `wanted` is something else.
    """
    if wanted not in ("auto", "gloo", "nccl"):
        raise ConfigError(f"the link is {wanted!r}; it can be `auto`, `gloo` or `nccl`")
    if wanted == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"the link is nccl, but the device is {device.type}: NCCL moves data between CUDA devices only; "
            "use `auto` or `gloo`, or a CUDA device"
        )
    if wanted == "nccl" and not dist.is_nccl_available():
        raise ConfigError(
            "the link is nccl, but this build of torch has no NCCL; use `auto` or `gloo`, or install torch for CUDA on "
            "Linux"
        )
    if wanted == "auto":
        return "nccl" if device.type == "cuda" and dist.is_nccl_available() and not shared_device else "gloo"
    return "nccl" if wanted == "nccl" else "gloo"


def head_ring(
    model: Model, place: Place, device: torch.device, max_rows: int, text: Tensor, link: Link = "gloo"
) -> Ring:
    """The ring, for rank 0."""
    links = connect(model, place, device, max_rows, text, link=link)
    return Ring(model, device, max_rows, stage=stage_of(model, place, device), links=links)


def follower(
    model: Model, place: Place, device: torch.device, max_rows: int, text: Tensor, link: Link = "gloo"
) -> Worker:
    """The loop of any other rank."""
    outbox, inbox = connect(model, place, device, max_rows, text, link=link)
    return Worker(LinkSource(inbox), stage_of(model, place, device), outbox)
