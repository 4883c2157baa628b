"""Ranks as real processes: started together, ended together, and the one that failed is heard."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import fork_server
from tests.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]


class RankFailed(Exception):
    """A rank ended with an error, or did not end in time; the message has what it and the others wrote to stderr."""


def run_ranks(module: str, arguments: Sequence[str], stages: int, limit_s: float, port: int | None = None) -> list[str]:
    """Run `python -m module RANK STAGES PORT ARGUMENTS...` once per rank, one thread each; what they print, by rank.
    `port` is by default one that is free.

    They are forked (see `forked_ranks`), so that the seconds of an import pass once. However it ends, no
    process is left.

    Raises:
        RankFailed: as soon as one rank ends with an error, or after `limit_s` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(stages):  # one that is ended at once has not opened its own yet
            for kind in ("out", "err"):
                (Path(folder) / f"{rank}.{kind}").touch()
        python = fork_server.interpreter()
        command = [python, "-m", "tests.pipeline.forked_ranks", folder, str(limit_s), module, str(stages)]
        process = subprocess.Popen(
            [*command, str(free_port() if port is None else port), *arguments],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        try:
            _, complaint = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and all its ranks before it
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            raise RankFailed(f"{module} ended before its ranks, with {process.returncode}:\n{complaint}")
        codes: list[int | None] = json.loads((Path(folder) / "codes.json").read_text())
        said, complaints = (
            [(Path(folder) / f"{rank}.{kind}").read_text() for rank in range(stages)] for kind in ("out", "err")
        )
    if any(codes) or None in codes:
        late = [str(rank) for rank, code in enumerate(codes) if code is None]
        headline = [f"rank {', '.join(late)} of {module} did not end within {limit_s:g} s"] if late else []
        by_fault = sorted(range(stages), key=lambda rank: codes[rank] in (None, 0, -signal.SIGKILL))
        ends = [f"rank {rank} of {module} ended with {codes[rank]}:\n{complaints[rank]}" for rank in by_fault]
        raise RankFailed("\n".join([*headline, *ends]))
    return said
