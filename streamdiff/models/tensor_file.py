"""Reads and writes safetensors files of inputs and results (embeddings, noise, latents, video), not of model weights.

Reading: a contract per kind is compared with a file's header first, so nothing is allocated for a file that is refused,
and every refusal says what was expected and what is there. Writing: part by part; what is at the target is whole, or is
what was there before. safetensors only; never a pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from streamdiff.atomic_write import check_free, check_parent, temporary_sibling
from streamdiff.errors import ConfigError, StreamdiffError
from streamdiff.models import sampling
from streamdiff.models.camera import track_cameras
from streamdiff.models.headers import (
    ITEM_BYTES,
    LENGTH_BYTES,
    RAW,
    FileSpec,
    FreeDim,
    Shape,
    actions_contract,
    check_camera,
    check_contract,
    condition_contract,
    features_contract,
    latents_contract,
    noise_contract,
    parse_header,
    prompt_embeds_contract,
    read_camera_array,
    track_contract,
)
from streamdiff.models.sampling import TIMESTEPS

SUFFIX = ".safetensors"
_MOST_PARTS = 10**12  # the header has room for this count
_ALIGN_BYTES = 8


def read(path: Path, contract: FileSpec) -> dict[str, Tensor]:
    """The tensors of a file, float32 on the CPU, after `check`.

    Raises:
        ConfigError: what `check` and `parse_header` refuse, and values that are not finite.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist; expected {contract.what}, a safetensors file: {contract}")
    header = parse_header(path, contract.max_bytes)
    check_contract(contract, header)
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
    return read(path, prompt_embeds_contract(text_shape))["prompt_embeds"].flatten(0, -2)


def read_noise(
    path: Path, chunk_shape: tuple[int, int, int, int], *, steps: int, chunks: int = 1
) -> tuple[Tensor, Tensor]:
    """Noise for at least `chunks` chunks of `chunk_shape` in `steps` denoise steps, float32, instead of a seed's:
    `initial` `[chunks, C, f, h, w]` and `renoise` `[chunks, steps-1, ...]`.

    Raises:
        ConfigError: see `read` and `noise_contract`; other numbers of chunks in the two.
    """
    found = read(path, noise_contract(chunk_shape, steps=steps, chunks=chunks))
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
    return read(path, latents_contract(chunk_shape, chunks=chunks))["latents"]


def read_condition(path: Path, chunk_shape: Shape, masks: int) -> Tensor:
    """What a picture makes of a stream `[masks + C, n, h, w]`, float32: a mask (without one in the file: 1 on the first
    latent frame), then latents. What is shorter continues with its last latent frame.

    Raises:
        ConfigError: see `read` and `condition_contract`.
    """
    found = read(path, condition_contract(chunk_shape, masks))
    return sampling.condition(found["latents"], masks, found.get("mask"))


def read_features(path: Path, width: int) -> Tensor:
    """A picture's features `[T, width]`, float32. ConfigError: see `read` and `features_contract`."""
    return read(path, features_contract(width))["clip_features"].flatten(0, -2)


def read_actions(path: Path, frames: int, keyboard: int, mouse: int) -> Tensor:
    """Actions `[n, keyboard + mouse]` for each of at least so many `frames` of the video, float32.

    Raises:
        ConfigError: see `read` and `actions_contract`; a mouse that has not as many rows as the keyboard.
    """
    found = read(path, actions_contract(frames, keyboard, mouse))
    for name, tensor in found.items():
        _check_count(path, name, tensor, "keyboard", found["keyboard"], "frames")
    return torch.cat([found[name] for name in ("keyboard", "mouse") if name in found], 1)


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
        ConfigError: see `read` and `track_contract`; poses that are no rotations, or a focal length of 0 or less.
    """
    if path.suffix == ".npy" and path.exists():
        files = {"poses": path, "intrinsics": path.with_name("intrinsics.npy")}
        there = {name: file for name, file in files.items() if name == "poses" or file.exists()}
        return {name: torch.from_numpy(_read_array(name, file)) for name, file in there.items()}
    found = read(path, track_contract(not path.exists() or "keyboard" not in parse_header(path).entries))
    for name, tensor in found.items():
        check_camera(name, tensor.numpy(), str(path))
    return found


def _read_array(name: str, path: Path) -> NDArray[np.floating]:
    try:
        return read_camera_array(name, path.read_bytes(), str(path))
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
    return RAW.items() <= parse_header(path).metadata.items()


class TensorWriter:
    """Takes the parts of one tensor as they come, without knowing how many; see `writing`.

    The tensor is `[parts, *part_shape]`, float32.
    """

    def __init__(self, file: BinaryIO, name: str, part_shape: tuple[int, ...], metadata: Mapping[str, str]) -> None:
        self.name, self.part_shape, self.parts = name, part_shape, 0
        self._file, self._metadata = file, dict(metadata)
        # The header comes first and holds the count, which is known last: its room is kept, and filled with spaces.
        longest = len(self._header_text(_MOST_PARTS))
        self._header_length = -(-(LENGTH_BYTES + longest) // _ALIGN_BYTES) * _ALIGN_BYTES - LENGTH_BYTES
        self._file.seek(LENGTH_BYTES + self._header_length)

    def add(self, part: Tensor) -> None:
        """Append one part, `part_shape`, of any float dtype and device.

        Raises:
            ValueError: another shape.
            StreamdiffError: values that are not finite, in float32.
        """
        where = f"{self.name}[{self.parts}]"
        if tuple(part.shape) != self.part_shape:
            raise ValueError(f"{where}: expected shape {list(self.part_shape)}, got {list(part.shape)}")
        numbers = part.detach().to("cpu", torch.float32).contiguous()
        if fault := not_finite(numbers):
            raise StreamdiffError(f"{where}: expected finite values, got {fault}; nothing is written")
        self._file.write(numbers.numpy().data)
        self.parts += 1

    def finish(self) -> None:
        """Write what comes first.

        Raises:
            ValueError: no part has come.
        """
        if not self.parts:
            raise ValueError(f"{self.name}: no part was made, so there is nothing to write")
        self._file.seek(0)
        self._file.write(self._header_length.to_bytes(LENGTH_BYTES, "little"))
        self._file.write(self._header_text(self.parts).ljust(self._header_length))

    def _header_text(self, parts: int) -> bytes:
        shape = [parts, *self.part_shape]
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, prod(shape) * ITEM_BYTES["F32"]]}
        return json.dumps({"__metadata__": self._metadata, self.name: entry}).encode()


@contextmanager
def writing(
    path: Path, name: str, part_shape: tuple[int, ...], metadata: Mapping[str, str] | None = None
) -> Iterator[TensorWriter]:
    """A writer of the tensor `name`. At the end of the `with` the file is moved into place; nothing is left when it
    ends by an error.

    Args:
        metadata: texts for the file's header, such as the model's name.

    Raises:
        ConfigError: as `check_target`.
        ValueError: no part has come, and nothing else went wrong.
    """
    check_target(path)
    with temporary_sibling(path) as temporary:
        with temporary.open("xb") as file:
            writer = TensorWriter(file, name, part_shape, metadata or {})
            yield writer
            writer.finish()
        os.replace(temporary, path)


def write_tensor(path: Path, name: str, tensor: Tensor, metadata: Mapping[str, str] | None = None) -> None:
    """Write a tensor of one axis or more at once, as float32; see `writing`.

    Raises:
        ConfigError, ValueError, StreamdiffError: see `writing` and `TensorWriter`; nothing is written then.
    """
    with writing(path, name, tuple(tensor.shape[1:]), metadata) as writer:
        for part in tensor:
            writer.add(part)


_WHAT = "first steps"


def first_steps_contract(frames: int, *, steps: int, chunks: int, with_video: bool) -> FileSpec:
    """`timesteps` `[chunks]`, `[chunks, f]` (both of the first step) or `[chunks, steps, f]`; `sigmas`, of the same
    shape, may be left out; `noise_level` `[chunks]` or `[chunks, f]` is there if chunks start from a video, and only
    then. `frames` latent frames of a chunk; the file must hold at least `chunks` chunks."""
    count = FreeDim("chunks", chunks)
    shapes = ((count,), (count, frames), (count, steps, frames))
    tensors: dict[str, tuple[Shape, ...]] = {"timesteps": shapes, "sigmas": shapes}
    if with_video:
        tensors["noise_level"] = (count,), (count, frames)
    return FileSpec(_WHAT if with_video else f"{_WHAT}, without --video-latents", tensors, ("sigmas",))


def read_first_steps(path: Path, frames: int, *, steps: int, chunks: int, with_video: bool) -> dict[str, Tensor]:
    """What the file at `path` says, for at least `chunks` chunks of `frames` latent frames (F), by name, float32:
    `timesteps` `[n, steps, F]`, 0 to 1000; if it has them `sigmas` of the same shape, 0 to 1; and, `with_video` from
    which chunks start, `noise_level` `[n, 1, F]`, 0 to 1. `steps` is the number of steps of the chunk that has most.

    Raises:
        ConfigError: see `tensor_file.read` and `first_steps_contract`; a value out of range; sigmas of another shape
            than the timesteps.
    """
    found = read(path, first_steps_contract(frames, steps=steps, chunks=chunks, with_video=with_video))
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
