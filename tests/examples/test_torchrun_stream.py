"""The torchrun example as a user runs it: ranks on one machine, on two (agents), live, and ended by Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

import streamdiff
from tests import fork_server
from tests.free_ports import free_port
from tests.server.test_main import wait_until_ready

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torchrun_stream.py"
LIMIT_S = 240
PROMPT = "a yellow star moving up at night"
FRAMES = 20

pytestmark = pytest.mark.slow


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """torchrun; it and its ranks are forked, so that they need not import everything again."""
    environment = {"PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [fork_server.interpreter(), "-m", "torch.distributed.run", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No process of an example outlives its test; others may play beside it."""
    yield
    found = psutil.process_iter(["cmdline", "cwd"])
    ranks = {str(EXAMPLE), "tests.fork_server"}  # in whose name the forked ones run
    mine = [p for p in found if ranks & {*(p.info["cmdline"] or [])} and p.info["cwd"] == str(tmp_path)]
    for process in mine:
        process.kill()
    assert not mine


def pictures(folder: Path) -> list[np.ndarray]:
    return [np.asarray(Image.open(path)) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def plain() -> list[np.ndarray]:
    """The same stream on one stage."""
    with streamdiff.open(PROMPT, seed=3, steps=2, kv_context="staircase") as session:
        return [frame for _, frame in zip(range(FRAMES), session, strict=False)]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


ARGUMENTS = ("--prompt", PROMPT, "--seed", "3", "--steps", "2", "--seconds", str(FRAMES / 40), "--output", "out")


LAST, DEDICATED = ("--decode-rank", "last"), ("--decode-rank", "dedicated")
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (3, LAST),
        pytest.param(4, (), marks=SOAK),
        pytest.param(2, LAST, marks=SOAK),
        pytest.param(2, DEDICATED, marks=SOAK),
    ],
    ids=["three, the last decodes", "four", "two, the last decodes", "two, one decodes"],
)
def test_ranks_make_the_very_frames_of_one(
    tmp_path: Path, plain: list[np.ndarray], nothing_left: None, ranks: int, more: tuple[str, ...]
) -> None:
    """Whichever of them decodes; `test_two_nodes` has the first do it."""
    process = start("--nproc-per-node", str(ranks), str(EXAMPLE), *ARGUMENTS, *more, cwd=tmp_path)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert re.search(rf"{FRAMES} frames, [\d.]+ frames per second; first frame after [\d.]+ s", said)
    shares = [int(share) for share in re.findall(r"rank \d: +(\d+)% of the time at work", said)]
    assert len(shares) == ranks
    assert all(0 < share <= 100 for share in shares)
    assert same(pictures(tmp_path / "out"), plain)


def test_two_nodes(tmp_path: Path, plain: list[np.ndarray], nothing_left: None) -> None:
    """Two agents that meet over a port, each with one rank."""
    port = free_port()
    meet = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    agents = [
        start(*meet, "--local-addr", "127.0.0.1", "--rdzv-id", "two", str(EXAMPLE), *ARGUMENTS, cwd=tmp_path)
        for _ in range(2)
    ]
    said = [agent.communicate(timeout=LIMIT_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    assert same(pictures(tmp_path / "out"), plain)


def test_ctrl_c_keeps_what_was_made(tmp_path: Path, nothing_left: None) -> None:
    process = start("--nproc-per-node", "2", str(EXAMPLE), "--seconds", "3600", "--output", "a.mp4", cwd=tmp_path)
    assert process.stdout is not None
    heard = ""
    while not re.search(r"\| [1-9]\d*/144000", heard):
        heard += process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert "wrote a.mp4" in said, said
    assert (tmp_path / "a.mp4").stat().st_size > 1000


def address(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Where it serves, once it does, and what it said until then."""
    assert process.stdout is not None
    heard = ""
    while not (found := re.search(r"open (http://\S+/) ", heard)):
        line = process.stdout.readline()
        assert line, heard
        heard += line
    return found[1], heard


@SOAK
@pytest.mark.parametrize("end", ["ctrl-c", "killed"])
def test_live_torchrun_starts_a_killed_rank_again_as_often_as_it_is_told(
    tmp_path: Path, nothing_left: None, end: str
) -> None:
    """All ranks, and the web server with them, at the port it had, where the stream goes on from what was kept. After
    Ctrl-C, or when one is killed once too often, it is over, and nothing stays."""
    port = str(free_port())
    again = ("--nproc-per-node", "2", "--max-restarts", "1")
    state = tmp_path / "state"
    process = start(
        *again, str(EXAMPLE), "--serve", "--port", port, "--keep-s", "0.2", "--state-dir", str(state), cwd=tmp_path
    )

    def rank_1() -> psutil.Process:
        ranks = [child for child in fork_server.behind(process.pid).children() if child.environ().get("RANK") == "1"]
        assert len(ranks) == 1
        return ranks[0]

    assert httpx.get(address(process)[0] + "readyz", timeout=60).status_code == 200
    first, end_s = rank_1(), time.monotonic() + LIMIT_S
    while not (state / "default.session").exists():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    first.kill()
    url, heard = address(process)
    assert "<video" in httpx.get(url, timeout=60).text
    wait_until_ready(url)  # or the second may be killed before the session is there again
    assert rank_1() != first
    if end == "ctrl-c":
        process.send_signal(signal.SIGINT)
    else:
        rank_1().kill()
    said, _ = process.communicate(timeout=LIMIT_S)
    assert not list(tmp_path.glob("*.mp4")), "no file that nobody asked for"
    assert "open http" not in said
    assert "Session default continues from a snapshot, frame" in heard + said, said
    if end == "ctrl-c":
        assert "streamdiff:" not in said, "no complaint at the end"
    else:
        assert process.returncode == 1
        assert "rank 1 is gone" in said, said
