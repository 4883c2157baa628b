"""LoRAs that sessions load while they play: files of one folder, which clients name and never point at."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from streamdiff.core import MOST_LORAS, lora_id, split_label
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.spec import Lora
from streamdiff.models.transformer.lora import LAYERS
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import open_lora
from streamdiff.models.weight_files import some
from streamdiff.pipeline.distributed.message import MessageKind, SessionUpdate
from streamdiff.pipeline.distributed.state_exchange import lora_key, stage_key

if TYPE_CHECKING:
    from streamdiff.pipeline.ring import Ring

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class LoadedLora:
    """A LoRA that was read, by its `label` (`core.split_label`); and, if it was not loaded already, what each stage has
    of it, by block and layer."""

    label: str
    parts: Sequence[dict[str, Tensor]] = ()

    @property
    def id(self) -> int:
        return lora_id(self.label)

    @property
    def name(self) -> str:
        """Of its file, without the suffix."""
        return split_label(self.label)[0]


class LoraFolder:
    """The LoRAs of `folder`, of which at most `most` are loaded at once; a ring has the blocks `runs`, stage by
    stage."""

    def __init__(self, ring: Ring, folder: Path, most: int, runs: Sequence[tuple[int, int]]) -> None:
        """Raises ConfigError: there is no such folder."""
        if not folder.is_dir():
            raise ConfigError(f"model.lora_dir is {folder}, which is no folder", field="model.lora_dir")
        self._ring, self._folder, self.most, self._runs = ring, folder, min(most, MOST_LORAS), runs
        self._shapes = _shapes(ring.stage.denoiser, runs[-1][1])
        self.loaded: dict[int, LoadedLora] = {}
        """By id, those of which the ranks have their parts."""
        self._digests: dict[tuple[str, int, int, int], str] = {}  # of versions of files that were read

    @property
    def names(self) -> tuple[str, ...]:
        """Of the files that are there now."""
        return tuple(sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}") if path.is_file()))

    def read(self, label: str) -> LoadedLora:
        """The LoRA of a name, or of the `label` of one that must have that content. From any thread.

        Raises:
            RequestError: there is none, it is being written, does not fit the model or has more than low-rank changes
                of the blocks' linear layers.
        """
        (name, wanted), known = split_label(label), self.names
        if name not in known:
            raise RequestError("lora", f"lora is {name[:60]!r}; model.lora_dir has {some(known) or 'none'}", "lora")
        path = self._folder / f"{name}{SUFFIX}"
        try:
            before = _version(path)
            if (digest := self._digests.get(before, "")) == "":
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            found = LoadedLora(f"{name}@{digest}")
            if found.id not in self.loaded:
                found = replace(found, parts=self._parts(path))
            after = _version(path)
        except (ConfigError, OSError) as error:
            raise RequestError("lora", f"lora {name!r} cannot be used: {error}", "lora") from None
        if before != after:
            raise RequestError("lora", f"lora {name!r} is being replaced; ask again when its file is whole", "lora")
        self._digests[before] = digest
        if wanted and wanted != digest:
            why = f"lora {name!r} has the digest {digest[:16]} here, but {wanted[:16]} is asked for: another content"
            raise RequestError("lora", why, "lora")
        return found

    def _parts(self, path: Path) -> list[dict[str, Tensor]]:
        """What each stage has of a file, by block of its own and layer. Raises ConfigError."""
        adapter, dtype = open_lora(Lora(path), self._shapes), self._ring.stage.denoiser.dtype
        layers = {f"blocks.{block}.{layer}.weight" for block in range(self._runs[-1][1]) for layer in LAYERS}
        if more := [name for name, (parts, _) in adapter.changes.items() if name not in layers or "diff" in parts]:
            raise ConfigError(
                f"{adapter.checkpoint}: it changes more than the blocks' linear layers, by more than two factors "
                f"({some(more)}); merge it at the start (model.lora)"
            )
        found: list[dict[str, Tensor]] = []
        for first, end in self._runs:
            own: dict[str, Tensor] = {}
            for block in range(first, end):
                for layer in LAYERS:
                    if (name := f"blocks.{block}.{layer}.weight") in adapter.changes:
                        pair = adapter.factors(name, torch.device("cpu"), dtype)
                        own |= {f"{block - first}.{layer}.{half}": each for half, each in pair._asdict().items()}
            found.append(own)
        return found

    def take(self, lora: LoadedLora, session: int, used: Collection[int]) -> None:
        """Have all ranks load a LoRA for a session, if they have not; one that is not among those `used` makes room.
        Mutates: self, ring.

        Raises:
            RequestError: as many as may be are in use.
        """
        if lora.id in self.loaded:
            return
        if len(self.loaded) >= self.most:
            idle = next((each for each in self.loaded if each not in used), None)
            if idle is None:
                names = ", ".join(each.name for each in self.loaded.values())
                why = f"lora {lora.name!r} is one too many: {names} are in use, and model.max_loras is {self.most}"
                raise RequestError("lora", f"{why}; take one out first", "lora")
            self.drop(idle, session)
        ring, exchange = self._ring, self._ring.stage.exchange
        for stage, part in enumerate(lora.parts):
            for share in range(ring.stage.shares):
                exchange.put(lora_key(stage_key(stage, share), lora.id), (part, None))
        self.loaded[lora.id] = LoadedLora(lora.label)
        ring.tell(MessageKind.LORA, SessionUpdate(session, lora.id, saved=True))

    def drop(self, lora: int, session: int) -> None:
        """Have all ranks forget a LoRA that is in no use. Mutates: self, ring."""
        if self.loaded.pop(lora, None) is not None:
            self._ring.tell(MessageKind.LORA, SessionUpdate(session, lora))


def _version(path: Path) -> tuple[str, int, int, int]:
    """What differs where a file is another one, or has changed."""
    found = path.stat()
    return path.name, found.st_ino, found.st_size, found.st_mtime_ns


def _shapes(denoiser: WanDenoiser, blocks: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a model of so many blocks, which are alike."""
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in denoiser.model.state_dict().items():
        begin, block, rest = name.partition("blocks.0.")
        numbers = range(blocks) if block and not begin else range(not name.startswith("blocks."))
        found |= {f"blocks.{number}.{rest}" if block else name: tuple(tensor.shape) for number in numbers}
    return found
