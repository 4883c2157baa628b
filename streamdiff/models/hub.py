"""Files of published models: from the hub's cache, or over the network where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub

from streamdiff.errors import ConfigError
from streamdiff.models.catalogue import Files


def missing(files: Files) -> list[tuple[str, str, int | None]]:
    """Repository, name and size in bytes (None: not told) of the files, patterns spelled out, that the cache lacks.
    Where there is no way to the hub, but something for each in the cache, nothing is missing.

    Raises:
        ConfigError: see `fetch`.
    """
    try:
        with _reachable(files.repo, files.files):
            if any("*" in name for name in files.files):
                found: Any = huggingface_hub.snapshot_download(
                    files.repo, allow_patterns=list(files.files), dry_run=True
                )
            else:
                found = [huggingface_hub.hf_hub_download(files.repo, name, dry_run=True) for name in files.files]
    except ConfigError:
        if folder_on_disk(files) is not None:
            return []
        raise
    return [(files.repo, each.filename, each.file_size) for each in found if each.will_download]


def fetch_file(repo: str, name: str, bar: type[Any] | None = None) -> Path:
    """Where a file lies, fetched first if it is not in the cache; `bar` is made, like a `tqdm`, to tell how far it is.

    Raises:
        ConfigError: see `fetch`.
    """
    with _reachable(repo, (name,)):
        return Path(huggingface_hub.hf_hub_download(repo, name, tqdm_class=bar))


def fetch(files: Files) -> list[Path]:
    """Where the files lie, fetched first if they are not in the cache (`HF_HOME`), with a progress bar; of patterns, as
    of weights in shards, the folder of the first.

    Raises:
        ConfigError: not on the hub, or there is no way to it; says what to put where by hand.
    """
    if any("*" in name for name in files.files):
        return [fetch_folder(files) / Path(files.files[0]).parent]
    return [fetch_file(files.repo, name) for name in files.files]


def fetch_folder(files: Files, only: Sequence[str] = ()) -> Path:
    """A folder with the files, which are patterns such as `text_encoder/*`, or with those that fit `only`; fetched
    first if they are not in the cache.

    Raises:
        ConfigError: see `fetch`.
    """
    with _reachable(files.repo, files.files):
        return Path(huggingface_hub.snapshot_download(files.repo, allow_patterns=list(only or files.files)))


def folder_on_disk(files: Files) -> Path | None:
    """That folder where all patterns match something in the cache, else None. Looks at folders only."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            huggingface_hub.snapshot_download(files.repo, allow_patterns=list(files.files), local_files_only=True)
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if all(any(folder.glob(pattern)) for pattern in files.files) else None


def download_command(repo: str, names: Sequence[str]) -> str:
    """What to type to fetch files, or patterns, of a repository."""
    patterns = any("*" in name for name in names)
    return f"hf download {repo} " + " ".join(f"--include '{name}'" if patterns else name for name in names)


@contextmanager
def _reachable(repo: str, names: Sequence[str]) -> Iterator[None]:
    """Whatever the hub's client raises for files that it cannot list or download is a ConfigError that says the way
    out: it has a dozen kinds of errors, those of the network and of the library for large files among them."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{', '.join(names)} of {repo} is not in the hub's cache and cannot be fetched: {reason}. Fetch it "
            f"elsewhere with `{download_command(repo, names)}` and copy the cache here (HF_HOME), or give the path"
        ) from error
