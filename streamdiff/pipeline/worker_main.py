"""Main function of every rank but rank 0: its stage's loop, from the start to the end of the ring."""

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
from streamdiff.device import bind, own_device
from streamdiff.errors import ConfigError
from streamdiff.pipeline import load_plan, rank_loader, topology
from streamdiff.pipeline.decode.decode_worker import DECODE_THREADS, DecodeWorker
from streamdiff.pipeline.distributed.heartbeat import HealthMonitor, RankLoop
from streamdiff.pipeline.distributed.link import GroupBroken, LinkClosed
from streamdiff.pipeline.distributed.rendezvous import RankContext, StartProgress
from streamdiff.pipeline.distributed.state_exchange import StoreExchange
from streamdiff.pipeline.load_plan import LoadPlan

EXIT_FAULT = 1
GRACE_S = 10.0
"""How long a rank waits after SIGTERM for rank 0 to end the ring."""


def run_worker(config: ModelConfig) -> None:
    """Run a stage until rank 0 stops the ring. The process ends with exit code 1 when the ring breaks.

    Raises:
        ConfigError: the ring cannot be built as configured.
    """
    run_rank(load_plan.plan_load(config, own_device(config.device)))


def run_rank(plan: LoadPlan) -> None:
    """As `run_worker`, of what a plan says."""
    config, device, context = plan.config, plan.device, plan.join()
    if context is None:
        raise ConfigError(
            "there is nothing to work for: the ring has one rank, which is rank 0; give --stages or --parallel "
            "(Python: stages, parallel), the same as on rank 0, under torchrun"
        )
    rank_topology = topology.StageTopology.of(config, context.rank, device, plan.max_rows)
    progress = start_progress(context, config)
    loaded = rank_loader.load_rank(load_plan.plan_rank(plan, context), context)
    decoder = loaded.decoder
    workers: list[RankLoop] = []
    context.send_memory(loaded.memory)
    exchange = StoreExchange(context.store)
    stage_worker, links = None, None
    if loaded.model is not None:
        stage_worker = topology.stage_worker(loaded.model, rank_topology, device, progress.enter)
        stage_worker.stage.exchange, stage_worker.stage.swaps = exchange, loaded.swaps
        workers.append(stage_worker)
        progress.enter("graphs")
    else:
        progress.enter("graphs")
        topology.join_edges(rank_topology, plan.spec, device)
    if decoder is not None:  # before the graphs: the head waits for these, and makes its own then
        links = topology.decode_links(plan.spec, context.rank, context.rank, device, plan.pixel_format)
    if stage_worker is not None:
        rank_loader.compile_stage(plan, stage_worker.stage, loaded.memory, progress)
    if decoder is not None and links is not None:
        # Beside a stage it has a thread of its own, alone it is the process.
        threads = DECODE_THREADS if workers else torch.get_num_threads()
        rank_loader.compile_decoder(plan, decoder, threads)
        timer = workers[0].timer if workers else None
        given = decoder, links[1], links[0], device, plan.decode_latents, timer, exchange, loaded.swaps
        workers.append(DecodeWorker(*given))
    progress.finish()
    work(workers, context, config.watchdog_s, device)
    loaded.swaps.close()


def start_progress(context: RankContext, config: ModelConfig) -> StartProgress:
    """A start that ends this process when a rank of the ring stands still: its own thread may be what hangs."""
    return StartProgress(
        context, config.stages, lambda fault: exit_now(f"rank {context.rank} ends: {fault}"), config.shares
    )


def work(workers: Sequence[RankLoop], context: RankContext, watchdog_s: float, device: torch.device) -> None:
    """Run the loops of this rank to their end, each but the first on a thread of its own. Mutates: the process's signal
    handlers."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_later)
    atexit.register(exit_now)
    monitor = HealthMonitor(context, workers, lambda fault: exit_now(f"rank {context.rank} ends: {fault}"), watchdog_s)
    monitor.start()
    others = [
        threading.Thread(target=_run_on_thread, args=(worker, monitor, context, device), daemon=True)
        for worker in workers[1:]
    ]
    for thread in others:
        thread.start()
    _run(workers[0], monitor, context)
    for thread in others:
        thread.join()
    monitor.finish()
    atexit.unregister(exit_now)


def _run_on_thread(worker: RankLoop, monitor: HealthMonitor, context: RankContext, device: torch.device) -> None:
    """Run a second loop on a thread; the rank ends with it."""
    torch.set_num_threads(DECODE_THREADS)
    bind(device)
    threading.excepthook = _exit_on_error
    _run(worker, monitor, context)


def _exit_on_error(raised: threading.ExceptHookArgs) -> None:
    if raised.exc_value is not None:
        traceback.print_exception(raised.exc_value)
    exit_now()


def _run(worker: RankLoop, monitor: HealthMonitor, context: RankContext) -> None:
    """Run a loop; if it raises, report the fault to the other ranks, with what was being executed, and re-raise."""
    try:
        worker.run()
    except LinkClosed as error:
        exit_now(f"rank {context.rank} ends: {monitor.report(link_fault(error, context.rank, worker, monitor))}")
    except Exception as error:
        error.add_note(f"on rank {context.rank}, {worker.where()}")
        monitor.report(f"rank {context.rank} failed {worker.where()}: {type(error).__name__}: {error}")
        raise


def link_fault(error: LinkClosed, rank: int, worker: RankLoop | HealthMonitor, monitor: HealthMonitor) -> str:
    """The fault that a closed link means, as `rank` reports it. Where an exchange among several ranks ended it is asked
    which of them still say something."""
    peers = monitor.silent(error.peers) or error.peers if isinstance(error, GroupBroken) else (error.peer,)
    return f"rank {', '.join(map(str, peers))} is gone ({error}); rank {rank} noticed it {worker.where()}"


def exit_now(message: str | None = None) -> None:
    """End the process at once: its posted receives would abort the interpreter."""
    if message is not None:
        print(f"streamdiff: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAULT)


def _exit_later(number: int, frame: FrameType | None) -> None:
    """Exit after `GRACE_S`: launcher and terminal signal all ranks at once, and rank 0 then ends the ring in order."""
    timer = threading.Timer(GRACE_S, exit_now)
    timer.daemon = True
    timer.start()
