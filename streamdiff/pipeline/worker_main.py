"""What every rank but the head runs: its stage's loop, from the start to the end of the ring."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from types import FrameType

import torch

from streamdiff.config import ModelConfig
from streamdiff.device import bind
from streamdiff.pipeline import rank_loader, topology
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS, DecodeWorker
from streamdiff.pipeline.distributed.compile_progress import Progress
from streamdiff.pipeline.distributed.heartbeat import HealthMonitor
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.distributed.nccl import edge_groups
from streamdiff.pipeline.distributed.rendezvous import RankContext
from streamdiff.pipeline.runner.worker import Worker

EXIT_FAULT = 1
GRACE_S = 10.0
"""How long a rank that was told to end waits for the head to end the ring."""


def follow(config: ModelConfig) -> None:
    """Work as a stage until the head stops the ring. The process ends with exit code 1 when the ring breaks.

    Raises:
        ConfigError: the ring cannot be built as configured.
    """
    device = rank_loader.own_device(config.device)
    member = rank_loader.join(config)
    place = topology.StageTopology.of(config, member.rank, device)
    decoder = rank_loader.load_decoder(config, device) if member.rank == config.decode_rank else None
    workers: list[Worker | DecodeWorker] = []
    progress = Progress(member, config.stages)
    if member.rank < config.stages:
        trunk, _ = rank_loader.load_share(
            config, member, device, lambda blocks: rank_loader.load_trunk(config, device, blocks), decoder
        )
        member.tell_room(room := rank_loader.own_room(config, device, decoder))
        worker = topology.follower(trunk, place, device)
        rank_loader.compile_stage(config, worker.stage, room, progress)
        workers.append(worker)
    else:
        member.tell_room(rank_loader.own_room(config, device, decoder))
        if place.link == "nccl":
            edge_groups(config.stages, device)  # all ranks make them together, also who has none
    if decoder is not None:
        # Beside a stage it has a thread of its own, alone it is the process.
        threads = DECODE_THREADS if workers else torch.get_num_threads()
        rank_loader.compile_decoder(config, decoder, device, threads)
        spec, kind = rank_loader.read_spec(config), rank_loader.pictures_of(config, device)
        outbox, inbox = topology.decode_links(spec, member.rank, config.decode_rank, device, kind)
        timer = workers[0].timer if workers else None
        workers.append(DecodeWorker(decoder, inbox, outbox, device, rank_loader.at_once(config, device), timer))
    member.meet(progress.made)
    _work(workers, member, config.hang_s, device)


def _work(workers: Sequence[Worker | DecodeWorker], member: RankContext, hang_s: float, device: torch.device) -> None:
    """Run the loops of this rank to their end, each but the first on a thread of its own."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _told_to_end)
    atexit.register(leave)
    watch = HealthMonitor(member, workers, lambda fault: leave(f"rank {member.rank} ends: {fault}"), hang_s)
    watch.start()
    others = [
        threading.Thread(target=_beside, args=(worker, watch, member, device), daemon=True) for worker in workers[1:]
    ]
    for thread in others:
        thread.start()
    _run(workers[0], watch, member)
    for thread in others:
        thread.join()
    watch.finish()
    atexit.unregister(leave)


def _beside(worker: Worker | DecodeWorker, watch: HealthMonitor, member: RankContext, device: torch.device) -> None:
    """A loop on a thread; the rank does not go on without it."""
    torch.set_num_threads(DECODE_THREADS)
    bind(device)
    threading.excepthook = _die
    _run(worker, watch, member)


def _die(raised: threading.ExceptHookArgs) -> None:
    if raised.exc_value is not None:
        traceback.print_exception(raised.exc_value)
    leave()


def _run(worker: Worker | DecodeWorker, watch: HealthMonitor, member: RankContext) -> None:
    """The one outer frame of a follower's loop: it says where it was, tells the others, and lets the error go on."""
    try:
        worker.run()
    except LinkClosed as error:
        leave(f"rank {member.rank} ends: {watch.report(gone(error, member.rank, worker))}")
    except Exception as error:
        error.add_note(f"on rank {member.rank}, {worker.where()}")
        watch.report(f"rank {member.rank} failed {worker.where()}: {type(error).__name__}: {error}")
        raise


def gone(error: LinkClosed, rank: int, worker: Worker | DecodeWorker | HealthMonitor) -> str:
    """The fault that a closed link means to `rank`."""
    return f"rank {error.peer} is gone ({error}); rank {rank} noticed it {worker.where()}"


def leave(message: str | None = None) -> None:
    """End the process at once: its posted receives would abort the interpreter."""
    if message is not None:
        print(f"streamdiff: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


def _told_to_end(number: int, frame: FrameType | None) -> None:
    """Launcher and terminal tell all ranks at once; the head then ends the ring in order, which takes a moment."""
    timer = threading.Timer(GRACE_S, leave)
    timer.daemon = True
    timer.start()
