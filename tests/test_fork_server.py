"""Who stands for a forked process is taken for it: same output and exit code, and neither outlives the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu_check import NOT_HERE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]


def test_its_output_and_exit_code_are_the_forked_ones() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "sync:clean", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (NOT_HERE, "sync:clean: on a CPU nothing waits\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_both(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import signal\nprint('waits', flush=True)\nsignal.pause()\nprint('goes on')\n")
    with subprocess.Popen([sys.executable, str(tmp_path / "waits.py")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(number)
        assert process.stdout.read() == "", "both have ended"
    assert process.returncode == -number


HEARS = """
import signal, sys
ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print("ignored" if ignored else "not ignored", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("action", "begins"), [(signal.SIG_IGN, "ignored"), (signal.SIG_DFL, "not ignored")])
def test_a_signal_is_ignored_or_handled_as_by_one_that_starts(
    action: signal.Handlers, begins: str, tmp_path: Path
) -> None:
    """A shell's background job ignores Ctrl-C, and so does what it starts, unless that has a handler of its own."""
    (tmp_path / "hears.py").write_text(HEARS)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "hears.py")],
        stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, action),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == f"{begins}\n"
        process.send_signal(signal.SIGINT)
    assert process.returncode == 7


def test_what_the_forked_one_has_forked_ends_with_it(tmp_path: Path) -> None:
    """As the ranks of a test that is cut off."""
    (folder := tmp_path / "ranks").mkdir()
    os.mkfifo(folder / "0")  # where the rank says which process it is
    ranks = ("fork", str(tmp_path), "600", "tests.pipeline.distributed.lost_rank", "1", "0", "no luck", str(folder))
    with subprocess.Popen([sys.executable, "-m", "tests.pipeline.forked_ranks", *ranks]) as process:
        rank = psutil.Process(int((folder / "0").read_text()))
        process.kill()
    rank.wait(60)


def test_what_needs_no_fork_is_run_and_starts_others_the_same_way() -> None:
    code = "import sys, pytest; print(sys.executable, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [sys.executable, "False"]
