"""Rings of three ranks of which the last stops as it starts: `python -m tests.pipeline.distributed.start_process`.

Prints, as JSON, what the ranks of each ring said before they ended, by where rank 2 stopped. Ranks are forked, so that
they need not import everything again.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from streamdiff.config import ModelConfig
from streamdiff.engine.process.launcher import open_store
from streamdiff.pipeline import build, rank_process, topology
from streamdiff.pipeline.distributed import heartbeat, rendezvous
from streamdiff.pipeline.distributed.nccl import NcclReceiver
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.pipeline.distributed.rendezvous_backend import use_rendezvous
from tests.small import save_model

RANKS = 3
LIMITS_S = {"rendezvous": 5.0, "weights": 30.0, "communicators": 5.0, "first transfers": 5.0, "graphs": 5.0}
"""Of the phase where a rank stops. Others need some time for their weights on a busy machine."""
HANG_S = 10.0


def hang(*given: Any, **named: Any) -> NoReturn:
    """Wait for ever; other threads go on."""
    threading.Event().wait()
    raise AssertionError


def stop(*given: Any, **named: Any) -> None:
    """All of the process stands still."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_after_the_others(arrivals: int) -> Callable[..., None]:
    """What is under way to the others arrives before all of the process stands still: each says a byte when it has."""

    def at(*given: Any, **named: Any) -> None:
        for _ in range(RANKS - 1):
            os.read(arrivals, 1)
        stop()

    return at


def say_first(arrivals: int, call: Callable[..., Any]) -> Callable[..., Any]:
    def at(*given: Any, **named: Any) -> Any:
        os.write(arrivals, b".")
        return call(*given, **named)

    return at


def hang_at_edge_1(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def at(*given: Any, **named: Any) -> Any:
        return hang() if named.get("group_desc") == "edge 1" else new_group(*given, **named)

    return at


def break_rank(where: str, arrivals: int) -> None:
    """Mutates: the product's modules."""
    match where:
        case "rendezvous":
            rendezvous.join = hang
        case "weights":
            rank_process.load_rank = stop
        case "communicators":
            dist.new_group = hang_at_edge_1(dist.new_group)
        case "first transfers":
            NcclReceiver.warm_up = stop_after_the_others(arrivals)  # type: ignore[method-assign]
        case "graphs":
            rank_process.compile_stage = hang
        case "warm-up":
            ModelRunner.carry_out = hang  # type: ignore[method-assign]


def rank_main(rank: int, port: int, where: str, output: int, arrivals: tuple[int, int], model: Path) -> NoReturn:
    """A rank as the launcher starts it, with the model in this folder; `arrivals` is a pipe that all ranks share."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.set_num_threads(1)
    use_rendezvous()
    topology.link_of = lambda config, device: "nccl"
    limit_s = LIMITS_S.get(where, HANG_S)
    if where == "rendezvous":
        rendezvous.START_LIMIT = timedelta(seconds=limit_s)
    heartbeat.PHASES.update(
        {phase: limit_s if phase == where else 600.0 for phase in LIMITS_S if phase in heartbeat.PHASES}
    )
    if rank == RANKS - 1:
        break_rank(where, arrivals[0])
    else:
        topology.warm_up = say_first(arrivals[1], topology.warm_up)
    config = ModelConfig(name=str(model), stages=RANKS, device="cpu", watchdog_s=HANG_S)
    try:
        rank_process.run_worker(config) if rank else build.build_pipeline(config)
    except Exception:
        traceback.print_exc()
    os._exit(1)


def play(where: str, model: Path) -> list[str]:
    """What ranks 0 and 1 said."""
    store, arrivals = open_store(), os.pipe()
    ranks, outputs = [], []
    for rank in range(RANKS):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            rank_main(rank, store.port, where, writing, arrivals, model)
        os.close(writing)
        ranks.append(pid)
        outputs.append(os.fdopen(reading))
    said = [output.read() for output in outputs[: RANKS - 1]]  # until they have ended
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for end in arrivals:
        os.close(end)
    return said


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), RANKS)
        print(json.dumps({where: play(where, Path(folder)) for where in (*LIMITS_S, "warm-up")}))
