"""Writes latents to a safetensors file, chunk by chunk; what is at the target is whole, or is what was there before."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models.conditioning import not_finite
from streamdiff.models.headers import ITEM_BYTES, LENGTH_BYTES

_MOST_CHUNKS = 10**12  # the header has room for this count
_ALIGN_BYTES = 8


def check_target(path: Path) -> None:
    """Find out early whether a file could be written at `path`.

    Raises:
        ConfigError: it could not.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: expected a file's name, but this is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path}: the folder {path.parent} cannot be written to")


class LatentsWriter:
    """Takes chunks as they come, without knowing how many. Use it in a `with`: at its end the file is moved into
    place, and nothing is left when it ends by an error.

    The tensor is `latents` `[chunks, C, f, h, w]`, float32, clean, normalised as the model has them.
    """

    def __init__(
        self, path: Path, chunk_shape: tuple[int, int, int, int], metadata: dict[str, str] | None = None
    ) -> None:
        """`chunk_shape` is `[C, f, h, w]`; `metadata` are texts for the file's header, such as the model's name.

        Raises:
            ConfigError: a target that cannot be written.
        """
        check_target(path)
        self.path, self.chunk_shape, self.chunks = path, chunk_shape, 0
        self._metadata = {"normalised": "model", **(metadata or {})}
        # The header comes first and holds the count, which is known last: its room is kept, and filled with spaces.
        room = len(self._header_text(_MOST_CHUNKS))
        self._room = -(-(LENGTH_BYTES + room) // _ALIGN_BYTES) * _ALIGN_BYTES - LENGTH_BYTES
        self._temporary = path.parent / f".streamdiff-{secrets.token_hex(6)}.part"
        self._file = self._temporary.open("xb")
        self._file.seek(LENGTH_BYTES + self._room)

    def add(self, latents: Tensor) -> None:
        """Append one chunk `[C, f, h, w]`, of any float dtype and device.

        Raises:
            ValueError: another shape, or values that are not finite.
        """
        if tuple(latents.shape) != self.chunk_shape:
            raise ValueError(f"chunk {self.chunks}: expected shape {list(self.chunk_shape)}, got {list(latents.shape)}")
        chunk = latents.detach().to("cpu", torch.float32)
        if fault := not_finite(chunk):
            raise ValueError(f"chunk {self.chunks}: expected finite latents, got {fault}")
        self._file.write(chunk.numpy().tobytes())
        self.chunks += 1

    def __enter__(self) -> LatentsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises ValueError where no chunk has come and nothing else went wrong."""
        try:
            with self._file:
                if kind is not None:
                    return
                if not self.chunks:
                    raise ValueError(f"{self.path}: no chunk was made, so there is nothing to write")
                self._file.seek(0)
                self._file.write(self._room.to_bytes(LENGTH_BYTES, "little"))
                self._file.write(self._header_text(self.chunks).ljust(self._room))
            os.replace(self._temporary, self.path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def _header_text(self, chunks: int) -> bytes:
        size = chunks * ITEM_BYTES["F32"]
        for each in self.chunk_shape:
            size *= each
        entry = {"dtype": "F32", "shape": [chunks, *self.chunk_shape], "data_offsets": [0, size]}
        return json.dumps({"__metadata__": self._metadata, "latents": entry}).encode()


def write_latents(path: Path, latents: Tensor, metadata: dict[str, str] | None = None) -> None:
    """Write `[chunks, C, f, h, w]` at once; see `LatentsWriter`.

    Raises:
        ConfigError, ValueError: see `LatentsWriter`; nothing is written then.
    """
    if latents.ndim != 5:
        raise ValueError(f"expected latents [chunks, C, f, h, w], got {list(latents.shape)}")
    channels, frames, height, width = latents.shape[1:]
    with LatentsWriter(path, (channels, frames, height, width), metadata) as writer:
        for chunk in latents:
            writer.add(chunk)
