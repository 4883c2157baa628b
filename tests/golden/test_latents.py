"""Latents do not change: not by a change of structure, and not by how a session is played.

Where a change is meant to move the numbers, write the table anew, and say why in the commit:
`python -m tests.golden.play --write`.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from tests.golden.play import CASES, SHARED, TABLE, TOGETHER, WAYS
from tests.rules.source import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("golden latents")]


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, str]]:
    command = [sys.executable, "-m", "tests.golden.play"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    table: dict[str, dict[str, str]] = json.loads(ended.stdout)
    return table


def test_however_a_session_is_played_its_latents_are_the_same(made: dict[str, dict[str, str]]) -> None:
    """Saved, swapped, killed, beside another in one forward, on 1 to 3 stages. `1x2` sums in another order."""
    for way in WAYS:
        for case in CASES:
            assert made[way][case].split()[0] == made["1 stage"][case], f"{case}: {way}"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the table was made on x86-64")
def test_latents_are_those_of_the_table(made: dict[str, dict[str, str]]) -> None:
    assert {way: made[way] for way in (TOGETHER, SHARED)} == json.loads(TABLE.read_text())
