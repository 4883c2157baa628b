"""Environment variables for the Python child processes that the package starts."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path


def environment() -> dict[str, str]:
    """This process's variables, and what a child needs to import this very package and no module of the current folder:
    `python -m` would look there first."""
    root = Path(__file__).resolve().parents[1]
    variables = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    if str(root) not in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return variables
