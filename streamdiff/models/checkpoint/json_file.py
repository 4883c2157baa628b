"""Small files that come with weights. No torch: whoever only plans reads them too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from streamdiff.errors import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ConfigError: it cannot be read, is not JSON, or holds something else.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are both
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold a JSON object with keys, but holds {type(tree).__name__}")
    return tree


def cache_folder(name: str) -> Path:
    """Where files of this kind may be kept that can be made again: `streamdiff/NAME` in the user's cache folder
    (`XDG_CACHE_HOME`, else `~/.cache`). Need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "streamdiff" / name


def some(names: Iterable[str], count: int = 3) -> str:
    """The first few of many names, for a message."""
    names = list(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
