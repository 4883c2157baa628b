"""What steers a model is fixed when a chunk is admitted, and goes with it wherever it is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from streamdiff.core import KV_CONTEXTS
from streamdiff.engine import messages
from streamdiff.engine.engine import Engine
from streamdiff.errors import RequestError
from streamdiff.pipeline.ring import Ring, local_parts
from streamdiff.pipeline.runner.controls import HeldControls
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.distributed.context_process import STEERED
from tests.pipeline.playing import Order, local_ring, pictures_of, play, same
from tests.saving import save
from tests.small import CONTROLS, CPU, RED, WHITE, small_model

MODEL = small_model(1, layers=4, heads=4, sink=2, controls=CONTROLS)
KEYS = {0: [{"x": 0.5}], 2: [{"x": 0.0, "jump": 1.0}], 3: [{"jump": 0.0}], 5: [{"pan": 1.0}, {"pan": 0.0}]}


def latents(order: Order, chunks: int = 8, stages: int = 1) -> list[torch.Tensor]:
    return play(local_ring(MODEL, CPU, stages), MODEL, {0: order}, chunks)[0]


def test_what_is_held_is_for_all_latent_frames_and_a_tap_for_the_first() -> None:
    held = HeldControls()
    held.set({0: -0.5, 2: 1.0})
    assert held.take(3, CONTROLS).tolist() == [[-0.5, 0, 1], [-0.5, 0, 1], [-0.5, 0, 1]]
    held.set({2: 0.0})
    held.set({0: 1.0})
    held.set({0: -1.0})  # the newest state wins
    held.set({1: 1.0})
    held.set({1: 0.0})  # a tap of what is the same all over a chunk
    assert held.take(3, CONTROLS).tolist() == [[-1, 1, 0], [-1, 1, 0], [-1, 1, 0]]
    held.set({2: 1.0})
    held.set({2: 0.0, 0: 0.0})
    assert held.take(3, CONTROLS).tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]], "held before is no tap"
    assert not held.take(3, CONTROLS).any()


@pytest.mark.parametrize("kv_context", KV_CONTEXTS)
def test_a_chunk_obeys_from_its_admission_on_and_none_before(kv_context: str) -> None:
    order = Order(RED, 5, 4, kv_context, change_at=99)
    still = latents(order)
    for chunk, values in ((0, {"x": 1.0}), (3, {"jump": 1.0}), (4, {"pan": -1.0})):
        steered = latents(Order(RED, 5, 4, kv_context, 99, keys={chunk: [values]}))
        assert same(steered[:chunk], still[:chunk])
        assert all(not torch.equal(one, other) for one, other in zip(steered[chunk:], still[chunk:], strict=True))
    at_rest = latents(Order(RED, 5, 4, kv_context, 99, keys={2: [{"x": 0.0}]}))
    assert same(at_rest, still)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_sessions_steered_apart_equal_each_alone_on_any_number_of_stages(stages: int) -> None:
    for max_rows in (1, 4):
        ring = local_ring(MODEL, CPU, stages, max_rows)
        together = play(ring, MODEL, STEERED, 9)
        for name, order in STEERED.items():
            alone = latents(order, 9)
            assert same(together[name], alone) if max_rows == 1 else True
            for one, other in zip(together[name], alone, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_recache_runs_the_past_under_the_controls_that_it_had() -> None:
    """As the same stream whose controls were held all along, and not as one that had none then."""
    first, later = {0: [{"x": 1.0}]}, {0: [{"x": 1.0}], 4: [{"x": 0.0}]}
    held = latents(Order(RED, 5, 4, "clean", 4, switch="recache", keys=first))
    let_go = latents(Order(RED, 5, 4, "clean", 4, switch="recache", keys=later))
    assert same(held[:4], let_go[:4]) and not torch.equal(held[4], let_go[4])
    ring = local_ring(MODEL, CPU)
    play(ring, MODEL, {0: Order(RED, 5, 4, "clean", 4, switch="recache", keys=later)}, 8)
    kept = ring.sampler.sessions[0].controls
    assert set(kept) <= set(ring.sampler.sessions[0].kept) | {8, 9, 10, 11, 12, 13} and len(kept) < 8, "old ones go"


@pytest.mark.parametrize("kv_context", KV_CONTEXTS)
def test_a_saved_session_has_the_controls_of_chunks_in_flight_and_nobody_holds_any(kv_context: str) -> None:
    before, after = (StreamingPipeline(MODEL, CPU, parts=local_parts(MODEL, CPU, 2)) for _ in range(2))
    before.open(0, before.text.encode(RED), seed=3, epoch=0, steps=4, kv_context=kv_context)
    before.set_controls(0, {"x": 1.0, "jump": 1.0})
    pictures_of(before, 2 * MODEL.spec.chunk_frames)
    for _ in range(3):
        before.step()
    before.set_controls(0, {"x": 0.0, "jump": 0.0})
    before.sampler.sessions[0].held.pressed.clear()
    snapshot, frames = save(before, 0)
    waiting = [picture for each in frames for picture in each.pictures]
    got = waiting + pictures_of(before, 40)
    after.resting.load(0, snapshot)
    assert all(map(np.array_equal, got[len(waiting) :][:40], pictures_of(after, 40)))
    before.close()
    after.close()


def engine() -> Engine:
    made = Engine(StreamingPipeline(MODEL, CPU), 8 * MODEL.spec.chunk_frames)
    made.handle(messages.Open("s", RED, 3))
    return made


def events(engine: Engine, kind: type, count: int = 1) -> list[messages.Event]:
    found: list[messages.Event] = []
    while len(found) < count:
        found += [event for event in engine.step(0.1) if isinstance(event, kind)]
    return found


def test_receipts_name_the_first_chunk_and_frame_that_obey_and_no_epoch_begins() -> None:
    made = engine()
    events(made, messages.FrameBatch)
    (accepted,) = made.handle(messages.SetControls("s", {"x": 1.0}, "a"))
    assert isinstance(accepted, messages.Accepted) and accepted.epoch == 0
    assert made.handle(messages.SetControls("s", {"x": 0.5})) == [], "nobody asks"
    found: list[messages.Event] = []
    while not any(isinstance(event, messages.ControlsApplied) for event in found):
        found += made.step(0.1)
        made.handle(messages.Shown("s", sum(len(e.pictures) for e in found if isinstance(e, messages.FrameBatch))))
    (applied,) = (event for event in found if isinstance(event, messages.ControlsApplied))
    following = found[found.index(applied) + 1]
    assert isinstance(following, messages.FrameBatch)
    assert applied.requests == ("a",) and applied.chunk == following.chunk >= 1
    assert applied.first_frame == following.first and not any(isinstance(e, messages.Applied) for e in found)
    made.close()


def test_keys_stay_down_over_a_reset_and_its_first_chunk_obeys() -> None:
    made = engine()
    made.handle(messages.SetControls("s", {"x": 1.0}, "before"))
    events(made, messages.ControlsApplied)
    for request, values in (("held", {"pan": 0.5}), ("later", {"jump": 1.0})):
        made.handle(messages.SetControls("s", values, request))
    made.handle(messages.Reset("s", 3))
    (applied,) = events(made, messages.ControlsApplied)
    assert isinstance(applied, messages.ControlsApplied)
    assert (applied.requests, applied.chunk) == (("held", "later"), 0)
    assert made._pipeline.sampler.sessions[0].controls[0].tolist() == [[1, 0.5, 1]] * MODEL.spec.chunk_latents
    made.close()


def test_a_paused_session_remembers_a_bounded_number_of_requests() -> None:
    made = engine()
    made.handle(messages.SetPaused("s", True))
    for number in range(1000):
        made.handle(messages.SetControls("s", {"x": number / 1000}, str(number)))
    assert list(made._sessions["s"]._control_requests) == [str(number) for number in range(744, 1000)]
    made.close()


def test_a_steered_session_is_made_no_further_ahead_than_it_must() -> None:
    made = engine()
    made.handle(messages.SetControls("s", {"x": 1.0}))
    frames = 0
    while made.busy:
        frames += sum(len(event.pictures) for event in made.step(0.1) if isinstance(event, messages.FrameBatch))
    assert frames == 2 * MODEL.spec.chunk_frames, "the chunk on show, and one more"
    made.close()


@pytest.mark.parametrize("values", [{"y": 1.0}, {"x": 1.5}, {"x": float("nan")}, {"x": 1.0, "jump": 0.5}])
def test_what_the_model_cannot_do_is_refused_whole(values: dict[str, float]) -> None:
    made = engine()
    (refused,) = made.handle(messages.SetControls("s", values, "a"))
    assert isinstance(refused, messages.Refused) and refused.field in ("control", *values)
    assert not made._pipeline.sampler.sessions[0].held.held
    made.close()


def test_a_model_without_controls_refuses_each_by_name() -> None:
    ring = Ring(small_model(1), CPU)
    ring.open(0, small_model(1).text.encode(WHITE), epoch=0, steps=4, kv_context="clean")
    with pytest.raises(RequestError) as refusal:
        ring.set_controls(0, {"x": 1.0})
    assert refusal.value.code == "control" and "has none" in str(refusal.value)
