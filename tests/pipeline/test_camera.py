"""A world steered by a camera: cameras go with a chunk to every stage, whoever shares a forward with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from streamdiff.core import MicroStep
from streamdiff.errors import RequestError
from streamdiff.models.camera import poses_of_keys
from streamdiff.models.model import Model
from streamdiff.models.spec import CAMERA_CONTROLS, CAMERA_ROWS
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.pipeline.ring import local_parts
from streamdiff.pipeline.runner.sampler import Finished
from streamdiff.pipeline.streaming_pipeline import StreamingPipeline
from tests.pipeline.playing import Order, local_ring, pictures_of, play, same
from tests.saving import save
from tests.small import CPU, RED, WHITE, small_model, with_camera


def camera_model() -> Model:
    """Chunks of 2 latent frames, of which a window has 5 and the sink 3; positions end at 8."""
    small = small_model(1, layers=4, heads=4, planes=0, window=5, sink=3)
    spec = replace(
        small.spec, controls=CAMERA_CONTROLS, action_rows=CAMERA_ROWS, rope="absolute", positions=8, width=32, height=32
    )
    return replace(small, spec=spec, denoiser=WanDenoiser(with_camera(small.denoiser.model)))


MODEL = camera_model()
STEERED = {
    0: Order(RED, 5, 4, "clean", switch="recache", keys={1: [{"forward": 1.0}], 3: [{"look_right": -0.5}]}),
    1: Order(RED, 5, 4, "clean", keys={2: [{"look_up": 1.0}, {"look_up": 0.0}], 5: [{"right": -1.0}]}),
    2: Order(WHITE, 6, 4, "staircase", keys={0: [{"forward": -1.0, "look_right": 1.0}]}),
}


def alone(order: Order, stages: int = 1, keeps: bool = True) -> list[torch.Tensor]:
    ring = local_ring(MODEL, CPU, stages)
    for stage in (ring.stage, *(worker.stage for worker in ring.local)):
        stage.keeps_cameras = keeps
    return play(ring, MODEL, {0: order}, 7)[0]


@pytest.mark.parametrize("stages", [1, 3])
def test_worlds_steered_apart_equal_each_alone_on_any_number_of_stages(stages: int) -> None:
    for max_rows in (1, 3):
        together = play(local_ring(MODEL, CPU, stages, max_rows), MODEL, STEERED, 7)
        for name, order in STEERED.items():
            for one, other in zip(together[name], alone(order), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
                assert max_rows > 1 or torch.equal(one, other)


def test_a_key_is_obeyed_from_its_chunk_on() -> None:
    still, walking = (
        alone(Order(RED, 5, 4, "clean", 99)),
        alone(Order(RED, 5, 4, "clean", 99, keys={3: [{"forward": 1}]})),
    )
    assert same(still[:3], walking[:3])
    assert all((one - other).norm() > 0.05 * one.norm() for one, other in zip(still[3:], walking[3:], strict=True))


@pytest.mark.parametrize("name", STEERED)
def test_what_cameras_do_is_the_same_once_per_chunk_and_step_by_step(name: int) -> None:
    assert same(alone(STEERED[name], 2), alone(STEERED[name], 2, keeps=False))
    ring = local_ring(MODEL, CPU)
    play(ring, MODEL, {0: replace(STEERED[name], keys={})}, 4)
    assert len(ring.stage.sessions[0].steered) <= 6, "only chunks in flight are kept"


def test_a_saved_world_looks_where_it_looked() -> None:
    before, after = (StreamingPipeline(MODEL, CPU, parts=local_parts(MODEL, CPU, 2)) for _ in range(2))
    count = 5 * MODEL.spec.chunk_frames
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
    chunk, frames = MODEL.spec.chunk_latents, MODEL.spec.chunk_frames
    track = poses_of_keys(np.tile([1.0, 0.0, 0.0, 0.0], (4 * (2 * chunk - 1), 1)))[0]
    made: dict[StreamingPipeline, list[Tensor]] = {}

    def opened(**given: Tensor) -> StreamingPipeline:
        pipeline = StreamingPipeline(MODEL, CPU, parts=local_parts(MODEL, CPU, 1))
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
