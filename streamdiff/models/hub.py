"""Files of published models: from the hub's cache, or over the network where there is one."""

from __future__ import annotations

from pathlib import Path

from streamdiff.errors import ConfigError
from streamdiff.models.catalogue import Files


def fetch(files: Files) -> list[Path]:
    """Where the files lie, fetched first if they are not in the cache (`HF_HOME`), with a progress bar.

    Raises:
        ConfigError: not on the hub, or there is no way to it; says what to put where by hand.
    """
    if not files.on_hub:
        raise ConfigError(f"{', '.join(files.files)} of {files.repo} cannot be fetched from here; give the file's path")
    return [_fetch(files.repo, name) for name in files.files]


def _fetch(repo: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{name} of {repo} is not in the hub's cache and cannot be fetched: {reason}. Fetch it elsewhere with "
            f"`hf download {repo} {name}` and copy the cache here (HF_HOME), or give the file's path"
        ) from None
