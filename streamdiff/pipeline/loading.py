"""From a configuration to this rank's place, device and weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models.base import Model, ModelSpec, StreamDecoder, Trunk
from streamdiff.models.headers import read_header
from streamdiff.models.tiny import model as tiny
from streamdiff.pipeline import balance, group
from streamdiff.pipeline.budget import free_bytes
from streamdiff.pipeline.facts import read_facts
from streamdiff.pipeline.plan import check_stages, split_evenly
from streamdiff.version import __version__

Run = tuple[int, int]
"""First and last block (exclusive) of a stage."""
T = TypeVar("T", bound=Trunk)


def model_folder(config: ModelConfig) -> Path:
    """Raises ConfigError for a model that is not there."""
    folder = tiny.WEIGHTS if config.name == "tiny" else Path(config.name)
    if not folder.is_dir():
        raise ConfigError(f"model.name is {config.name!r}; it can be `tiny`, the embedded model, or a model's folder")
    return folder


def pick_device(wanted: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU. Of several CUDA devices a rank takes that of its number on this
    machine.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is cuda, but torch sees no CUDA device; use `auto` or `cpu`")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device(wanted)


def join(config: ModelConfig) -> group.Member:
    """Meet the other ranks.

    Raises:
        ConfigError: more stages than blocks, another number of ranks than stages, or ranks that are not alike.
    """
    check_stages(config.stages, read_facts(config.name).blocks)
    group.check_world(config.stages, config.ranks)
    return group.join(_facts(config))


def load_share(
    config: ModelConfig,
    member: group.Member,
    device: torch.device,
    load: Callable[[Run], T],
    decoder: StreamDecoder | None,
) -> tuple[T, tuple[Run, ...]]:
    """This stage's part of the model, and the blocks of all stages. `load` reads a part.

    Without a profile an even share is loaded and measured first; on a rank whose share then turns out to be another,
    that one is loaded instead.
    """
    even = split_evenly(read_facts(config.name).blocks, config.stages)[member.rank]
    if config.profile is not None:
        runs = balance.share_out(config, member, None)
        return load(runs[member.rank]), runs
    trunk = load(even)
    own = balance.measure(trunk, decoder, device, (member.rank, config.stages), config.kv_context)
    runs = balance.share_out(config, member, own)
    return (trunk if runs[member.rank] == even else load(runs[member.rank])), runs


def own_room(config: ModelConfig, device: torch.device) -> int:
    """Bytes that this rank has for caches, once its weights are loaded."""
    return free_bytes(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), config.memory_gb)


def load_model(config: ModelConfig, device: torch.device, blocks: Run | None = None) -> Model:
    """What the head needs, with `blocks` only; without the decoder. Mutates: torch's number of threads."""
    torch.set_num_threads(config.threads)
    return tiny.load(model_folder(config), device, config.name, blocks, decodes=False)


def load_trunk(config: ModelConfig, device: torch.device, blocks: Run) -> Trunk:
    """What any other stage needs. Mutates: torch's number of threads."""
    torch.set_num_threads(config.threads)
    return tiny.load_trunk(model_folder(config), device, config.name, blocks)


def load_decoder(config: ModelConfig, device: torch.device) -> StreamDecoder:
    """What the rank needs that decodes."""
    return tiny.load_autoencoder(model_folder(config), device)[1]


def read_spec(config: ModelConfig) -> ModelSpec:
    """The model's facts."""
    return tiny.read_spec(model_folder(config), config.name)


def _facts(config: ModelConfig) -> dict[str, str]:
    """What must be the same on all ranks: the program, torch, the configuration, and the weights' shapes and names."""
    return {
        "streamdiff": __version__,
        "torch": torch.__version__,
        **{f"model.{name}": str(value) for name, value in config.model_dump().items()},
        "weights": _digest(model_folder(config)),
    }


def _digest(folder: Path) -> str:
    """Of all configuration files, and of the weights' headers and sizes: no weights are read."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.json")):
        digest.update(path.read_bytes())
    for path in sorted(folder.rglob("*.safetensors")):
        digest.update(read_header(path))
        digest.update(str(path.stat().st_size).encode())
    return digest.hexdigest()[:16]
