"""Who stands for a forked process is taken for it: same output and exit code, and neither outlives the other."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]


def test_its_output_and_exit_code_are_the_forked_ones() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "sync:clean", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "sync:clean: on a CPU nothing waits\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_both(number: signal.Signals) -> None:
    """The forked one writes no result any more."""
    command = [sys.executable, "-m", "benchmarks.gpu_check", "cpu:clean", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert b"device: cpu" in process.stderr.readline()
        process.send_signal(number)
        assert process.stdout.read() == b""
    assert process.returncode == -number


def test_what_needs_no_fork_is_run_and_starts_others_the_same_way() -> None:
    code = "import sys, pytest; print(sys.executable, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [sys.executable, "False"]
