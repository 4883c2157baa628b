"""Starts the ranks of a ring on this machine and waits for them: `python -m streamdiff.engine.process.launcher
--address FOLDER`.

Every rank runs the engine process (`engine.process.main`), where rank 0 becomes the engine and the others work for it.
When one ends before its time, all are ended. torch elastic starts and ends the processes. Its rendezvous is left out,
since that listens on all interfaces and unpickles what it gets: ranks meet at a store that listens on loopback only
(docs/decisions/0009).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from streamdiff import child_process
from streamdiff.engine.process.engine_process import name_exit
from streamdiff.engine.process.ipc import EXIT_CONFIG, read_config
from streamdiff.heavy_import import heavy_import

with heavy_import():
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not listed for checkers
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes
    from torch.distributed.elastic.multiprocessing.api import RunProcsResult

EXIT_FAILED = 1
_ELASTIC = "torch.distributed.elastic"
"""Logger of torch's launcher, which is silenced: this module and the ranks report failures themselves."""
_HOST = "127.0.0.1"
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_LOOK_S = 0.1


def launch(module: str, ranks: int, arguments: Sequence[str], log_folder: str) -> int:
    """Run `python -m module` as so many `ranks` until all have ended; returns the exit code: 0, `EXIT_CONFIG` where a
    rank said so, 128 and the number of the signal that ended it, else `EXIT_FAILED`.

    `log_folder` is one that somebody removes afterwards. Mutates: elastic's logging, this process's signal handlers.
    """
    logging.getLogger(_ELASTIC).setLevel(logging.CRITICAL)
    store = open_store()
    context = None
    try:
        context = start_processes(
            "ranks",
            sys.executable,
            args={rank: ("-m", module, *arguments) for rank in range(ranks)},
            envs={rank: {**child_process.environment(), **_place(rank, ranks, store.port)} for rank in range(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=log_folder),
        )
        return _exit_code(context.wait(period=_LOOK_S))
    except SignalException as error:
        if context is not None:
            with contextlib.suppress(SignalException):  # another one: the ranks end when they see that nobody waits
                context.close(error.sigval)
        return 128 + int(error.sigval)


def open_store() -> TCPStore:
    """A key-value server on loopback, for the ranks. It listens on a socket that was bound here, since a `TCPStore`
    that binds its own takes all interfaces, whatever host it is given. It hands out bytes as they are."""
    with socket.create_server((_HOST, 0)) as listener:
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # closed by the store
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment variables of a rank's process: those that torchrun sets, and the network interface to use."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is to use the launcher's store, not to bring another
        "GLOO_SOCKET_IFNAME": _INTERFACE,
        "NCCL_SOCKET_IFNAME": f"={_INTERFACE}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # ranks share this machine; each sets its own later
    }


def _exit_code(result: RunProcsResult | None) -> int:
    """Exit code of the launcher once all ranks have ended; prints to standard error how failed ranks ended."""
    codes = {rank: failure.exitcode for rank, failure in sorted(result.failures.items())} if result is not None else {}
    if not codes:
        return 0
    if EXIT_CONFIG in codes.values():  # the rank has said why
        return EXIT_CONFIG
    ends = ", ".join(f"rank {rank} ended {name_exit(code)}" for rank, code in codes.items())
    print(f"streamdiff: {ends}", file=sys.stderr)
    return EXIT_FAILED


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m streamdiff.engine.process.launcher", description="the ranks of a ring"
    )
    parser.add_argument("--module", default="streamdiff.engine.process.main", help="what every rank runs")
    parser.add_argument("--address", required=True, help="private folder of the IPC socket and the configuration")
    parser.add_argument("--spare", action="store_true", help="ranks import everything, and wait to be needed")
    options = parser.parse_args(argv)
    ranks = read_config(Path(options.address)).model.ranks
    passed = ("--address", options.address, *(["--spare"] * options.spare))
    return launch(options.module, ranks, passed, options.address)


if __name__ == "__main__":
    raise SystemExit(main())
