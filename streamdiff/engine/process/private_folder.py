"""The private folder that a web process shares with its engine: the IPC socket, and the configuration.

A configuration holds secrets (stream keys, TURN credentials), so it is never an argument of a process: everybody on the
machine can read those. Torch-free.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from streamdiff.config import Config

_CONFIG = "config.json"


def make() -> Path:
    """A new folder (mode 0700) for temporary files, for the caller to remove."""
    return Path(tempfile.mkdtemp(prefix="streamdiff-"))


def write_config(folder: Path, config: Config) -> None:
    """Put the whole configuration there for `read_config`, readable by this user only.

    Raises:
        FileExistsError: there is one.
    """
    descriptor = os.open(folder / _CONFIG, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(config.model_dump_json())


def read_config(folder: Path) -> Config:
    """The configuration that was put there."""
    return Config.model_validate_json((folder / _CONFIG).read_text(encoding="utf-8"))
