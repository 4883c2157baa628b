"""What steers a model is fixed when a chunk is admitted, and goes with it wherever it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from streamdiff.core import KV_CONTEXTS, MicroStep
from streamdiff.engine import messages
from streamdiff.engine.engine import Engine
from streamdiff.errors import RequestError
from streamdiff.models.camera import poses_of_keys
from streamdiff.models.model import Model
from streamdiff.models.spec import CAMERA_CONTROLS, CAMERA_ROWS
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.runner.controls import HeldControls
from streamdiff.pipeline.runner.sampler import Finished
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.distributed.context_process import STEERED
from tests.pipeline.playing import Order, local_ring, pictures_of, play, same
from tests.saving import save
from tests.small import CONTROLS, CPU, RED, WHITE, small_model, with_camera

MODEL = small_model(1, layers=4, heads=4, sink=2, controls=CONTROLS)


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


@pytest.fixture
def made() -> Iterator[Engine]:
    engine = Engine(StreamingPipeline(MODEL, CPU), 8 * MODEL.spec.chunk_frames)
    engine.handle(messages.Open("s", RED, 3))
    yield engine
    engine.close()


def events(engine: Engine, kind: type, count: int = 1) -> list[messages.Event]:
    found: list[messages.Event] = []
    while len(found) < count:
        found += [event for event in engine.step(0.1) if isinstance(event, kind)]
    return found


def test_receipts_name_the_first_chunk_and_frame_that_obey_and_no_epoch_begins(made: Engine) -> None:
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


def test_keys_stay_down_over_a_reset_and_its_first_chunk_obeys(made: Engine) -> None:
    made.handle(messages.SetControls("s", {"x": 1.0}, "before"))
    events(made, messages.ControlsApplied)
    for request, values in (("held", {"pan": 0.5}), ("later", {"jump": 1.0})):
        made.handle(messages.SetControls("s", values, request))
    made.handle(messages.Reset("s", 3))
    (applied,) = events(made, messages.ControlsApplied)
    assert isinstance(applied, messages.ControlsApplied)
    assert (applied.requests, applied.chunk) == (("held", "later"), 0)
    assert made._pipeline.sampler.sessions[0].controls[0].tolist() == [[1, 0.5, 1]] * MODEL.spec.chunk_latents


def test_a_paused_session_remembers_a_bounded_number_of_requests(made: Engine) -> None:
    made.handle(messages.SetPaused("s", True))
    for number in range(1000):
        made.handle(messages.SetControls("s", {"x": number / 1000}, str(number)))
    assert list(made._sessions["s"]._control_requests) == [str(number) for number in range(744, 1000)]


def test_a_steered_session_is_made_no_further_ahead_than_it_must(made: Engine) -> None:
    made.handle(messages.SetControls("s", {"x": 1.0}))
    frames = 0
    while made.busy:
        frames += sum(len(event.pictures) for event in made.step(0.1) if isinstance(event, messages.FrameBatch))
    assert frames == 2 * MODEL.spec.chunk_frames, "the chunk on show, and one more"


@pytest.mark.parametrize("values", [{"y": 1.0}, {"x": 1.5}, {"x": float("nan")}, {"x": 1.0, "jump": 0.5}])
def test_what_the_model_cannot_do_is_refused_whole(made: Engine, values: dict[str, float]) -> None:
    (refused,) = made.handle(messages.SetControls("s", values, "a"))
    assert isinstance(refused, messages.Refused) and refused.field in ("control", *values)
    assert not made._pipeline.sampler.sessions[0].held.held


# ---- a camera --------------------------------------------------------------------------------------------------------


def camera_model() -> Model:
    """Chunks of 2 latent frames, of which a window has 5 and the sink 3; positions end at 8."""
    small = small_model(1, layers=4, heads=4, planes=0, window=5, sink=3)
    spec = replace(
        small.spec, controls=CAMERA_CONTROLS, action_rows=CAMERA_ROWS, rope="absolute", positions=8, width=32, height=32
    )
    return replace(small, spec=spec, denoiser=WanDenoiser(with_camera(small.denoiser.model)))


WORLD = camera_model()
LOOKING = {
    0: Order(RED, 5, 4, "clean", switch="recache", keys={1: [{"forward": 1.0}], 3: [{"look_right": -0.5}]}),
    1: Order(RED, 5, 4, "clean", keys={2: [{"look_up": 1.0}, {"look_up": 0.0}], 5: [{"right": -1.0}]}),
    2: Order(WHITE, 6, 4, "staircase", keys={0: [{"forward": -1.0, "look_right": 1.0}]}),
}


def seen(order: Order, stages: int = 1, keeps: bool = True) -> list[torch.Tensor]:
    ring = local_ring(WORLD, CPU, stages)
    for stage in (ring.stage, *(worker.stage for worker in ring.local)):
        stage.keeps_cameras = keeps
    return play(ring, WORLD, {0: order}, 7)[0]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("model", "orders"), [(MODEL, STEERED), (WORLD, LOOKING)], ids=["controls", "camera"])
def test_sessions_steered_apart_equal_each_alone_on_any_number_of_stages(
    model: Model, orders: dict[int, Order], stages: int
) -> None:
    alone = {name: play(local_ring(model, CPU), model, {0: order}, 9)[0] for name, order in orders.items()}
    for max_rows in (1, len(orders)):
        together = play(local_ring(model, CPU, stages, max_rows), model, orders, 9)
        assert max_rows > 1 or all(same(together[name], alone[name]) for name in orders)
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_a_key_is_obeyed_from_its_chunk_on() -> None:
    still, walking = (
        seen(Order(RED, 5, 4, "clean", 99)),
        seen(Order(RED, 5, 4, "clean", 99, keys={3: [{"forward": 1}]})),
    )
    assert same(still[:3], walking[:3])
    assert all((one - other).norm() > 0.05 * one.norm() for one, other in zip(still[3:], walking[3:], strict=True))


@pytest.mark.parametrize("name", LOOKING)
def test_what_cameras_do_is_the_same_once_per_chunk_and_step_by_step(name: int) -> None:
    assert same(seen(LOOKING[name], 2), seen(LOOKING[name], 2, keeps=False))
    ring = local_ring(WORLD, CPU)
    play(ring, WORLD, {0: replace(LOOKING[name], keys={})}, 4)
    assert len(ring.stage.sessions[0].steered) <= 6, "only chunks in flight are kept"


def test_a_saved_world_looks_where_it_looked() -> None:
    before, after = (StreamingPipeline(WORLD, CPU, parts=local_parts(WORLD, CPU, 2)) for _ in range(2))
    count = 5 * WORLD.spec.chunk_frames
    before.open(0, before.text.encode(RED), seed=3, epoch=0, steps=4, kv_context="clean")
    before.set_controls(0, {"look_right": 1.0})
    pictures_of(before, count)
    before.set_controls(0, {"look_right": 0.0, "forward": 1.0})  # ahead is where it looks by now
    snapshot, _ = save(before, 0)
    after.resting.load(0, snapshot)
    assert after.sampler.sessions[0].heading.yaw > 0
    after.set_controls(0, {"forward": 1.0})
    assert all(map(np.array_equal, pictures_of(before, count), pictures_of(after, count)))
    before.close()
    after.close()


def test_given_poses_are_followed_as_far_as_they_go_and_then_keys_steer() -> None:
    """A way straight ahead over two chunks is that of the key; a saved session has the rest of it."""
    chunk, frames = WORLD.spec.chunk_latents, WORLD.spec.chunk_frames
    track = poses_of_keys(np.tile([1.0, 0.0, 0.0, 0.0], (4 * (2 * chunk - 1), 1)))[0]
    made: dict[StreamingPipeline, list[Tensor]] = {}

    def opened(**given: Tensor) -> StreamingPipeline:
        pipeline = StreamingPipeline(WORLD, CPU, parts=local_parts(WORLD, CPU, 1))
        latents, advance = made.setdefault(pipeline, []), pipeline.sampler.advance

        def noted(row: MicroStep, flow: Tensor) -> Finished | None:
            if (finished := advance(row, flow)) is not None:
                latents.append(finished.latents.clone())
            return finished

        pipeline.sampler.advance = noted  # type: ignore[method-assign]
        text = pipeline.text.encode(RED)
        pipeline.open(0, text, seed=3, epoch=0, steps=4, kv_context="clean", **given)
        return pipeline

    def more(pipeline: StreamingPipeline, chunks: int) -> None:
        end = len(made[pipeline]) + chunks
        while len(made[pipeline]) < end or pipeline.busy:
            pipeline.set_frame_credit(0, (end - len(made[pipeline])) * frames)
            pipeline.step(0.1)

    held = opened()
    held.set_controls(0, {"forward": 1.0})
    given = opened(controls=held.cameras_of({"poses": track}))
    given.set_controls(0, {"look_up": 1.0})
    given.set_controls(0, {"look_up": 0.0})  # a tap that nobody sees
    more(given, 1)
    again = opened()
    again.close_session(0)
    again.resting.load(0, save(given, 0)[0])
    more(held, 2)
    held.set_controls(0, {"forward": 0.0, "right": 1.0})
    for pipeline in (held, given, again):
        if pipeline is not held:
            more(pipeline, 1)
            pipeline.set_controls(0, {"right": 1.0})
        more(pipeline, 2)
    for rest in (made[given], made[given][:1] + made[again]):
        torch.testing.assert_close(rest, made[held], rtol=1e-5, atol=1e-5)
    with pytest.raises(RequestError) as error:
        held.cameras_of({"poses": track[:4]})
    assert error.value.field == "poses" and held.info.has_camera
    for pipeline in (held, given, again):
        pipeline.close()
