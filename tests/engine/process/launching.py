"""A launcher of one rank, without torch: the rank has its standard output, as those of `engine.process.launcher`
have."""

from __future__ import annotations

import subprocess
import sys

if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, "-m", "tests.engine.painted", *sys.argv[1:]]))
