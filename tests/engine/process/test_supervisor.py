"""Real engine processes that end in all the ways there are, and what comes after them."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from zmq import ZMQError

from streamdiff.config import Config, ModelConfig
from streamdiff.engine.messages import Applied, Event, Failed, FrameBatch, Open, Opened, Ready, SetPaused, Shutdown
from streamdiff.engine.process import supervisor
from streamdiff.engine.process.engine_process import EngineProcess
from streamdiff.engine.process.supervisor import EngineSupervisor, Restarting, RestartPolicy
from streamdiff.errors import EngineFailure

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]

LIMIT_S = 240.0


class NoSpare(EngineProcess):
    """For a machine that has no room for another process."""

    def __init__(self, error: OSError, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self._error = error

    async def prepare(self) -> None:
        raise self._error


class Kept:
    """A supervisor of engines that paint, and all its events as they come."""

    def __init__(self, most: int = 3, watchdog_s: float = LIMIT_S, spare: bool = False) -> None:
        self.model = "painted"
        self.made: list[EngineProcess] = []
        self.no_spare: OSError | None = None
        """Why no further spare can be started."""
        self._watchdog_s = watchdog_s
        self.supervisor = EngineSupervisor(self._make, RestartPolicy(most, window_s=600.0, wait_s=0.01), spare=spare)
        self.events = self.supervisor.events()

    def _make(self) -> EngineProcess:
        config = Config(model=ModelConfig(name=self.model, watchdog_s=self._watchdog_s))
        kind = EngineProcess if self.no_spare is None else partial(NoSpare, self.no_spare)
        self.made.append(kind(config, start_limit_s=LIMIT_S, module="tests.engine.painted"))
        return self.made[-1]

    async def until(self, *kinds: type[Event] | type[Restarting]) -> Event | Restarting:
        """The next event of these kinds."""
        async with asyncio.timeout(LIMIT_S):
            async for event in self.events:
                if isinstance(event, kinds):
                    return event
        raise AssertionError(f"the events ended without {kinds}")


@asynccontextmanager
async def kept(most: int = 3, watchdog_s: float = LIMIT_S, spare: bool = False) -> AsyncIterator[Kept]:
    run = Kept(most, watchdog_s, spare)
    await run.supervisor.start()
    try:
        yield run
    finally:
        await run.events.aclose()
        await run.supervisor.stop()
    assert not any(psutil.pid_exists(engine.pid) for engine in run.made if not isinstance(engine, NoSpare))


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every engine's private folder is gone afterwards."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert list(tmp_path.glob("streamdiff-*")) == []


async def test_a_killed_engine_is_followed_by_another_that_takes_the_session_up() -> None:
    async with kept() as run:
        await run.supervisor.send(Open("a", "red", 3))
        await run.until(FrameBatch)
        os.kill(run.made[0].pid, signal.SIGKILL)
        restarting = await run.until(Restarting)
        assert isinstance(restarting, Restarting)
        assert restarting.reason == "the engine ended by signal SIGKILL (often: out of memory)"
        assert restarting.retry_after_s >= 1
        with pytest.raises(EngineFailure, match="SIGKILL"):
            await run.supervisor.send(SetPaused("a", True))
        assert await run.until(Ready) == run.supervisor.ready
        await run.supervisor.send(Open("a", "blue", 4, epoch=7, made_frames=50, shown_frames=40))
        assert await run.until(Opened) == Opened("a", 7, "blue")
        assert await run.until(Applied) == Applied("a", 7, 0, 50)
        batch = await run.until(FrameBatch)
        assert isinstance(batch, FrameBatch)
        assert (batch.epoch, batch.chunk, batch.first) == (7, 0, 50)
        assert [engine.pid != run.made[0].pid for engine in run.made] == [False, True]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("fail raise", "ArithmeticError: the paint ran out; in the engine process, session 'a' at chunk 0"),
        ("fail exit", "the engine ended with exit code 7"),
        ("fail hang", "the engine hung: it said nothing for 3 s, and was ended (a machine so slow"),
    ],
)
async def test_an_engine_that_raises_leaves_or_hangs_is_followed_by_another(
    prompt: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept(watchdog_s=3.0) as run:
        await run.supervisor.send(Open("a", prompt))
        restarting = await run.until(Restarting)
        assert isinstance(restarting, Restarting)
        assert restarting.reason.startswith(words)
        assert prompt != "fail exit" or "the last it wrote:\n  about to leave without a word" in caplog.text
        await run.until(Ready)
        await run.supervisor.send(Open("a", "red"))
        await run.until(FrameBatch)


async def test_an_idle_engine_does_not_count_as_one_that_hangs() -> None:
    async with kept(watchdog_s=3.0) as run:
        waiting = asyncio.create_task(run.until(Restarting))
        await asyncio.wait({waiting}, timeout=6.0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_an_engine_that_cannot_start_again_is_tried_until_the_bound_and_the_reason_told() -> None:
    async with kept(most=2) as run:
        run.model = "broken"
        os.kill(run.made[0].pid, signal.SIGKILL)
        reasons = [await run.until(Restarting, Failed) for _ in range(3)]
        assert [type(each) for each in reasons] == [Restarting, Restarting, Failed]
        last = reasons[-1]
        assert isinstance(last, Failed)
        assert "failed again after 2 restarts within 600 s" in last.reason
        assert "serve.max_restarts" in last.reason and "the weights are sour" in last.reason
        assert run.supervisor.gave_up
        assert await anext(run.events, None) is None, "nothing comes after it"
        assert len(run.made) == 3


async def test_a_spare_takes_over_and_another_waits() -> None:
    async with kept(spare=True) as run:
        first, second = run.made
        assert second.alive
        os.kill(first.pid, signal.SIGKILL)
        assert await run.until(Ready) == second.ready
        assert len(run.made) == 3 and run.made[2].alive
        await run.supervisor.send(Open("a", "red"))
        await run.until(FrameBatch)
        assert second.alive


async def test_a_spare_that_has_died_is_passed_over() -> None:
    async with kept(most=1, spare=True) as run:
        first, second = run.made
        os.kill(second.pid, signal.SIGKILL)
        await second.wait()
        os.kill(first.pid, signal.SIGKILL)
        assert await run.until(Ready, Failed) == run.made[2].ready, "and does not count as a failure"


async def test_a_spare_that_dies_while_it_waits_is_followed_by_another(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SPARE_AGAIN_S", 0.01)
    async with kept(most=1, spare=True) as run:
        first, second = run.made
        os.kill(second.pid, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            while len(run.made) < 3 or not run.made[2].alive:
                await asyncio.sleep(0.01)
        assert "The spare engine ended by signal SIGKILL" in caplog.text
        os.kill(first.pid, signal.SIGKILL)
        assert await run.until(Ready, Failed) == run.made[2].ready
        assert len(run.made) == 4 and run.made[3].alive


async def test_no_spare_waits_for_an_engine_that_is_given_up() -> None:
    async with kept(most=1, spare=True) as run:
        for _ in range(2):
            os.kill(run.made[-2].pid, signal.SIGKILL)
            last = await run.until(Ready, Failed)
        assert isinstance(last, Failed) and run.supervisor.gave_up
        assert await anext(run.events, None) is None
        assert len(run.made) == 3 and not run.made[2].alive


@pytest.mark.parametrize("kind", [OSError, ZMQError])
async def test_an_engine_runs_where_no_spare_can_be_had(
    caplog: pytest.LogCaptureFixture, kind: type[OSError | ZMQError]
) -> None:
    async with kept(spare=True) as run:
        run.no_spare = kind(errno.EAGAIN, "Resource temporarily unavailable")
        os.kill(run.made[0].pid, signal.SIGKILL)
        assert await run.until(Ready, Failed) == run.made[1].ready
        assert "No spare engine waits" in caplog.text and "temporarily unavailable" in caplog.text
        run.no_spare = None
        os.kill(run.made[1].pid, signal.SIGKILL)
        assert await run.until(Ready, Failed) == run.made[3].ready


async def test_a_spare_whose_launcher_was_killed_is_ended() -> None:
    engine = EngineProcess(Config(), module="tests.engine.process.launching")
    await engine.prepare()
    launcher = psutil.Process(engine.pid)
    async with asyncio.timeout(LIMIT_S):
        while not (ranks := launcher.children()):
            await asyncio.sleep(0.01)
        launcher.kill()
        await engine.stop()
        while ranks[0].is_running() and ranks[0].status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


async def test_an_engine_that_is_never_started_again_is_told_as_it_was() -> None:
    async with kept(most=0) as run:
        os.kill(run.made[0].pid, signal.SIGKILL)
        failed = await run.until(Restarting, Failed)
        assert isinstance(failed, Failed) and failed.reason.startswith("the engine ended by signal SIGKILL")
        assert not run.supervisor.gave_up


async def test_an_engine_that_is_told_to_end_is_not_started_again() -> None:
    async with kept() as run:
        stopping = asyncio.create_task(run.supervisor.stop())
        assert await anext(run.events, None) is None
        await stopping
        assert len(run.made) == 1
        with pytest.raises(EngineFailure):
            await run.supervisor.send(Shutdown())
