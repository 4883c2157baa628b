"""Orders for sessions, and how tests play them on any ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from streamdiff.models.model import Model
from streamdiff.pipeline.distributed.message import MessageLayout
from streamdiff.pipeline.ring import Ring, local_parts
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.distributed.local_link import LocalLink
from tests.small import BLUE, RED, WHITE

CHUNKS, CHUNKS_LONG = 8, 16  # with a window of three chunks: evictions


@dataclass(frozen=True)
class Order:
    """What a session is opened with, and the chunk before which `play` changes its prompt by `switch`, or, with
    `then_steps`, its number of steps. `keys`: by chunk, what controls are set to before it is admitted, one after the
    other."""

    text: str
    seed: int
    steps: int
    kv_context: str
    change_at: int = 4
    then_steps: int | None = None
    switch: str = "keep"
    keys: Mapping[int, Sequence[Mapping[str, float]]] = field(default_factory=dict)


def local_ring(
    model: Model, device: torch.device, stages: int = 1, max_rows: int = 1, link: type[LocalLink] = LocalLink
) -> Ring:
    """A ring whose stages are all in this process."""
    rows = max(max_rows, model.spec.first_chunks)
    return Ring(model, device, max_rows, local_parts(model, device, stages, local_links(model, stages, rows, link)))


def local_links(model: Model, stages: int, rows: int, link: type[LocalLink] = LocalLink) -> list[LocalLink]:
    """Links with slots and records between the stages of a ring that carry so many rows."""
    onward, back = MessageLayout.between_stages(model, rows), MessageLayout.back_to_head(model, rows)
    return [*(link(onward) for _ in range(stages - 1)), link(back)]


def play(ring: Ring, model: Model, orders: dict[int, Order], chunks: int = CHUNKS) -> dict[int, list[torch.Tensor]]:
    """Latents of `chunks` chunks of every session, made together."""
    for name, order in orders.items():
        text = model.text.encode(order.text)
        ring.open(name, text, seed=order.seed, epoch=0, steps=order.steps, kv_context=order.kv_context)
    done: dict[int, list[torch.Tensor]] = {name: [] for name in orders}
    changed: set[int] = set()
    pressed = dict.fromkeys(orders, -1)  # the chunk before which keys were set last
    while any(len(latents) < chunks for latents in done.values()):
        for name, order in orders.items():
            admitted = ring.scheduler.next_chunk(name)
            if admitted == order.change_at and name not in changed:
                changed.add(name)
                if order.then_steps is None:
                    ring.set_conditioning(name, model.text.encode(BLUE), epoch=1, switch=order.switch)
                else:
                    ring.set_steps(name, order.then_steps, epoch=1)
            for values in order.keys.get(admitted, ()) if pressed[name] < admitted else ():
                ring.set_controls(name, values)
            pressed[name] = admitted
            limit = chunks + 6 if name in changed else order.change_at  # a staircase needs newcomers
            limit = min([limit, *(chunk for chunk in order.keys if chunk > admitted)])
            ring.scheduler.set_frame_credit(name, (limit - admitted) * model.spec.chunk_frames)
        assert ring.has_work, "the ring stands still"
        for row, latents in ring.step_latents(1.0)[1]:
            assert row.chunk == len(done[row.session])
            assert row.epoch == int(row.chunk >= orders[row.session].change_at), "no chunk mixes two epochs"
            done[row.session].append(latents.clone())
    return {name: latents[:chunks] for name, latents in done.items()}


def end(ring: Ring, *sessions: int) -> None:
    """Close sessions, and wait until nothing of them is in the ring."""
    for session in sessions:
        ring.close_session(session)
    while ring.has_work:
        ring.step_latents()


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


THREE = {
    0: Order(RED, 5, 4, "clean", switch="recache"),
    1: Order(WHITE, 6, 4, "staircase", switch="recache"),
    2: Order(RED, 7, 4, "same_step"),
}
OTHER_STEPS = {
    3: Order(RED, 8, 4, "clean", 5, then_steps=2),
    4: Order(WHITE, 9, 4, "staircase", 5, then_steps=2),
    5: Order(RED, 10, 2, "staircase", 6, then_steps=4),
    6: Order(WHITE, 11, 4, "same_step", 5, then_steps=2),
    7: Order(RED, 12, 2, "same_step", 5, then_steps=4),
}


def pictures_of(pipeline: StreamingPipeline, count: int) -> list[np.ndarray]:
    """The next `count` pictures of the only session, and those that come with them."""
    pictures: list[np.ndarray] = []
    while len(pictures) < count:
        pipeline.set_frame_credit(0, 6 * pipeline.info.chunk_frames)
        pictures += [picture for each in pipeline.step(0.1) for picture in each.pictures]
    return pictures
