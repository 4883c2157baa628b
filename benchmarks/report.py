"""What every benchmark writes beside its numbers: the command, the commit, the machine, the software, the date.

Also the one JSON writer and the one table printer. Knows nothing about what is measured. Works without torch, so that
benchmarks of the web side can use it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

from streamdiff import clock

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "diffusers", "transformers", "numpy", "av", "aiortc", "fastapi", "uvicorn", "pyzmq")

Value = str | int | float | bool | None
Json = Value | Mapping[str, "Json"] | Sequence["Json"]


@dataclass(frozen=True)
class Header:
    """Where a result comes from. Holds no host name, no user name and no path outside the repository. `warm_up` says
    what was done first and not counted."""

    command: str
    date: str
    commit: str
    hardware: dict[str, Value]
    software: dict[str, str]
    threads: dict[str, Value]
    warm_up: str


def header(argv: Sequence[str] | None = None, *, warm_up: str) -> Header:
    """The header of a result that is being made now by this process. Call it before the work, on the quiet machine."""
    return Header(
        command=_command(sys.argv if argv is None else argv),
        date=datetime.fromtimestamp(clock.wall_s(), UTC).isoformat(timespec="seconds"),
        commit=commit(),
        hardware=_hardware(),
        software=_software(),
        threads=_threads(),
        warm_up=warm_up,
    )


def public_path(text: str) -> str:
    """A path or `--option=path` as it may be published: inside the repository relative to it, else `.../name`."""
    option, separator, value = text.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return text
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else f".../{path.name}"
    return f"{option}{separator}{shown}"


def commit() -> str:
    """The commit this tree is at, with `+changes` when files differ from it; `unknown` outside a git work tree."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head[:12]}+changes" if changed else head[:12]


def write_json(path: Path, head: Header, results: Mapping[str, Json], **more: Json) -> None:
    """Write `{"header": ..., **more, "results": ...}`; the file appears whole or not at all.

    Raises:
        ValueError: a number is not finite (JSON has no word for it).
    """
    text = json.dumps({"header": asdict(head), **more, "results": results}, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def table(rows: Sequence[Mapping[str, Value]]) -> str:
    """A Markdown table of rows that share their keys; floats with three digits, None as a dash."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of `values` lie, between neighbours in proportion; `values` in any order.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def duration(seconds: float) -> str:
    """A span of time for people: `48 s`, `12 min`, `3.4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _cell(value: Value) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _command(argv: Sequence[str]) -> str:
    first = Path(argv[0]).resolve()
    program = argv[0]
    if first.suffix == ".py" and first.is_relative_to(ROOT):
        program = "python -m " + ".".join(first.relative_to(ROOT).with_suffix("").parts)
    return " ".join([public_path(program), *(public_path(word) for word in argv[1:])])


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _hardware() -> dict[str, Value]:
    found: dict[str, Value] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpus"] = torch.cuda.device_count()
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    elif torch is None:
        found |= _gpus()
    return found


def _gpus() -> dict[str, Value]:
    """The GPUs of a machine, for a process without torch: what the driver's own tool says; nothing where it is not."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    name, _, mib = lines[0].rpartition(", ") if lines else ("", "", "")
    if not mib.isdecimal():
        return {}
    return {"gpu": name, "gpus": len(lines), "gpu_memory_gib": round(int(mib) / 1024, 1)}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _software() -> dict[str, str]:
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return found


def _threads() -> dict[str, Value]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Value] = {"allowed_cores": allowed, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.get_num_threads()
    return found
