"""The engine process, which compiles nothing but the decoder: a stage's graphs take minutes, and have other tests."""

from __future__ import annotations

import os
import sys

from streamdiff.engine import main as engine

if __name__ == "__main__":
    from streamdiff.pipeline import loading

    loading.compile_stage = lambda *given: None
    code = engine.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
