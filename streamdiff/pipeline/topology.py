"""Topology of a ring over processes: which ranks are linked, by what, and the ends of their links.

Edge i leads from stage i to stage i + 1, the last one back to the head. All ranks of a ring build the same edges. Where
several ranks share a stage (`distributed.context_parallel`), rank c of each stage is linked to rank c of the next one;
the head also to the others of its stage, which it hands what enters, and of the last stage its first rank sends back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.model import StageModel
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.decode.decode_worker import latents_layout, pictures_layout
from streamdiff.pipeline.distributed.context_parallel import stage_group
from streamdiff.pipeline.distributed.cuda_streams import one_stage_link
from streamdiff.pipeline.distributed.link import Receiver, Sender, ring_edges
from streamdiff.pipeline.distributed.message import MessageLayout
from streamdiff.pipeline.distributed.nccl import NcclEnd, NcclReceiver, NcclSender, edge_groups, warm_up
from streamdiff.pipeline.distributed.tcp import TcpReceiver, TcpSender
from streamdiff.pipeline.planner.partition import rows_carried
from streamdiff.pipeline.ring import RingParts
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.video.pixel_format import PictureKind

Link = Literal["gloo", "nccl"]
OnEdge = Callable[[str, int], None]
"""Progress callback: takes the phase of the start that comes next, and the edge in it; see `start_progress`."""


_LATENTS_TAG, _PICTURES_TAG = 1_000_001, 1_000_002  # beyond those of any ring's edges


@dataclass(frozen=True)
class StageTopology:
    """Rank `rank` of a ring of `stages`, and what all of its ranks have to agree on: `rows` in a forward, `link`, and
    how many ranks share a stage, `shares`: those of a stage are numbered one after the other. `ring` tells rings over
    the same processes apart."""

    rank: int
    stages: int
    ring: int = 0
    rows: int = 1
    link: Link = "gloo"
    shares: int = 1

    @classmethod
    def of(cls, config: ModelConfig, rank: int, device: torch.device, max_rows: int = 1) -> StageTopology:
        """That of a configuration. Raises ConfigError as `link_of`."""
        return cls(rank, config.stages, rows=max_rows, link=link_of(config, device), shares=config.shares)

    @property
    def stage(self) -> int:
        return self.rank // self.shares

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Sending and receiving rank of every edge."""
        return ring_edges(self.stages, self.shares)

    def layout(self, edge: int, model: StageModel) -> MessageLayout:
        """What an edge carries."""
        receiver, carried = self.edges[edge][1], rows_carried(model.spec, self.rows)
        if receiver == 0:
            return MessageLayout.back_to_head(model, carried)
        if receiver < self.shares:
            return MessageLayout.within_first_stage(model, carried)
        return MessageLayout.between_stages(model, carried, self.shares)

    def tag(self, edge: int) -> int:
        return self.ring * len(self.edges) + edge


def connect_stage(
    model: StageModel, topology: StageTopology, device: torch.device, on_edge: OnEdge = lambda phase, edge: None
) -> RingParts:
    """A rank's stage, and what leads from it. `model` has its blocks only. With `nccl` all ranks of the default group,
    which is one of gloo, call this or `join_edges`; it returns when all have, and `on_edge` is called with the next
    edge."""
    group = stage_group(topology.stages, topology.shares, model.spec.chunk_latents, device)
    stage = ModelRunner(model, device, topology.stage, topology.stages, group)
    if not topology.edges:
        return RingParts(stage)
    senders: Mapping[int, Sender]
    receivers: Mapping[int, Receiver]
    if topology.link == "nccl":
        senders, receivers = _connect_nccl(model, topology, device, on_edge)
    else:
        senders, receivers = _connect_tcp(model, topology, device)
    loop = one_stage_link(device)
    fellows = [sender for edge, sender in senders.items() if 0 < topology.edges[edge][1] < topology.shares]
    onward = [sender for sender in senders.values() if sender not in fellows]
    # Where no edge leads on, what a rank sends goes nowhere, or on the head comes back.
    sender = onward[0] if onward else loop if topology.rank == 0 else Sender()
    return RingParts(stage, (sender, next(iter(receivers.values()), loop)), fellows)


def _connect_tcp(
    model: StageModel, topology: StageTopology, device: torch.device
) -> tuple[dict[int, Sender], dict[int, Receiver]]:
    """Ends of edges by their numbers, those that receive made before those that wait for these."""
    receivers, senders = dict[int, Receiver](), dict[int, Sender]()
    for edge, (source, target) in enumerate(topology.edges):
        if target == topology.rank:
            receivers[edge] = TcpReceiver(topology.layout(edge, model), source, topology.tag(edge), device)
    for edge, (source, target) in enumerate(topology.edges):
        if source == topology.rank:
            senders[edge] = TcpSender(topology.layout(edge, model), target, topology.tag(edge))
    return senders, receivers


def _connect_nccl(
    model: StageModel, topology: StageTopology, device: torch.device, on_edge: OnEdge
) -> tuple[dict[int, NcclSender], dict[int, NcclReceiver]]:
    """Communicators of all edges, this rank's ends, and a message over every edge before anything depends on one."""
    groups = edge_groups(topology.stages, device, on_edge=partial(on_edge, "communicators"), shares=topology.shares)

    def end(edge: int, peer: int) -> NcclEnd:
        group = groups[edge]
        assert group is not None
        return NcclEnd(topology.layout(edge, model), peer, topology.tag(edge), device, group)

    edges, rank = topology.edges, topology.rank
    receivers = {
        edge: NcclReceiver(end(edge, ends[0]), paced=rank == 0) for edge, ends in enumerate(edges) if ends[1] == rank
    }
    senders = {edge: NcclSender(end(edge, ends[1])) for edge, ends in enumerate(edges) if ends[0] == rank}
    warm_up({**senders, **receivers}, partial(on_edge, "first transfers"))
    on_edge("graphs", 0)
    dist.barrier()
    return senders, receivers


def join_edges(topology: StageTopology, spec: ModelSpec, device: torch.device) -> None:
    """What a rank without an edge does while the others `connect`: all ranks make groups together."""
    stage_group(topology.stages, topology.shares, spec.chunk_latents, device)
    if topology.link == "nccl" and topology.edges:  # the head of a ring without edges does not `connect`
        edge_groups(topology.stages, device, shares=topology.shares)
        dist.barrier()


def link_of(config: ModelConfig, device: torch.device) -> Link:
    """The link of a configuration; the same on all ranks of machines that are alike.

    Raises:
        ConfigError: ranks would share a stage on CUDA, without NCCL between them.
    """
    if device.type != "cuda":
        return "gloo"  # through host memory
    # A rank that only decodes is at no edge, and may share a stage's device. NCCL before 2.30 refuses other such ranks.
    stages_here = min(config.stage_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    can_have = dist.is_nccl_available() and stages_here <= torch.cuda.device_count()
    if config.shares > 1 and not can_have:
        raise ConfigError(
            f"parallel is {config.parallel}, and the link is gloo: ranks that share a stage on CUDA exchange over "
            "NCCL, which wants a device for each; use fewer ranks, or device cpu"
        )
    return "nccl" if can_have else "gloo"


def decode_links(
    spec: ModelSpec, rank: int, decode_rank: int, device: torch.device, kind: PictureKind
) -> tuple[TcpSender, TcpReceiver]:
    """The ends, on the head or on the rank that decodes, of the edges between the two: latents there, pictures of
    `kind` back."""
    there, back = latents_layout(spec), pictures_layout(spec, kind)
    if rank == 0:
        receiver = TcpReceiver(back, decode_rank, _PICTURES_TAG, torch.device("cpu"))
        return TcpSender(there, decode_rank, _LATENTS_TAG), receiver
    receiver = TcpReceiver(there, 0, _LATENTS_TAG, device)
    return TcpSender(back, 0, _PICTURES_TAG), receiver
