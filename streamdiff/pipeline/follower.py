"""What every rank but the head runs: its stage's loop, from the start to the end of the ring."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType

from streamdiff.config import ModelConfig
from streamdiff.pipeline import loading, ranks
from streamdiff.pipeline.group import Member
from streamdiff.pipeline.links import LinkClosed
from streamdiff.pipeline.watch import Watch
from streamdiff.pipeline.worker import Worker

EXIT_FAULT = 1
GRACE_S = 10.0
"""How long a rank that was told to end waits for the head to end the ring."""


def follow(config: ModelConfig) -> None:
    """Work as a stage until the head stops the ring. The process ends with exit code 1 when the ring breaks.

    Raises:
        ConfigError: the ring cannot be built as configured.
    """
    member = loading.join(config)
    device = loading.pick_device(config.device)
    trunk, _ = loading.load_share(config, member, device, lambda blocks: loading.load_trunk(config, device, blocks))
    member.tell_room(loading.own_room(config, device))
    worker = ranks.follower(trunk, ranks.Place(member.rank, member.stages), device)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _told_to_end)
    atexit.register(leave)
    watch = Watch(member, worker, lambda fault: leave(f"rank {member.rank} ends: {fault}"), config.hang_s)
    watch.start()
    _run(worker, watch, member)
    watch.finish()
    atexit.unregister(leave)


def _run(worker: Worker, watch: Watch, member: Member) -> None:
    """The one outer frame of a follower: it says where it was, tells the others, and lets the error go on."""
    try:
        worker.run()
    except LinkClosed as error:
        leave(f"rank {member.rank} ends: {watch.report(gone(error, member.rank, worker))}")
    except Exception as error:
        error.add_note(f"on rank {member.rank}, {worker.where()}")
        watch.report(f"rank {member.rank} failed {worker.where()}: {type(error).__name__}: {error}")
        raise


def gone(error: LinkClosed, rank: int, worker: Worker) -> str:
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
