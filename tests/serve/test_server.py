"""The whole server as a process: addresses, ports, Ctrl-C, and the end of the engine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.errors import ConfigError
from streamdiff.serve import server

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
Running = tuple[subprocess.Popen[str], str]


def _start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.serve.scripted", "serve", "--no-browser", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://\S+/", line):
            return found.group(0)
    raise AssertionError(process.communicate()[1])


@pytest.fixture
def running() -> Iterator[Running]:
    process = _start()
    try:
        yield process, _address(process)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_and_ends_clean(number: signal.Signals) -> None:
    process = _start()
    url = _address(process)
    [engine] = psutil.Process(process.pid).children()
    assert httpx.get(url + "readyz", timeout=20).status_code == 200
    assert "streamdiff" in httpx.get(url, timeout=20).text
    process.send_signal(number)
    _, complaints = process.communicate(timeout=30)
    assert process.returncode == 0
    assert complaints == ""
    assert not engine.is_running()


def test_it_can_be_ended_while_the_engine_starts() -> None:
    process = _start()
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_port_in_use_is_one_line_and_exit_code_2(running: Running) -> None:
    port = running[1].rstrip("/").rsplit(":", 1)[1]
    second = _start("--port", port)
    _, complaints = second.communicate(timeout=60)
    assert second.returncode == 2
    [line] = complaints.splitlines()
    assert port in line
    assert "in use" in line
    assert "--port" in line
    assert httpx.get(running[1] + "healthz", timeout=20).status_code == 200


@pytest.mark.parametrize("host", ["203.0.113.77", "no.such.host.invalid"])
def test_an_address_that_is_not_ours(host: str) -> None:
    assert server.run(Config(serve=ServeConfig(host=host, port=0))) == 2
    with pytest.raises(ConfigError, match=re.escape(host)):
        server._listen(host, 0)


def test_the_address_that_is_printed() -> None:
    for host, expected in [("127.0.0.1", "http://127.0.0.1:{}/"), ("0.0.0.0", "http://127.0.0.1:{}/")]:
        with server._listen(host, 0) as listener:
            assert server.address_of(listener) == expected.format(listener.getsockname()[1])
    if socket.has_ipv6:
        with server._listen("::1", 0) as listener:
            assert server.address_of(listener) == f"http://[::1]:{listener.getsockname()[1]}/"


def test_an_engine_that_dies_is_named_and_ends_the_server(running: Running) -> None:
    process, _ = running
    [engine] = psutil.Process(process.pid).children()
    os.kill(engine.pid, signal.SIGKILL)
    _, complaints = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "SIGKILL" in complaints.splitlines()[0]
    assert "Traceback" not in complaints


def test_an_engine_that_raises_says_where() -> None:
    process = _start("--name", "dies-2")
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "out of paint" in complaints
    assert "session 'default'" in complaints
