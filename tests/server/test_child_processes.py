"""Children of a real server, in a folder that somebody else has put modules into: none of those is imported, and no
child shows a secret of the configuration in its arguments or its environment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from streamdiff.config import Config, IceServer, ServeConfig

pytestmark = pytest.mark.slow
LIMIT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]
STREAM_KEY, CREDENTIAL = "the-stream-key", "the-turn-credential"
SERVE = """
import sys
from functools import partial
from streamdiff.config import Config
from streamdiff.engine.process.engine_process import EngineProcess
from streamdiff.server import main

config = Config.model_validate_json(sys.stdin.read())
sys.exit(main.run(config, supervise=partial(EngineProcess, module="tests.server.scripted")))
"""
# It notes that it was run, and then is the module whose name it has, so that nothing breaks.
FOREIGN = """
import os, sys
open({mark!r}, "a").close()
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
del sys.modules["fractions"]
import fractions
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that is there once a foreign module was run. Mutates: the current folder's contents, see `program`."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    path = tmp_path / "mark"
    (folder / "fractions.py").write_text(FOREIGN.format(mark=str(path)))
    return path


@contextmanager
def program(script: str, mark: Path, serve: ServeConfig) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that serves, run in the foreign folder without importing from there itself; and its address."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        cwd=mark.parent / "foreign", env={**variables, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(Config(serve=serve).model_dump_json())
        process.stdin.close()
        try:
            yield process, next(line for line in process.stdout if "http://" in line)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(LIMIT_S)
            finally:
                process.kill()


def children(process: subprocess.Popen[str]) -> dict[str, str]:
    """Arguments and environment of every process below, by the module that it runs."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        words = child.cmdline()
        found[words[words.index("-m") + 1]] = " ".join([*words, *child.environ().values()])
    return found


def settings(*outputs: str) -> ServeConfig:
    turn = IceServer(url="turn:127.0.0.1", username="somebody", credential=CREDENTIAL)
    return ServeConfig(port=0, open_browser=False, warm_standby=False, outputs=list(outputs), ice_servers=[turn])


def test_an_engine_and_a_writer_show_nothing_and_import_nothing_foreign(mark: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        port = listener.getsockname()[1]
        with program(SERVE, mark, settings(f"rtmp://127.0.0.1:{port}/live/{STREAM_KEY}")) as (process, _):
            connection, _ = listener.accept()  # the writer has imported all it needs
            shown = children(process)
            connection.close()
    assert set(shown) == {"tests.server.scripted", "streamdiff.server.outputs.muxer"}
    for module, text in shown.items():
        assert STREAM_KEY not in text and CREDENTIAL not in text, module
    assert not mark.exists(), "a module of the current folder was run"
