"""Opens torch's pickle files (`.pt`, `.pth`, `.bin`) for `checkpoint`, with tensors memory-mapped.

A torch file is a pickle, which can run code when it is opened; it is opened with torch's `weights_only`, and one that
needs more than that is refused.
"""

from __future__ import annotations

import pickle
import re
import struct
from pathlib import Path

import torch

from streamdiff.errors import ConfigError

_OLD_START = b"\x80\x02"
# What torch's reader raises, as it does not look whether a pickle is whole before it uses it.
_DAMAGED = (
    *(RuntimeError, EOFError, OSError, ValueError, LookupError),
    *(AssertionError, AttributeError, TypeError, struct.error),
)


def unpickle(path: Path, *, old: bool = False) -> object:
    """What a torch file holds, its tensors mapped into memory.

    Args:
        old: take a file from before torch 1.6 too, which cannot be mapped; all of it is then read.

    Raises:
        ConfigError: it cannot be read, or `weights_only` refuses it.
    """
    if hint := pointer_hint(path):
        raise ConfigError(f"{path}: not a torch file{hint}")
    try:
        mapped = not (old and _is_old(path))
        tree: object = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class|function)\s+([\w.]+\.[\w.]+)", str(error))
        what = f" ({found[1]})" if found else ""
        raise ConfigError(
            f"{path}: holds more than tensors{what}. A pickle can run code when it is opened, so it is opened with "
            "weights_only=True, and torch refuses this one; take a safetensors file, or save the tensors alone"
        ) from None
    except _DAMAGED as error:
        if "_use_new_zipfile_serialization" in str(error):
            raise ConfigError(
                f"{path}: not a torch file, or one from before torch 1.6, which cannot be mapped into memory; load and "
                "save it anew with torch.save, or take a safetensors file"
            ) from None
        raise ConfigError(f"{path}: not a readable torch file: {_reason(error)}") from None
    return tree


def _is_old(path: Path) -> bool:
    """Whether it begins as torch's files did before they were zip archives: with a pickle."""
    with path.open("rb") as file:
        return file.read(len(_OLD_START)) == _OLD_START


def _reason(error: Exception) -> str:
    """The first line of what torch says, which can be nothing, or a bare number."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")


def pointer_hint(path: Path) -> str:
    """What to say about a file of a few bytes that stands for a large one."""
    if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs"):
        return " (it is a Git LFS pointer: the weights themselves were not downloaded; `git lfs pull` does it)"
    return ""
