"""The NCCL link on real GPUs: `python -m tests.gpu.nccl_ring --stages 2`.

One rank per GPU where there are enough. Otherwise ranks share them, which NCCL allows from 2.30 on, as an experiment
(`NCCL_MULTI_RANK_GPU_ENABLE`): what is measured then shows that it is right, and says nothing about speed. An older
NCCL that torch brought along can be replaced with `LD_PRELOAD=.../libnccl.so.2`. Ranks on one GPU take turns unless an
MPS daemon runs, and a rank that waits inside NCCL keeps its turn: slow is normal.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu_check import NOT_HERE
from streamdiff import clock
from tests.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SHARED_FROM = (2, 30)
VARIABLES = ("NCCL_", "TORCH_NCCL_", "CUDA_")
KV_CONTEXTS = ("clean", "staircase", "same_step")
PARTS = {"order": 2, "connect": None, "links": 2, "steady": 2, "ring": None}
"""Programs of `nccl_rank.py` and how many ranks play them; None: as many as there are stages."""
LIMIT_S = 60.0
"""For one part."""


def loaded_nccl() -> tuple[int, int, int] | None:
    """The version of the NCCL in this process, which LD_PRELOAD may have changed; None without NCCL."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    torch.cuda.nccl.version()  # whatever torch loads late is loaded now
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:  # linked into torch
        return torch.cuda.nccl.version()[:3]
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def refusal(stages: int, devices: int, version: tuple[int, int, int] | None) -> str | None:
    """Why a ring of `stages` ranks cannot run on `devices` GPUs with this NCCL; None when it can."""
    if devices == 0:
        return "torch sees no CUDA device"
    if version is None:
        return "this build of torch has no NCCL"
    if devices < stages and version < SHARED_FROM:
        name = ".".join(map(str, version))
        return (
            f"{stages} ranks on {devices} GPU need NCCL 2.30 or newer, loaded is {name}; see LD_PRELOAD in nccl_ring.py"
        )
    return None


def refused(stages: int) -> str | None:
    """Why not here."""
    return refusal(stages, torch.cuda.device_count(), loaded_nccl())


def finding(kv_context: str, same: bool, worst: float) -> str:
    """The line in which a rank says whether the ring made what one stage makes."""
    return f"{kv_context}: bit for bit {same}, worst difference {worst:.1e}"


def check_same(said: str) -> None:
    """Raises AssertionError unless a ring has said of each KV context, once, that it makes the same bits."""
    for kv_context in KV_CONTEXTS:
        found = re.findall(rf"^{kv_context}: bit for bit (\w+), (.*)$", said, re.MULTILINE)
        assert len(found) == 1, f"{kv_context} was compared {len(found)} times:\n{said}"
        ((same, more),) = found
        assert same == "True", f"{kv_context} makes something else over the ring: {more}"


def environment(ranks: int, devices: int, log: Path | None = None) -> dict[str, str]:
    """Of a rank. Ranks that share a GPU have to share its blocks, else NCCL hangs. NCCL writes into the folder `log`
    what it uses for each edge, a file for each process."""
    usual = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": str(max(1, 8 // ranks)), "NCCL_NVLS_ENABLE": "0"}
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log / "nccl.%p.log")} if log is not None else {}
    return {**usual, **debug, **(shared if devices < ranks else {})}


def describe(log: Path) -> None:
    """Write down what a stranger has to know of this machine: how GPUs are linked, versions, variables."""
    log.mkdir(parents=True, exist_ok=True)
    lines = [f"torch {torch.__version__}, NCCL {loaded_nccl()}"]
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    for command in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines += ["", " ".join(command), done.stdout or done.stderr]
    (log / "machine.txt").write_text("\n".join(lines) + "\n")


def play(part: str, ranks: int, folder: Path, limit_s: float = LIMIT_S, *, debug: bool = False) -> str:
    """Run a part on so many processes, each of which prints into a file of its own in `folder`; what all of them said.
    `debug`: NCCL writes there, too.

    Raises:
        RuntimeError: a rank failed, or did not end within `limit_s`; with what all ranks said.
    """
    arguments = [part, str(ranks), str(free_port())]
    environment_of_all = environment(ranks, torch.cuda.device_count(), folder if debug else None)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{part}.rank{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, file in enumerate(files):
        with file.open("wb") as out:
            words = [sys.executable, "-m", "tests.gpu.nccl_rank", str(rank), *arguments]
            processes.append(
                subprocess.Popen(words, cwd=ROOT, env=environment_of_all, stdout=out, stderr=subprocess.STDOUT)
            )
    end_s = clock.monotonic_s() + limit_s
    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        if clock.monotonic_s() > end_s:
            break
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
    said = "\n".join(f"rank {rank}:\n{file.read_text('utf-8', 'replace')}" for rank, file in enumerate(files))
    if any(codes):
        ends = ", ".join(f"rank {rank} with {code}" for rank, code in enumerate(codes) if code)
        killed = " (SIGKILL, often: out of memory)" if -signal.SIGKILL in codes else ""
        raise RuntimeError(f"{said}\npart {part} failed: {ends}{killed}")
    if None in codes:
        raise RuntimeError(f"{said}\npart {part} hangs (on a shared GPU: try fewer NCCL_MAX_CTAS, or MPS)")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description="The NCCL link on real GPUs: is it right, and how long does it take?")
    parser.add_argument("--stages", type=int, default=2, help="ranks of the ring (default: 2)")
    parser.add_argument("--part", choices=PARTS, help="only this one (default: all, one after the other)")
    parser.add_argument("--log", type=Path, metavar="DIR", help="folder for facts of the machine and NCCL's own log")
    options = parser.parse_args()
    reason = refused(options.stages)
    if reason:
        print(f"skipped: {reason}")
        return NOT_HERE
    print(
        f"NCCL {loaded_nccl()}, torch {torch.__version__}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    )
    if options.log is not None:
        describe(options.log)
    with tempfile.TemporaryDirectory(prefix="streamdiff-") as folder:
        for part in [options.part] if options.part else PARTS:
            ranks, log = PARTS[part] or options.stages, options.log or Path(folder)
            print(f"== {part}", flush=True)
            print(said := play(part, ranks, log, debug=options.log is not None), flush=True)
            if part == "ring":
                check_same(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
