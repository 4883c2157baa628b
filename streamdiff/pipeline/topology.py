"""Ranks over real processes: who is linked to whom.

Edge i leads from stage i to stage i + 1, the last one back to the head. All ranks of a ring build the same edges. Where
several ranks share a stage (`distributed.context_parallel`), rank c of each stage is linked to rank c of the next one;
the head also to the others of its stage, which it hands what enters, and of the last stage its first rank sends back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.model import Model, StageModel
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.decode.decode_worker import latents_layout, pictures_layout
from streamdiff.pipeline.distributed.context_parallel import ContextGroup, stage_group
from streamdiff.pipeline.distributed.fan_out import FanOutReceiver, FanOutSender
from streamdiff.pipeline.distributed.link import Receiver, Sender
from streamdiff.pipeline.distributed.local_link import NoLink, NoSender
from streamdiff.pipeline.distributed.message import MessageLayout
from streamdiff.pipeline.distributed.nccl import NcclEnd, NcclReceiver, NcclSender, edge_groups, warm_up
from streamdiff.pipeline.distributed.tcp import TcpReceiver, TcpSender
from streamdiff.pipeline.executor import RingExecutor, rows_carried
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.runner.worker import Worker
from streamdiff.video.pixel_format import PictureKind

Link = Literal["gloo", "nccl"]
OnEdge = Callable[[str, int], None]
"""Told which phase of the start comes next, and which edge in it; see `start_progress`."""


def _ignore(phase: str, edge: int) -> None:
    """Nobody wants to know."""


_LATENTS_TAG, _PICTURES_TAG = 1_000_001, 1_000_002  # beyond those of any ring's edges


@dataclass(frozen=True)
class StageTopology:
    """Rank `rank` of a ring of `stages`, and what all of its ranks have to agree on: `rows` in a forward, `link`,
    whether a clean pass takes the next chunk's first step with it, and how many ranks share a stage, `shares`: those of
    a stage are numbered one after the other. `ring` tells rings over the same processes apart."""

    rank: int
    stages: int
    ring: int = 0
    rows: int = 1
    link: Link = "gloo"
    clean_with_next: bool = False
    shares: int = 1

    @classmethod
    def of(cls, config: ModelConfig, rank: int, device: torch.device) -> StageTopology:
        """That of a configuration. Raises ConfigError as `pick_link`."""
        return cls(
            rank,
            config.stages,
            link=link_of(config, device),
            clean_with_next=config.clean_with_next,
            shares=config.shares,
        )

    def carried(self, spec: ModelSpec) -> int:
        """Rows that the edges have to carry."""
        return rows_carried(spec, self.rows, self.clean_with_next)

    @property
    def stage(self) -> int:
        return self.rank // self.shares

    @property
    def share(self) -> int:
        """Which of its stage's ranks it is."""
        return self.rank % self.shares

    @property
    def edge_in(self) -> int:
        return (self.stage - 1) % self.stages

    @property
    def edge_out(self) -> int:
        return self.stage

    @property
    def before(self) -> int | None:
        """The rank that sends to this one; None: nobody, as it is head and last stage."""
        if self.stage == 0 and self.share > 0:
            return 0
        return None if self.stages == 1 else (self.stage - 1) % self.stages * self.shares + self.share

    @property
    def after(self) -> int | None:
        """The rank that this one sends its result to; None: nobody, or itself."""
        if self.stage < self.stages - 1:
            return self.rank + self.shares
        return 0 if self.share == 0 and self.stages > 1 else None

    def tag(self, edge: int) -> int:
        return self.ring * self.stages + edge


def connect(
    model: StageModel,
    topology: StageTopology,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    on_edge: OnEdge = _ignore,
) -> tuple[Sender, Receiver]:
    """This rank's ends of its two edges. `group` is one of gloo, the default one when it is None. With `nccl` all ranks
    of the default group have to call this or `join_edges`, it returns when all have, and `on_edge` is told which edge
    is next."""
    carried, shares = topology.carried(model.spec), topology.shares

    def layout(edge: int) -> MessageLayout:
        if edge == topology.stages - 1:
            return MessageLayout.back_to_head(model, carried)
        return MessageLayout.between_stages(model, carried, shares)

    if topology.link == "nccl":
        return _connect_nccl(topology, device, layout(topology.edge_out), layout(topology.edge_in), group, on_edge)
    loop = NoLink()
    receiver: Receiver = loop
    sender: Sender = loop if topology.rank == 0 else NoSender()
    if topology.before is not None:
        entry = topology.stage == 0 and topology.share > 0
        arriving = MessageLayout.within_first_stage(model, carried) if entry else layout(topology.edge_in)
        receiver = TcpReceiver(arriving, topology.before, topology.tag(topology.edge_in), device, group)
    if topology.after is not None:
        sender = TcpSender(layout(topology.edge_out), topology.after, topology.tag(topology.edge_out), group)
    return sender, receiver


def fan_out(model: StageModel, topology: StageTopology, group: dist.ProcessGroup | None = None) -> list[Sender]:
    """The head's ends of its edges to the other ranks of its stage, after `connect`."""
    entry = MessageLayout.within_first_stage(model, topology.carried(model.spec))
    return [TcpSender(entry, rank, topology.tag(topology.edge_in), group) for rank in range(1, topology.shares)]


def share_stages(topology: StageTopology, spec: ModelSpec) -> ContextGroup | None:
    """This rank's group where several share a stage, else None. All ranks of the default group call this together,
    before they connect."""
    return stage_group(topology.stages, topology.shares, spec.chunk_latents) if topology.shares > 1 else None


def _connect_nccl(
    topology: StageTopology,
    device: torch.device,
    layout_out: MessageLayout,
    layout_in: MessageLayout,
    records: dist.ProcessGroup | None,
    on_edge: OnEdge,
) -> tuple[NcclSender, NcclReceiver]:
    """Communicators of all edges, this rank's ends, and a message over every edge before anything depends on one."""
    groups = edge_groups(topology.stages, device, on_edge=partial(on_edge, "communicators"))
    out, into = groups[topology.edge_out], groups[topology.edge_in]
    assert out is not None and into is not None
    after, before = (topology.rank + 1) % topology.stages, (topology.rank - 1) % topology.stages
    receiver = NcclReceiver(NcclEnd(layout_in, before, topology.tag(topology.edge_in), device, into, records))
    sender = NcclSender(NcclEnd(layout_out, after, topology.tag(topology.edge_out), device, out, records))
    warm_up(sender, receiver, topology.rank, topology.stages, partial(on_edge, "first transfers"))
    on_edge("graphs", 0)
    dist.barrier(records)
    return sender, receiver


def join_edges(topology: StageTopology, spec: ModelSpec, device: torch.device) -> None:
    """What a rank without an edge does while the others `connect`: all ranks make groups together."""
    share_stages(topology, spec)
    if topology.link == "nccl":
        edge_groups(topology.stages, device)
        dist.barrier()


def link_of(config: ModelConfig, device: torch.device) -> Link:
    """The link of a configuration; the same on all ranks of machines that are alike.

    Raises:
        ConfigError: as `pick_link`.
    """
    # A rank that only decodes is at no edge, and may share a stage's device.
    stages_here = min(config.stage_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    shared = device.type == "cuda" and stages_here > torch.cuda.device_count()
    return pick_link(config.link, device, shared)


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


def head_ring(model: Model, topology: StageTopology, device: torch.device, on_edge: OnEdge = _ignore) -> RingExecutor:
    """The ring, for rank 0. `model` has the blocks of rank 0 only."""
    group = share_stages(topology, model.spec)
    links = connect(model, topology, device, None, on_edge) if topology.stages * topology.shares > 1 else None
    others = fan_out(model, topology)
    if links is not None and others:
        links = FanOutSender(links[0], others), links[1]
    stage = ModelRunner(model, device, topology.stage, topology.stages, group)
    ring = RingExecutor(
        model, device, topology.rows, stage=stage, links=links, clean_with_next=topology.clean_with_next
    )
    if others:
        ring.worker.receiver = FanOutReceiver(ring.worker.receiver, others)
    return ring


def follower(model: StageModel, topology: StageTopology, device: torch.device, on_edge: OnEdge = _ignore) -> Worker:
    """The loop of any other rank. `model` has this rank's blocks only."""
    group = share_stages(topology, model.spec)
    sender, receiver = connect(model, topology, device, None, on_edge)
    return Worker(receiver, ModelRunner(model, device, topology.stage, topology.stages, group), sender)


def decode_links(
    spec: ModelSpec,
    rank: int,
    decode_rank: int,
    device: torch.device,
    kind: PictureKind = "rgb",
    group: dist.ProcessGroup | None = None,
) -> tuple[TcpSender, TcpReceiver]:
    """The ends, on the head or on the rank that decodes, of the edges between the two: latents there, pictures of
    `kind` back."""
    there, back = latents_layout(spec), pictures_layout(spec, kind)
    if rank == 0:
        receiver = TcpReceiver(back, decode_rank, _PICTURES_TAG, torch.device("cpu"), group)
        return TcpSender(there, decode_rank, _LATENTS_TAG, group), receiver
    receiver = TcpReceiver(there, 0, _LATENTS_TAG, device, group)
    return TcpSender(back, 0, _PICTURES_TAG, group), receiver
