"""`serve --gpus N`: how many stages, and ranks that share each, is left to the planner. Looks at what is here first."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

from streamdiff.child_process import environment
from streamdiff.commands import plan
from streamdiff.commands.plan_report import best_words
from streamdiff.config import Config, ModelConfig
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.pipeline.planner.forecast import Gpu, Kind, gpus, recognise

_KINDS: dict[str, Kind] = {"one": "alone", "many": "crowd"}
_NAMES = """
import json, torch
print(json.dumps([torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]))
"""


def devices_here() -> list[str]:
    """Names of the CUDA devices that torch sees, asked in a process of its own: the server's never loads torch.

    Raises:
        EngineFailure: torch does not answer.
    """
    probe = subprocess.run([sys.executable, "-c", _NAMES], env=environment(), capture_output=True, text=True)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        raise EngineFailure(f"torch does not say which CUDA devices are here: {last}")
    names: list[str] = json.loads(probe.stdout)
    return names


def with_best(
    config: Config, count: int | None, goal: str | None, here: Callable[[], Sequence[str]] = devices_here
) -> Config:
    """`config` with the stages, shares and, where that was left open, place of decoding that are best on `count` of the
    devices `here`, for one stream, or with the goal `many` for as many as fit. Says which, and why, on standard error.
    Without `count` the configuration as it is.

    Raises:
        ConfigError: something else decides already, the devices are not there, or the model does not fit on them.
        EngineFailure: as `devices_here`.
    """
    if count is None:
        if goal is not None:
            raise ConfigError(f"--for {goal} says what --gpus N is used for; give --gpus too", field="goal")
        return config
    model = config.model
    _check(model, count, goal)
    gpu, has_place = _kind(count, list(here())), "decode_rank" in model.model_fields_set
    job = plan.PlanJob(
        gpu=gpu.name,
        gpus=count,
        max_rows=config.batching.max_rows,
        decode_rank=model.decode_rank if has_place else "auto",
        dtype=None if model.dtype == "auto" else model.dtype,
    )
    found, kind = plan.compare(model, job), _KINDS[goal or "one"]
    if (best := found.best(kind)) is None:
        raise ConfigError(
            f"{model.name} does not fit on {found.machine}, however they are used; streamdiff plan --gpu {gpu.name} "
            f"--model {model.name} says which options make it fit",
            field="gpus",
            code="memory",
        )
    decode = "" if has_place else f" --decode-rank {best.decode}"
    why = f"{best_words(found, kind)}; of {len(found.cases)} ways to use {found.machine}, estimated"
    print(f"streamdiff: --parallel {best.parallel}{decode}: {why}", file=sys.stderr)
    chosen = {**model.model_dump(exclude_unset=True), "parallel": best.parallel, "decode_rank": best.decode}
    return config.model_copy(update={"model": ModelConfig.model_validate(chosen)})


def _check(model: ModelConfig, count: int, goal: str | None) -> None:
    """Raises ConfigError where something else decides already."""
    if goal not in (None, *_KINDS):
        raise ConfigError(f"--for is {goal!r}, but must be {' or '.join(_KINDS)}", field="goal")
    for name in sorted({"parallel", "stages"} & model.model_fields_set):
        raise ConfigError(
            f"--gpus {count} chooses stages and the ranks that share them, and {name} is given "
            f"({getattr(model, name)}, by --{name} or model.{name} in the file); leave one of them out",
            field=f"model.{name}",
        )
    if model.device == "cpu":
        raise ConfigError(
            f"--gpus is {count}, and device is cpu; --stages or --parallel split a model over processes on a CPU",
            field="model.device",
        )


def _kind(count: int, titles: Sequence[str]) -> Gpu:
    """The GPU that the first `count` devices are. Raises ConfigError: they are not there, not alike, or not known."""
    if len(titles) < count:
        there = ", ".join(titles) if titles else "none"
        raise ConfigError(
            f"--gpus is {count}, and torch sees {len(titles)} CUDA devices here ({there}). Give fewer, or --stages or "
            f"--parallel; streamdiff plan --gpus {count} --gpu h100 says what GPUs that are not here would do",
            field="gpus",
        )
    kinds = sorted(set(titles[:count]))
    gpu = recognise(kinds[0])
    if len(kinds) > 1 or gpu is None:
        raise ConfigError(
            f"--gpus is {count}, and the devices are {', '.join(kinds)}; what is best is computed for GPUs alike, of "
            f"the kinds {', '.join(gpus())}. Say it yourself with --parallel PxC (docs/parallel.md)",
            field="gpus",
        )
    return gpu
