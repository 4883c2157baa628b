"""A standby engine process: has imported everything, which takes seconds with torch, and waits to take over.

The IPC folder has a pipe, which the web process holds open and writes to when the spare is needed; that ends
unwritten when the web process is gone, however it went. Torch-free itself; holds no model and no CUDA context.
"""

from __future__ import annotations

import importlib
import os
import select
import shutil
import sys
import threading
from pathlib import Path

from streamdiff.heavy_import import heavy_import

_PIPE = "begin"
_EVERYBODY = b"." * 1024
"""More than there are ranks, each of which reads one byte."""
_SETTLE_S = 10.0
"""A stream that begins has the machine for itself for so long."""
_NICE = 10
"""Of the import, behind a stream that plays: a tenth of a core that both want."""


def open_pipe(folder: Path) -> int:
    """Make the pipe; returns its descriptor, for `tell` and to close when the process is stopped. Never blocks."""
    os.mkfifo(folder / _PIPE, 0o600)
    return os.open(folder / _PIPE, os.O_RDWR | os.O_NONBLOCK)


def tell(descriptor: int) -> None:
    """Wake every process that waits at the pipe, now or later."""
    os.write(descriptor, _EVERYBODY)


def wait(folder: Path, module: str) -> None:
    """Wait for `tell`, and import `module` after `_SETTLE_S` if it has not come by then. Ends the process, and removes
    `folder`, when the web process has died."""
    try:
        pipe = os.open(folder / _PIPE, os.O_RDONLY | os.O_NONBLOCK)  # or it waits for one who writes, who may be gone
    except FileNotFoundError:
        os._exit(0)  # another rank has seen it, and removed the folder
    importing: threading.Thread | None = None
    try:
        byte = os.read(pipe, 1)  # empty: the web process is gone already, which `select` would not say
    except BlockingIOError:
        readable, _, _ = select.select([pipe], [], [], _SETTLE_S)
        if not readable:
            importing = threading.Thread(target=_import, args=(module,), name="import", daemon=True)
            importing.start()
        os.set_blocking(pipe, True)
        byte = os.read(pipe, 1)
    if not byte:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.close(pipe)
    if importing is not None:
        importing.join()


def _import(module: str) -> None:
    if sys.platform == "linux":  # where this is of one thread: the engine itself shall not be as modest
        os.nice(_NICE)
    with heavy_import():
        importlib.import_module(module)
