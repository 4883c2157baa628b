"""Tensors in files of their own: what a model takes instead of a prompt or a seed, and what comes out of it.

Reading: a contract per kind is compared with a file's header first, so nothing is allocated for a file that is refused,
and every refusal says what was expected and what is there. Writing: part by part; what is at the target is whole, or is
what was there before. safetensors only; never a pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamdiff.atomic_write import check_parent, temporary_sibling
from streamdiff.errors import ConfigError, StreamdiffError
from streamdiff.models.checkpoint.safetensors_header import ITEM_BYTES, LENGTH_BYTES, Entry, Header, parse_header

FLOATS = ("F32", "BF16", "F16", "F64")
MAX_BYTES = 8 * 2**30
"""Size limit of a file whose number of chunks is open."""
MAX_VIDEO_BYTES = 64 * 2**30
"""Size limit of a file of frames, which are much larger than their latents."""
SUFFIX = ".safetensors"
NORMALISED = {"normalised": "model"}
"""What the header of a file with latents says of them: they are normalised as the model has them."""
RAW = {"normalised": "no"}
"""They are as the autoencoder's network gives them."""
MOTION = "motion"
"""Where that header says how video that was encoded moves: for each latent frame the largest root mean square
difference, over pixels in [-1, 1], of one of its frames from the frame before."""
_MOST_PARTS = 10**12  # the header has room for this count
_ALIGN_BYTES = 8
_HEADER_BYTES = 2**20  # room for a header where a limit is computed from shapes


@dataclass(frozen=True)
class FreeDim:
    """A dimension that a file may choose, `low` to `high` (None: without end); the same everywhere in one file."""

    name: str
    low: int = 1
    high: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def range(self) -> str:
        """As a remark in a message."""
        return f"at least {self.low:,}" if self.high is None else f"{self.low:,} to {self.high:,}"


Shape = tuple[int | FreeDim, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a contract: any of `shapes`, any of `dtypes` (safetensors' names)."""

    name: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = FLOATS
    required: bool = True

    def describe(self, bound: dict[str, int] | None = None) -> str:
        """The shapes in words, free dimensions that are in `bound` as numbers."""
        known = bound or {}
        frees = {
            size for shape in self.shapes for size in shape if isinstance(size, FreeDim) and size.name not in known
        }
        listed = " or ".join(f"[{', '.join(_size(size, known) for size in shape)}]" for shape in self.shapes)
        ranges: dict[str, list[str]] = {}
        for free in sorted(frees, key=lambda free: free.name):
            ranges.setdefault(free.range, []).append(free.name)
        remarks = "; ".join(f"{', '.join(names)} {each}" for each, names in ranges.items())
        return f"{listed} ({remarks})" if remarks else listed


@dataclass(frozen=True)
class FileSpec:
    """The tensors of one file: the required ones must all be there (companions), and no others. `what` names it."""

    what: str
    tensors: tuple[TensorSpec, ...]
    max_bytes: int = MAX_BYTES

    def describe(self) -> str:
        """The tensors in words."""
        return ", ".join(f"{wanted.name} {wanted.describe()}" for wanted in self.tensors)


def prompt_embeds_contract(text_shape: tuple[int, int]) -> FileSpec:
    """`prompt_embeds` `[L, D]` or `[1, L, D]`, with (most L, D) in `text_shape`: a prompt's embeddings, unpadded or
    padded with zeros."""
    length = FreeDim("L", 1, text_shape[0])
    wanted = TensorSpec("prompt_embeds", ((length, text_shape[1]), (1, length, text_shape[1])))
    return FileSpec("prompt embeddings", (wanted,), prod(text_shape) * ITEM_BYTES["F64"] + _HEADER_BYTES)


def noise_contract(chunk_shape: Shape, *, steps: int, chunks: int = 1, max_bytes: int = MAX_BYTES) -> FileSpec:
    """`initial` `[chunks, C, f, h, w]`, what the first step of each chunk receives, and its companion `renoise`
    `[chunks, steps-1, C, f, h, w]`, the noise of each later step; without later steps `renoise` may be left out.
    `chunk_shape` is `[C, f, h, w]`; the file must hold at least `chunks` chunks."""
    count = FreeDim("chunks", chunks)
    initial = TensorSpec("initial", ((count, *chunk_shape),))
    renoise = TensorSpec("renoise", ((count, steps - 1, *chunk_shape),), required=steps > 1)
    return FileSpec("noise", (initial, renoise), max_bytes)


def latents_contract(
    chunk_shape: Shape, *, chunks: int = 1, whole: bool = False, max_bytes: int = MAX_BYTES
) -> FileSpec:
    """`latents` `[chunks, C, f, h, w]`, clean and normalised as the model has them; `chunk_shape` is `[C, f, h, w]`,
    and the file must hold at least `chunks` chunks. With `whole` they may also be a clip `[C, F, h, w]`."""
    shapes: tuple[Shape, ...] = ((FreeDim("chunks", chunks), *chunk_shape),)
    if whole:
        shapes = ((chunk_shape[0], FreeDim("F"), *chunk_shape[2:]), *shapes)
    return FileSpec("clean latents", (TensorSpec("latents", shapes),), max_bytes)


def video_contract(max_bytes: int = MAX_VIDEO_BYTES) -> FileSpec:
    """`video` `[3, F, H, W]`: red, green and blue of F frames, from -1 to 1, which is not checked here."""
    return FileSpec("frames", (TensorSpec("video", ((3, FreeDim("F"), FreeDim("H"), FreeDim("W")),)),), max_bytes)


def check(contract: FileSpec, header: Header) -> dict[str, int]:
    """Compare a file's header with the contract; returns the free dimensions as the file has them.

    Raises:
        ConfigError: too large a file, missing or unknown tensors, or one of another rank, shape or dtype.
    """
    place = f"{header.path}: {contract.what}"
    if header.file_bytes > contract.max_bytes:
        raise ConfigError(f"{place}: expected at most {contract.max_bytes:,} bytes, got {header.file_bytes:,}")
    known = {wanted.name for wanted in contract.tensors}
    missing = [wanted for wanted in contract.tensors if wanted.required and wanted.name not in header.entries]
    unknown = sorted(set(header.entries) - known)
    if missing or unknown:
        faults = [f"{wanted.name} is missing" for wanted in missing] + [f"{name} is unknown" for name in unknown[:3]]
        held = ", ".join(sorted(header.entries)[:6]) or "nothing"
        raise ConfigError(
            f"{place}: {', '.join(faults)}; expected {contract.describe()}, got {held} ({len(header.entries)} in all)"
        )
    bound: dict[str, int] = {}
    for wanted in contract.tensors:
        if (entry := header.entries.get(wanted.name)) is not None:
            _check_tensor(place, wanted, entry, bound)
    return bound


def read(path: Path, contract: FileSpec) -> dict[str, Tensor]:
    """The tensors of a file, float32 on the CPU, after `check`.

    Raises:
        ConfigError: what `check` and `parse_header` refuse, and values that are not finite.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist; expected {contract.what}, a safetensors file: {contract.describe()}")
    header = parse_header(path, contract.max_bytes)
    check(contract, header)
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in header.entries:
                # A copy: the file's own pages would change, or vanish, with the file.
                found[name] = file.get_tensor(name).to(torch.float32, copy=True)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    for name, tensor in found.items():
        if fault := not_finite(tensor):
            raise ConfigError(f"{path}: {contract.what}: {name}: expected finite values (in float32), got {fault}")
    return found


def read_prompt_embeds(path: Path, text_shape: tuple[int, int]) -> Tensor:
    """A prompt's embeddings `[T, D]` of `text_shape`, float32; rows beyond those of the file are zero.

    Raises:
        ConfigError: see `read` and `prompt_embeds_contract`.
    """
    rows = read_rows(path, text_shape)
    return torch.cat([rows, rows.new_zeros(text_shape[0] - len(rows), text_shape[1])])


def read_rows(path: Path, text_shape: tuple[int, int]) -> Tensor:
    """A prompt's embeddings `[L, D]`, float32, as the file has them; `text_shape` is (most L, D).

    Raises:
        ConfigError: see `read` and `prompt_embeds_contract`.
    """
    return read(path, prompt_embeds_contract(text_shape))["prompt_embeds"].flatten(0, -2)


@dataclass(frozen=True)
class Noise:
    """Noise from a file instead of a seed: `initial` `[chunks, C, f, h, w]`, `renoise` `[chunks, steps-1, ...]`."""

    initial: Tensor
    renoise: Tensor


def read_noise(path: Path, chunk_shape: tuple[int, int, int, int], *, steps: int, chunks: int = 1) -> Noise:
    """Noise for at least `chunks` chunks of `chunk_shape` in `steps` denoise steps, float32.

    Raises:
        ConfigError: see `read` and `noise_contract`.
    """
    found = read(path, noise_contract(chunk_shape, steps=steps, chunks=chunks))
    initial = found["initial"]
    return Noise(initial, found.get("renoise", initial.new_zeros(len(initial), 0, *chunk_shape)))


def read_latents(path: Path, chunk_shape: Shape, *, chunks: int = 1, whole: bool = False) -> Tensor:
    """Latents `[chunks, C, f, h, w]`, with `whole` also `[C, F, h, w]`, float32; `chunk_shape` may have `FreeDim`
    sizes.

    Raises:
        ConfigError: see `read` and `latents_contract`.
    """
    return read(path, latents_contract(chunk_shape, chunks=chunks, whole=whole))["latents"]


def read_video(path: Path) -> Tensor:
    """Frames `[3, F, H, W]`, float32.

    Raises:
        ConfigError: see `read` and `video_contract`.
    """
    return read(path, video_contract())["video"]


def not_finite(tensor: Tensor) -> str:
    """What is not finite in `tensor`, in words; empty where all is."""
    for number, part in enumerate(tensor):  # part by part: the mask of all of it would be a quarter as large again
        finite = part.isfinite()
        if not bool(finite.all()):
            place: list[int] = [number, *(~finite).nonzero()[0].tolist()]
            count = sum(int((~each.isfinite()).sum()) for each in tensor)
            return f"{float(tensor[tuple(place)])} at {place} ({count:,} of {tensor.numel():,} are not finite)"
    return ""


def _check_tensor(place: str, wanted: TensorSpec, entry: Entry, bound: dict[str, int]) -> None:
    """Mutates: bound, with the free dimensions of this tensor."""
    if entry.dtype not in wanted.dtypes:
        raise ConfigError(f"{place}: {wanted.name}: expected dtype {' or '.join(wanted.dtypes)}, got {entry.dtype}")
    for shape in wanted.shapes:
        if (found := _match(shape, entry.shape, bound)) is not None:
            bound.update(found)
            return
    expected, ranks = wanted.describe(bound), {len(shape) for shape in wanted.shapes}
    rank = "" if len(entry.shape) in ranks else f", which has {len(entry.shape)} dimensions"
    raise ConfigError(f"{place}: {wanted.name}: expected shape {expected}, got {list(entry.shape)}{rank}")


def _match(shape: Shape, actual: tuple[int, ...], bound: dict[str, int]) -> dict[str, int] | None:
    """The free dimensions if `actual` fits `shape`, those in `bound` being given; None if it does not."""
    if len(shape) != len(actual):
        return None
    found = dict(bound)
    for want, size in zip(shape, actual, strict=True):
        if isinstance(want, FreeDim):
            if size < want.low or (want.high is not None and size > want.high):
                return None
            want = found.setdefault(want.name, size)
        if want != size:
            return None
    return found


def _size(size: int | FreeDim, bound: dict[str, int]) -> str:
    return f"{size.name}={bound[size.name]}" if isinstance(size, FreeDim) and size.name in bound else str(size)


# ---- writing --------------------------------------------------------------------------------------------------------


def check_target(path: Path) -> None:
    """Find out early whether a tensor file could be written at `path`.

    Raises:
        ConfigError: another ending, a folder, or a parent folder that is not there or cannot be written to.
    """
    if path.suffix != SUFFIX or path.is_dir():
        what = "but this is a folder" if path.is_dir() else f"but this ends in {path.suffix!r}"
        raise ConfigError(f"{path}: expected a file's name that ends in {SUFFIX}, {what}")
    check_parent(path)


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
        room = len(self._header_text(_MOST_PARTS))
        self._room = -(-(LENGTH_BYTES + room) // _ALIGN_BYTES) * _ALIGN_BYTES - LENGTH_BYTES
        self._file.seek(LENGTH_BYTES + self._room)

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
        self._file.write(self._room.to_bytes(LENGTH_BYTES, "little"))
        self._file.write(self._header_text(self.parts).ljust(self._room))

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
