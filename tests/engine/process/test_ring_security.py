"""What a ring that is started here shows to others: no socket beyond loopback, no secret, nobody who unpickles."""

from __future__ import annotations

import asyncio
import ipaddress
import pickle
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
from streamdiff.engine.messages import Open
from streamdiff.engine.process import ipc
from streamdiff.engine.process.engine_process import EngineProcess
from streamdiff.engine.process.ipc import EngineClient
from tests.engine.process.test_launcher import watch
from tests.fork_server import behind

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]
LIMIT_S = 120.0
STAGES = 2
STREAM_KEY, CREDENTIAL = "the-stream-key", "the-turn-credential"


def config() -> Config:
    """A ring's, with the secrets that a configuration may hold."""
    turn = IceServer(url="turn:127.0.0.1", username="somebody", credential=CREDENTIAL)
    serve = ServeConfig(outputs=[f"rtmp://127.0.0.1/live/{STREAM_KEY}"], ice_servers=[turn])
    return Config(model=ModelConfig(stages=STAGES, decode_rank="dedicated", kv_context="staircase"), serve=serve)


@asynccontextmanager
async def ring() -> AsyncIterator[tuple[EngineClient, list[psutil.Process]]]:
    """A ring with a session, and its processes: the launcher first. Afterwards none of them is left. They are those
    that stand for forked ones (`behind`), and have the arguments and the environment that they are given."""
    supervisor = EngineProcess(config(), start_limit_s=LIMIT_S, stop_limit_s=2.0)
    client = await supervisor.start()
    processes: list[psutil.Process] = []
    try:
        await client.send(Open("one", "a red circle moving left"))
        launcher = psutil.Process(supervisor.pid)
        processes += [launcher, *behind(launcher.pid).children(recursive=True)]
        yield client, processes
    finally:
        await supervisor.stop()
        _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
        for process in alive:
            process.kill()
    assert not alive


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


async def test_a_ring_lets_nobody_in(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    async with ring() as (client, processes):
        assert len(processes) == 1 + STAGES + 1, "a launcher, the stages, and a rank that decodes"
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
    folder = ipc.make_folder(config())
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert ipc.read_config(folder) == config()
