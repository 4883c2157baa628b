"""Headers of safetensors files, and contracts of input files (embeddings, noise, latents, video).

A header has names, dtypes, shapes and offsets, checked against the file's size; no tensor data is read. A contract says
which names, dtypes and shapes are expected; `tensor_file` reads the data after the check. Every refusal says what was
expected and what is there. Imports no torch: the planner and the web process use it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from streamdiff.errors import ConfigError

ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1},
}
"""Bytes of a number, by the names that safetensors gives to its kinds."""
LENGTH_BYTES = 8
"""Before the header stands its length: so many bytes, little-endian."""
_MAX_HEADER_BYTES = 100_000_000  # what safetensors itself allows
_MAX_DIMENSIONS = 16
_HOW = "write it with safetensors.torch.save_file"
DAMAGED = "download it again"


_Size = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""Bounded, as sizes are multiplied and printed."""


class TensorEntry(BaseModel, frozen=True):
    """One tensor: `dtype` by safetensors' name (`F32`, `BF16`), and where its bytes begin and end after the header."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], Field(max_length=_MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


_TEXTS: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


@dataclass(frozen=True)
class TensorHeader:
    """What the file at `path`, of `file_bytes` bytes in all, says of its tensors, by name."""

    path: Path
    file_bytes: int
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def parse_header(path: Path, max_bytes: int | None = None) -> TensorHeader:
    """The header of a safetensors file whose tensors fill the rest of the file without gap or overlap. Of a file with
    more than `max_bytes` bytes not even the header is read.

    Raises:
        ConfigError: it cannot be read, is another kind of file (a pickle is called one), is too large, or says what
            cannot be.
    """
    try:
        with path.open("rb") as file:
            return parse_file(file, path.stat().st_size, path, max_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def packed_header(tree: Mapping[str, Any]) -> bytes:
    """A safetensors file's beginning: the length of the header, and the header, to a multiple of 8 bytes."""
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def stored_values(folder: Path) -> int:
    """Numbers in the weight files (*.safetensors) of `folder`, from their headers alone; 0 without any.

    Raises:
        ConfigError: a file is damaged.
    """
    headers = map(parse_header, sorted(folder.glob("*.safetensors")))
    return sum(prod(entry.shape) for header in headers for entry in header.entries.values())


def parse_data(data: bytes | memoryview, name: str) -> TensorHeader:
    """The same of a file's content; errors call it `name`."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    refused = length > min(len(data) - LENGTH_BYTES, _MAX_HEADER_BYTES)  # then nothing of it is copied
    header = data[: LENGTH_BYTES + (0 if refused else length)]
    return parse_file(BytesIO(header), len(data), Path(name))


def parse_file(file: BinaryIO, file_bytes: int, path: Path, max_bytes: int | None = None) -> TensorHeader:
    """The same of an open file of `file_bytes` bytes, from where it stands; errors call it `path`."""
    start = file.read(LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or length > min(file_bytes - LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise _other_kind(path, start, file_bytes, length)
    if max_bytes is not None and file_bytes > max_bytes:
        raise ConfigError(f"{path}: expected at most {max_bytes:,} bytes, got {file_bytes:,}")
    text = file.read(length)
    try:
        tree = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a safetensors file: its header is not JSON: {error}; {_HOW}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: not a safetensors file: its header holds no names; {_HOW}")
    name = "__metadata__"
    try:
        texts = _TEXTS.validate_python(tree.pop(name, {}))
        entries = {}
        for name, value in tree.items():  # one by one, as the first fault is enough
            entries[name] = TensorEntry.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        wanted = "texts by name" if name == "__metadata__" else "dtype, shape and data_offsets (begin and end)"
        found = ": ".join([*map(str, problem["loc"][-1:]), problem["msg"]])
        raise ConfigError(f"{path}: {name[:80]}: expected {wanted}, but {found}") from None
    _check_layout(path, entries, file_bytes - LENGTH_BYTES - len(text))
    return TensorHeader(path, file_bytes, entries, texts)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name that comes twice could be read in two ways."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:60]!r} stands in it twice")
        found[name] = value
    return found


def _other_kind(path: Path, start: bytes, file_bytes: int, length: int) -> ConfigError:
    """Why it is not safetensors. Only asked when the length is wrong: a good one may begin with the same bytes."""
    if what := kind_of(start):
        return ConfigError(f"{path}: {what}")
    if start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        return ConfigError(
            f"{path}: this is a pickle (as torch.save writes it), and those are not read, because reading one can run "
            f"whatever is in it. Expected safetensors: {_HOW}"
        )
    if start.startswith(b"\x93NUMPY"):
        return ConfigError(f"{path}: this is a NumPy array file; expected safetensors: {_HOW}")
    return ConfigError(
        f"{path}: not a safetensors file, or cut off: it has {file_bytes:,} bytes, but would begin with a header of "
        f"{length:,}; {DAMAGED}, or {_HOW}"
    )


def kind_of(start: bytes) -> str:
    """What a file is, by its first bytes, and what to do; empty where it may hold tensors."""
    text = start.lstrip().lower()
    if not start.strip(b"\0"):
        return f"is empty, or only its place was kept and nothing was downloaded; {DAMAGED}"
    if start.startswith(b"version "):
        return "is a Git LFS pointer: the weights themselves were not downloaded; `git lfs pull` does it"
    if start.startswith(b"GGUF"):
        return "is a GGUF file; one that holds a transformer is read where its name ends in .gguf"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return f"is a web page, which came in place of the file; {DAMAGED}, by the link that downloads it"
    if start.isascii() and start.decode().replace("\n", " ").replace("\r", " ").replace("\t", " ").isprintable():
        return f"is a text, which begins with {start[:40].decode().strip()!r}; expected tensors"
    return ""


def _check_layout(path: Path, entries: dict[str, TensorEntry], data_bytes: int) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, own_end = entry.data_offsets
        if begin != end or own_end < begin:
            raise ConfigError(
                f"{path}: {name}: its bytes are {begin:,} to {own_end:,}, but those of the tensor before it end at "
                f"{end:,}"
            )
        needed = prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0)
        if entry.dtype in ITEM_BYTES and needed != own_end - begin:
            raise ConfigError(
                f"{path}: {name}: {entry.dtype} {list(entry.shape)} takes {needed:,} bytes, but the header declares "
                f"{own_end - begin:,}"
            )
        end = own_end
    if end != data_bytes:
        remedy = f"; it is cut off: {DAMAGED}" if data_bytes < end else ""
        raise ConfigError(f"{path}: the header declares {end:,} bytes of tensors, but {data_bytes:,} follow it{remedy}")


FLOATS = ("F32", "BF16", "F16", "F64")
"""Dtypes of a file's tensors, by safetensors' names."""
MAX_BYTES = 8 * 2**30
"""Size limit of a file whose number of chunks is open."""
MAX_VIDEO_BYTES = 64 * 2**30
"""Size limit of a file of frames, which are much larger than their latents."""
NORMALISED = {"normalised": "model"}
"""What the header of a file with latents says of them: they are normalised as the model has them."""
RAW = {"normalised": "no"}
"""They are as the autoencoder's network gives them."""
MOTION = "motion"
"""Where that header says how video that was encoded moves: for each latent frame the largest root mean square
difference, over pixels in [-1, 1], of one of its frames from the frame before."""
_HEADER_BYTES = 2**20  # room for a header where a limit is computed from shapes


@dataclass(frozen=True)
class FreeDim:
    """A dimension that a file may choose, `low` to `high` (None: without end)."""

    name: str
    low: int = 1
    high: int | None = None

    def __str__(self) -> str:
        if self.high is not None:
            return f"{self.name} ({self.low:,} to {self.high:,})"
        return self.name if self.low <= 1 else f"{self.name} (at least {self.low:,})"


Shape = tuple[int | FreeDim, ...]


@dataclass(frozen=True)
class FileSpec:
    """The tensors of one file by name, each with the shapes that it may have, in any of `FLOATS`: all but `optional`
    ones must be there (companions), and no others. `what` names it."""

    what: str
    tensors: dict[str, tuple[Shape, ...]]
    optional: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES

    def __str__(self) -> str:
        return ", ".join(f"{name} {self.shapes(name)}" for name in self.tensors)

    def shapes(self, name: str) -> str:
        """Shapes that the tensor `name` may have, for people."""
        return " or ".join(f"[{', '.join(map(str, shape))}]" for shape in self.tensors[name])


def prompt_embeds_contract(text_shape: tuple[int, ...]) -> FileSpec:
    """`prompt_embeds` `[L, D]` or `[1, L, D]`, with (most L, D) in `text_shape`: a prompt's embeddings, unpadded or
    padded with zeros."""
    rows = FreeDim("L", 1, text_shape[0]), text_shape[1]
    most = prod(text_shape) * ITEM_BYTES["F64"] + _HEADER_BYTES
    return FileSpec("prompt embeddings", {"prompt_embeds": (rows, (1, *rows))}, max_bytes=most)


def latents_contract(
    chunk_shape: Shape, *, chunks: int = 1, frames: int = 1, what: str = "clean latents", max_bytes: int = MAX_BYTES
) -> FileSpec:
    """`latents`, clean and normalised as the model has them, as a clip `[C, F, h, w]` of at least `frames` latent
    frames or as `[chunks, C, f, h, w]`, at least `chunks`; `chunk_shape` is `[C, f, h, w]`."""
    clip = chunk_shape[0], FreeDim("F", frames), *chunk_shape[2:]
    return FileSpec(what, {"latents": (clip, (FreeDim("chunks", chunks), *chunk_shape))}, max_bytes=max_bytes)


def image_latents_contract(chunk_shape: tuple[int, ...], *, chunks: int) -> FileSpec:
    """`latents` of the `chunks` chunks that a stream begins with, exactly: `[chunks, C, f, h, w]`, or as a clip
    `[C, chunks * f, h, w]`; `chunk_shape` is `[C, f, h, w]`."""
    channels, frames, *size = chunk_shape
    most = chunks * prod(chunk_shape) * ITEM_BYTES["F64"] + _HEADER_BYTES
    shapes = (chunks, *chunk_shape), (channels, chunks * frames, *size)
    return FileSpec("a picture's latents", {"latents": shapes}, max_bytes=most)


CAMERA_SHAPES: dict[str, tuple[int, ...]] = {"poses": (4, 4), "intrinsics": (4,)}
"""Of a row for each frame of the video, in files of NumPy's."""
_NO_ROTATION = 1e-3
"""Deviation from an orthogonal matrix from which on a pose is refused."""


def read_camera_array(name: str, data: bytes | memoryview, place: str) -> NDArray[np.floating]:
    """The numbers `[n, *CAMERA_SHAPES[name]]` of a file of NumPy's (.npy); nothing is allocated before its header has
    been compared with its length.

    Raises:
        ConfigError: another file, shape or kind; or as `check_camera`.
    """
    wanted, file = CAMERA_SHAPES[name], BytesIO(data)
    expected = f"{place}: expected NumPy's file (.npy) of floating-point numbers of shape {['n', *wanted]}"
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read(file)
    except (ValueError, EOFError, SyntaxError, TypeError) as error:
        raise ConfigError(f"{expected}, which cannot be read: {str(error)[:80]}") from None
    if shape[1:] != wanted or not shape[0] or kind.kind != "f":
        raise ConfigError(f"{expected}, got {kind} {list(shape)}")
    if len(data) - file.tell() != prod(shape) * kind.itemsize:
        raise ConfigError(f"{expected}, got {len(data):,} bytes for {kind} {list(shape)}")
    file.seek(0)
    array: NDArray[np.floating] = np.load(file, allow_pickle=False)
    check_camera(name, array, place)
    return array


def check_camera(name: str, array: NDArray[np.floating], place: str) -> None:
    """Raises ConfigError unless `intrinsics` have focal lengths above 0, and `poses` rotations; all of it finite."""
    if not np.isfinite(array).all():
        raise ConfigError(f"{place}: {name}: expected finite values")
    if name == "intrinsics" and not (array[:, :2] > 0).all():
        raise ConfigError(f"{place}: intrinsics: expected focal lengths above 0, got {array[:, :2].min():g}")
    if name == "poses":
        turns = np.asarray(array[:, :3, :3], np.float64)
        off = np.abs(turns @ turns.swapaxes(1, 2) - np.eye(3)).max((1, 2)) + (np.linalg.det(turns) < 0)
        if off.max() > _NO_ROTATION:
            found = [list(row) for row in turns[off.argmax()].astype(object)]
            raise ConfigError(f"{place}: poses: expected rotations, got {found}")


VIDEO_FILE = FileSpec("frames", {"video": ((3, FreeDim("F"), FreeDim("H"), FreeDim("W")),)}, max_bytes=MAX_VIDEO_BYTES)
"""`video` `[3, F, H, W]`: red, green and blue of F frames, from -1 to 1, which is not checked here."""


def check_contract(contract: FileSpec, header: TensorHeader) -> None:
    """Compare a file's header with the contract.

    Raises:
        ConfigError: too large a file, missing or unknown tensors, or one of another rank, shape or dtype.
    """
    place = f"{header.path}: {contract.what}"
    if header.file_bytes > contract.max_bytes:
        raise ConfigError(f"{place}: expected at most {contract.max_bytes:,} bytes, got {header.file_bytes:,}")
    missing = contract.tensors.keys() - header.entries.keys() - {*contract.optional}
    unknown = header.entries.keys() - contract.tensors.keys()
    if missing or unknown:
        faults = [f"{name} is missing" for name in sorted(missing)] + [
            f"{name} is unknown" for name in sorted(unknown)[:3]
        ]
        held = ", ".join(sorted(header.entries)[:6]) or "nothing"
        raise ConfigError(
            f"{place}: {', '.join(faults)}; expected {contract}, got {held} ({len(header.entries)} in all)"
        )
    for name, entry in header.entries.items():
        if entry.dtype not in FLOATS:
            raise ConfigError(f"{place}: {name}: expected dtype {' or '.join(FLOATS)}, got {entry.dtype}")
        if not any(_matches(shape, entry.shape) for shape in contract.tensors[name]):
            raise ConfigError(f"{place}: {name}: expected shape {contract.shapes(name)}, got {list(entry.shape)}")


def _matches(shape: Shape, actual: tuple[int, ...]) -> bool:
    return len(shape) == len(actual) and all(
        want.low <= size <= (want.high or size) if isinstance(want, FreeDim) else want == size
        for want, size in zip(shape, actual, strict=True)
    )


def read_motion(header: TensorHeader) -> list[float] | None:
    """How far the pixels of each latent frame of `latents` move, as the file's header says; None: it does not.

    Raises:
        ConfigError: it says it otherwise than MOTION has it.
    """
    if MOTION not in header.metadata:
        return None
    shape = header.entries["latents"].shape
    frames = shape[1] if len(shape) == 4 else shape[0] * shape[2]
    try:
        values = [float(each) for each in header.metadata[MOTION].split()]
    except ValueError:
        values = []
    if len(values) != frames or not all(0 <= each <= 2 for each in values):  # the largest difference in [-1, 1]
        raise ConfigError(
            f"{header.path}: `{MOTION}` in its header must be a number from 0 to 2 for each of its {frames} latent "
            "frames"
        )
    return values
