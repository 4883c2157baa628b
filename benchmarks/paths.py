"""What benchmarks of fast paths have in common: which are run, and the row of each beside the plain one's.

Knows nothing about what a path does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks import report
from streamdiff.pipeline.runner.torch_compile import CACHE_VARIABLE


def add_option(parser: argparse.ArgumentParser, paths: Iterable[str]) -> None:
    """`--paths`. Mutates: parser."""
    parser.add_argument("--paths", default=",".join(paths), help=f"of {', '.join(paths)} (default: all)")


def chosen(parser: argparse.ArgumentParser, text: str, paths: Iterable[str]) -> list[str]:
    """Those that `text` names, after `plain`. Ends the program with a usage error for others than `paths`."""
    names = list(dict.fromkeys(["plain", *text.split(",")]))
    if unknown := [name for name in names if name not in paths]:
        parser.error(f"--paths has {', '.join(unknown)}; there are {', '.join(paths)}")
    return names


@contextmanager
def no_compiled_code() -> Iterator[None]:
    """Within, torch finds nothing on disk that was compiled before, as at a first start. Mutates: the environment."""
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[CACHE_VARIABLE]
            if before is not None:
                os.environ[CACHE_VARIABLE] = before


def row(path: str, seconds: Sequence[float], plain: Sequence[float], compile_s: float) -> dict[str, report.Value]:
    """Seconds per chunk of a path; `ratio` is how many times as fast as the plain one it is, by the medians."""
    median_s = statistics.median(seconds)
    return {
        "path": path,
        "chunk_s": median_s,
        "least_s": min(seconds),
        "ratio": statistics.median(plain) / median_s,
        "compile_s": compile_s,
    }


def tell(rows: Sequence[dict[str, report.Value]], head: report.Header, options: argparse.Namespace) -> None:
    """Print the rows; write them to `options.out` if that is given, with all other options as the settings."""
    print(report.table(rows))
    if options.out is not None:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        report.write_json(options.out, head, {"paths": rows}, settings=settings)
