"""The file of `generate --first-steps`: timesteps and noise levels by chunk, or by latent frame, in place of the
schedule's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.tensor_contract import FileSpec, FreeDim, TensorSpec
from streamdiff.models.checkpoint.tensor_file import read
from streamdiff.models.sampling import TIMESTEPS

_WHAT = "first steps"


@dataclass(frozen=True)
class FirstSteps:
    """Contents of such a file, float32, F latent frames of a chunk: `timesteps` `[n, steps, F]`, 0 to 1000; `sigmas` of
    the same shape, 0 to 1, or None where the file has none; `noise_level` `[n, F]`, 0 to 1, or None as well."""

    timesteps: Tensor
    sigmas: Tensor | None
    noise_level: Tensor | None


def first_steps_contract(frames: int, *, steps: int, chunks: int, with_video: bool) -> FileSpec:
    """`timesteps` `[chunks]`, `[chunks, f]` (both of the first step) or `[chunks, steps, f]`; `sigmas`, of the same
    shape, may be left out; `noise_level` `[chunks]` or `[chunks, f]` is there if chunks start from a video, and only
    then. `frames` latent frames of a chunk; the file must hold at least `chunks` chunks."""
    count = FreeDim("chunks", chunks)
    shapes = ((count,), (count, frames), (count, steps, frames))
    tensors = [TensorSpec("timesteps", shapes), TensorSpec("sigmas", shapes, required=False)]
    if with_video:
        tensors.append(TensorSpec("noise_level", ((count,), (count, frames))))
    return FileSpec(_WHAT if with_video else f"{_WHAT}, without --video-latents", tuple(tensors))


def read_first_steps(path: Path, frames: int, *, steps: int, chunks: int, with_video: bool) -> FirstSteps:
    """Read the file at `path`, for at least `chunks` chunks of `frames` latent frames; `steps` is the number of steps
    of the chunk that has most, `with_video` whether chunks start from a video.

    Raises:
        ConfigError: see `tensor_file.read` and `first_steps_contract`; a value out of range; sigmas of another shape
            than the timesteps.
    """
    found = read(path, first_steps_contract(frames, steps=steps, chunks=chunks, with_video=with_video))
    timesteps, sigmas, level = found["timesteps"], found.get("sigmas"), found.get("noise_level")
    if sigmas is not None and sigmas.shape != timesteps.shape:
        raise ConfigError(
            f"{path}: {_WHAT}: sigmas: expected shape {list(timesteps.shape)}, as timesteps have, got "
            f"{list(sigmas.shape)}"
        )
    for name, values, high in (("timesteps", timesteps, TIMESTEPS), ("sigmas", sigmas, 1.0), ("noise_level", level, 1)):
        if values is not None:
            _check_range(path, name, values, high)
    return FirstSteps(
        _by_frame(timesteps, frames),
        None if sigmas is None else _by_frame(sigmas, frames),
        None if level is None else _by_frame(level, frames)[:, 0],
    )


def _by_frame(values: Tensor, frames: int) -> Tensor:
    """`[n]`, `[n, F]` or `[n, steps, F]` as `[n, steps, F]`."""
    if values.ndim == 1:
        values = values[:, None].expand(-1, frames)
    return values if values.ndim == 3 else values[:, None]


def _check_range(path: Path, name: str, values: Tensor, high: float) -> None:
    """Raises ConfigError for a value below 0 or above `high`."""
    outside = ((values < 0) | (values > high)).nonzero().tolist()
    if outside:
        place = outside[0]
        raise ConfigError(
            f"{path}: {_WHAT}: {name}: expected values from 0 to {high:g}, got {float(values[tuple(place)]):g} at "
            f"{place} ({len(outside):,} of {values.numel():,} are outside)"
        )
