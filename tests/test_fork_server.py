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


def test_what_the_forked_one_has_forked_ends_with_it(tmp_path: Path) -> None:
    """As the ranks of a test that is cut off."""
    (folder := tmp_path / "ranks").mkdir()
    os.mkfifo(folder / "0")  # where the rank says which process it is
    ranks = ("fork", str(tmp_path), "600", "tests.pipeline.distributed.lost_rank", "1", "0", "no luck", str(folder))
    with subprocess.Popen([sys.executable, "-m", "tests.pipeline.forked_ranks", *ranks]) as process:
        rank = psutil.Process(int((folder / "0").read_text()))
        process.kill()
    rank.wait(60)
