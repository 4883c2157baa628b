"""`python -m streamdiff.models.download`: downloads the files of a model that are not on disk, and reports progress.

Reads the model's configuration as JSON, one line, from standard input, whose end ends the process. Writes JSON lines:
an object with the fields of `DownloadProgress` now and then, and `{"error": ...}` where a file cannot be downloaded.
Torch-free.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from typing import Any

from tqdm import tqdm

from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.config import ModelConfig
from streamdiff.errors import ConfigError
from streamdiff.models import hub, resolve
from streamdiff.models.catalogue import Files

EXIT_CONFIG = 2
_REPORT_INTERVAL_S = 0.5
LEAVE_S = 5.0
"""Seconds that removing a partial download may take when the parent has gone."""


@dataclass(frozen=True)
class DownloadProgress:
    """Progress of a download: `done` of `total` bytes of `file` in the repository `repo`, at `rate` bytes per second.
    `files` are missing, this one included, which have `missing` bytes in all. None: not known."""

    repo: str
    file: str
    done: int
    total: int | None
    rate: float | None
    files: int
    missing: int

    def __str__(self) -> str:
        size = f" of {_bytes(self.total)}" if self.total else ""
        rate = f" at {_bytes(self.rate)}/s" if self.rate else ""
        left = f"{self.files} file{'s' if self.files > 1 else ''}, {_bytes(self.missing)}, still missing"
        return f"fetching {self.file} of {self.repo}: {_bytes(self.done)}{size}{rate}; {left}"


def download(needed: Sequence[Files], tell: Callable[[DownloadProgress], None]) -> None:
    """Download those of the files `needed` that the hub's cache lacks, one after another. A transfer that is cut is
    resumed, as often as something comes in between.

    Raises:
        ConfigError: a file cannot be downloaded; complete files stay.
    """
    missing = [each for files in needed for each in hub.missing(files)]
    for number, (repo, name, size) in enumerate(missing):
        left = sum(size or 0 for _, _, size in missing[number:])
        begun = DownloadProgress(repo, name, 0, size, None, len(missing) - number, left)
        hub.fetch_file(repo, name, _bar(begun, tell))


def _bar(begun: DownloadProgress, tell: Callable[[DownloadProgress], None]) -> type[tqdm[Any]]:
    """A tqdm class that reports progress of what has `begun` to `tell` instead of drawing it."""

    class ReportingBar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0

        def __init__(self, *given: Any, **options: Any) -> None:
            quiet = {"file": StringIO(), "disable": False, "mininterval": _REPORT_INTERVAL_S, "leave": False}
            super().__init__(*given, **{**options, **quiet})

        def display(self, *given: Any, **options: Any) -> None:
            done = int(self.n)
            left = max(0, begun.missing - done)
            tell(replace(begun, done=done, rate=self.format_dict["rate"], missing=left))

    return ReportingBar


def _bytes(count: float) -> str:
    return str(tqdm.format_sizeof(count, "B", 1000))


def main() -> int:
    def write(tree: dict[str, Any]) -> None:
        print(json.dumps(tree), flush=True)

    config = ModelConfig.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    try:
        with exit_on_sigterm():
            resolve.check_repository(config)
            download(resolve.to_fetch(config), lambda progress: write(asdict(progress)))
    except ConfigError as error:
        write({"error": str(error)})
        return EXIT_CONFIG
    return 0


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(LEAVE_S)
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
