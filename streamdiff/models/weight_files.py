"""Finds the file with a model's weights in a folder, says what a file is that holds none, and reads the small JSON
files beside it. Imports no torch."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from streamdiff.errors import ConfigError
from streamdiff.models.headers import DAMAGED, kind_of, parse_header

SAFETENSORS, INDEX, PICKLES, GGUF = ".safetensors", ".safetensors.index.json", (".pt", ".pth", ".bin"), ".gguf"
"""Endings of a file, of the index of several, of torch's files, and of llama.cpp's."""
ENDINGS = (SAFETENSORS, INDEX, *PICKLES, GGUF)
USUAL_STEMS = ("diffusion_pytorch_model",)
_BEGINNING_BYTES = 512
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\..+)")
_EXPERTS = ("transformer_2", "high_noise_model", "low_noise_model")
_EXPERT_FILE = re.compile(r"(high|low)[-_. ]?noise", re.IGNORECASE)
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Kind = TypeVar("_Kind")


def weights_file(folder: Path, stems: Sequence[str] = USUAL_STEMS) -> Path:
    """The file to open of those in a folder, or in `transformer` in it: one of these stems, else the only one.

    Raises:
        ConfigError: there is none, several could be meant, or they are parts of something else.
    """
    if not _weight_files(folder) and (folder / "transformer").is_dir():
        folder = folder / "transformer"
    files = _weight_files(folder)
    for stem in stems:
        for ending in (INDEX, SAFETENSORS, *PICKLES, GGUF):
            if folder / (stem + ending) in files:
                return folder / (stem + ending)
    for endings in ((INDEX,), (SAFETENSORS,), PICKLES, (GGUF,)):
        if found := [path for path in files if path.name.endswith(endings)]:
            if len(found) == 1:
                return found[0]
            if shard := _SHARD.fullmatch(found[0].name):
                raise ConfigError(_part_of(found[0], shard))
            some = ", ".join(path.name for path in found[:4])
            raise ConfigError(f"{folder}: has {len(found)} files that could be meant ({some}); name one of them")
    if any(folder.glob("*.distcp")):
        raise ConfigError(
            f"{folder}: is a checkpoint of torch.distributed, in parts; make one file of it with `python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE.pt`, and give that"
        )
    raise ConfigError(f"{folder}: has no weights ({', '.join(ENDINGS)})")


def check_file(path: Path) -> None:
    """Say what a file of weights is that cannot be read as such, or is only a part. Reads its beginning and its end.

    Raises:
        ConfigError: nothing there, no permission, another kind of file, one that is cut off, or one of several shards.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_BEGINNING_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file or folder") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if path.name.endswith(".bin.index.json"):
        raise ConfigError(f"{path}: is the index of shards in pickles, which are not read; take {SAFETENSORS} files")
    is_gguf = path.suffix == GGUF and start.startswith(b"GGUF")
    if not path.name.endswith(INDEX) and not is_gguf and (what := kind_of(start)):
        raise ConfigError(f"{path}: {what}")
    is_zip, is_tensors = start.startswith(b"PK\x03\x04"), start[8:10] in (b'{"', b"{}", b"{ ")
    if path.suffix in PICKLES and is_zip and not zipfile.is_zipfile(path):
        raise ConfigError(f"{path}: is cut off: it begins as a torch file, and its end is missing; {DAMAGED}")
    for known, endings in ((is_zip, PICKLES), (is_tensors, (SAFETENSORS,))):
        if known and path.suffix not in endings:
            raise ConfigError(f"{path}: holds what a file holds that ends in {' or '.join(endings)}; rename it")
    if path.suffix == SAFETENSORS:
        parse_header(path)
    if (shard := _SHARD.fullmatch(path.name)) is not None and int(shard[3]) > 1:
        raise ConfigError(_part_of(path, shard))


def _part_of(shard: Path, match: re.Match[str]) -> str:
    """What to say of one of several files that hold the tensors together."""
    index = shard.with_name(f"{match[1]}{match[4]}.index.json")
    if match[4] != SAFETENSORS:
        return f"{shard}: is one of {int(match[3])} shards in pickles, which are not read; take the {SAFETENSORS} files"
    if index.is_file():
        return f"{shard}: is one of {int(match[3])} shards; give their index, {index}, or their folder"
    return (
        f"{shard}: is one of {int(match[3])} shards, and their index is missing: put {index.name} and all shards into "
        f"{shard.parent}, and give that folder"
    )


def check_one_expert(path: Path) -> None:
    """Raises ConfigError for a model, a folder or a file, whose denoising is split between two transformers, as
    Wan2.2-A14B's is: one of them alone makes another picture."""
    folder = path if path.is_dir() else path.parent
    for place in (folder, folder.parent) if folder.name in ("transformer", *_EXPERTS) else (folder,):
        index = place / "model_index.json"
        stored = read_object(index) if index.is_file() else {}
        said = [name for name in ("transformer_2", "boundary_ratio") if stored.get(name) not in (None, [None, None])]
        found = [name for name in _EXPERTS if (place / name).is_dir()] or said
        if found or _EXPERT_FILE.search(path.name):
            raise ConfigError(
                f"{path}: has two experts ({some(found) or path.name}), a transformer for high noise and one for low, "
                "as Wan2.2-A14B has; such models are not supported, and one of the two alone makes another picture"
            )


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(ENDINGS))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ConfigError: it cannot be read, is not JSON, or holds something else.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are the first
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a JSON object with keys, but holds {type(tree).__name__}")
    return tree


def validated(path: Path, kind: type[_Kind], content: Mapping[str, Any] | None = None) -> _Kind:
    """The JSON file at `path` as a `kind`, a pydantic model or a dataclass, whose types it must have as they are.

    Args:
        content: what is in the file, where that is read already.

    Raises:
        ConfigError: as `read_object`; keys that are missing or of another kind, one per line.
    """
    content = read_object(path) if content is None else content
    try:
        # By way of JSON, where a strict type takes a list for a tuple.
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        problems = (
            f"{path}: {'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        )
        raise ConfigError("\n".join(problems)) from None


_HOLDS = (
    (r"lora_(A|B|down|up|unet|transformer)|lokr_|hada_", "a LoRA, which is given as --lora FILE beside the model"),
    (r"(^|\.)(shared|token_embedding|token_embd)\.weight$", "a text encoder, which is given as --text-encoder"),
    (r"(^|\.)decoder\.(up_blocks|upsamples|middle|mid_block|conv\w*|\d+)\.", "an autoencoder, which is given as --vae"),
    (r"(^|\.)blocks\.\d+\.(\w+\.)?(self_attn|cross_attn|attn1|attn2)\.", "a transformer, which is given as --weights"),
)


def what_it_holds(names: Iterable[str]) -> str:
    """What a file with tensors of these names is, and how it is given; empty where that is not known."""
    names = list(names)
    return next((what for pattern, what in _HOLDS if any(re.search(pattern, name) for name in names)), "")


def some(names: Iterable[str], count: int = 3) -> str:
    """The first few of many names, for a message."""
    names = list(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def fault_list(faults: Mapping[str, Sequence[str]]) -> str:
    """How many names have each fault, and the first few of them: `2 missing (a, b); 1 unexpected (c)`; empty where none
    has any."""
    return "; ".join(f"{len(names)} {what} ({some(names)})" for what, names in faults.items() if names)
