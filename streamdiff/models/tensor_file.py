"""Reads and writes safetensors files of inputs and results (embeddings, noise, latents, video), not of model weights.

Reading: a contract per kind is compared with a file's header first, so nothing is allocated for a file that is refused,
and every refusal says what was expected and what is there. Writing: part by part; what is at the target is whole, or is
what was there before. safetensors only; never a pickle.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from streamdiff.atomic_write import check_free, check_parent, temporary_sibling
from streamdiff.errors import ConfigError, StreamdiffError
from streamdiff.models import headers, sampling
from streamdiff.models.camera import track_cameras
from streamdiff.models.headers import FileSpec, FreeDim, Shape
from streamdiff.models.sampling import TIMESTEPS

SUFFIX = ".safetensors"
Shapes = dict[str, tuple[Shape, ...]]


def read(path: Path, contract: FileSpec) -> dict[str, Tensor]:
    """The tensors of a file, float32 on the CPU, after `check`.

    Raises:
        ConfigError: what `check` and `parse_header` refuse, and values that are not finite.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist; expected {contract.what}, a safetensors file: {contract}")
    header = headers.parse_header(path, contract.max_bytes)
    headers.check_contract(contract, header)
    try:
        # A copy: the file's own pages would change, or vanish, with the file.
        found = {name: tensor.to(torch.float32, copy=True) for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    for name, tensor in found.items():
        if fault := not_finite(tensor):
            raise ConfigError(f"{path}: {contract.what}: {name}: expected finite values (in float32), got {fault}")
    return found


def read_rows(path: Path, text_shape: tuple[int, int]) -> Tensor:
    """A prompt's embeddings `[L, D]`, float32, as the file has them; `text_shape` is (most L, D).

    Raises:
        ConfigError: see `read` and `prompt_embeds_contract`.
    """
    return read(path, headers.prompt_embeds_contract(text_shape))["prompt_embeds"].flatten(0, -2)


def read_noise(
    path: Path, chunk_shape: tuple[int, int, int, int], *, steps: int, chunks: int = 1
) -> tuple[Tensor, Tensor]:
    """Noise for at least `chunks` chunks of `chunk_shape` in `steps` denoise steps, float32, instead of a seed's:
    `initial` `[chunks, C, f, h, w]`, what the first step of each chunk receives, and `renoise`
    `[chunks, steps-1, ...]`, the noise of each later step, which a file may leave out where there are none.

    Raises:
        ConfigError: see `read`; other numbers of chunks in the two.
    """
    count = FreeDim("chunks", chunks)
    shapes: Shapes = {"initial": ((count, *chunk_shape),), "renoise": ((count, steps - 1, *chunk_shape),)}
    found = read(path, FileSpec("noise", shapes, () if steps > 1 else ("renoise",)))
    initial = found["initial"]
    renoise = found.get("renoise", initial.new_zeros(len(initial), 0, *chunk_shape))
    _check_count(path, "renoise", renoise, "initial", initial)
    return initial, renoise


def _check_count(path: Path, name: str, tensor: Tensor, other: str, of: Tensor, what: str = "chunks") -> None:
    """Raises ConfigError unless both are for as many chunks, or frames."""
    if len(tensor) != len(of):
        raise ConfigError(f"{path}: {name} is for {len(tensor)} {what}, and {other} for {len(of)}")


def read_latents(path: Path, chunk_shape: Shape, *, chunks: int = 1) -> Tensor:
    """Latents `[chunks, C, f, h, w]` or `[C, F, h, w]`, float32; `chunk_shape` may have `FreeDim` sizes.

    Raises:
        ConfigError: see `read` and `latents_contract`.
    """
    return read(path, headers.latents_contract(chunk_shape, chunks=chunks))["latents"]


def read_condition(path: Path, chunk_shape: Shape, masks: int) -> Tensor:
    """What a picture makes of a stream `[masks + C, n, h, w]`, float32: `mask` `[masks, F, h, w]`, 1 where latents are
    to be kept (without one in the file: 1 on the first latent frame), then `latents` `[C, F, h, w]`, the picture's and
    of what comes after it. What is shorter continues with its last latent frame.

    Raises:
        ConfigError: see `read`.
    """
    frames = FreeDim("F"), *chunk_shape[2:]
    shapes: Shapes = {"latents": ((chunk_shape[0], *frames),), "mask": ((masks, *frames),)}
    found = read(path, FileSpec("a picture's condition", shapes, ("mask",)))
    return sampling.condition(found["latents"], masks, found.get("mask"))


def read_features(path: Path, width: int) -> Tensor:
    """A picture's `clip_features` `[T, width]`, float32, `[1, T, width]` in some files. ConfigError: see `read`."""
    rows = FreeDim("T"), width
    features = FileSpec("a picture's features", {"clip_features": (rows, (1, *rows))})
    return read(path, features)["clip_features"].flatten(0, -2)


def read_actions(path: Path, frames: int, keyboard: int, mouse: int) -> Tensor:
    """Actions `[n, keyboard + mouse]` for each of at least so many `frames` of the video, float32.

    Raises:
        ConfigError: see `read`; a mouse that has not as many rows as the keyboard.
    """
    columns = {"keyboard": keyboard, "mouse": mouse} if mouse else {"keyboard": keyboard}
    count = FreeDim("frames", frames)
    found = read(path, FileSpec("actions", {name: ((count, width),) for name, width in columns.items()}))
    for name, tensor in found.items():
        _check_count(path, name, tensor, "keyboard", found["keyboard"], "frames")
    return torch.cat([found[name] for name in columns], 1)


def read_cameras(path: Path, frames: int, size: tuple[int, int], *, chunks: int) -> Tensor:
    """Cameras `[n, frames, VALUES]` of at least `chunks` chunks of so many latent frames, for pictures of `size`
    (width, height), of a track: see `camera.track_cameras`.

    Raises:
        ConfigError: see `read_track`; it is for fewer.
    """
    found = track_cameras(read_track(path), frames, *size)
    if len(found) < chunks:
        raise ConfigError(
            f"{path}: is for {len(found)} chunks of {frames} latent frames, and --chunks is {chunks}; n latent frames "
            "are 4 n - 3 frames",
            field="controls",
        )
    return found


def read_track(path: Path) -> dict[str, Tensor]:
    """A camera's track, as `camera.track_cameras` takes it: of a safetensors file, or of NumPy's `poses.npy` and
    `intrinsics.npy` beside it.

    Raises:
        ConfigError: see `read`; poses that are no rotations, or a focal length of 0 or less.
    """
    if path.suffix == ".npy" and path.exists():
        files = {"poses": path, "intrinsics": path.with_name("intrinsics.npy")}
        there = {name: file for name, file in files.items() if name == "poses" or file.exists()}
        return {name: torch.from_numpy(_read_array(name, file)) for name, file in there.items()}
    count, posed = FreeDim("frames"), not path.exists() or "keyboard" not in headers.parse_header(path).entries
    shapes: Shapes = {"poses": ((count, 4, 4),)} if posed else {"keyboard": ((count, 8),)}
    usual = () if posed else ("intrinsics",)
    found = read(path, FileSpec("a camera's track", {**shapes, "intrinsics": ((count, 4),)}, usual))
    for name, tensor in found.items():
        headers.check_camera(name, tensor.numpy(), str(path))
    return found


def _read_array(name: str, path: Path) -> NDArray[np.floating]:
    try:
        return headers.read_camera_array(name, path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def not_finite(tensor: Tensor) -> str:
    """What is not finite in `tensor`, in words; empty where all is."""
    for number, part in enumerate(tensor):  # part by part: the mask of all of it would be a quarter as large again
        finite = part.isfinite()
        if not bool(finite.all()):
            place: list[int] = [number, *(~finite).nonzero()[0].tolist()]
            count = sum(int((~each.isfinite()).sum()) for each in tensor)
            return f"{float(tensor[tuple(place)])} at {place} ({count:,} of {tensor.numel():,} are not finite)"
    return ""


# ---- writing --------------------------------------------------------------------------------------------------------


def check_target(path: Path, overwrite: bool = True) -> None:
    """Find out early whether a tensor file could be written at `path`.

    Raises:
        ConfigError: another ending, a folder, a parent folder that is not there or cannot be written to, or without
            `overwrite` a file that exists.
    """
    if path.suffix != SUFFIX or path.is_dir():
        what = "but this is a folder" if path.is_dir() else f"but this ends in {path.suffix!r}"
        raise ConfigError(f"{path}: expected a file's name that ends in {SUFFIX}, {what}")
    check_parent(path)
    if not overwrite:
        check_free(path)


def is_raw(path: Path) -> bool:
    """Whether the header of the safetensors file at `path` says `RAW`; ConfigError where it is none."""
    return headers.RAW.items() <= headers.parse_header(path).metadata.items()


@contextmanager
def writing(
    path: Path, name: str, shape: tuple[int, ...], metadata: Mapping[str, str] | None = None
) -> Iterator[Callable[[Tensor], None]]:
    """What appends the next part, `shape[1:]`, of any float dtype and device, to the tensor `name` of this `shape`,
    float32. At the end of the `with`, when all parts have come, the file is moved into place; nothing is left when it
    ends by an error.

    Args:
        metadata: texts for the file's header, such as the model's name.

    Raises:
        ConfigError: as `check_target`.
        ValueError: a part of another shape, or not all parts have come.
        StreamdiffError: a part with values that are not finite, in float32.
    """
    check_target(path)
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, prod(shape) * headers.ITEM_BYTES["F32"]]}
    number = itertools.count()

    def add(part: Tensor) -> None:
        where = f"{name}[{next(number)}]"
        if tuple(part.shape) != shape[1:]:
            raise ValueError(f"{where}: expected shape {list(shape[1:])}, got {list(part.shape)}")
        numbers = part.detach().to("cpu", torch.float32).contiguous()
        if fault := not_finite(numbers):
            raise StreamdiffError(f"{where}: expected finite values, got {fault}; nothing is written")
        file.write(numbers.numpy().data)

    with temporary_sibling(path) as temporary:
        with temporary.open("xb") as file:
            file.write(headers.packed_header({"__metadata__": dict(metadata or {}), name: entry}))
            yield add
        if (made := next(number)) != shape[0]:
            raise ValueError(f"{name}: {made} of {shape[0]} parts were made")
        os.replace(temporary, path)


def write_tensor(path: Path, name: str, tensor: Tensor, metadata: Mapping[str, str] | None = None) -> None:
    """Write a tensor of one axis or more at once, as float32; raises as `writing`."""
    with writing(path, name, tuple(tensor.shape), metadata) as add:
        for part in tensor:
            add(part)


_WHAT = "first steps"


def read_first_steps(path: Path, frames: int, *, steps: int, chunks: int, with_video: bool) -> dict[str, Tensor]:
    """What the file at `path` says, for at least `chunks` chunks of `frames` latent frames (F), by name, float32:
    `timesteps` `[n, steps, F]`, 0 to 1000; if it has them `sigmas` of the same shape, 0 to 1; and, `with_video` from
    which chunks start, `noise_level` `[n, 1, F]`, 0 to 1. `steps` is the number of steps of the chunk that has most.
    The file may also have `[n]` or `[n, F]`, of the first step.

    Raises:
        ConfigError: see `read`; a value out of range; sigmas of another shape than the timesteps.
    """
    count = FreeDim("chunks", chunks)
    first: tuple[Shape, ...] = (count,), (count, frames)
    shapes: Shapes = dict.fromkeys(("timesteps", "sigmas"), (*first, (count, steps, frames)))
    if with_video:
        shapes["noise_level"] = first
    what = _WHAT if with_video else f"{_WHAT}, without --video-latents"
    found = read(path, FileSpec(what, shapes, ("sigmas",)))
    timesteps = found["timesteps"]
    if (sigmas := found.get("sigmas", timesteps)).shape != timesteps.shape:
        raise ConfigError(
            f"{path}: {_WHAT}: sigmas: expected shape {list(timesteps.shape)}, as timesteps have, got "
            f"{list(sigmas.shape)}"
        )
    if with_video:
        _check_count(path, "noise_level", found["noise_level"], "timesteps", timesteps)
    for name, values in found.items():
        _check_range(path, name, values, TIMESTEPS if name == "timesteps" else 1.0)
    return {name: _by_frame(values, frames) for name, values in found.items()}


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
