"""The whole server as a process: addresses, ports, Ctrl-C, and the end of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.errors import ConfigError
from streamdiff.server import main
from tests import fork_server
from tests.server.test_restart import watching

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]

ROOT = Path(__file__).resolve().parents[2]
REAL = sys.executable
"""The interpreter itself; in a test that forks, `sys.executable` is what stands for it."""
Running = tuple[subprocess.Popen[str], str]


def start(
    *options: str, python: str | None = None, descriptors: tuple[int, int] | None = None
) -> subprocess.Popen[str]:
    """`descriptors`: soft and hard limit, of the real interpreter only."""
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, descriptors)
    return subprocess.Popen(
        [python or sys.executable, "-m", "tests.server.scripted", "serve", "--no-browser", *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=None if descriptors is None else limit,
    )


def printed_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"https?://\S+/", line):
            return found.group(0)
    raise AssertionError(process.communicate()[1])


@pytest.fixture
def running() -> Iterator[Running]:
    process = start()
    try:
        yield process, printed_address(process)
    finally:
        process.kill()
        process.communicate()


def wait_until_ready(url: str) -> None:
    """The address is printed before the default session is open."""
    with httpx.Client(base_url=url, timeout=20) as http:
        while (status := http.get("/readyz").status_code) != 200:
            assert status == 503


@pytest.mark.parametrize(("number", "python"), [(signal.SIGINT, REAL), (signal.SIGTERM, None)], ids=["2-real", "15"])
def test_it_serves_and_ends_clean(number: signal.Signals, python: str | None) -> None:
    """Also with an interpreter that starts and is taken down, of the server and of its engines."""
    process = start(python=python)
    url = printed_address(process)
    wait_until_ready(url)
    engine, spare = sorted(fork_server.behind(process.pid).children(), key=psutil.Process.create_time)
    assert "streamdiff" in httpx.get(url, timeout=20).text
    process.send_signal(number)
    _, complaints = process.communicate(timeout=30)
    assert process.returncode == 0
    assert complaints == ""
    assert not engine.is_running() and not spare.is_running()


def test_a_port_in_use_is_one_line_and_exit_code_2(running: Running) -> None:
    port = running[1].rstrip("/").rsplit(":", 1)[1]
    second = start("--port", port)
    _, complaints = second.communicate(timeout=60)
    assert second.returncode == 2
    [line] = complaints.splitlines()
    assert port in line
    assert "in use" in line
    assert "--port" in line
    assert httpx.get(running[1] + "healthz", timeout=20).status_code == 200


@pytest.mark.parametrize("host", ["203.0.113.77", "no.such.host.invalid"])
def test_an_address_that_is_not_ours(host: str) -> None:
    assert main.run(Config(serve=ServeConfig(host=host, port=0))) == 2
    with pytest.raises(ConfigError):
        main.listen(host, 0)


def test_the_address_that_is_printed() -> None:
    for host, expected in [("127.0.0.1", "http://127.0.0.1:{}/"), ("0.0.0.0", "http://127.0.0.1:{}/")]:
        with main.listen(host, 0) as listener:
            assert main.address_of(listener) == expected.format(listener.getsockname()[1])
    if socket.has_ipv6:
        with main.listen("::1", 0) as listener:
            assert main.address_of(listener) == f"http://[::1]:{listener.getsockname()[1]}/"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_others_are_let_in_only_with_a_token_or_knowingly(host: str, tmp_path: Path) -> None:
    refused = start("--host", host)
    _, complaints = refused.communicate(timeout=60)
    assert refused.returncode == 2
    [line] = complaints.splitlines()
    assert "--control-token-file" in line and "--insecure" in line and host in line
    (tmp_path / "token").write_text("a-token-of-some-length")
    for options in (["--insecure"], ["--control-token-file", str(tmp_path / "token")]):
        process = start("--host", host, *options)
        status = httpx.post(printed_address(process) + "api/control", json={"type": "pause"}, timeout=20).status_code
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert (process.returncode, status) == (0, 200 if options == ["--insecure"] else 401)


async def test_viewers_may_finish_while_no_session_is_opened_any_more() -> None:
    process = start("--drain-s", "60")
    url = printed_address(process)
    async with httpx.AsyncClient(base_url=url, timeout=20) as http, watching(http) as viewer:
        await viewer.until_frame(lambda pts, colour: True)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert "60 s" in await asyncio.to_thread(process.stdout.readline)
        refused = await http.post("/api/sessions", json={})
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert (await http.get("/readyz")).status_code == 503
        await viewer.until_frame(lambda pts, colour: True)
        await http.delete(viewer.location)
    _, complaints = process.communicate(timeout=30)
    assert (process.returncode, complaints) == (0, "")


def test_an_engine_that_dies_is_named_and_ends_the_server_where_it_is_not_started_again() -> None:
    process = start("--restarts", "0")
    printed_address(process)
    [engine] = fork_server.behind(process.pid).children()
    os.kill(engine.pid, signal.SIGKILL)
    _, complaints = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "SIGKILL" in complaints.splitlines()[0]
    assert "Traceback" not in complaints


def test_silent_connections_leave_descriptors_for_health_and_the_log_short() -> None:
    hard = 1024
    process = start(python=REAL, descriptors=(128, hard))
    try:
        url = printed_address(process)
        wait_until_ready(url)
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert re.search(rf"Max open files +{hard} +{hard} ", limits)
        port = int(url.rsplit(":")[2].strip("/"))
        with contextlib.ExitStack() as silent:
            for _ in range(1200):
                silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            assert [httpx.get(f"{url}healthz", timeout=20).status_code for _ in range(5)] == [200] * 5
        assert httpx.get(f"{url}api/state", timeout=20).status_code == 200
    finally:
        process.terminate()
        said = process.communicate(timeout=30)
    assert process.returncode == 0 and said[1] == ""
