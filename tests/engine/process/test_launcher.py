"""Real ranks behind a supervisor: they stream, and when one of them fails it is named and nothing is left behind.
Others get no access, and see no secret."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import pickle
import re
import signal
import socket
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from streamdiff.config import Config, IceServer, ModelConfig, ServeConfig
from streamdiff.engine.messages import Failed, FrameBatch, LoadFigures, Open, Shown
from streamdiff.engine.process import ipc
from streamdiff.engine.process.engine_process import EngineProcess
from streamdiff.engine.process.ipc import EngineClient
from streamdiff.errors import EngineFailure
from tests.fork_server import behind

LIMIT_S = 600.0  # ends what hangs; a busy machine takes minutes
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]
MORE = pytest.mark.soak
"""The same with more ranks than it takes, or where another case has the same way to its end."""


@asynccontextmanager
async def ring(
    folder: Path,
    model: ModelConfig,
    module: str = "streamdiff.engine.process.main",
    spare: bool = False,
    serve: ServeConfig | None = None,
    **limits: float,
) -> AsyncIterator[tuple[EngineProcess, EngineClient, list[psutil.Process]]]:
    """A ring, and its processes: the launcher first. Afterwards none of them and no file is left."""
    shared = set(Path("/dev/shm").iterdir())
    config = Config(model=model, serve=serve or ServeConfig())
    supervisor = EngineProcess(config, start_limit_s=LIMIT_S, module=module, **limits)
    if spare:
        await supervisor.prepare()
    client = await supervisor.start()
    launcher = psutil.Process(supervisor.pid)
    processes = [launcher, *sorted(behind(launcher.pid).children(), key=lambda process: int(process.environ()["RANK"]))]
    try:
        yield supervisor, client, processes
    finally:
        await supervisor.stop()
        _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
        for process in alive:
            process.kill()
    assert not alive
    assert not left(folder)
    assert set(Path("/dev/shm").iterdir()) <= shared


def left(folder: Path) -> list[Path]:
    """Files in `folder`, but for the cache that torch's compiler keeps for the next time."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files of this process and of the ranks go."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


async def watch(client: EngineClient, chunks: int) -> str:
    """Look at a stream until it has brought so many chunks, or ends; returns why it ended, or an empty text."""
    async with asyncio.timeout(LIMIT_S):
        async for event in client.events():
            if isinstance(event, Failed):
                return event.reason
            if isinstance(event, FrameBatch):
                try:
                    await client.send(Shown("one", event.first + len(event.pictures)))
                except EngineFailure as failure:  # it ended while it was told
                    return str(failure)
                if event.chunk == chunks:
                    return ""
    return "ended"


@pytest.mark.parametrize(
    ("stages", "spare"),
    [pytest.param(3, False, marks=MORE), (2, True), pytest.param(4, False, marks=MORE)],
    ids=["new", "spare", "four"],
)
async def test_ranks_stream_and_end_together(folder: Path, stages: int, spare: bool) -> None:
    """When they are told to, where a spare took over; else because their launcher dies: `ring` looks."""
    model = ModelConfig(stages=stages, kv_context="staircase")
    async with ring(folder, model, spare=spare) as (_, client, processes):
        assert len(processes) - 1 == stages
        await client.send(Open("one", "a red circle moving left"))
        assert await watch(client, 4) == ""
        async with asyncio.timeout(LIMIT_S):
            told = await anext(event async for event in client.events() if isinstance(event, LoadFigures))
        assert len(told.busy_s) == stages and min(told.busy_s) > 0
        if not spare:
            os.kill(processes[0].pid, signal.SIGKILL)
            assert await watch(client, 1000)


async def test_a_rank_that_only_decodes_sends_pictures_and_ends_with_the_head(folder: Path) -> None:
    """Latents go to it and pictures come back, in its prompt's colours. The head dies: so do stages and decoder."""
    model = ModelConfig(stages=2, kv_context="staircase", decode_rank="dedicated")
    async with ring(folder, model) as (supervisor, client, processes):
        await client.send(Open("one", "a red circle at night"))
        async with asyncio.timeout(LIMIT_S):
            batch = await anext(event async for event in client.events() if isinstance(event, FrameBatch))
        ready = supervisor.ready
        assert batch.pictures.shape[1:] == (ready.height, ready.width, 3)
        rgb = batch.pictures.astype(int)
        assert (rgb[..., 0] - rgb[..., 2]).max() > 100 and rgb.mean() < 100, "something red in the dark"
        os.kill(processes[1].pid, signal.SIGKILL)
        assert "the engine ended with exit code 1" in await watch(client, 1000)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(
            "raise",
            r"rank {rank} failed at session 0, chunk 6, step \d: ArithmeticError: the test's own fault",
            marks=MORE,
        ),
        ("kill", r"rank {rank} is gone .*rank \d noticed it after session 0, chunk \d, step \d"),
        ("hang", r"rank {rank} hangs: 6 s at session 0, chunk 6, step \d"),
        ("device", r"rank {rank} hangs: its device is at session 0, chunk 6, step \d for 6 s"),
        pytest.param(
            "stop", r"rank {rank} hangs: silent for 6 s .*in the ring: session 0, chunk \d, step \d", marks=MORE
        ),
    ],
    ids=["raise", "kill", "hang", "device", "stop"],
)
@pytest.mark.parametrize(("stages", "rank"), [(2, 1), *(pytest.param(4, rank, marks=MORE) for rank in (1, 2, 3))])
async def test_a_rank_that_fails_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, words: str, stages: int, rank: int
) -> None:
    if stages == 2 and fault in ("kill", "stop"):
        stages, rank = 3, 2  # a rank that is neither its neighbour nor the head takes part
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULT_RANK", str(rank))
    watchdog_s = 6.0 if fault in ("hang", "device", "stop") else 60.0
    model = ModelConfig(stages=stages, kv_context="staircase", watchdog_s=watchdog_s)
    async with ring(folder, model, "tests.engine.faulty") as (_, client, _):
        await client.send(Open("one", "a red circle moving left"))
        reason = await watch(client, 1000)
    assert re.search(words.format(rank=rank), reason), reason
    assert "in the ring: session 0, chunk" in reason
    assert "session 'one' at chunk" in reason, "the session's own name too"


async def test_an_engine_of_one_rank_whose_device_is_stuck_says_so_and_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, although its decoder waits for the device for ever: else the supervisor would have to kill it."""
    monkeypatch.setenv("FAULT", "device")
    monkeypatch.setenv("FAULT_RANK", "0")
    supervisor = EngineProcess(
        Config(model=ModelConfig(watchdog_s=6.0)), start_limit_s=LIMIT_S, module="tests.engine.faulty"
    )
    client = await supervisor.start()
    try:
        await client.send(Open("one", "a red circle moving left"))
        reason = await watch(client, 1000)
        assert await supervisor.wait() == 1
    finally:
        await supervisor.stop()
    assert re.search(r"rank 0 hangs: its device is at session 0, chunk 6, step \d for 6 s", reason), reason
    assert "session 'one' at chunk" in reason


# ---- what a ring shows to others -------------------------------------------------------------------------------------


STREAM_KEY, CREDENTIAL = "the-stream-key", "the-turn-credential"
TURN = IceServer(url="turn:127.0.0.1", username="somebody", credential=CREDENTIAL)
SECRETS = ServeConfig(outputs=[f"rtmp://127.0.0.1/live/{STREAM_KEY}"], ice_servers=[TURN])


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """Addresses at which a process can be reached over TCP or UDP."""
    return [
        (each.laddr.ip, each.laddr.port)
        for each in process.net_connections("inet")
        if each.laddr and (each.status == psutil.CONN_LISTEN or (each.type == socket.SOCK_DGRAM and not each.raddr))
    ]


class Mark:
    """A pickle of it makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def strike(port: int, pickled: bytes) -> int:
    """Put a pickle under every key of the store at the port, as everybody can who reaches it; returns how many."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    keys = store.list_keys()
    for key in keys:
        store.set(key, b64encode(pickled) if "rendezvous" in key else pickled)  # as torch elastic's own would read it
    return len(keys)


async def test_a_ring_lets_nobody_in(folder: Path) -> None:
    """No socket is beyond loopback, no secret is shown, and nobody unpickles what others put into the store."""
    mark = folder / "unpickled"
    model = ModelConfig(stages=2, decode_rank="dedicated", kv_context="staircase")
    async with ring(folder, model, serve=SECRETS, stop_limit_s=2.0) as (_, client, processes):
        assert len(processes) == 1 + 2 + 1, "a launcher, the stages, and a rank that decodes"
        await client.send(Open("one", "a red circle moving left"))
        assert await watch(client, 1) == ""
        reachable = {process.pid: listening(behind(process.pid)) for process in processes}
        for process in processes:
            shown = " ".join([*process.cmdline(), *process.environ().values()])
            assert STREAM_KEY not in shown and CREDENTIAL not in shown, shown
        where = [address for each in reachable.values() for address in each]
        assert where, "ranks listen for each other"
        assert all(ipaddress.ip_address(host).is_loopback for host, _ in where), where
        for _, port in set(reachable[processes[0].pid]):  # the launcher's store
            assert await asyncio.to_thread(strike, port, pickle.dumps(Mark(mark))) > 0
    assert not mark.exists(), "a process has run what it was told"


def test_the_configuration_is_handed_over_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = Config(serve=SECRETS)
    folder = ipc.make_folder(config)
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert ipc.read_config(folder) == config
