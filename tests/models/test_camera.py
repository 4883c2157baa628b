"""Cameras of worlds: keys to poses, poses to cameras of latent frames, cameras to channels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from streamdiff.models import camera
from streamdiff.models.camera import Heading, Poses, poses_of_keys

FORWARD, RIGHT, YAW, PITCH = np.eye(4)


SOMEWHERE = np.array([3.17, 1.3, -2.1])


def turned(angles: NDArray[np.floating]) -> NDArray[np.float64]:
    """Rotations `[n, 3, 3]` by `angles` around a slanted axis, of a camera that is tilted."""
    skew = torch.tensor([[0, -0.6, 0.3], [0.6, 0, -0.742], [-0.3, 0.742, 0]], dtype=torch.float64)
    tilt = torch.linalg.matrix_exp(torch.tensor([[0, 0.4, 0.1], [-0.4, 0, -1.1], [-0.1, 1.1, 0]], dtype=torch.float64))
    length = float(torch.linalg.matrix_norm(skew)) / 2**0.5
    found: NDArray[np.float64] = torch.stack(
        [tilt @ torch.linalg.matrix_exp(skew / length * float(angle)) for angle in angles]
    ).numpy()
    return found


def wandering(count: int) -> Poses:
    """Poses of a camera that moves about, and turns evenly: more than once around in the longest."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, :3, :3] = turned(np.arange(count) * 0.3)
    poses[:, :3, 3] = np.random.default_rng(3).normal(0, 0.2, (count, 3)).cumsum(0) + SOMEWHERE
    return poses


def test_a_key_moves_along_the_ground_and_turns_stop_at_the_steepest_pitch() -> None:
    poses, heading = poses_of_keys(np.stack([FORWARD, YAW * 45, FORWARD, RIGHT]))
    assert poses[1][:3, 3] == pytest.approx([0, 0, 0.05], abs=1e-6)
    assert poses[3][:3, 3] == pytest.approx([0.05, 0, 0.05], abs=1e-6), "after 90 degrees to the right ahead is x"
    assert poses[4][:3, 3] == pytest.approx([0.05, 0, 0], abs=1e-6)
    assert heading.yaw == pytest.approx(90)
    steep, heading = poses_of_keys(np.stack([PITCH] * 60 + [FORWARD]))
    assert heading.pitch == 84
    assert steep[-1][:3, 3] == pytest.approx([0, 0, 0.05], abs=1e-5), "looking up it still walks"
    assert steep[-1][1, 2] == pytest.approx(-np.sin(np.radians(84))), "y points down"


@pytest.mark.parametrize(("frames", "chunk", "count", "last"), [(21, 3, 6, 20), (24, 4, 4, 20), (57, 3, 15, 56)])
def test_latent_poses_lie_evenly_between_video_frames(frames: int, chunk: int, count: int, last: int) -> None:
    poses = wandering(frames)
    places = np.linspace(0, last, count)
    found = camera.latent_poses(poses, chunk)
    assert found[:, :3, :3] == pytest.approx(turned(places * 0.3), abs=1e-12)
    for axis in range(3):
        assert found[:, axis, 3] == pytest.approx(np.interp(places, np.arange(frames), poses[:, axis, 3]), abs=1e-12)


def test_poses_are_seen_from_the_one_before_and_the_largest_step_is_one() -> None:
    poses = wandering(5)
    found = camera.relative_poses(poses)
    steps = np.linalg.inv(poses[:-1]) @ poses[1:]
    assert (found[0] == np.eye(4)).all()
    assert found[1:, :3, :3] == pytest.approx(steps[:, :3, :3], abs=1e-12)
    largest = np.linalg.norm(steps[:, :3, 3], axis=1).max()
    assert found[1:, :3, 3] == pytest.approx(steps[:, :3, 3] / largest, abs=1e-12)


def test_a_camera_that_only_turns_does_not_jump() -> None:
    poses = wandering(9)
    poses[:, :3, 3] = SOMEWHERE + np.random.default_rng(1).normal(0, 1e-8, (9, 3))
    assert np.abs(camera.relative_poses(camera.latent_poses(poses, 3))[:, :3, 3]).max() < 1e-6


def pixel(own: torch.Tensor, row: int, column: int) -> NDArray[np.float64]:
    """What a pixel's six channels are, by the equations as they stand in the published description."""
    place, (fx, fy, cx, cy) = own[:12].view(3, 4).double().numpy(), own[12:].double().numpy()
    seen = np.array([(column + 0.5 - cx) / fx, (row + 0.5 - cy) / fy, 1])
    return np.concatenate([place[:, 3], place[:, :3] @ (seen / np.linalg.norm(seen))])


def test_channels_hold_each_pixels_translation_and_direction() -> None:
    relative = camera.relative_poses(wandering(3))
    own = camera.cameras(relative, np.array([500.0, 400.0, 416.0, 240.0]), 48, 32)
    assert own[2, 12:].tolist() == pytest.approx([500 * 48 / 832, 400 * 32 / 480, 24, 16]), "the picture is smaller"
    channels = camera.camera_channels(own, 4, 6)
    assert channels.shape == (3, camera.CHANNELS, 4, 6)
    for frame, row, column in ((0, 0, 0), (1, 13, 29), (2, 31, 47)):
        found = channels[frame, :, row // 8, column // 8].view(6, 8, 8)[:, row % 8, column % 8]
        assert found.numpy() == pytest.approx(pixel(own[frame], row, column), abs=1e-6)


def test_held_keys_go_by_a_fixed_unit_from_chunk_to_chunk() -> None:
    """Chunk by chunk as over the whole; a latent frame of one key is a step of 1, and of the first nothing moves."""
    vectors = np.random.default_rng(2).integers(-1, 2, (9, 4)).astype(np.float64)
    vectors[1:3] = FORWARD
    poses, _ = poses_of_keys(np.repeat(vectors[1:], 4, 0))
    expected = camera.cameras(camera.relative_poses(poses[::4], 0.2), camera.USUAL_INTRINSICS, 832, 480)
    heading, found = Heading(), []
    for chunk in range(3):
        own, heading = camera.held_cameras(vectors[3 * chunk : 3 * chunk + 3], heading, chunk == 0, 832, 480)
        found.append(own)
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-6)
    assert torch.equal(found[0][0], camera.still_cameras(1, 832, 480)[0])
    assert found[0][1, [3, 7, 11]].tolist() == pytest.approx([0, 0, 1], abs=1e-4)


def test_a_track_of_keys_is_as_if_they_were_held() -> None:
    keys = torch.zeros(21, 8)
    keys[:, 0] = keys[9:, 7] = 1  # W, then L too
    found = camera.track_cameras({"keyboard": keys}, 3, 832, 480)
    vectors = np.stack([FORWARD] * 3 + [FORWARD + YAW] * 3)
    first, _ = camera.held_cameras(vectors[:3], Heading(), True, 832, 480)
    assert found.shape == (2, 3, camera.VALUES)
    torch.testing.assert_close(found[0, :, :12], first[:, :12])
