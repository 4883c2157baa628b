"""The engine process: loads the pipeline, sends `Ready`, then serves the IPC socket until it is stopped.

It ends on `Shutdown`, on SIGTERM, and when its parent is gone: the parent holds the other end of its standard input,
so end of file there means the parent died, however it died. Knows nothing about viewers or HTTP.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import math
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from streamdiff import clock
from streamdiff.config import ModelConfig
from streamdiff.engine.engine import Engine
from streamdiff.engine.messages import Alive, Failed, Shutdown
from streamdiff.engine.process.ipc import EXIT_CONFIG, EngineServer, open_pipe, read_config
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.heavy_import import heavy_import

if TYPE_CHECKING:
    from streamdiff.pipeline.streaming_pipeline import StreamingPipeline

# How long `step` may wait for a decode with nothing else to do: the most by which a command can be late then.
_DECODE_WAIT_S = 0.01
# How often an idle engine looks whether its pipeline is well.
_IDLE_WAIT_S = 0.5
# How often a busy engine says that it lives; an idle one does whenever it looks.
_ALIVE_S = 0.25
# A launcher that lost a rank ends the others at once. How long to wait then for the pipeline's own failure.
_FAILURE_GRACE_S = 1.0
# What takes the seconds of a start: torch, and all that loads a pipeline.
_HEAVY = "streamdiff.pipeline.build"
# How long the process may take to end by itself after its parent died.
_ORPHAN_LIMIT_S = 5.0


# A stream that begins has the machine for itself for so long; then a standby process imports what is heavy, behind a
# stream that plays: with a tenth of a core that both want.
_SETTLE_S = 10.0
_NICE = 10


class Stop:
    """Stop request of the process, by SIGTERM, SIGINT or its parent's death, with a file descriptor to poll for it.
    Mutates: this process's signal handlers."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of the IPC socket, removed here once the parent, whose it is, is gone."""
        self._folder = folder
        self.requested = self._orphaned = False
        self.loading = True
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch_parent, name="parent-watch", daemon=True).start()

    @property
    def fd(self) -> int:
        """File descriptor that is readable once a stop was requested."""
        return self._reader.fileno()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self.loading:
            raise SystemExit(0)

    def _watch_parent(self) -> None:
        """Request a stop at end of file on standard input, which means that the parent has died."""
        # os.read, not sys.stdin: a thread blocked inside a buffered reader holds its lock and aborts the interpreter.
        while os.read(0, 4096):
            pass
        self._orphaned = True
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_ORPHAN_LIMIT_S)  # the process ends meanwhile, and this thread with it
        self.clean_up()
        os._exit(1)  # something hangs, and nobody is left to end it

    def clean_up(self) -> None:
        """Remove the IPC folder if the parent is gone."""
        if self._orphaned:
            shutil.rmtree(self._folder, ignore_errors=True)


def wait_as_standby(folder: Path, module: str) -> None:
    """Wait at the pipe in `folder` until this process is needed, and import `module` after `_SETTLE_S` if that has not
    come by then. Ends the process, and removes `folder`, when the web process, which holds the pipe open, has died."""
    try:
        pipe = open_pipe(folder)
    except FileNotFoundError:
        os._exit(0)  # another rank has seen it, and removed the folder
    importing: threading.Thread | None = None
    try:
        byte = os.read(pipe, 1)  # empty: the web process is gone already, which `select` would not say
    except BlockingIOError:
        if not select.select([pipe], [], [], _SETTLE_S)[0]:
            importing = threading.Thread(target=_import_modestly, args=(module,), name="import", daemon=True)
            importing.start()
        os.set_blocking(pipe, True)
        byte = os.read(pipe, 1)
    if not byte:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.close(pipe)
    if importing is not None:
        importing.join()


def _import_modestly(module: str) -> None:
    if sys.platform == "linux":  # where this is of one thread: the engine itself shall not be as modest
        os.nice(_NICE)
    with heavy_import():
        importlib.import_module(module)


def _load_runtime(config: ModelConfig) -> StreamingPipeline:
    with heavy_import():
        from streamdiff.pipeline.build import load_pipeline  # torch takes seconds to import

    return load_pipeline(config)


def _serve(server: EngineServer, engine: Engine, stop: Stop) -> None:
    """The engine loop: handle commands, step the engine, send events. Waits in `poll` when the engine is idle."""
    alive_s = clock.monotonic_s()
    while not stop.requested:
        if clock.monotonic_s() >= alive_s:
            alive_s = clock.monotonic_s() + _ALIVE_S
            server.send(Alive())
        for command in server.poll(0.0 if engine.busy else _IDLE_WAIT_S):
            for event in engine.handle(command):
                server.send(event)
            if isinstance(command, Shutdown):
                return
        for event in engine.step(_DECODE_WAIT_S):
            server.send(event)
    engine.check(_FAILURE_GRACE_S)


def main(argv: Sequence[str] | None = None, *, load: Callable[[ModelConfig], StreamingPipeline] = _load_runtime) -> int:
    """Run the process; returns its exit code. `load` makes the pipeline."""
    parser = argparse.ArgumentParser(prog="python -m streamdiff.engine.process.main", description="the engine process")
    parser.add_argument("--address", type=Path, required=True, help="private folder: IPC socket, configuration")
    parser.add_argument("--spare", action="store_true", help="import everything, and wait to be needed")
    arguments = parser.parse_args(argv)
    if arguments.spare:
        wait_as_standby(arguments.address, _HEAVY)
    with log_on_stderr():
        if int(os.environ.get("RANK", "0")) > 0:
            return run_as_worker(read_config(arguments.address).served_model())
        return _run(arguments.address, Stop(arguments.address), load)


@contextmanager
def log_on_stderr() -> Iterator[None]:
    """What the package logs, settings that were chosen included, is written to standard error: for programs, where
    Python's own programs that use the package configure logging as they like."""
    logger, handler = logging.getLogger("streamdiff"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("streamdiff: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _run(address: Path, stop: Stop, load: Callable[[ModelConfig], StreamingPipeline]) -> int:
    """Run the engine loop on the IPC socket and configuration in folder `address`; returns the exit code.

    Ends when `stop` is requested or the web process sends `Shutdown`.
    """
    server = EngineServer(address, wake_fd=stop.fd)
    engine: Engine | None = None
    try:
        config = read_config(address)
        max_ahead_frames = math.ceil(config.playback.max_ahead_s * config.playback.fps)
        engine = Engine(load(config.served_model()), max_ahead_frames, config.serve.rewind_mb * 1_000_000)
        stop.loading = False
        server.send(engine.ready())
        _serve(server, engine, stop)
    except ConfigError as error:
        server.send(Failed(str(error)))
        return EXIT_CONFIG
    except Exception as error:
        # The one outer frame of this process: it says where the sessions were, and re-raises the error.
        error.add_note(f"in the engine process, {engine.describe() if engine else 'while loading the model'}")
        what = str(error) if isinstance(error, EngineFailure) else f"{type(error).__name__}: {error}"
        server.send(Failed("; ".join([what, *error.__notes__])))
        raise
    finally:
        if engine is not None:
            engine.close()
        server.close()
        stop.clean_up()
    return 0


def run_as_worker(config: ModelConfig) -> int:
    """Run a rank other than 0; returns the exit code. Rank 0 reports errors of the configuration."""
    with heavy_import():
        from streamdiff.pipeline.rank_process import run_worker  # torch takes seconds to import

    return work_for_rank_0(partial(run_worker, config))


def work_for_rank_0(work: Callable[[], None]) -> int:
    """Run `work`; returns the exit code. On ConfigError it first waits for rank 0, which reports the same error."""
    try:
        work()
    except ConfigError:
        threading.Event().wait(_ORPHAN_LIMIT_S)
        return EXIT_CONFIG
    return 0


def main_and_end(argv: Sequence[str] | None = None) -> NoReturn:
    """Be the engine process, to its end, whatever raises: `main`, and then no waiting for anything.

    Taking the interpreter down with torch in it takes seconds, and Ctrl-C waits for it; and it waits for threads, of
    which one that waits for a device that is stuck never ends.
    """
    sys.excepthook = _end
    _leave(main(argv))


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: print an uncaught exception, and exit with code 1."""
    sys.__excepthook__(kind, error, trace)
    _leave(1)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main_and_end()
