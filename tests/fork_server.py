"""One process for all tests of a session that has torch and the pipeline imported, and forks those that need them.

An import takes four seconds of a core, and a ring of three ranks four of them. `interpreter` is an executable to be
taken for `sys.executable`: as `python -m MODULE ...` it is a small process that stands for the forked one (same
output, input, environment and folder; signals are passed on, both end together, with the same code), where `MODULE` is
one of MODULES, or `streamdiff` with one of COMMANDS, and so as `python SCRIPT.py ...`; anything else it runs
itself, and what that starts in turn is started so too. `behind` is the process that another one stands for, with its
children and sockets.

For tests whose subject is not how a process starts, what it imports, or what it has open, and that set no variable
which is read at an import, as the hub's client does. CUDA does not bear it.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import psutil

from streamdiff.heavy_import import heavy_import

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "benchmarks.gpu_check",
    "benchmarks.sleeping_ring",
    "benchmarks.stream_rank",
    "streamdiff.engine.process.launcher",
    "streamdiff.engine.process.main",
    "tests.engine.faulty",
    "tests.engine.painted",
    "tests.pipeline.distributed.start_process",
    "tests.pipeline.forked_ranks",
    "tests.pipeline.runner.compiled_process",
    "tests.server.scripted",
    "torch.distributed.run",
}
COMMANDS = {"doctor", "generate", "plan", "serve"}
_IMPORTED = (
    "streamdiff.pipeline.build", "streamdiff.pipeline.rank_process", "streamdiff.server.main",
    "torch.distributed.elastic.multiprocessing",
)  # fmt: skip
_DESCRIPTORS = (0, 1, 2)
_SIGNALS = [int(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)]
"""Those that are passed on."""
_LENGTH = 16
"""Bytes of every number that is sent."""

# Runs without site and with nothing imported that takes long; fields in braces are filled in.
_STAND_IN = """#!{python} -IS
import array, os, sys
argv, environment = sys.argv[1:], dict(os.environ)
if argv[:1] == ["-u"]:
    argv, environment["PYTHONUNBUFFERED"] = argv[1:], "1"
command = argv[1:2] == ["streamdiff"] and argv[2:3] and argv[2] in {commands!r}
module = argv[:1] == ["-m"] and (command or argv[1] in {modules!r})
if not module and not (argv and argv[0].endswith(".py")):
    os.execv({python!r}, [{path!r}, *sys.argv[1:]])
import json, signal, socket
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
signals = {signals}
ignored = [number for number in signals if signal.getsignal(number) is signal.SIG_IGN]
told = json.dumps({{"argv": argv, "environment": environment, "folder": os.getcwd(), "ignored": ignored}}).encode()
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
server.sendmsg([b"%{length}d" % len(told)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", {fds}))])
server.sendall(told)
process = int(server.recv({length}, socket.MSG_WAITALL))
with open("/proc/self/comm", "w") as name:
    name.write(str(process))
for number in signals:  # those that are ignored too, as the forked one may have a handler of its own
    signal.signal(number, lambda number, _: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
for descriptor in {fds}:
    os.close(descriptor)
code = int(server.recv({length}, socket.MSG_WAITALL) or -9)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


folder: Path | None = None
"""Of the executable and the server behind it; `tests.conftest` says which, outside pytest there is none."""


@cache
def interpreter() -> str:
    """The executable that forks, in `folder`. The first process that asks makes it there, with a server behind it that
    ends when all that have asked have ended."""
    assert folder is not None, "this is under pytest"
    folder.mkdir(exist_ok=True)
    address, path = folder / "fork.sock", folder / "bin" / "python"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _start_server(address)
            _write_stand_in(path, address)
    hold = socket.socket(socket.AF_UNIX)
    hold.connect(str(address))
    atexit.register(hold.close)
    return str(path)


def behind(process: int) -> psutil.Process:
    """The process that this one stands for; itself, if it stands for none. Its own name says which."""
    one = psutil.Process(process)
    if folder is not None and str(folder / "bin" / "python") in one.cmdline():
        while not one.name().isdigit():  # it is being forked
            time.sleep(0.01)
        return psutil.Process(int(one.name()))
    return one


def _start_server(address: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(128)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.fork_server", str(listener.fileno())]
    subprocess.run(
        command, cwd=ROOT, env=environment, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, start_new_session=True, check=True,
    )  # fmt: skip
    listener.close()


def _write_stand_in(path: Path, address: Path) -> None:
    """Beside it what makes it, for the interpreter, a virtual environment with this one's packages: Python finds its
    packages, and what `sys.executable` is, by the path that it is called by."""
    path.parent.mkdir()
    prefix = Path(sys.prefix)
    (path.parent.parent / "lib").symlink_to(prefix / "lib")
    (path.parent.parent / "pyvenv.cfg").write_bytes((prefix / "pyvenv.cfg").read_bytes())
    python = str(Path(sys.executable).resolve())
    path.write_text(
        _STAND_IN.format(
            python=python,
            path=str(path),
            modules=MODULES,
            commands=COMMANDS,
            address=str(address),
            signals=_SIGNALS,
            length=_LENGTH,
            fds=list(_DESCRIPTORS),
        )
    )
    path.chmod(0o755)


# ---- the server --------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """Forks a process for each request; who asked and the process end together."""

    listener: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    processes: dict[int, socket.socket] = field(default_factory=dict)
    """Who asked, by process."""
    holds: set[socket.socket] = field(default_factory=set)

    def serve(self) -> dict[str, Any] | None:
        """Until nobody holds it any more; in a forked process: what it is to be."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(reader, selectors.EVENT_READ)
        held = False
        while self.holds or not held:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    connection, _ = self.listener.accept()
                    self.selector.register(connection, selectors.EVENT_READ)
                    self.holds.add(connection)
                    held = True
                elif key.fileobj == reader:
                    os.read(reader, 4096)
                    self.reap()
                elif (wanted := self.hear(key.fileobj)) is not None:  # type: ignore[arg-type]
                    self.leave(reader, writer)
                    return wanted
        return None

    def hear(self, connection: socket.socket) -> dict[str, Any] | None:
        """A request, for which a process is forked, or the end of who asked, and so of its process."""
        rights = socket.CMSG_SPACE(len(_DESCRIPTORS) * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = connection.recvmsg(_LENGTH, rights)
        except ConnectionResetError:  # it was killed, and has not read how its process ended
            data = b""
        if not data:
            self.forget(connection)
            for process, asked in list(self.processes.items()):
                if asked is connection:
                    with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet, and nobody in it
                        os.killpg(process, signal.SIGKILL)
                    os.kill(process, signal.SIGKILL)
            return None
        descriptors = array.array("i", ancillary[0][2])
        told = bytearray()
        while len(told) < int(data):
            told += connection.recv(65536)
        process = os.fork()
        if process == 0:
            for own, given in zip(_DESCRIPTORS, descriptors, strict=True):
                os.dup2(given, own)
        for descriptor in descriptors:
            os.close(descriptor)
        if process == 0:
            wanted: dict[str, Any] = json.loads(told)
            return wanted
        self.processes[process] = connection
        connection.sendall(_number(process))
        return None

    def forget(self, connection: socket.socket) -> None:
        """Mutates: self."""
        self.holds.discard(connection)
        self.selector.unregister(connection)
        connection.close()

    def reap(self) -> None:
        """Tell of processes that have ended. Mutates: self."""
        while self.processes:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            with contextlib.suppress(OSError):  # who asked has ended before
                self.processes.pop(process).sendall(_number(os.waitstatus_to_exitcode(status)))

    def leave(self, *pipe: int) -> None:
        """In a forked process: have nothing of the server's. Mutates: this process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for connection in (self.listener, *self.holds):
            connection.close()
        for descriptor in pipe:
            os.close(descriptor)


def _number(value: int) -> bytes:
    return str(value).rjust(_LENGTH).encode()


def become(wanted: dict[str, Any], executable: str) -> None:
    """Be the process that was asked for, to its end. Mutates: this process."""
    os.setsid()
    for number in _SIGNALS:  # as an interpreter that starts has them
        plain = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in wanted["ignored"] else plain)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    argv, sys.executable = wanted["argv"], executable
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # as `python` reads it when it starts
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _end(end.code or 0)
    _end(0)


def _end(code: int) -> NoReturn:
    """End this process as the interpreter does, but for taking all modules down, which takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    if os.fork():  # it is nobody's child, or tests that look at theirs would see it
        os._exit(0)
    listener = socket.socket(fileno=int(sys.argv[1]))
    address = Path(listener.getsockname())
    with heavy_import():
        for module in _IMPORTED:
            importlib.import_module(module)
    gc.freeze()  # or each forked process looks through all of it, and has a copy then
    wanted = Server(listener).serve()
    if wanted is not None:
        become(wanted, str(address.parent / "bin" / "python"))


if __name__ == "__main__":
    sys.path[:] = dict.fromkeys([str(ROOT), *sys.path, sysconfig.get_path("purelib")])
    main()
