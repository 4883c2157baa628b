"""The whole server as a process: addresses, ports, Ctrl-C, the end of the engine, and a trace of what it does."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from streamdiff.config import Config, ServeConfig
from streamdiff.errors import ConfigError
from streamdiff.pipeline.profiler import TRACE
from streamdiff.server import main
from tests import fork_server
from tests.server.test_restart import LIMIT_S, MODEL, serving, start, watching

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]

REAL = sys.executable
"""The interpreter itself; in a test that forks, `sys.executable` is what stands for it."""


def wait_until_ready(url: str) -> None:
    """The address is printed before the default session is open."""
    with httpx.Client(base_url=url, timeout=20) as http:
        while (status := http.get("/readyz").status_code) != 200:
            assert status == 503


@pytest.mark.parametrize(("number", "python"), [(signal.SIGINT, REAL), (signal.SIGTERM, None)], ids=["2-real", "15"])
def test_it_serves_and_ends_clean(number: signal.Signals, python: str | None) -> None:
    """Also with an interpreter that starts and is taken down, of the server and of its engines."""
    server = start(python=python)
    url = server.address()
    wait_until_ready(url)
    children = fork_server.behind(server.process.pid).children()
    assert len(children) == 2, "an engine and a spare"
    assert "streamdiff" in httpx.get(url, timeout=20).text
    server.process.send_signal(number)
    server.process.wait(LIMIT_S)
    assert (server.close(), server.complaints) == (0, "")
    assert not any(each.is_running() for each in children)


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
async def test_others_are_let_in_only_with_a_token_or_knowingly(host: str, tmp_path: Path) -> None:
    refused = start("--host", host)
    assert refused.process.wait(LIMIT_S) == refused.close() == 2
    [line] = refused.complaints.splitlines()
    assert "--control-token-file" in line and "--insecure" in line and host in line
    (tmp_path / "token").write_text("a-token-of-some-length")
    for options, status in ((["--insecure"], 200), (["--control-token-file", str(tmp_path / "token")], 401)):
        async with serving("--host", host, *options) as (_, http):
            assert (await http.post("/api/control", json={"type": "pause"})).status_code == status


async def test_viewers_may_finish_while_no_session_is_opened_any_more() -> None:
    async with serving("--drain-s", "60") as (server, http):
        async with watching(http) as viewer:
            await viewer.until_frame(lambda pts, colour: True)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.stdout is not None
            assert "60 s" in await asyncio.to_thread(server.process.stdout.readline)
            refused = await http.post("/api/sessions", json={})
            assert (refused.status_code, refused.json()["code"]) == (503, "draining")
            assert (await http.get("/readyz")).status_code == 503
            await viewer.until_frame(lambda pts, colour: True)
            await http.delete(viewer.location)
        await asyncio.to_thread(server.process.wait, LIMIT_S)
    assert server.complaints == ""


async def test_silent_connections_leave_descriptors_for_health_and_the_log_short() -> None:
    hard = 1024
    async with serving(python=REAL, descriptors=(128, hard)) as (server, http):
        url, port = str(http.base_url), http.base_url.port
        wait_until_ready(url)
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        assert re.search(rf"Max open files +{hard} +{hard} ", limits)
        with contextlib.ExitStack() as silent:
            for _ in range(1200):
                silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            assert [httpx.get(f"{url}healthz", timeout=20).status_code for _ in range(5)] == [200] * 5
        assert httpx.get(f"{url}api/state", timeout=20).status_code == 200
    assert server.complaints == ""


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.soak), 2])
async def test_a_stream_that_is_watched_is_traced(tmp_path: Path, stages: int) -> None:
    (tmp_path / "alone.yaml").write_text("serve: {warm_standby: false}")  # no spare takes the engine's time
    options = ("--config", str(tmp_path / "alone.yaml"), "--profile", str(tmp_path / "costs"))
    ring = ("--stages", "2", "--kv-context", "staircase") if stages == 2 else ()
    async with serving(*options, *ring, program=MODEL) as (server, http), watching(http), asyncio.timeout(LIMIT_S):
        while "streamdiff: trace of 4 chunks" not in server.complaints:
            await asyncio.sleep(0.05)
    assert [path.name for path in (tmp_path / "costs").iterdir()] == [TRACE]
    with gzip.open(tmp_path / "costs" / TRACE, "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"aten::scaled_dot_product_attention", "aten::addmm"} <= names
    assert sum(name.startswith("ProfilerStep#") for name in names) == 4
