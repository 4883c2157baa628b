"""An engine that brings its own web server: for programs that are an engine already, as rank 0 under torchrun is."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

from streamdiff import child_process
from streamdiff.config import Config
from streamdiff.engine.process import private_folder
from streamdiff.engine.process.main import EventHook, Stop, run
from streamdiff.engine.process.parent_engine import BYE

_WEB_LIMIT_S = 10.0


def host(config: Config, tap: EventHook = lambda engine, event: None) -> int:
    """Serve `config` until Ctrl-C or SIGTERM, with this process as the engine and a child as the web server.

    `tap` is shown the engine and every event of the streams, in this process. Returns the exit code.

    Raises:
        EngineFailure: a rank of the ring failed.
    """
    with tempfile.TemporaryDirectory(prefix="streamdiff-") as folder:
        private_folder.write_config(Path(folder), config)
        stop = Stop(Path(folder))
        stop.listen()
        web = subprocess.Popen(
            [sys.executable, "-m", "streamdiff.server.main", "--address", folder],
            env=child_process.environment(),
            stdin=subprocess.PIPE,
            start_new_session=True,  # a launcher signals whole sessions; the web process ends when this one lets it
        )
        assert web.stdin is not None
        try:
            code = run(Path(folder), stop, tap=tap)
            with contextlib.suppress(BrokenPipeError):  # the web process has ended by itself
                web.stdin.write(BYE)
                web.stdin.flush()
            return code
        finally:
            web.stdin.close()
            try:
                web.wait(_WEB_LIMIT_S)
            except subprocess.TimeoutExpired:
                web.kill()
                web.wait()
