"""A snapshot's file: safetensors, with a JSON header in its metadata. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from streamdiff.atomic_write import check_parent, temporary_sibling
from streamdiff.errors import ConfigError
from streamdiff.models.spec import ModelSpec
from streamdiff.pipeline.snapshot.header import FORMAT, KIND, SnapshotHeader, read_header, read_metadata
from streamdiff.version import __version__

_PICTURES = "pictures"


@dataclass(frozen=True)
class Snapshot:
    """A session at rest.

    model: the facts of its model by name, `weights` among them: what must be the same where it goes on.
    session: what it is opened with: seed, steps, kv_context, epoch; and `next_chunk`.
    trees, tensors: see `session_state.walk.save`; tensors of each tree have its name in front.
    about: what who saved it wants to know again: prompts, frame numbers; as JSON has it.
    """

    model: Mapping[str, Any]
    session: Mapping[str, Any]
    trees: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, nearly all of the file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

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

    def write(self, path: Path) -> None:
        """Write it whole, or nothing.

        Raises:
            ConfigError: the folder is not there or cannot be written to.
        """
        check_parent(path)
        with temporary_sibling(path) as temporary:
            save_file(dict(self.tensors), temporary, self._metadata())
            temporary.replace(path)

    def to_bytes(self) -> bytes:
        """What `write` writes."""
        return save(dict(self.tensors), self._metadata())

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Snapshot:
        """The snapshot in a file's content. Raises ConfigError as `read` does."""
        header = read_header(data)
        try:
            return cls._of(header, load(bytes(data)))
        except SafetensorError as error:
            raise ConfigError(f"the snapshot is not readable: {error}") from None

    def _metadata(self) -> dict[str, str]:
        parts = {"model": self.model, "session": self.session, "trees": self.trees, "about": self.about}
        header = json.dumps({"streamdiff": __version__, **parts})
        return {"kind": KIND, "format": str(FORMAT), "header": header}

    @classmethod
    def _of(cls, header: SnapshotHeader, tensors: Mapping[str, Tensor]) -> Snapshot:
        return cls(header.model, header.session, header.trees, tensors, header.about)

    @classmethod
    def read(cls, path: Path) -> Snapshot:
        """The snapshot in a file.

        Raises:
            ConfigError: nothing there, no snapshot, a damaged one, or one of another format.
        """
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                header = read_metadata(file.metadata() or {}, str(path))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            return cls._of(header, tensors)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: not a readable snapshot: {error}") from None


def model_facts(spec: ModelSpec, dtype: object, weights: Sequence[str]) -> dict[str, Any]:
    """What must be the same where a session goes on, as JSON has it: the model's facts, and digests of its blocks."""
    facts: dict[str, Any] = json.loads(json.dumps({**asdict(spec), "dtype": str(dtype), "weights": list(weights)}))
    return facts
