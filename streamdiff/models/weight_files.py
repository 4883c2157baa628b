"""Finds the file with a model's weights in a folder, and reads the small JSON files beside it. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from streamdiff.errors import ConfigError

SAFETENSORS, INDEX, PICKLES = ".safetensors", ".safetensors.index.json", (".pt", ".pth", ".bin")
"""Endings of a file, of the index of several, and of torch's files."""
USUAL_STEMS = ("diffusion_pytorch_model",)
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Kind = TypeVar("_Kind")


def weights_file(folder: Path, stems: Sequence[str] = USUAL_STEMS) -> Path:
    """The file to open of those in a folder, or in `transformer` in it: one of these stems, else the only one.

    Raises:
        ConfigError: there is none, or several could be meant.
    """
    if not _weight_files(folder) and (folder / "transformer").is_dir():
        folder = folder / "transformer"
    files = _weight_files(folder)
    for stem in stems:
        for ending in (INDEX, SAFETENSORS, *PICKLES):
            if folder / (stem + ending) in files:
                return folder / (stem + ending)
    for endings in ((INDEX,), (SAFETENSORS,), PICKLES):
        if found := [path for path in files if path.name.endswith(endings)]:
            if len(found) == 1:
                return found[0]
            some = ", ".join(path.name for path in found[:4])
            raise ConfigError(f"{folder}: has {len(found)} files that could be meant ({some}); name one of them")
    raise ConfigError(f"{folder}: has no weights ({SAFETENSORS}, {INDEX} or {', '.join(PICKLES)})")


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith((SAFETENSORS, INDEX, *PICKLES)))


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
        raise ConfigError(problems(path, error)) from None


def problems(path: object, error: ValidationError) -> str:
    """What pydantic found wrong in a file, one problem per line."""
    return "\n".join(
        f"{path}: {'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    )


def some(names: Iterable[str], count: int = 3) -> str:
    """The first few of many names, for a message."""
    names = list(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def fault_list(faults: Mapping[str, Sequence[str]]) -> str:
    """How many names have each fault, and the first few of them: `2 missing (a, b); 1 unexpected (c)`; empty where none
    has any."""
    return "; ".join(f"{len(names)} {what} ({some(names)})" for what, names in faults.items() if names)
