"""The ring of a reference run over processes, one for each stage: what `streamdiff generate --processes` starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from streamdiff.commands import reference_model
from streamdiff.commands.reference_model import Found, ReferenceJob
from streamdiff.models.model import Model, StageModel
from streamdiff.pipeline import topology
from streamdiff.pipeline.distributed import rendezvous
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.executor import RingExecutor
from streamdiff.pipeline.load_plan import check_world, rank_facts
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.topology import StageTopology
from streamdiff.pipeline.worker_group import WorkerGroup
from streamdiff.pipeline.worker_main import start_progress, work


@contextmanager
def head_of_ranks(found: Found) -> Iterator[tuple[Model, RingExecutor, Callable[[], None]]]:
    """Rank 0 of the ring: what it has of the model, the ring, and a check that raises where that is broken. The other
    ranks end with it.

    Raises:
        ConfigError: ranks that are not alike, or parts that are missing or do not fit.
        EngineFailure: a rank that does not come, or ends before its time.
    """
    config = found.job.model
    context = _join(found)
    progress = start_progress(context, config)
    model = found.load(_blocks(found, 0))
    ring = topology.connect_head(model, StageTopology.of(config, 0, found.device), found.device, progress.enter)
    group = WorkerGroup(context, ring, config.watchdog_s)
    progress.finish()
    group.start(lambda: None)
    try:
        yield model, ring, group.check
    except LinkClosed as error:
        raise group.broken(error) from error
    group.leave()


def follow(job: ReferenceJob) -> None:
    """Run a rank other than 0 until the ring ends.

    Raises:
        ConfigError: as `reference_model.find` and `head_of_ranks`.
    """
    found = reference_model.find(job)
    context, config = _join(found), job.model
    progress = start_progress(context, config)
    model = StageModel(found.spec, found.denoiser(_blocks(found, context.rank)))
    rank_topology = StageTopology.of(config, context.rank, found.device)
    worker = topology.stage_worker(model, rank_topology, found.device, progress.enter)
    progress.finish()
    work([worker], context, config.watchdog_s, found.device)


def _join(found: Found) -> rendezvous.RankContext:
    """Rendezvous with the other ranks. Mutates: torch's number of threads."""
    config = found.job.model
    torch.set_num_threads(config.threads)
    check_world(config)
    return rendezvous.join({**rank_facts(config, found.loader), "spec": str(found.spec)})


def _blocks(found: Found, rank: int) -> tuple[int, int]:
    """First and last block (exclusive) of a stage: even shares, as stages in one process have."""
    config = found.job.model
    return split_evenly(found.blocks, config.stages)[rank // config.shares]
