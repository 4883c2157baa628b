"""`streamdiff.load`: a stream that continues from a snapshot file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamdiff import api
from streamdiff.api import StreamSession, model_config
from streamdiff.heavy_import import heavy_import


def load(path: str | Path, **options: Any) -> StreamSession:
    """Load a model, and go on with a stream that `StreamSession.save` wrote: the next frame is the one that was to be
    taken next, and all that follow are those of the stream that was saved, to the bit, on the same hardware. Of a file
    that a server gave the next frame is the one after those that it had made. A stream that was paused goes on too.

    Args:
        path: the file.
        options: those that the stream was opened with, see `streamdiff.open`. `stages`, `threads`, `decode_rank` and
            `device` may be others. The file names no model, so that a file from elsewhere has nothing loaded.

    Raises:
        ConfigError: no snapshot, one of another format, or an option that cannot be used.
        RequestError: it is of another model, other weights, another size or window; says which.
    """
    config = model_config(options)
    with heavy_import():
        from streamdiff.pipeline.snapshot.file import Snapshot  # imports torch
    snapshot = Snapshot.read(Path(path))
    session = StreamSession(api.load(config), None)
    try:
        session.go_on_from(snapshot)
    except BaseException:
        session.close()
        raise
    return session
