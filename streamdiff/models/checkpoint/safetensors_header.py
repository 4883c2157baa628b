"""Parses headers of safetensors files: names, dtypes, shapes and offsets, checked against the file's size. Reads no
tensor data.

Imports no torch, so that the planner and the web process can use it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

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


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `dtype` by safetensors' name (`F32`, `BF16`), and its bytes, `begin` to `end`, after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What the file at `path`, of `file_bytes` bytes in all, says of its tensors, by name."""

    path: Path
    file_bytes: int
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def parse_header(path: Path, max_bytes: int | None = None) -> Header:
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


def stored_values(folder: Path) -> int:
    """Numbers in the weight files (*.safetensors) of `folder`, from their headers alone; 0 without any.

    Raises:
        ConfigError: a file is damaged.
    """
    headers = map(parse_header, sorted(folder.glob("*.safetensors")))
    return sum(prod(entry.shape) for header in headers for entry in header.entries.values())


def parse_data(data: bytes | memoryview, name: str) -> Header:
    """The same of a file's content; errors call it `name`."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    refused = length > min(len(data) - LENGTH_BYTES, _MAX_HEADER_BYTES)  # then nothing of it is copied
    header = data[: LENGTH_BYTES + (0 if refused else length)]
    return parse_file(BytesIO(header), len(data), Path(name))


def parse_file(file: BinaryIO, file_bytes: int, path: Path, max_bytes: int | None = None) -> Header:
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
    metadata = tree.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConfigError(f"{path}: __metadata__ must hold texts by name, but is {json.dumps(metadata)[:60]}")
    entries = {name: _entry(path, name, value) for name, value in tree.items()}
    _check_layout(path, entries, file_bytes - LENGTH_BYTES - len(text))
    return Header(path, file_bytes, entries, metadata)


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
    if start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        return ConfigError(
            f"{path}: this is a pickle (as torch.save writes it), and those are not read, because reading one can run "
            f"whatever is in it. Expected safetensors: {_HOW}"
        )
    if start.startswith(b"\x93NUMPY"):
        return ConfigError(f"{path}: this is a NumPy array file; expected safetensors: {_HOW}")
    return ConfigError(
        f"{path}: not a safetensors file, or cut off: it has {file_bytes:,} bytes, but would begin with a header of "
        f"{length:,}; {_HOW}"
    )


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    offsets: Any = fields.get("data_offsets")
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    good = isinstance(dtype, str) and _counts(shape) and _counts(offsets) and len(offsets) == 2
    if not good or offsets[0] > offsets[1]:
        raise ConfigError(
            f"{path}: {name}: expected dtype, shape and data_offsets (begin and end), but the header says "
            f"{json.dumps(value)[:80]}"
        )
    entry = TensorEntry(dtype, tuple(shape), *offsets)
    if entry.dtype in ITEM_BYTES and prod(entry.shape) * ITEM_BYTES[entry.dtype] != entry.end - entry.begin:
        raise ConfigError(
            f"{path}: {name}: {entry.dtype} {list(entry.shape)} takes {prod(entry.shape) * ITEM_BYTES[entry.dtype]:,} "
            f"bytes, but the header declares {entry.end - entry.begin:,}"
        )
    return entry


def _counts(value: Any) -> bool:
    """Whether `value` is a list of sizes. Bounded, as whoever wrote the file has them multiplied and printed."""
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(path: Path, entries: dict[str, TensorEntry], data_bytes: int) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise ConfigError(
                f"{path}: {name}: its bytes begin at {entry.begin:,}, but those of the tensor before it end at {end:,}"
            )
        end = entry.end
    if end != data_bytes:
        raise ConfigError(f"{path}: the header declares {end:,} bytes of tensors, but {data_bytes:,} follow it")
