"""A snapshot's file: safetensors, with a JSON header in its metadata. Nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamdiff.atomic_write import check_parent, temporary_sibling
from streamdiff.errors import ConfigError
from streamdiff.models.headers import LENGTH_BYTES, TensorEntry, packed_header
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.runner.init_latents import GivenVideo
from streamdiff.session_state.walk import META, described, pieces
from streamdiff.snapshot_header import FORMAT, KIND, MAX_HEADER_BYTES, SnapshotHeader, read_header
from streamdiff.version import __version__

LOOSE = ("start", "prompt_embeds", "video", "video_levels", "pictures")
"""Tensors that no tree names: latents `[n, C, F, h, w]` and a prompt's embeddings that a reset begins with, the video
that the session was opened with, and pictures uint8 `[n, H, W, 3]` that were made and not taken yet."""
_MOST, _MOST_NUMBERS = 2**31, 2**40
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PIECE_BYTES = 1 << 20
"""Written and digested at a time: it is in the processor's cache the second time."""


class FileTensors(Mapping[str, Tensor]):
    """The tensors in a file's content, each read when it is asked for, into memory of its own."""

    def __init__(self, data: bytes | memoryview, entries: Mapping[str, TensorEntry]) -> None:
        """Raises ConfigError for a tensor of a type that no session has."""
        self._entries = entries
        self._data = memoryview(data)[LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little") :]
        for name, entry in entries.items():
            if entry.dtype not in _DTYPES:
                raise ConfigError(f"tensor {name!r} is {entry.dtype} in the snapshot; it can be {', '.join(_DTYPES)}")
            # With a 0 among them, others could have a product that torch cannot count.
            if max(entry.shape, default=0) > _MOST or prod(max(1, size) for size in entry.shape) > _MOST_NUMBERS:
                raise ConfigError(f"tensor {name!r} has the shape {list(entry.shape)} in the snapshot; that is none")

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        dtype = _DTYPES[entry.dtype]
        begin, end = entry.data_offsets
        if begin == end:
            return torch.empty(entry.shape, dtype=dtype)
        own = bytearray(self._data[begin:end])
        return torch.frombuffer(own, dtype=dtype).view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def outline(self) -> dict[str, Tensor]:
        """The tensors without content, of which nothing is read."""
        return {
            name: torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device=META)
            for name, entry in self._entries.items()
        }


@dataclass(frozen=True)
class Snapshot(SnapshotHeader):
    """A session at rest: what the header of its file says, and its tensors, see `session_state.walk.save`."""

    tensors: Mapping[str, Tensor] = field(repr=False)

    @property
    def outline(self) -> dict[str, Tensor]:
        """Its tensors without content."""
        if isinstance(self.tensors, FileTensors):
            return self.tensors.outline()
        return {name: each.to(META) for name, each in self.tensors.items()}

    def with_loose(self, **tensors: Tensor | None) -> Snapshot:
        """The same with those of LOOSE that are not None."""
        given = {name: each.cpu() for name, each in tensors.items() if each is not None}
        return replace(self, tensors={**self.tensors, **given})

    def with_pictures(self, pictures: Sequence[NDArray[np.uint8]]) -> Snapshot:
        """The same with pictures uint8 `[H, W, 3]` that were made and not taken yet."""
        return self.with_loose(pictures=torch.from_numpy(np.stack(pictures))) if pictures else self

    @property
    def pictures(self) -> list[NDArray[np.uint8]]:
        """Those pictures."""
        return list(self.tensors["pictures"].numpy()) if "pictures" in self.tensors else []

    @property
    def video(self) -> GivenVideo | None:
        """The video that the session was opened with."""
        if "video" not in self.tensors:
            return None
        return GivenVideo(self.tensors["video"], tuple(self.tensors["video_levels"].tolist()))

    def _start_shape(self, spec: ModelSpec, found: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Of `start`: latents of the first chunks, or a picture's condition, of any number of latent frames."""
        if not spec.condition_channels:
            return spec.first_chunks, *spec.chunk_shape
        frames = found["start"].shape[1] if "start" in found and found["start"].ndim == 4 else 0
        return spec.condition_channels, max(1, frames), spec.latent_height, spec.latent_width

    def check_loose(self, spec: ModelSpec) -> None:
        """Raises ConfigError where tensors of LOOSE are not such as this model has."""
        found = {name: each for name, each in self.outline.items() if name in LOOSE}
        count = {name: len(each) if each.ndim else 0 for name, each in found.items()}
        known = {
            "start": torch.empty(self._start_shape(spec, found), device=META),
            "prompt_embeds": torch.empty(spec.text_shape, device=META),
            "video": torch.empty(count.get("video", 0), *spec.chunk_shape, device=META),
            "video_levels": torch.empty(count.get("video", 0), dtype=torch.float64, device=META),
            "pictures": torch.empty(
                count.get("pictures", 0), spec.height, spec.width, 3, dtype=torch.uint8, device=META
            ),
        }
        for name, each in found.items():
            if described(each) != described(known[name]):
                raise ConfigError(f"{name} is {described(each)} in the snapshot, but {described(known[name])} here")
        levels = self.tensors.get("video_levels", torch.ones(1))
        if ("video" in found) != ("video_levels" in found) or not bool(((levels > 0) & (levels <= 1)).all()):
            raise ConfigError("video and video_levels go together in a snapshot, levels above 0 and at most 1")

    def write(self, path: Path) -> None:
        """Write it whole, or nothing.

        Raises:
            ConfigError: the folder is not there or cannot be written to, the disk is full, or `path` is a folder; or
                the header is one that no reader takes.
        """
        check_parent(path)
        with temporary_sibling(path) as temporary:
            try:
                with temporary.open("wb") as file:
                    self._write_to(file)
                temporary.replace(path)
            except OSError as error:
                raise ConfigError(f"{path} cannot be written: {error}") from error

    def to_bytes(self) -> bytes:
        """What `write` writes. Raises ConfigError for a header that no reader takes."""
        file = BytesIO()
        self._write_to(file)
        return file.getvalue()

    def _write_to(self, file: BinaryIO) -> None:
        """Write the tensors and count their digests in one pass, then the header, which has the digests, before them.
        safetensors' own writer has the header first."""
        # Larger numbers first, so that each tensor lies at a multiple of its numbers' size.
        tensors = sorted(self.tensors.items(), key=lambda named: (-named[1].element_size(), named[0]))
        begin, entries = 0, {}
        for name, tensor in tensors:
            offsets = [begin, begin := begin + tensor.nbytes]
            entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        digests = dict.fromkeys(self.tensors, hashlib.sha256().hexdigest())
        header = packed_header({"__metadata__": self._metadata(digests), **entries})
        if len(header) - LENGTH_BYTES > MAX_HEADER_BYTES:
            raise ConfigError(
                f"the snapshot's header has {len(header):,} bytes; it can have at most {MAX_HEADER_BYTES:,}"
            )
        file.write(header)
        for name, tensor in tensors:
            digest = hashlib.sha256()
            for piece in pieces(tensor.contiguous(), _PIECE_BYTES):
                file.write(piece)
                digest.update(piece)
            digests[name] = digest.hexdigest()
        file.seek(0)
        file.write(packed_header({"__metadata__": self._metadata(digests), **entries}))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, name: str = "the snapshot") -> Snapshot:
        """The snapshot in a file's content, which errors call `name`. Of its tensors nothing is read before they are
        asked for. Raises ConfigError as `read_header`."""
        header, entries = read_header(data, name)
        return cls(**vars(header), tensors=FileTensors(data, entries))

    def _metadata(self, digests: Mapping[str, str]) -> dict[str, str]:
        """`digests`: SHA-256 of each tensor's bytes, in hexadecimal."""
        parts = {"model": self.model, "session": asdict(self.session), "trees": self.trees, "about": self.about}
        header = json.dumps({"streamdiff": __version__, **parts, "digests": digests})
        return {"kind": KIND, "format": str(FORMAT), "header": header}


def mapped(path: Path) -> memoryview:
    """The content of a snapshot's file, which is not to be changed meanwhile. Raises ConfigError for what cannot be
    read."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ConfigError(f"{path}: not a readable snapshot: {error}") from None


def model_facts(spec: ModelSpec, dtype: object) -> dict[str, Any]:
    """What must be the same where a session continues, as JSON has it, but for its `weights`, digests of its blocks."""
    facts: dict[str, Any] = json.loads(json.dumps({**asdict(spec), "dtype": str(dtype)}))
    return facts


def check_model(theirs: Mapping[str, Any], here: Mapping[str, Any], what: str = "the snapshot") -> None:
    """Raises ConfigError for the first of the `model_facts` of `what` that is another one here, by its name."""
    for name in sorted({*theirs, *here} - {"weights"}):
        if theirs.get(name) != here.get(name):
            differ = f"{name} is {theirs.get(name)!s:.200} in {what}, but {here.get(name)!s:.200} here"
            why = f"{differ}; a session resumes only in the model, size and window that it was made in"
            raise ConfigError(why, field=name, code="model")
