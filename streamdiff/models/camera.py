"""Cameras of LingBot-World: held keys to poses, poses to how the camera of each latent frame stands to that of the one
before, and that to channels per latent pixel. After robbyant's published code (github.com/robbyant/lingbot-world).

Poses are camera-to-world, `[n, 4, 4]`, with OpenCV's axes (x right, y down, z forward). What travels with a chunk is a
*camera* per latent frame, `VALUES` numbers: rotation and translation to the latent frame before (the first three rows
of a pose), then fx, fy, cx, cy in pixels of the video. Poses are float64 numpy on the host; channels are made on the
device, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from streamdiff.session_state.fields import session_state

Poses = NDArray[np.float64]

VALUES = 16
"""Numbers of a camera."""
FRAMES = 4
"""Video frames of a latent frame, but the first of a stream, which has one."""
CHANNELS = 6 * 8 * 8
"""Channels of a latent pixel: translation and direction of each of its 8 x 8 pixels."""
INTRINSICS_SIZE = 832, 480
"""Width and height of the picture that intrinsics are given for."""
USUAL_INTRINSICS = 503.0, 503.0, 416.0, 240.0
"""fx, fy, cx, cy where none are given: 79 degrees across."""
UNIT = 0.2
"""Translation that counts as 1 while keys steer: `FRAMES` of one key. The authors divide by the largest of the whole
sequence, which a live stream does not know."""
STILL = 1e-6
"""Largest translation that counts as none: rounding, which would be blown up to a full step."""
_ORIGIN = 0.0, 0.0, 0.0
_MOVE, _TURN_DEG, _STEEPEST_DEG = 0.05, 2.0, 85.0  # of a video frame


@session_state("heading")
class Heading(NamedTuple):
    """Where a camera that keys steer looks and stands: degrees to the right (yaw) and up (pitch), and its position."""

    yaw: float = 0.0
    pitch: float = 0.0
    position: tuple[float, float, float] = _ORIGIN

    @property
    def pose(self) -> Poses:
        """Its pose `[4, 4]`."""
        yaw, pitch = np.radians((self.yaw, self.pitch))
        (a, b), (c, d) = (np.cos(yaw), np.sin(yaw)), (np.cos(pitch), np.sin(pitch))
        pose = np.eye(4)
        pose[:3, :3] = np.array([[a, 0, b], [0, 1, 0], [-b, 0, a]]) @ np.array([[1, 0, 0], [0, c, -d], [0, d, c]])
        pose[:3, 3] = self.position
        return pose

    def moved(self, forward: float, right: float, yaw: float, pitch: float) -> Heading:
        """It after a video frame under these keys, each -1 to 1. Moves are on the ground plane; a pitch beyond 85
        degrees is not made."""
        turned = self.pitch + _TURN_DEG * pitch
        now = self._replace(
            yaw=(self.yaw + _TURN_DEG * yaw) % 360, pitch=turned if abs(turned) <= _STEEPEST_DEG else self.pitch
        )
        ahead, aside = now.pose[:3, 2] * (1, 0, 1), now.pose[:3, 0] * (1, 0, 1)
        step = sum(
            _MOVE * amount * axis / (np.linalg.norm(axis) + 1e-6) for amount, axis in ((forward, ahead), (right, aside))
        )
        x, y, z = np.asarray(self.position) + step
        return now._replace(position=(float(x), float(y), float(z)))


def poses_of_keys(keys: NDArray[np.floating], start: Heading | None = None) -> tuple[Poses, Heading]:
    """Poses `[n + 1, 4, 4]`, from `start` (None: at the origin) on, and the last heading, of `keys` `[n, 4]` per video
    frame: forward, right, yaw to the right, pitch up, each -1 to 1."""
    headings = [start or Heading()]
    for row in keys:
        headings.append(headings[-1].moved(*map(float, row)))
    return np.stack([each.pose for each in headings]), headings[-1]


def latent_poses(poses: NDArray[np.floating], chunk: int) -> Poses:
    """One pose per latent frame `[F, 4, 4]` of poses per video frame, whole chunks of `chunk` latent frames: evenly
    spaced over the `FRAMES` n + 1 first poses, so between video frames where not all latent frames are used."""
    count = (len(poses) - 1) // FRAMES + 1
    places = np.linspace(0, FRAMES * (count - 1), count - count % chunk)
    before = np.minimum(places.astype(int), max(0, len(poses) - 2))
    after, share = np.minimum(before + 1, len(poses) - 1), (places - before)[:, None]
    own = np.asarray(poses, np.float64)
    result = np.tile(np.eye(4), (len(places), 1, 1))
    result[:, :3, 3] = own[before, :3, 3] + share * (own[after, :3, 3] - own[before, :3, 3])
    result[:, :3, :3] = _matrices(_slerp(_quaternions(own[before]), _quaternions(own[after]), share))
    return result


def relative_poses(poses: Poses, unit: float | None = None) -> Poses:
    """Each pose as seen from the one before, the first the identity; translations are divided by `unit`, None: by the
    largest, if that is more than STILL."""
    turns, places = poses[:, :3, :3], poses[:, :3, 3]
    back = turns[:-1].swapaxes(1, 2)
    result = np.tile(np.eye(4), (len(poses), 1, 1))
    result[1:, :3, :3] = back @ turns[1:]
    result[1:, :3, 3] = (back @ (places[1:] - places[:-1])[..., None])[..., 0]
    if unit is None:
        largest = float(np.linalg.norm(result[:, :3, 3], axis=1).max(initial=0.0))
        unit = largest if largest > STILL else 1.0
    result[:, :3, 3] /= unit
    return result


def cameras(relative: Poses, intrinsics: ArrayLike, width: int, height: int) -> Tensor:
    """Cameras `[F, VALUES]`, float32 on the CPU, of relative poses and `intrinsics` `[4]`, for pictures of this size in
    pixels."""
    across, down = width / INTRINSICS_SIZE[0], height / INTRINSICS_SIZE[1]
    scaled = np.asarray(intrinsics, np.float64) * (across, down, across, down)
    lens = np.broadcast_to(scaled, (len(relative), 4))
    return torch.from_numpy(np.concatenate([relative[:, :3].reshape(-1, 12), lens], 1)).float()


def still_cameras(frames: int, width: int, height: int) -> Tensor:
    """Cameras `[frames, VALUES]` that stand."""
    return cameras(np.tile(np.eye(4), (frames, 1, 1)), USUAL_INTRINSICS, width, height)


def held_cameras(vectors: ArrayLike, heading: Heading, begins: bool, width: int, height: int) -> tuple[Tensor, Heading]:
    """Cameras `[F, VALUES]` of a chunk whose latent frames have these `vectors` `[F, 4]` of held keys (forward, right,
    yaw, pitch), from where the camera is heading, and where it is then. Of a stream that `begins` the first latent
    frame is one of the video, where nothing has moved yet."""
    keys = np.repeat(np.asarray(vectors, np.float64)[int(begins) :], FRAMES, 0)
    poses, end = poses_of_keys(keys, Heading(heading.yaw, heading.pitch))  # without end: only differences matter
    relative = relative_poses(poses[::FRAMES], UNIT)
    return cameras(relative if begins else relative[1:], USUAL_INTRINSICS, width, height), end._replace(
        position=_ORIGIN
    )


def track_cameras(track: Mapping[str, Tensor], chunk: int, width: int, height: int) -> Tensor:
    """Cameras `[n, chunk, VALUES]` of whole chunks: of `poses` `[frames, 4, 4]` per video frame, divided by the largest
    step of all, or of `keyboard` `[frames, 8]` (W, A, S, D, I, J, K, L), by the rule of held keys; with `intrinsics`
    `[1 or frames, 4]`, of which the first count, or the usual ones."""
    if (keyboard := track.get("keyboard")) is not None:
        w, a, s, d, up, left, down, right = np.asarray(keyboard, np.float64).T
        poses, _ = poses_of_keys(np.stack([w - s, d - a, right - left, up - down], 1))
        relative = relative_poses(poses[: len(keyboard) : FRAMES], UNIT)
    else:
        relative = relative_poses(latent_poses(np.asarray(track["poses"]), chunk))
    lens = np.asarray(track["intrinsics"][0]) if "intrinsics" in track else USUAL_INTRINSICS
    count = len(relative) // chunk
    found: Tensor = cameras(relative[: count * chunk], lens, width, height).unflatten(0, (count, chunk))
    return found


def camera_channels(own: Tensor, height: int, width: int) -> Tensor:
    """Cameras `[F, VALUES]` to channels `[F, CHANNELS, h, w]` of `height` x `width` latent pixels, in float32: of each
    pixel the camera's translation, then the direction that it sees, turned with the camera (no cross product)."""
    own = own.float()
    place, lens = own[:, :12].view(-1, 3, 4), own[:, 12:, None, None]
    wide, high = (torch.where(lens[:, at] == 0, 1.0, lens[:, at]) for at in (0, 1))  # of a warm-up
    y, x = (torch.arange(8 * size, device=own.device, dtype=torch.float32) + 0.5 for size in (height, width))
    right, down = (x - lens[:, 2]) / wide, (y[:, None] - lens[:, 3]) / high
    right, down = (each.expand(-1, len(y), len(x)) for each in (right, down))
    seen = F.normalize(torch.stack([right, down, torch.ones_like(right)], 1), dim=1)
    turned = torch.einsum("fij,fjyx->fiyx", place[:, :, :3], seen)
    return F.pixel_unshuffle(torch.cat([place[:, :, 3, None, None].expand_as(turned), turned], 1), 8)


# ---- rotations between two poses -------------------------------------------------------------------------------------


def _quaternions(poses: Poses) -> Poses:
    """The rotations of poses as unit quaternions `[n, 4]`, w last, each of any sign."""
    (a, b, c), (d, e, f), (g, h, i) = poses[:, :3, :3].transpose(1, 2, 0)
    rows = (a - e - i, b + d, c + g, h - f), (b + d, e - a - i, f + h, c - g), (c + g, f + h, i - a - e, d - b)
    symmetric = np.array([*rows, (h - f, c - g, d - b, a + e + i)]).transpose(2, 0, 1)
    found: Poses = np.linalg.eigh(symmetric)[1][:, :, -1]
    return found


def _slerp(one: Poses, other: Poses, share: Poses) -> Poses:
    """Rotations on the shorter way from `one` to `other`, `share` `[n, 1]` of it."""
    cosine = (one * other).sum(1, keepdims=True)
    other, angle = np.where(cosine < 0, -other, other), np.arccos(np.minimum(np.abs(cosine), 1.0))
    near = angle < 1e-8
    sine = np.where(near, 1.0, np.sin(angle))
    first, second = (np.where(near, part, np.sin(part * angle) / sine) for part in (1 - share, share))
    found: Poses = first * one + second * other
    return found


def _matrices(quaternions: Poses) -> Poses:
    """Rotation matrices `[n, 3, 3]` of quaternions."""
    x, y, z, w = (quaternions / np.linalg.norm(quaternions, axis=1, keepdims=True)).T
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        (2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        (2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    )
    return np.array(rows).transpose(2, 0, 1)
