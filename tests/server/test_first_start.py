"""The first start of a published model, a whole server against a hub on loopback: what is told while it is fetched."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.free_ports import free_port
from tests.hub_server import Hub, running
from tests.pipeline.processes import ROOT

pytestmark = pytest.mark.slow

LIMIT_S = 240.0
WEIGHTS = "checkpoints/self_forcing_dmd.pt"
FILES = {
    "gdhe17/Self-Forcing": {WEIGHTS: b"w" * 1000},
    "Wan-AI/Wan2.1-T2V-1.3B": {"Wan2.1_VAE.pth": b"v"},
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {"text_encoder/config.json": b"{}", "tokenizer/tokenizer.json": b"{}"},
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running({repo: dict(files) for repo, files in FILES.items()}) as hub:
        hub.held.add(WEIGHTS)
        yield hub


@contextmanager
def server(hub: Hub, home: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """`serve --model self-forcing` with a scripted engine, which reads none of the files."""
    port = str(free_port())
    command = [sys.executable, "-m", "tests.server.scripted", "serve", "--no-browser", "--name", "self-forcing"]
    process = subprocess.Popen(
        [*command, "--port", port, *options],
        cwd=ROOT,
        env=hub.environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
        try:
            yield process, http
        finally:
            process.kill()
            process.communicate()


def until(http: httpx.Client, process: subprocess.Popen[str], code: str | None) -> httpx.Response:
    """The answer of /readyz once it says `code`; None: it is ready."""
    while process.poll() is None:
        with suppress(httpx.TransportError):  # it does not listen yet
            answer = http.get("/readyz")
            if answer.json().get("code") == code:
                return answer
    raise AssertionError(process.communicate()[0])


def test_while_a_model_is_fetched_it_lives_and_says_how_far_it_is(hub: Hub, tmp_path: Path) -> None:
    with server(hub, tmp_path) as (process, http):
        answer = until(http, process, "fetching")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        size = "0.00B of 1.00kB; 4 files, 1.00kB, still missing"
        assert answer.json()["detail"] == f"Fetching {WEIGHTS} of gdhe17/Self-Forcing: {size}."
        assert http.get("/healthz").status_code == 200
        page = http.get("/")
        assert page.headers["refresh"] == "1" and f"Fetching {WEIGHTS}" in page.text
        hub.go.set()
        until(http, process, None)
        process.send_signal(signal.SIGINT)
        log, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert f"fetching {WEIGHTS} of gdhe17/Self-Forcing" in log and "fetching Wan2.1_VAE.pth" in log
        assert log.index("fetching") < log.index("loading the model 'self-forcing'")
    assert [name for name, _ in hub.transfers].count(WEIGHTS) == 1


def test_files_are_named_to_nobody_where_watching_takes_a_token(hub: Hub, tmp_path: Path) -> None:
    for name in ("view", "control"):
        (tmp_path / name).write_text(f"{name}-0123456789abcdef")
    tokens = ("--view-token-file", str(tmp_path / "view"), "--control-token-file", str(tmp_path / "control"))
    with server(hub, tmp_path, *tokens) as (process, http):
        assert until(http, process, "fetching").json()["detail"] == "Fetching the model's files."
