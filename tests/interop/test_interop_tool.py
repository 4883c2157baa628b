"""`tools/interop.sh` where a viewer cannot be had: never silently."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "interop.sh"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The only folder on PATH: what every system has, and no Node."""
    for name in ("bash", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    return tmp_path


def program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n", encoding="ascii")
    (folder / name).chmod(0o755)


def run(programs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "CI"} | environment | {"PATH": str(programs)}
    return subprocess.run([programs / "bash", TOOL], env=env, capture_output=True, text=True)


def test_in_continuous_integration_that_is_an_error(programs: Path) -> None:
    program(programs, "id", "echo 1000")
    ran = run(programs, CI="true")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "nothing is left out" in ran.stderr
