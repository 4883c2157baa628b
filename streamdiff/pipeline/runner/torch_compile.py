"""How `torch.compile` is used here: a function is one graph without breaks, and compiled code is kept on disk."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import TypeVar, cast

import torch

from streamdiff.errors import ConfigError

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps compiled code, of Triton too."""
TRITON_CAPABILITY = (7, 0)
"""Compute capability of NVIDIA GPUs from which on torch compiles for them."""
Function = TypeVar("Function", bound=Callable[..., object])


def one_graph(function: Function) -> Function:
    """`function` as one graph for fixed shapes, compiled when it is called first.

    Raises, when called:
        torch._dynamo.exc.Unsupported: it cannot be one graph.
    """
    # torch keeps what it has compiled with the code object, and stops at eight versions: each call here has its own.
    plain = cast(FunctionType, function)
    own = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, None, plain.__closure__)
    return cast(Function, torch.compile(own, fullgraph=True, dynamic=False))


def keep_compiled_code() -> Path:
    """Let torch keep what it compiles in a private folder, and find there what an earlier process compiled: the folder
    that TORCHINDUCTOR_CACHE_DIR names, else `streamdiff/compiled` in the user's cache folder. torch itself tells by
    graph, shapes, versions and device what fits. To be called before anything is compiled. Returns the folder.
    Mutates: the process's environment.

    Raises:
        ConfigError: the folder cannot be made, or others may write there; torch unpickles what lies in it.
    """
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(CACHE_VARIABLE) or user / "streamdiff" / "compiled")
    way_out = f"name another folder with {CACHE_VARIABLE}, or leave --compile off"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"compiled code cannot be kept in {folder} ({error.strerror}); {way_out}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"compiled code is not kept in {folder}: its owner is user {found.st_uid} and its mode "
            f"{found.st_mode & 0o777:o}, but it must be of user {os.getuid()} and for nobody else to write, as code in "
            f"it is run; chmod 700 {folder}, or {way_out}"
        )
    os.environ[CACHE_VARIABLE] = str(folder)
    return folder


def compile_fault(device: torch.device) -> str | None:
    """Why torch cannot compile for a CUDA `device` here; None if it can, as far as that is known before."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    if not any(map(shutil.which, compilers)):  # Triton compiles what launches its kernels
        return f"there is no C compiler ({', '.join(compilers)})"
    if (found := torch.cuda.get_device_capability(device)) < TRITON_CAPABILITY:
        return f"the GPU's compute capability is {found[0]}.{found[1]}, and compiling takes {TRITON_CAPABILITY[0]}.0"
    return None
