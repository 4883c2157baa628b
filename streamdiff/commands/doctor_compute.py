"""The part of `streamdiff doctor` that is about computing: torch, GPUs, attention kernels, quantisation, trials."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from streamdiff.config import Config
from streamdiff.errors import ConfigError
from streamdiff.models.resolve import Defaults, settle
from streamdiff.models.spec import with_window
from streamdiff.pipeline.planner import model_sizes

if TYPE_CHECKING:
    import torch

_HEAD_DIM = 128


class Grade(Enum):
    """Severity of a finding."""

    GOOD = "ok"
    NOTE = "note"
    BAD = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    grade: Grade
    text: str


def look_at_torch(config: Config) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of its own is missing
        yield Finding("torch", Grade.BAD, f"cannot be imported: {error}")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Finding("torch", Grade.GOOD, f"{torch.__version__} ({build}), {torch.get_num_threads()} threads by default")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            yield Finding("gpu", Grade.GOOD, f"cuda:{index} {device.name}, {device.total_memory / 2**30:.0f} GiB")
    elif config.model.device == "cuda":
        yield Finding("gpu", Grade.BAD, "none, but the device is set to cuda; use --device auto")
    elif Path("/dev/nvidiactl").exists():
        yield Finding(
            "gpu", Grade.NOTE, "there is an NVIDIA device, but this torch cannot use it: make distclean serve"
        )
    else:
        yield Finding("gpu", Grade.NOTE, "none; the embedded model runs on the CPU")


def look_at_kernels(config: Config) -> Iterator[Finding]:
    """Every attention kernel computes a small case, of the width that Wan's heads have."""
    try:
        from streamdiff.models.transformer import attention_backend
    except (ImportError, OSError):
        return  # torch or diffusers: said elsewhere, or by what needs it
    device, dtype = _computes_in(config)
    found = attention_backend.survey(device, dtype, heads=2, head_dim=_HEAD_DIM)
    right = [name for name, fault in found.items() if fault is None]
    case = f"{device}, {str(dtype).removeprefix('torch.')}"
    yield Finding("attention", Grade.GOOD, f"{', '.join(right)}: compared with the formula, right here ({case})")
    chosen = config.model.attention
    if found[chosen] is not None:
        yield Finding("attention", Grade.BAD, f"{chosen} {found[chosen]}")
    others = [name for name, fault in found.items() if fault is not None and name != chosen]
    absent = [name for name in others if "is not installed" in str(found[name])]
    for names, what in ((absent, "not installed"), ([n for n in others if n not in absent], "not for this machine")):
        if names:
            yield Finding("attention", Grade.NOTE, f"{what}: {', '.join(names)}")


def look_at_quantisation(config: Config) -> Iterator[Finding]:
    try:
        from streamdiff.models.transformer import quantization
    except (ImportError, OSError):
        return  # as above
    device, dtype = _computes_in(config)
    absent = None if importlib.util.find_spec("torchao") else f"takes torchao; {quantization.INSTALL}"
    faults = {mode: quantization.unsuited(mode, device, dtype) or absent for mode in quantization.MODES[1:]}
    if right := [mode for mode, fault in faults.items() if fault is None]:
        version = importlib.metadata.version("torchao")
        yield Finding("quantize", Grade.GOOD, f"{' and '.join(right)} by torchao {version}")
    for mode, fault in faults.items():
        if fault is not None:
            yield Finding("quantize", Grade.BAD if config.model.quantize == mode else Grade.NOTE, f"{mode} {fault}")


def look_at_trials(config: Config) -> Iterator[Finding]:
    """Findings on settings left at `auto`: runs the kernel trials of a start, at the model's sizes."""
    try:
        from streamdiff.pipeline import load_plan
    except (ImportError, OSError):
        return  # as above
    device, dtype = _computes_in(config)
    model = settled(config).config
    if "auto" not in (model.attention, model.quantize):
        return
    try:
        sizes = _sizes(config)
    except ConfigError:  # its files say it when it is loaded
        yield Finding("trial", Grade.NOTE, "at the start: how large the model is is not known before")
        return
    for choice in load_plan.try_kernels(model, sizes, device, dtype)[1]:
        yield Finding(choice.setting, Grade.GOOD, f"{choice.value}, {choice.reason}")


def _sizes(config: Config) -> model_sizes.ModelSizes:
    """The model's, with the picture and window that the configuration wants. Raises ConfigError."""
    model, sizes = config.model, model_sizes.sizes_of(config.model)
    return replace(sizes, spec=with_window(sizes.spec, model.window, model.sink, model.rope))


def settled(config: Config) -> Defaults:
    """The model configuration with defaults filled in for the device of this machine."""
    from streamdiff.pipeline.runner.torch_compile import compile_fault

    device, _ = _computes_in(config)
    try:
        steps = _sizes(config).spec.steps
    except ConfigError:
        steps = ()
    return settle(config.model, device.type, steps, lambda: compile_fault(device))


def _computes_in(config: Config) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the transformer."""
    from streamdiff.device import pick_device, pick_dtype

    device = pick_device("cpu" if config.model.device == "cpu" else "auto")  # not what is missing: that is told above
    return device, pick_dtype(config.model.dtype, device)
