"""Starts the ranks of a ring on this machine and waits for them: `python -m streamdiff.engine.launch --stages 4 ...`.

torch elastic does the work. All other options go to the engine process of every rank (`engine.main`), where rank 0
becomes the engine and the others work for it. When one ends before its time, all are ended.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from streamdiff.config import Config
from streamdiff.engine.bridge import EXIT_CONFIG
from streamdiff.engine.supervisor import name_exit

EXIT_FAILED = 1
_ELASTIC = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api")
"""Loggers of what is told here, or by the ranks, in words of our own."""


def launch(module: str, ranks: int, arguments: Sequence[str], log_folder: str) -> int:
    """Run `python -m module` as so many `ranks` until all have ended; returns the exit code: 0, `EXIT_CONFIG` where a
    rank said so, 128 and the number of the signal that ended it, else `EXIT_FAILED`.

    `log_folder` is one that somebody removes afterwards. Mutates: this process's environment, and elastic's logging.
    """
    for logger in _ELASTIC:
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share this machine; each sets its own number later
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=log_folder),
        local_addr="127.0.0.1",
        event_log_handler="null",
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        if EXIT_CONFIG in codes.values():  # the rank has said why
            return EXIT_CONFIG
        ends = ", ".join(f"rank {rank} ended {name_exit(code)}" for rank, code in codes.items())
        print(f"streamdiff: {ends}", file=sys.stderr)
        return EXIT_FAILED
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m streamdiff.engine.launch", description="the ranks of a ring")
    parser.add_argument("--module", default="streamdiff.engine.main", help="what every rank runs")
    parser.add_argument("--address", required=True, help="private folder of the bridge's socket")
    parser.add_argument("--config-json", required=True, help="the whole configuration as JSON")
    parser.add_argument("--spare", action="store_true", help="ranks import everything, and wait to be needed")
    options = parser.parse_args(argv)
    ranks = Config.model_validate_json(options.config_json).model.ranks
    passed = ("--address", options.address, "--config-json", options.config_json, *(["--spare"] * options.spare))
    return launch(options.module, ranks, passed, options.address)


if __name__ == "__main__":
    raise SystemExit(main())
