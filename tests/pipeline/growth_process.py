"""Does a ring of real processes grow?

Three sessions, one per KV context, play legs of some chunks each. On the way prompts change, sessions are reset, closed
and opened. After each leg the ring runs dry, and an update that means nothing goes around: every rank that meets it
counts what its process holds. What is held after the first legs must be what is held at the end.

As a rank: `RANK STAGES PORT LEGS LEG`; it prints its counts as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import count

import psutil
import torch
import torch.distributed as dist

from streamdiff.pipeline import topology
from streamdiff.pipeline.distributed.link import SLOTS
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.distributed.tcp import TcpReceiver, TcpSender
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.model_runner import ModelRunner, Worker
from tests.pipeline.processes import run_ranks
from tests.small import BLUE, CPU, RED, small_model

WARM_LEGS = 5
KV_CONTEXTS = ("clean", "staircase", "same_step")
MARK = 2**20  # no session has this number
LEAVE_S = 60.0
SLACK = {
    "resident_bytes": 4 << 20,
    "files": 0,
    "threads": 0,
    "objects": 200,
    "tensors": 20,
    "sessions": 0,
    "queued": 2 * SLOTS,
    "texts": 4,
    "latents": 6,
    "in_ring": 1,
}
"""By how much a count may be higher than after the first legs: what happens to be in flight."""

Counts = dict[str, int]


class Counter(Worker):
    """A rank that counts what it holds when the mark goes by. `ring` is for the head."""

    ring: Ring | None = None

    def __init__(self, stage: ModelRunner, sender: TcpSender, receiver: TcpReceiver) -> None:
        super().__init__(receiver, stage, sender)
        self.links, self.process = (sender, receiver), psutil.Process()
        self.found: list[Counts] = []

    def execute(self, message: StageMessage) -> None:
        super().execute(message)
        if message.update is not None and message.update.session == MARK:
            self.found.append(self.counts())

    def counts(self) -> Counts:
        gc.collect()
        sender, receiver = self.links
        sessions, objects = self.stage.sessions.values(), gc.get_objects()
        heads = self.ring.sampler.sessions.values() if self.ring else ()
        return {
            "resident_bytes": self.process.memory_info().rss,
            "files": self.process.num_fds(),
            "threads": self.process.num_threads(),
            "objects": len(objects),
            "tensors": sum(isinstance(each, torch.Tensor) for each in objects),
            "sessions": len(sessions) + len(heads),
            "queued": sender._leaving.qsize() + receiver._arrived.qsize(),
            "texts": sum(len(session.text) for session in sessions),
            "latents": sum(len(session.latents) for session in heads),
            "in_ring": len(self.ring.in_ring) if self.ring else 0,
        }


class Show:
    """The sessions of a head, by number; `epochs` never repeat."""

    def __init__(self, ring: Ring, texts: Sequence[torch.Tensor], frames: int, leg: int) -> None:
        self.ring, self.texts, self.frames, self.chunks, self.epochs = ring, texts, frames, leg, count()
        for name in range(len(KV_CONTEXTS)):
            self.open(name)

    def open(self, name: int) -> None:
        self.ring.open(name, self.texts[0], seed=name, epoch=next(self.epochs), steps=2, kv_context=KV_CONTEXTS[name])

    def leg(self, number: int) -> None:
        """So many chunks, then nothing is in the ring. Mutates: the ring, on all ranks."""
        done, often = 0, self.chunks // 4
        while done < self.chunks:
            for name in range(len(KV_CONTEXTS)):
                self.ring.scheduler.set_frame_credit(name, self.frames)
            for _ in self.ring.step_latents(LEAVE_S)[1]:
                done += 1
                if done % often == 0:
                    text = self.texts[done // often % 2]
                    self.ring.set_conditioning(done // often % 3, text, epoch=next(self.epochs))
        name = number % 3
        self.ring.close_session(name)
        self.open(name)
        self.ring.reset((name + 1) % 3, self.texts[1], seed=number, epoch=next(self.epochs))
        for each in range(len(KV_CONTEXTS)):
            self.ring.scheduler.set_frame_credit(each, 0)
        while self.ring.has_work:
            self.ring.step_latents(LEAVE_S)


def main(rank: int, stages: int, port: int, legs: int, leg: int) -> list[Counts]:
    """One rank, from start to end; what it counted after each leg."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, stages, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=stages, timeout=timedelta(days=3650))
    model = small_model(6, layers=stages, heads=1, chunk=1, window=3, planes=0)
    part, place = model.part(*split_evenly(model.blocks, stages)[rank]), topology.StageTopology(rank, stages)
    parts = topology.connect_stage(part, place, CPU)
    assert parts.links is not None
    worker = Counter(parts.stage, *parts.links)
    gc.collect()
    gc.freeze()  # what was imported is not counted, and is not looked at again and again
    if rank > 0:
        worker.run()
        return worker.found
    ring = Ring(part, CPU, parts=parts)
    worker.ring, ring.worker = ring, worker
    show = Show(ring, [model.text.encode(text) for text in (RED, BLUE)], model.spec.chunk_frames, leg)
    for number in range(legs):
        show.leg(number)
        ring.close_session(MARK)
        while ring.has_work:
            ring.step_latents(LEAVE_S)
    ring.stop(LEAVE_S)
    return worker.found


def faults(found: Sequence[Counts]) -> list[str]:
    """What grew: counts after later legs against those after the first WARM_LEGS."""
    before, later = found[WARM_LEGS - 1], found[WARM_LEGS:]
    return [
        f"{name}: {before[name]} after {WARM_LEGS} legs, {most} later"
        for name, slack in SLACK.items()
        if (most := max(counts[name] for counts in later)) > before[name] + slack
    ]


def grow(stages: int, legs: int, leg: int, limit_s: float) -> list[list[Counts]]:
    """What each rank of a ring of so many processes counted after each of so many legs of `leg` chunks."""
    module = "tests.pipeline.growth_process"
    return [json.loads(said) for said in run_ranks(module, [str(legs), str(leg)], stages, limit_s)]


if __name__ == "__main__":
    print(json.dumps(main(*(int(word) for word in sys.argv[1:]))))
