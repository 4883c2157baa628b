"""LoRAs that sessions load while they play: files of one folder, which clients name and never point at."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from streamdiff.core import MOST_LORAS, lora_id, split_label
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models.spec import Lora
from streamdiff.models.transformer.lora import LAYERS, BlockFactors
from streamdiff.models.transformer.wan import WanDenoiser
from streamdiff.models.transformer.weights import open_lora
from streamdiff.models.weight_files import some
from streamdiff.pipeline.distributed.message import MessageKind, SessionUpdate
from streamdiff.pipeline.distributed.state_exchange import lora_key, stage_key
from streamdiff.session_state import walk

if TYPE_CHECKING:
    from streamdiff.pipeline.ring import Ring

SUFFIX = ".safetensors"
_VERSION = attrgetter("st_ino", "st_size", "st_mtime_ns")


class LoadedLora(NamedTuple):
    """A LoRA that was read, by its `label` (`core.split_label`); and, if it was not loaded already, what each stage has
    of it, block by block."""

    label: str
    parts: Sequence[Sequence[BlockFactors]] = ()


class LoraFolder:
    """The LoRAs of `folder` (None: there are none), of which at most `most` are loaded at once; a ring has the blocks
    `runs`, stage by stage."""

    def __init__(
        self, ring: Ring, folder: str | None = None, most: int = 0, runs: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Raises ConfigError: there is no such folder."""
        self._ring, self._most, self._runs = ring, min(most, MOST_LORAS), runs
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(f"model.lora_dir is {folder}, which is no folder", field="model.lora_dir")
        self._shapes = {} if folder is None else _shapes(ring.stage.denoiser, runs[-1][1])
        self.loaded: dict[int, str] = {}
        """Labels, by id, of those that the ranks have."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the files that are there now."""
        paths = [] if self._folder is None else self._folder.glob(f"*{SUFFIX}")
        return tuple(sorted(path.stem for path in paths if path.is_file()))

    def read(self, label: str) -> LoadedLora:
        """The LoRA of a name, or of the `label` of one that must have that content. From any thread.

        Raises:
            RequestError: there is none, it is being written, does not fit the model or has more than low-rank changes
                of the blocks' linear layers.
        """
        (name, wanted), known = split_label(label), self.names
        if self._folder is None or name not in known:
            raise RequestError("lora", f"lora is {name[:60]!r}; model.lora_dir has {some(known) or 'none'}", "lora")
        path = self._folder / f"{name}{SUFFIX}"
        try:
            before = _VERSION(path.stat())
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found = LoadedLora(f"{name}@{digest}")
            if lora_id(found.label) not in self.loaded:
                found = found._replace(parts=self._parts(path))
            after = _VERSION(path.stat())
        except (ConfigError, OSError) as error:
            raise RequestError("lora", f"lora {name!r} cannot be used: {error}", "lora") from None
        if before != after:
            raise RequestError("lora", f"lora {name!r} is being replaced; ask again when its file is whole", "lora")
        if wanted and wanted != digest:
            why = f"lora {name!r} has the digest {digest[:16]} here, but {wanted[:16]} is asked for: another content"
            raise RequestError("lora", why, "lora")
        return found

    def _parts(self, path: Path) -> list[list[BlockFactors]]:
        """What each stage has of a file. Raises ConfigError."""
        adapter, dtype = open_lora(Lora(path), self._shapes), self._ring.stage.denoiser.dtype
        names = [{layer: f"blocks.{at}.{layer}.weight" for layer in LAYERS} for at in range(self._runs[-1][1])]
        layers = {name for own in names for name in own.values()}
        if more := [name for name, (parts, _) in adapter.changes.items() if name not in layers or "diff" in parts]:
            raise ConfigError(
                f"{adapter.checkpoint}: it changes more than the blocks' linear layers, by more than two factors "
                f"({some(more)}); merge it at the start (model.lora)"
            )
        blocks: list[BlockFactors] = [
            {layer: adapter.factors(name, walk.CPU, dtype) for layer, name in own.items() if name in adapter.changes}
            for own in names
        ]
        return [blocks[first:end] for first, end in self._runs]

    def take(self, loras: Sequence[LoadedLora], session: int, used: Collection[int]) -> dict[str, int]:
        """Have all ranks load LoRAs for a session, unless they have; those that are not among these or `used` make
        room. Returns their ids by name. Mutates: self, ring.

        Raises:
            RequestError: as many as may be are in use; none is loaded then.
        """
        ids = {split_label(each.label)[0]: lora_id(each.label) for each in loras}
        new = {lora_id(each.label): each for each in loras if lora_id(each.label) not in self.loaded}
        idle = [each for each in self.loaded if each not in used and each not in ids.values()]
        over, gone = len(self.loaded) + len(new) - self._most, any(not each.parts for each in new.values())
        if over > len(idle) or gone:  # one that was loaded already has no parts
            names = ", ".join(split_label(each)[0] for each in self.loaded.values()) or "none"
            why = f"lora {', '.join(ids)} is one too many: {names} are loaded, and model.max_loras is {self._most}"
            raise RequestError("lora", f"{why}; take one out first, or ask again", "lora")
        for each in idle[: max(0, over)]:
            self.drop(each, session)
        for number, lora in new.items():
            for stage, part in enumerate(lora.parts):
                for share in range(self._ring.stage.shares):
                    self._ring.stage.exchange.put(lora_key(stage_key(stage, share), number), walk.save(part))
            self.loaded[number] = lora.label
            self._ring.tell(MessageKind.LORA, SessionUpdate(session, number, saved=True))
        return ids

    def drop(self, lora: int, session: int) -> None:
        """Have all ranks forget a LoRA that is in no use. Mutates: self, ring."""
        if self.loaded.pop(lora, None) is not None:
            self._ring.tell(MessageKind.LORA, SessionUpdate(session, lora))


def _shapes(denoiser: WanDenoiser, blocks: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a model of so many blocks, which are alike."""
    own = {name: tuple(each.shape) for name, each in denoiser.model.state_dict().items()}
    first = {name.removeprefix("blocks.0."): shape for name, shape in own.items() if name.startswith("blocks.0.")}
    return own | {f"blocks.{block}.{name}": shape for block in range(blocks) for name, shape in first.items()}
