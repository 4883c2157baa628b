"""Ranks of a test as processes: `python -m tests.pipeline.forked_ranks FOLDER LIMIT_S MODULE STAGES PORT ...`.

It imports `MODULE`, and all that takes seconds, once, and forks a process for each rank, which then runs it as
`python -m MODULE RANK STAGES PORT ...` would.

What they print goes to `FOLDER/RANK.out` and `.err`, their exit codes to `FOLDER/codes.json`: null for those that had
not ended after `LIMIT_S` seconds. The first that fails ends all.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn

from streamdiff import clock
from streamdiff.heavy_import import heavy_import


def rank_main(folder: Path, module: str, rank: int, arguments: list[str]) -> NoReturn:
    """Be a rank, to its end. Mutates: this process's output, arguments and modules."""
    for descriptor, suffix in ((1, "out"), (2, "err")):
        with open(folder / f"{rank}.{suffix}", "wb") as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = [module, str(rank), *arguments]
    del sys.modules[module]  # it is run as `__main__`
    code = 0
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_codes(processes: list[int], limit_s: float) -> list[int | None]:
    """Wait for the processes, all of which are killed once one has failed or the time is up; none for one that was
    late."""
    ended: SimpleQueue[tuple[int, int]] = SimpleQueue()

    def wait(rank: int) -> None:
        ended.put((rank, os.waitstatus_to_exitcode(os.waitpid(processes[rank], 0)[1])))

    for rank in range(len(processes)):
        threading.Thread(target=wait, args=(rank,)).start()
    codes: dict[int, int] = {}
    killed, late = False, []
    end_s = clock.monotonic_s() + limit_s
    while len(codes) < len(processes):
        try:
            rank, code = ended.get(timeout=None if killed else max(0.0, end_s - clock.monotonic_s()))
            codes[rank] = code
        except Empty:
            late = [rank for rank in range(len(processes)) if rank not in codes]
        if not killed and (late or any(codes.values())):
            killed = True
            for rank, process in enumerate(processes):
                if rank not in codes:
                    os.kill(process, signal.SIGKILL)
    return [None if rank in late else codes[rank] for rank in range(len(processes))]


def fork(folder: Path, module: str, arguments: list[str]) -> list[int]:
    """The processes of as many ranks as the first of the arguments says."""
    with heavy_import():
        importlib.import_module(module)
    processes = []
    for rank in range(int(arguments[0])):
        if (process := os.fork()) == 0:
            rank_main(folder, module, rank, arguments)
        processes.append(process)
    return processes


def main(folder: Path, limit_s: float, module: str, arguments: list[str]) -> None:
    processes = fork(folder, module, arguments)
    (folder / "codes.json").write_text(json.dumps(exit_codes(processes, limit_s)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])
