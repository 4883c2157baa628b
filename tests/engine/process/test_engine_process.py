"""A real engine process, started, used, killed; and what its parent's death does to it. A process that waits at its
pipe."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from streamdiff.config import Config, ModelConfig
from streamdiff.engine.messages import Closed, Event, FrameBatch, Open, Opened, Shown
from streamdiff.engine.process import engine_process as supervisor_module
from streamdiff.engine.process.engine_process import EngineProcess
from streamdiff.engine.process.ipc import EngineClient, make_pipe, wake
from streamdiff.errors import ConfigError, EngineFailure

pytestmark = pytest.mark.slow

LIMIT_S = 240.0
MODULE = "tests.engine.painted"
ROOT = Path(__file__).resolve().parents[3]


def supervisor(model: str = "tiny", start_limit_s: float = LIMIT_S, stop_limit_s: float = LIMIT_S) -> EngineProcess:
    config = Config(model=ModelConfig(name=model))
    return EngineProcess(config, start_limit_s=start_limit_s, stop_limit_s=stop_limit_s, module=MODULE)


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[EngineProcess, EngineClient]]:
    running = supervisor()
    client = await running.start()
    try:
        yield running, client
    finally:
        await running.stop()
    assert not psutil.pid_exists(running.pid)


async def until(client: EngineClient, kind: type[Event]) -> list[Event]:
    """Events up to the first of `kind`."""
    events: list[Event] = []
    async with asyncio.timeout(LIMIT_S):
        async for event in client.events():
            events.append(event)
            if isinstance(event, kind):
                return events
    raise AssertionError(f"the events ended without {kind.__name__}: {events}")


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Whatever happens, the private folder is gone afterwards."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield  # type: ignore[misc]
    assert list(tmp_path.glob("streamdiff-*")) == []


async def test_an_idle_engine_sleeps_and_a_command_wakes_it() -> None:
    async with engine() as (running, client):
        await client.send(Open("a", "red"))
        async with asyncio.timeout(LIMIT_S):  # to the end of the lead: 36 frames
            async for event in client.events():
                if isinstance(event, FrameBatch) and event.first + len(event.pictures) == 36:
                    break
        process = psutil.Process(running.pid)
        before = process.num_ctx_switches().voluntary
        await asyncio.sleep(0.5)
        assert process.num_ctx_switches().voluntary - before < 10, "it waits, it does not poll"
        await client.send(Shown("a", 6))
        assert isinstance((await until(client, FrameBatch))[-1], FrameBatch)


async def test_stopping_closes_everything_in_order() -> None:
    running = supervisor()
    client = await running.start()
    await client.send(Open("a", "red"))
    await until(client, Opened)
    reading = asyncio.create_task(until(client, Closed))
    await running.stop()
    await reading
    assert await running.wait() == 0
    await running.stop()  # again: nothing
    with pytest.raises(EngineFailure):
        await client.send(Shown("a", 1))


async def test_what_the_engine_writes_needs_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may be started with it closed."""
    running = supervisor()
    monkeypatch.setattr(sys, "stderr", None)
    await running.start()
    await running.stop()
    assert await running.wait() == 0


async def test_an_engine_that_hangs_is_killed_when_stopped() -> None:
    running = supervisor(stop_limit_s=0.3)
    client = await running.start()
    await client.send(Open("a", "fail hang"))
    async with asyncio.timeout(LIMIT_S):
        while "hanging" not in running._last_lines:  # before that a Shutdown would still be read
            await asyncio.sleep(0.01)
    async with asyncio.timeout(LIMIT_S):
        await running.stop()
    assert await running.wait() == -signal.SIGKILL


async def test_a_configuration_the_engine_refuses() -> None:
    with pytest.raises(ConfigError, match="there is no model 'unknown'"):
        await supervisor("unknown").start()


async def test_a_model_that_cannot_be_loaded() -> None:
    with pytest.raises(EngineFailure, match="did not start: ArithmeticError: the weights are sour"):
        await supervisor("broken").start()


async def test_a_start_may_take_any_time_as_long_as_something_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many times the limit: a look lasts until the engine has written something more."""
    looks = 0

    async def look(seconds: float) -> None:
        nonlocal looks
        looks += 1
        written = running._written
        if looks == 40:
            (tmp_path / "loaded").touch()
        async with asyncio.timeout(LIMIT_S):
            while running._written == written:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(supervisor_module, "_pause", look)
    running = supervisor(f"patient {tmp_path / 'loaded'}", start_limit_s=0.01)
    await running.start()
    await running.stop()
    assert looks >= 40


async def test_a_start_in_silence_is_given_up() -> None:
    running = supervisor("slow", start_limit_s=8)
    bars_and_lines = "  compiling: 0/2\n  compiling: 1/2\n  still loading"
    with pytest.raises(
        EngineFailure, match=f"said nothing for 8 s while it was loading; the last it wrote:\n{bars_and_lines}"
    ):
        await running.start()
    assert not psutil.pid_exists(running.pid)


async def test_a_cancelled_start_leaves_nothing() -> None:
    running = supervisor("slow")
    starting = asyncio.create_task(running.start())
    while running._process is None:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.pid_exists(running.pid)


@pytest.mark.parametrize(("model", "prompt"), [("tiny", "red"), ("tiny", "fail hang"), ("slow", "")])
def test_no_orphan_when_the_parent_is_killed(model: str, prompt: str, tmp_path: Path) -> None:
    """The parent dies by SIGKILL: the engine ends too, while it serves, hangs or loads, and cleans up."""
    script = f"""
import asyncio, tempfile
from streamdiff.config import Config, ModelConfig
from streamdiff.engine.messages import Open
from streamdiff.engine.process.engine_process import EngineProcess

async def main():
    tempfile.tempdir = {str(tmp_path)!r}
    running = EngineProcess(Config(model=ModelConfig(name={model!r})), module={MODULE!r})
    starting = asyncio.create_task(running.start())
    if {model!r} == "tiny":
        client = await starting
        await client.send(Open("a", {prompt!r}))
        await anext(client.events())
        while {prompt!r} == "fail hang" and "hanging" not in running._last_lines:
            await asyncio.sleep(0.01)
    while {model!r} == "slow" and not running._last_lines:
        await asyncio.sleep(0.05)
    print(running.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    gone, alive = psutil.wait_procs([child], timeout=LIMIT_S)
    assert gone and not alive


async def test_ctrl_c_in_a_terminal_does_not_reach_it_and_sigterm_ends_it_in_order() -> None:
    async with engine() as (running, _):
        assert os.getpgid(running.pid) == running.pid != os.getpgid(0)
        assert os.getsid(running.pid) == os.getsid(0), "its session is ours"
        os.kill(running.pid, signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), LIMIT_S) == 0


# Says on standard output when the module is imported, and when it was told.
WAITS = """
import sys
from pathlib import Path
from streamdiff.engine.process import main
main._SETTLE_S = float(sys.argv[2])
main.wait_as_standby(Path(sys.argv[1]), "this")
print("told", flush=True)
"""


def start(folder: Path, settle_s: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-u", "-c", WAITS, str(folder), str(settle_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "bridge"
    made.mkdir()
    return made


def test_it_imports_before_it_is_told(folder: Path) -> None:
    pipe = make_pipe(folder)
    with start(folder, 0.0) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("The Zen"), "what importing this module prints"
        wake(pipe)
        assert process.stdout.read().endswith("\ntold\n")
        assert process.wait(LIMIT_S) == 0
    os.close(pipe)
    assert folder.exists(), "it is the engine's now"


@pytest.mark.parametrize("ranks", [1, 3])
def test_telling_cuts_the_wait_short_for_all_who_come(folder: Path, ranks: int) -> None:
    pipe = make_pipe(folder)
    early = [start(folder, 3600.0) for _ in range(ranks - 1)]
    wake(pipe)
    for process in [*early, start(folder, 3600.0)]:
        with process:
            assert process.stdout is not None
            assert process.stdout.read().endswith("told\n")
    os.close(pipe)


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_it_ends_with_the_one_who_could_tell_it(folder: Path, when: str) -> None:
    pipe = make_pipe(folder)
    if when == "before":
        os.close(pipe)
    with start(folder, 3600.0 if when == "before" else 0.0) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if when != "before":
            os.close(pipe)
        assert "told" not in process.stdout.read()
        assert process.wait(LIMIT_S) == 0
    assert not folder.exists()
    with start(folder, 0.0) as late:
        assert late.wait(LIMIT_S) == 0, "another rank, that finds nothing any more"
