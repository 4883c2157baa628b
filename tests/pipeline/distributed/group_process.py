"""One rank that joins a group: `python -m tests.pipeline.distributed.group_process RANK STAGES PORT FACTS-BY-RANK
WHETHER-A-LAUNCHER-HAS-THE-STORE`."""

from __future__ import annotations

import json
import os
import sys

import torch.distributed as dist

from streamdiff.errors import ConfigError
from streamdiff.pipeline.distributed import rendezvous


def main(rank: int, stages: int, port: int, facts: str, agent_store: str) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(stages), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": agent_store,
    }  # fmt: skip
    try:
        member = rendezvous.join(json.loads(facts)[rank])
    except ConfigError as error:
        print(error)
    else:
        dist.barrier()  # who ends while another still connects to it would be missed
        print(f"rank {member.rank} of {member.ranks}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
