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
from streamdiff.pipeline import topology
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS, DecodeWorker
from streamdiff.pipeline.distributed.compile_progress import Progress
from streamdiff.pipeline.distributed.heartbeat import HealthMonitor
from streamdiff.pipeline.distributed.link import LinkClosed
from streamdiff.pipeline.distributed.nccl import edge_groups
from streamdiff.pipeline.distributed.rendezvous import RankContext
from streamdiff.pipeline.rank_loader import RankLoader, own_device
from streamdiff.pipeline.runner.worker import Worker

EXIT_FAULT = 1
GRACE_S = 10.0
"""How long a rank that was told to end waits for the head to end the ring."""


def follow(config: ModelConfig) -> None:
    """Work as a stage until the head stops the ring. The process ends with exit code 1 when the ring breaks.

    Raises:
        ConfigError: the ring cannot be built as configured.
    """
    loader = RankLoader(config, own_device(config.device))
    device, context = loader.device, loader.join()
    place = topology.StageTopology.of(config, context.rank, device)
    decoder = loader.load_decoder() if context.rank == config.decode_rank else None
    workers: list[Worker | DecodeWorker] = []
    progress = Progress(context, config.stages)
    if context.rank < config.stages:
        model, _ = loader.load_share(context, loader.load_stage, decoder)
        context.send_memory(memory := loader.session_memory(decoder))
        worker = topology.follower(model, place, device)
        loader.compile_stage(worker.stage, memory, progress)
        workers.append(worker)
    else:
        context.send_memory(loader.session_memory(decoder))
        if place.link == "nccl":
            edge_groups(config.stages, device)  # all ranks make them together, also who has none
    if decoder is not None:
        # Beside a stage it has a thread of its own, alone it is the process.
        threads = DECODE_THREADS if workers else torch.get_num_threads()
        loader.compile_decoder(decoder, threads)
        sender, receiver = topology.decode_links(
            loader.spec, context.rank, config.decode_rank, device, loader.pixel_format
        )
        timer = workers[0].timer if workers else None
        workers.append(DecodeWorker(decoder, receiver, sender, device, loader.decode_latents, timer))
    context.meet(progress.made)
    _work(workers, context, config.hang_s, device)


def _work(workers: Sequence[Worker | DecodeWorker], context: RankContext, hang_s: float, device: torch.device) -> None:
    """Run the loops of this rank to their end, each but the first on a thread of its own."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _told_to_end)
    atexit.register(leave)
    watch = HealthMonitor(context, workers, lambda fault: leave(f"rank {context.rank} ends: {fault}"), hang_s)
    watch.start()
    others = [
        threading.Thread(target=_beside, args=(worker, watch, context, device), daemon=True) for worker in workers[1:]
    ]
    for thread in others:
        thread.start()
    _run(workers[0], watch, context)
    for thread in others:
        thread.join()
    watch.finish()
    atexit.unregister(leave)


def _beside(worker: Worker | DecodeWorker, watch: HealthMonitor, context: RankContext, device: torch.device) -> None:
    """A loop on a thread; the rank does not go on without it."""
    torch.set_num_threads(DECODE_THREADS)
    bind(device)
    threading.excepthook = _die
    _run(worker, watch, context)


def _die(raised: threading.ExceptHookArgs) -> None:
    if raised.exc_value is not None:
        traceback.print_exception(raised.exc_value)
    leave()


def _run(worker: Worker | DecodeWorker, watch: HealthMonitor, context: RankContext) -> None:
    """The one outer frame of a follower's loop: it says where it was, tells the others, and lets the error go on."""
    try:
        worker.run()
    except LinkClosed as error:
        leave(f"rank {context.rank} ends: {watch.report(gone(error, context.rank, worker))}")
    except Exception as error:
        error.add_note(f"on rank {context.rank}, {worker.where()}")
        watch.report(f"rank {context.rank} failed {worker.where()}: {type(error).__name__}: {error}")
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
