"""One rank that carries out several command lines: `python -m tests.commands.reference_rank RANK RANKS PORT FILE`.

FILE is JSON, a list of `streamdiff generate --processes ...`; the ranks are there already, as under torchrun.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from streamdiff.cli import main


def run(rank: int, ranks: int, port: int, commands: list[list[str]]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    # As of the launcher: ranks meet at a store that outlives each of the rings.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=120))
    for number, command in enumerate(commands):
        status = main.main(command)
        assert status == 0, f"{command} ended with {status}"
        store.set(f"done/{number}/{rank}", "")
        store.wait([f"done/{number}/{other}" for other in range(ranks)])
        dist.destroy_process_group()


if __name__ == "__main__":
    run(*map(int, sys.argv[1:4]), json.loads(Path(sys.argv[4]).read_text()))
