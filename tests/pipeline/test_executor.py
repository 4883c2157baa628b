"""The ring: however many stages it has, the numbers are the same, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from streamdiff.pipeline.distributed.cuda_streams import PacedNoLink
from streamdiff.pipeline.distributed.message import StageMessage
from streamdiff.pipeline.ring import Ring, RingParts
from streamdiff.pipeline.runner.init_latents import InitLatents
from streamdiff.pipeline.runner.model_runner import ModelRunner
from streamdiff.pipeline.runner.sampler import Finished, StreamInputs
from tests.pipeline.distributed.fake_device import Device, World
from tests.pipeline.playing import THREE, local_ring, play, same
from tests.small import BLUE, CPU, RED, WHITE, small_model

CONTEXTS = ("clean", "staircase", "same_step")
MODEL = small_model(1, layers=4, sink=2)


@pytest.fixture(scope="module")
def alone() -> dict[int, list[torch.Tensor]]:
    """Every session by itself on one stage: what all others must equal."""
    return {name: play(Ring(MODEL, CPU), MODEL, {name: order})[name] for name, order in THREE.items()}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_sessions_of_all_contexts_share_the_ring(stages: int, alone: dict[int, list[torch.Tensor]]) -> None:
    together = play(local_ring(MODEL, CPU, stages), MODEL, THREE)
    for name in THREE:
        assert same(together[name], alone[name]), f"session {name}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_host_hands_over_a_forward_when_all_but_one_are_done(
    seed: int, alone: dict[int, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stage on a device that runs later, in turns that chance decides: the latents stay the same."""
    device = Device()
    world, loop, stage = World([device], seed), PacedNoLink(device), ModelRunner(MODEL, CPU)
    ring = Ring(MODEL, CPU, parts=RingParts(stage, (loop, loop)))
    carry_out, take_back = stage.carry_out, ring._take_back
    done, unfinished, woken = list[StageMessage](), list[int](), list[bool]()

    def later(message: StageMessage) -> StageMessage:
        unfinished.append(len(unfinished) - len(done))
        device.computing.run(lambda: done.append(message))
        return carry_out(message)

    def meanwhile(_: float) -> list[Finished]:
        world.a_while(1)
        return take_back(0.0)  # the device moves only here: to wait for it would be in vain

    monkeypatch.setattr(stage, "carry_out", later)
    monkeypatch.setattr(ring, "_take_back", meanwhile)
    ring.notify(lambda: woken.append(True))
    assert same(play(ring, MODEL, {1: THREE[1]})[1], alone[1])
    assert max(unfinished) == 1 and woken


@pytest.mark.slow
def test_several_rows_per_forward_agree_closely(alone: dict[int, list[torch.Tensor]]) -> None:
    """Kernels for larger matrices sum in another order."""
    together = play(local_ring(MODEL, CPU, 3, max_rows=4), MODEL, THREE)
    for name in THREE:
        for one, other in zip(together[name], alone[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_is_in_the_ring_at_a_reset_is_nobodys() -> None:
    ring = local_ring(MODEL, CPU, 4)
    order = THREE[1]
    ring.open(0, MODEL.text.encode(order.text), seed=1, epoch=0, steps=4, kv_context="staircase")
    ring.scheduler.set_frame_credit(0, 10**6)
    while len(ring.in_ring) < 2 or ring.scheduler.next_chunk(0) < 3:
        ring.step_latents()
    ring.reset(0, MODEL.text.encode(RED), seed=9, epoch=7)
    ring.scheduler.set_frame_credit(0, 12 * MODEL.spec.chunk_frames)
    got: list[torch.Tensor] = []
    while ring.has_work:
        got += [done.latents for done in ring.step_latents()[1]]
    fresh = Ring(MODEL, CPU)
    fresh.open(0, MODEL.text.encode(RED), seed=9, epoch=7, steps=4, kv_context="staircase")
    fresh.scheduler.set_frame_credit(0, 12 * MODEL.spec.chunk_frames)
    expected: list[torch.Tensor] = []
    while fresh.has_work:
        expected += [done.latents for done in fresh.step_latents()[1]]
    assert len(got) > 6 and same(got, expected)


class Lost(InitLatents):
    """Input whose device has no memory left."""

    def on(self, device: torch.device) -> InitLatents:
        raise torch.OutOfMemoryError("the test's own fault")


@pytest.mark.slow
def test_what_cannot_be_opened_leaves_nothing_open() -> None:
    """The slot can be used again, and what it makes is as if nothing had been."""
    ring, order = local_ring(MODEL, CPU, 2), THREE[1]
    lost = Lost.steady(torch.zeros(1, *MODEL.spec.chunk_shape), 0.5, 500.0)
    with pytest.raises(torch.OutOfMemoryError):
        ring.open(
            0, MODEL.text.encode(order.text), epoch=0, steps=4, kv_context="clean", given=StreamInputs(source=lost)
        )
    assert not ring.has_work, "no stage is told of it"
    assert same(play(ring, MODEL, {0: order})[0], play(Ring(MODEL, CPU), MODEL, {0: order})[0])


def test_what_cannot_be_reset_goes_on() -> None:
    """The stream is as if the reset had not been asked for."""
    ring, undisturbed = Ring(MODEL, CPU), Ring(MODEL, CPU)
    lost = Lost.steady(torch.zeros(1, *MODEL.spec.chunk_shape), 0.5, 500.0)
    made: list[list[torch.Tensor]] = []
    for each in (ring, undisturbed):
        each.open(0, MODEL.text.encode(RED), seed=1, epoch=0, steps=4, kv_context="clean")
        each.scheduler.set_frame_credit(0, 2 * MODEL.spec.chunk_frames)
        latents: list[torch.Tensor] = []
        while len(latents) < 1:
            latents += [done.latents for done in each.step_latents()[1]]
        if each is ring:
            with pytest.raises(torch.OutOfMemoryError):
                each.reset(0, MODEL.text.encode(BLUE), seed=2, epoch=1, given=StreamInputs(source=lost))
        while each.has_work:
            latents += [done.latents for done in each.step_latents()[1]]
        made.append(latents)
    assert len(made[0]) == 2 and same(made[0], made[1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
def test_sessions_that_come_change_pause_and_go_at_random_are_as_if_alone(seed: int) -> None:
    """Three slots on three stages; every finished chunk equals that of the same session with the ring to itself."""
    chance = random.Random(seed)
    ring = local_ring(MODEL, CPU, 3)
    epochs = [0, 0, 0]
    live: dict[int, Life] = {}
    past: list[Life] = []
    for _ in range(160):
        slot = chance.randrange(3)
        if slot not in live:
            live[slot] = Life(chance.randrange(100), chance.choice((2, 4)), chance.choice(CONTEXTS), epochs[slot], RED)
            life = live[slot]
            text = MODEL.text.encode(RED)
            ring.open(slot, text, seed=life.seed, epoch=life.epoch, steps=life.steps, kv_context=life.kv_context)
            epochs[slot] += 1
        elif chance.random() < 0.06:
            ring.close_session(slot)
            past.append(live.pop(slot))
        elif chance.random() < 0.1:
            text = chance.choice((RED, BLUE, WHITE))
            live[slot].texts[ring.scheduler.next_chunk(slot)] = text
            ring.set_conditioning(slot, MODEL.text.encode(text), epoch=epochs[slot])
            epochs[slot] += 1
        elif chance.random() < 0.1:
            steps = chance.choice((2, 4))
            live[slot].changes[ring.scheduler.next_chunk(slot)] = steps
            ring.set_steps(slot, steps, epoch=epochs[slot])
            epochs[slot] += 1
        elif chance.random() < 0.2:
            live[slot].paused = not live[slot].paused
            ring.scheduler.set_paused(slot, live[slot].paused)
        else:
            ring.scheduler.set_frame_credit(slot, chance.choice((0, 1, 3)) * MODEL.spec.chunk_frames)
        for _ in range(chance.randrange(4)):
            for row, latents in ring.step_latents()[1]:
                live[row.session].done.append(latents.clone())
    for slot in list(live):
        ring.close_session(slot)
        past.append(live.pop(slot))
    while ring.has_work:
        assert not ring.step_latents()[1]
    assert sum(len(life.done) for life in past) > 15
    for life in past:
        assert same(life.done, life.alone())
    assert not ring.scheduler._sessions and not ring.sampler.sessions
    assert not any(part.sessions for part in (ring.stage, *(worker.stage for worker in ring.local)))


class Life:
    """A session and what it made; `texts` and `changes`, of steps, by the chunk from which they hold."""

    def __init__(self, seed: int, steps: int, kv_context: str, epoch: int, text: str) -> None:
        self.seed, self.steps, self.kv_context, self.epoch = seed, steps, kv_context, epoch
        self.texts = {0: text}
        self.changes: dict[int, int] = {}
        self.paused = False
        self.done: list[torch.Tensor] = []

    def alone(self) -> list[torch.Tensor]:
        ring = Ring(MODEL, CPU)
        text = MODEL.text.encode(self.texts[0])
        ring.open(0, text, seed=self.seed, epoch=0, steps=self.steps, kv_context=self.kv_context)
        done: list[torch.Tensor] = []
        epoch, changes = 0, sorted(self.texts.items())
        steps = sorted(self.changes.items())
        while len(done) < len(self.done):
            admitted = ring.scheduler.next_chunk(0)
            while changes and changes[0][0] <= admitted:
                epoch += 1
                ring.set_conditioning(0, MODEL.text.encode(changes.pop(0)[1]), epoch=epoch)
            while steps and steps[0][0] <= admitted:
                epoch += 1
                ring.set_steps(0, steps.pop(0)[1], epoch=epoch)
            # A staircase needs newcomers.
            ahead = min([each[0][0] for each in (changes, steps) if each], default=admitted + 6) - admitted
            ring.scheduler.set_frame_credit(0, ahead * MODEL.spec.chunk_frames)
            done += [latents for _, latents in ring.step_latents()[1]]
        return done[: len(self.done)]
