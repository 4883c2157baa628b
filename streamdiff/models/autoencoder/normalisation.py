"""Normalisation of latents, shapes, and grouping of frames into latent frames, for all autoencoders.

*Raw* latents are what an autoencoder's network gives and takes. *Normalised* ones, `(raw - mean) / std` per channel,
are what the transformer works on, what streams carry, and what files hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WAN_CHANNELS = 16
# Of Wan2.1's 16 channels. `Wan2.1_VAE.pth` does not hold them: every program that reads it has them written down.
WAN_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
WAN_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


class Normalisation:
    """Between raw and normalised latents `[B, C, F, h, w]`; computes in float32, gives float32.

    `mean` and `std` are `[1, C, 1, 1, 1]`, float32.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        self.mean, self.std = (
            torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1, 1) for values in (mean, std)
        )

    def apply(self, raw: Tensor) -> Tensor:
        return (raw.float() - self.mean) / self.std

    def undo(self, latents: Tensor) -> Tensor:
        return latents.float() * self.std + self.mean


def check_shape(what: str, piece: Tensor, channels: int, spatial: int = 1) -> tuple[int, int, int]:
    """Size (batch, height, width) of latents or frames `[B, channels, n, height, width]`; ValueError for another shape,
    or for sides that are no multiple of `spatial`."""
    if piece.ndim != 5 or piece.shape[1] != channels or 0 in piece.shape:
        raise ValueError(f"{what} are {list(piece.shape)}; expected [B, {channels}, n, height, width], n at least 1")
    batch, _, _, height, width = piece.shape
    if height % spatial or width % spatial:
        raise ValueError(f"{what} are {width} x {height}; both sides must be multiples of {spatial}")
    return batch, height, width


def split_whole(pending: Tensor | None, frames: Tensor, first: int, group: int) -> tuple[Tensor, Tensor | None]:
    """Whole groups of `pending` and `frames` `[B, 3, n, H, W]` together, and what is left over (None: nothing).

    `first` frames make the first group, `group` each later one. What is left over holds no memory of `frames`.
    """
    joined = frames if pending is None else torch.cat([pending, frames], 2)
    count = joined.shape[2]
    whole = first + (count - first) // group * group if count >= first else 0
    return joined[:, :, :whole], joined[:, :, whole:].clone() if whole < count else None
