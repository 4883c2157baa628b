"""Sessions of the embedded model that go through what is generated of their state, on every rank, after every message;
`python -m tests.session_state.moved RANK STAGES PORT OUT` is one rank of a ring, and the head writes to OUT what came.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamdiff.models.model import Model
from streamdiff.models.tiny.model import WEIGHTS, load_model
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.planner.partition import split_evenly
from streamdiff.pipeline.ring import Ring
from streamdiff.pipeline.runner.init_latents import InitLatents
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.runner.sampler import StreamInputs
from streamdiff.pipeline.topology import StageTopology, connect_stage
from streamdiff.session_state import walk
from tests.pipeline.distributed.rendezvous_backend import join_ring
from tests.pipeline.playing import Order
from tests.small import BLUE, CPU, RED, WHITE

CHUNKS, CHANGE_AT = 6, 3
ORDERS = {
    0: Order(RED, 5, 4, "clean", CHANGE_AT, switch="recache"),
    1: Order(WHITE, 6, 4, "staircase", CHANGE_AT, then_steps=2),
    2: Order(RED, 7, 4, "same_step", CHANGE_AT),
}
LEAVE_S = 60.0


class Streams(NamedTuple):
    """Latents and pictures by session and chunk; `moments`, what was under way in (session, at which) it was moved."""

    latents: dict[int, list[Tensor]]
    pictures: dict[int, list[Tensor]]
    moments: set[tuple[int, str]]


def embedded() -> Model:
    return load_model(WEIGHTS, CPU)


@torch.inference_mode()
def spoil(state: object) -> None:
    """Overwrite what was left behind, so that whoever still holds it is found out."""
    for tensor in walk._tensors(state, "left behind"):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


class Mover:
    """Replaces states by copies, by what went to a device and back, and by what was saved and loaded, in turn."""

    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, state: Any, opened: Callable[[], Any]) -> Any:
        """What takes the place of `state`; `opened` gives a state that has just been opened in the same way."""
        how = next(self._turns) % 3
        if how == 1:
            return walk.to_device(state, CPU)
        if how == 0:
            moved = walk.copy(state)
        else:
            tensors, tree = walk.save(state)
            moved = walk.load(opened(), tensors, json.loads(json.dumps(tree)))
        assert walk.nbytes(moved) == walk.nbytes(state)
        spoil(state)
        return moved


def move_after_messages(stage: ModelRunner) -> None:
    """From now on the stage's sessions are moved after each message. Mutates: stage."""
    carry_out, mover = stage.carry_out, Mover()

    def moving(message: StageMessage) -> StageMessage:
        result = carry_out(message)
        for name in {row.session for row in message.rows}:

            def opened(name: int = name, old: Any = stage.sessions[name]) -> Any:
                stage.open(name, steps=old.steps, kv_context=ORDERS[name].kv_context)
                return stage.sessions[name]

            stage.sessions[name] = mover(stage.sessions[name], opened)
        return result

    stage.carry_out = moving  # type: ignore[method-assign]


def move_head(ring: Ring, name: int, mover: Mover) -> set[str]:
    """Move what the head alone has of a session; what was under way in it. Mutates: ring."""
    sampler, scheduler, order = ring.sampler, ring.scheduler, ORDERS[name]
    scheduled = scheduler._sessions[name]
    under_way = [chunk.entered - chunk.back for chunk in scheduled.chunks]
    moments = {"in mid-chunk"} if any(chunk.back >= 0 for chunk in scheduled.chunks) else set()
    moments |= set() if under_way else {"between chunks"}
    moments |= {"two in the ring"} if len(ring.in_ring) >= 2 and sum(under_way) else set()
    moments |= {"two of its own"} if sum(under_way) >= 2 else set()

    def prepared(old: Any = sampler.sessions[name]) -> Any:
        return sampler.prepare(order.seed, old.schedule, order.kv_context)

    def opened() -> Any:
        scheduler.close(name)
        scheduler.open(name, steps=scheduled.steps, kv_context=order.kv_context, epoch=scheduled.epoch)
        return scheduler._sessions[name]

    sampler.sessions[name] = mover(sampler.sessions[name], prepared)
    scheduler._sessions[name] = mover(scheduled, opened)
    return moments


def play(ring: Ring, model: Model, moved: bool) -> Streams:
    """All sessions together. Each changes at its chunk, those but the staircase when they have nothing in flight."""
    made = Streams({name: [] for name in ORDERS}, {name: [] for name in ORDERS}, set())
    mover, changed = Mover(), set[int]()
    assert model.decoder is not None
    memories = {name: model.decoder.new_memory() for name in ORDERS}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        source = InitLatents.steady(torch.randn(4, *model.spec.chunk_shape), 0.8, 700.0)
    if moved:
        move_after_messages(ring.stage)
    for name, order in ORDERS.items():
        ring.open(
            name, model.text.encode(order.text), seed=order.seed, epoch=0, steps=order.steps,
            kv_context=order.kv_context, given=StreamInputs(source=source if order.kv_context == "same_step" else None),
        )  # fmt: skip
    while any(len(latents) < CHUNKS for latents in made.latents.values()):
        for name, order in ORDERS.items():
            admitted, at_rest = ring.scheduler.next_chunk(name), ring.scheduler.drained(name)
            if name not in changed and admitted == CHANGE_AT and (at_rest or order.then_steps):
                changed.add(name)
                if order.then_steps:
                    ring.set_steps(name, order.then_steps, epoch=1)
                else:
                    ring.set_conditioning(name, model.text.encode(BLUE), epoch=1, switch=order.switch)
            limit = CHUNKS + 1 if name in changed else CHANGE_AT
            ring.scheduler.set_frame_credit(name, (limit - admitted) * model.spec.chunk_frames)
        assert ring.has_work, "the ring stands still"
        for row, latents in ring.step_latents(1.0)[1]:
            made.latents[row.session].append(latents.clone())
            memory = memories[row.session]
            made.pictures[row.session].append(model.decoder.decode(latents[None], memory).clone())
            memories[row.session] = mover(memory, model.decoder.new_memory) if moved else memory
        for name in ORDERS if moved else ():
            made.moments.update((name, moment) for moment in move_head(ring, name, mover))
    return made


def main(rank: int, stages: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    join_ring(rank, stages, port)
    model, topology = embedded(), StageTopology(rank, stages, 0, 1, "gloo")
    part = model.part(*split_evenly(model.blocks, stages)[rank])
    if rank:
        worker = connect_stage(part, topology, CPU).worker()
        move_after_messages(worker.stage)
        worker.run()
        return
    ring = Ring(part, CPU, topology.rows, connect_stage(part, topology, CPU))
    made = play(ring, model, moved=True)
    ring.stop(LEAVE_S)
    torch.save((made.latents, made.pictures, made.moments), out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
