"""What all tests share: with --no-skips a skipped test is a failure, so that a green run means that everything ran."""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import gc
import getpass
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests import fork_server

ROOT = Path(__file__).resolve().parent.parent

# A test may be skipped under --no-skips only when it carries one of these marks: what it needs cannot be installed.
MAY_SKIP = ("gpu",)

# A slow machine is no fault of the code.
settings.register_profile("streamdiff", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("streamdiff")

# What torch compiles is shared by all tests and the processes they start: where torch itself would keep it.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help=f"a skipped test fails, unless marked {MAY_SKIP}")
    parser.addoption("--soak", action="store_true", help="only the tests marked soak, which are left out otherwise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the soak tests or the others, and put slow ones first, above all those of one worker, so that none is left
    with them at the end."""
    soak = config.getoption("--soak")
    left_out = [item for item in items if (item.get_closest_marker("soak") is not None) != soak]
    chosen = [item for item in items if (item.get_closest_marker("soak") is not None) == soak]
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(
        chosen, key=lambda item: [item.get_closest_marker(mark) is None for mark in ("slow", "xdist_group")]
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """torch computes on one thread, whatever a test before has set: results are then the same on every machine, and
    small models are faster."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB. Mounting it takes root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)), capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(("umount", "--lazy", str(disk)), check=True)


class TogetherScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """One test at a time to whichever worker is free; of a file with `xdist_group`, whose tests share what is made at
    length, all to one, and with it those of other files with the same group. (xdist's own way to do so changes ids,
    which pytest 9.2 no longer lets it.)"""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0]) or nodeid

    def remove_node(self, node: Any) -> str | None:
        """What a worker that ended has done is not given out once more, as nothing: xdist would wait for its result."""
        work = self.assigned_work[node]
        for scope in [scope for scope, unit in work.items() if all(unit.values())]:
            del work[scope]
        crashed: str | None = super().remove_node(node)
        return crashed

    def _reschedule(self, node: Any) -> None:
        """A worker begins with a test when it has the next one, or is told that none follows: also one that takes the
        place of one that ended, which xdist gives one test and waits for."""
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue and not node.shutting_down:
            node.shutdown()

    def mark_test_pending(self, item: str) -> None:
        """A test whose process ended may be tried once more: `remove_node` has left it in the work that others take."""


@cache
def _group(file: str) -> str | None:
    """The name that the file gives with `pytest.mark.xdist_group("name")`, of which it has one at most."""
    found = re.search(r'xdist_group\("([^"]+)"\)', (ROOT / file).read_text("utf-8"))
    return found and found[1]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return TogetherScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


_COLLECTED = pytest.StashKey[Any]()
"""A file that is locked while the first worker collects."""


def pytest_configure_node(node: Any) -> None:
    """Of xdist, for each worker: in a fresh clone half of what collecting takes is pytest's own version of each file's
    asserts, which is kept on disk. So one worker collects first, and the others find them there."""
    if _COLLECTED not in node.config.stash:
        node.config.stash[_COLLECTED] = lock = tempfile.NamedTemporaryFile()  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
    else:
        node.workerinput["collects_after"] = node.config.stash[_COLLECTED].name


def pytest_xdist_node_collection_finished(node: Any) -> None:
    fcntl.flock(node.config.stash[_COLLECTED], fcntl.LOCK_UN)


def pytest_testnodedown(node: Any) -> None:
    fcntl.flock(node.config.stash[_COLLECTED], fcntl.LOCK_UN)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    if (path := getattr(session.config, "workerinput", {}).get("collects_after")) is not None:
        with open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)


def pytest_configure() -> None:
    """The collector looks through a million objects of imported modules in vain, while they come and ever after."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Nor is it to look through them once more at the process's end."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """pytest no longer watches a test that has failed; how it ends may hang as well."""
    limit_s = float(node.config.getini("faulthandler_timeout"))
    assert sys.__stderr__ is not None
    if limit_s == 0:
        return
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if (
        item.config.getoption("--no-skips")
        and report.skipped
        and not hasattr(report, "wasxfail")
        and not any(item.get_closest_marker(mark) for mark in MAY_SKIP)
    ):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that skips itself as a whole (`importorskip`) never reaches the hook above."""
    report = yield
    if collector.config.getoption("--no-skips") and report.outcome == "skipped":
        _fail(report)
    return report


def _fail(report: Any) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped, which --no-skips does not allow: {reason}"


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """What is kept for later, such as embeddings, goes into a folder of the tests', also from their processes. pip and
    the hub's client keep to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        usual = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        patch.setenv("PIP_CACHE_DIR", os.environ.get("PIP_CACHE_DIR", f"{usual}/pip"))
        patch.setenv("HF_HOME", os.environ.get("HF_HOME", f"{usual}/huggingface"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def fork_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where `fork_server` is, one for all workers."""
    own = tmp_path_factory.getbasetemp()
    fork_server.folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "forks"


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and ranks that this test starts, itself or over a server, are forked. For tests that are not about how
    they start."""
    monkeypatch.setattr(sys, "executable", fork_server.interpreter())


@pytest.fixture
def streamdiff_command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m streamdiff ...` as a user would, in an empty folder; gives the finished process."""

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 600, **options}
        return subprocess.run([sys.executable, "-m", "streamdiff", *arguments], env=environment, **options)

    return run
