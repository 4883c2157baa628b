"""A snapshot's file: safetensors, with a JSON header in its metadata. Nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from streamdiff.models.headers import LENGTH_BYTES, TensorEntry
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.runner.init_latents import GivenVideo
from streamdiff.session_state.walk import META, described
from streamdiff.snapshot_header import (
    FORMAT,
    KIND,
    MAX_HEADER_BYTES,
    SnapshotHeader,
    packed_header,
    read_entries,
)
from streamdiff.version import __version__

_PICTURES, _START, _EMBEDS, _VIDEO, _LEVELS = "pictures", "start", "prompt_embeds", "video", "video_levels"
LOOSE = (_PICTURES, _START, _EMBEDS, _VIDEO, _LEVELS)
"""Tensors that no tree names."""
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
        self._data, self._entries = memoryview(data), entries
        self._begin = LENGTH_BYTES + int.from_bytes(self._data[:LENGTH_BYTES], "little")
        for name, entry in entries.items():
            if entry.dtype not in _DTYPES:
                raise ConfigError(f"tensor {name!r} is {entry.dtype} in the snapshot; it can be {', '.join(_DTYPES)}")
            # With a 0 among them, others could have a product that torch cannot count.
            if max(entry.shape, default=0) > _MOST or prod(max(1, size) for size in entry.shape) > _MOST_NUMBERS:
                raise ConfigError(f"tensor {name!r} has the shape {list(entry.shape)} in the snapshot; that is none")

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        dtype = _DTYPES[entry.dtype]
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        own = bytearray(self._data[self._begin + entry.begin : self._begin + entry.end])
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

    def check_model(self, spec: ModelSpec, dtype: object) -> None:
        """Raises ConfigError for the first fact about the model that is another one here, by its name."""
        here = model_facts(spec, dtype, self.model.get("weights", ()))
        for name in sorted({*self.model, *here}):
            if (theirs := self.model.get(name)) != (ours := here.get(name)):
                raise ConfigError(
                    f"{name} is {theirs} in the snapshot, but {ours} here; a session goes on only in the model, size "
                    "and window that it was saved in"
                )

    def check_weights(self, here: Sequence[str]) -> None:
        """Raises ConfigError for other weights, of all blocks; see `transformer.weights_digest`."""
        if self.model["weights"] != list(here):
            raise ConfigError(
                "the snapshot is of other weights than those that are loaded, though of the same kind of model; load "
                "it into those that it was saved with"
            )

    def with_pictures(self, pictures: Iterable[NDArray[np.uint8]]) -> Snapshot:
        """The same with pictures uint8 `[H, W, 3]` that were made and not taken yet."""
        waiting = [torch.from_numpy(np.ascontiguousarray(each)) for each in pictures]
        return replace(self, tensors={**self.tensors, **({_PICTURES: torch.stack(waiting)} if waiting else {})})

    def pictures(self) -> list[NDArray[np.uint8]]:
        """Those pictures."""
        return list(self.tensors[_PICTURES].numpy()) if _PICTURES in self.tensors else []

    def with_given(self, latents: Tensor | None, embeddings: Tensor | None) -> Snapshot:
        """The same with latents `[n, C, F, h, w]` and a prompt's embeddings that a reset begins with; None: with none
        of them."""
        given = {_START: latents, _EMBEDS: embeddings}
        there = {name: each.cpu() for name, each in given.items() if each is not None}
        return replace(self, tensors={**self.tensors, **there}) if there else self

    def given(self) -> tuple[Tensor | None, Tensor | None]:
        """Those latents and embeddings."""
        return self.tensors.get(_START), self.tensors.get(_EMBEDS)

    def with_video(self, video: GivenVideo | None) -> Snapshot:
        """The same with the video that the session was opened with."""
        if video is None:
            return self
        levels = torch.tensor(video.levels, dtype=torch.float64)
        return replace(self, tensors={**self.tensors, _VIDEO: video.latents.cpu(), _LEVELS: levels})

    def video(self) -> GivenVideo | None:
        """That video, after `check_loose`."""
        if _VIDEO not in self.tensors:
            return None
        return GivenVideo(self.tensors[_VIDEO], tuple(self.tensors[_LEVELS].tolist()))

    def check_loose(self, spec: ModelSpec) -> None:
        """Raises ConfigError where tensors that no tree names are not such as this model has."""
        shapes, session = self.outline, self.about.get("session")
        pictures, video = shapes.get(_PICTURES), shapes.get(_VIDEO)
        count = 0 if video is None or not video.ndim else len(video)
        known: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = (
            (_START, (spec.first_chunks, *spec.chunk_shape), torch.float32),
            (_EMBEDS, spec.text_shape, torch.float32),
            (_VIDEO, (count, *spec.chunk_shape), torch.float32),
            (_LEVELS, (count,), torch.float64),
        )
        for name, expected_shape, dtype in known:
            expected, found = torch.empty(expected_shape, dtype=dtype, device=META), shapes.get(name)
            if found is not None and described(found) != described(expected):
                raise ConfigError(f"{name} is {described(found)} in the snapshot, but {described(expected)} here")
        levels = self.tensors.get(_LEVELS, torch.ones(count))
        if (_VIDEO in shapes) != (_LEVELS in shapes) or not bool(((levels > 0) & (levels <= 1)).all()):
            raise ConfigError(f"{_VIDEO} and {_LEVELS} go together in a snapshot, levels above 0 and at most 1")
        most = session["_made_frames"] if isinstance(session, dict) else 0
        shape = (spec.height, spec.width, 3)
        if pictures is not None and (
            pictures.dtype != torch.uint8 or pictures.shape[1:] != shape or not 0 < len(pictures) <= most
        ):
            raise ConfigError(
                f"{_PICTURES} is {described(pictures)} in the snapshot; it can be uint8 {['n', *shape]}, of n frames "
                f"from 1 to the {most} that were made"
            )

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
            digest, content = hashlib.sha256(), tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            for at in range(0, len(content), _PIECE_BYTES):
                file.write(content[at : at + _PIECE_BYTES])
                digest.update(content[at : at + _PIECE_BYTES])
            digests[name] = digest.hexdigest()
        file.seek(0)
        file.write(packed_header({"__metadata__": self._metadata(digests), **entries}))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, name: str = "the snapshot") -> Snapshot:
        """The snapshot in a file's content, which errors call `name`. Of its tensors nothing is read before they are
        asked for. Raises ConfigError as `read` does."""
        header, entries = read_entries(data, name)
        return cls(**vars(header), tensors=FileTensors(data, entries))

    def _metadata(self, digests: Mapping[str, str]) -> dict[str, str]:
        """`digests`: SHA-256 of each tensor's bytes, in hexadecimal."""
        parts = {"model": self.model, "session": self.session, "trees": self.trees, "about": self.about}
        header = json.dumps({"streamdiff": __version__, **parts, "digests": digests})
        return {"kind": KIND, "format": str(FORMAT), "header": header}

    @classmethod
    def read(cls, path: Path) -> Snapshot:
        """The snapshot in a file, which is not to be changed meanwhile; see `from_bytes`.

        Raises:
            ConfigError: nothing there, no snapshot, a damaged one, or one of another format.
        """
        try:
            with path.open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ConfigError(f"{path}: not a readable snapshot: {error}") from None
        return cls.from_bytes(data, str(path))


def model_facts(spec: ModelSpec, dtype: object, weights: Sequence[str]) -> dict[str, Any]:
    """What must be the same where a session goes on, as JSON has it: the model's facts, and digests of its blocks."""
    facts: dict[str, Any] = json.loads(json.dumps({**asdict(spec), "dtype": str(dtype), "weights": list(weights)}))
    return facts
