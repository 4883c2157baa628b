"""Ranks as real processes: started together, ended together, and the one that failed is heard."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class RankFailed(Exception):
    """A rank ended with an error, or did not end in time; the message has what it and the others wrote to stderr."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_ranks(module: str, arguments: Sequence[str], stages: int, limit_s: float) -> list[str]:
    """Run `python -m module RANK STAGES PORT ARGUMENTS...` once per rank, one thread each; what they print, by rank.

    However it ends, no process is left.

    Raises:
        RankFailed: as soon as one rank ends with an error, or after `limit_s` seconds.
    """
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[str]] = []

    def listen(rank: int) -> str:
        said, complaint = ranks[rank].communicate()
        if ranks[rank].returncode != 0:
            raise RankFailed(f"rank {rank} of {module} ended with {ranks[rank].returncode}:\n{complaint}")
        return said

    with ThreadPoolExecutor(stages) as pool:
        try:
            for rank in range(stages):
                command = [sys.executable, "-m", module, str(rank), str(stages), port, *arguments]
                ranks.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                    )
                )
            heard = [pool.submit(listen, rank) for rank in range(stages)]
            ended, late = wait(heard, timeout=limit_s, return_when=FIRST_EXCEPTION)
        finally:  # before the pool waits for its threads, which listen to these
            for process in ranks:
                process.kill()
    failed = [each for each in ended if each.exception() is not None]
    if failed or late:
        numbers = ", ".join(str(rank) for rank, each in enumerate(heard) if each in late)
        headline = [] if failed else [f"rank {numbers} of {module} did not end within {limit_s:g} s"]
        others = [each for each in heard if each not in failed and each.exception() is not None]  # ended by us
        raise RankFailed("\n".join([*headline, *(str(each.exception()) for each in [*failed, *others])]))
    return [each.result() for each in heard]
