"""Writes a tensor to a safetensors file, part by part; what is at the target is whole, or is what was there before.

How files are read and checked: `streamdiff/models/checkpoint/tensor_reader.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from streamdiff.atomic_write import check_parent, temporary_sibling
from streamdiff.errors import ConfigError, StreamdiffError
from streamdiff.models.checkpoint.safetensors_header import ITEM_BYTES, LENGTH_BYTES, parse_header
from streamdiff.models.checkpoint.tensor_reader import not_finite

SUFFIX = ".safetensors"
NORMALISED = {"normalised": "model"}
"""What the header of a file with latents says of them: they are normalised as the model has them."""
RAW = {"normalised": "no"}
"""They are as the autoencoder's network gives them."""
_MOST_PARTS = 10**12  # the header has room for this count
_ALIGN_BYTES = 8


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
