"""`serve --gpus N`: how many stages, and ranks that share each, is left to the planner. Looks at what is here first."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

from streamdiff.child_process import environment
from streamdiff.commands import plan, plan_parallel
from streamdiff.commands.plan import PlanJob
from streamdiff.config import Config, ModelConfig
from streamdiff.errors import ConfigError, EngineFailure
from streamdiff.pipeline.planner import gpus as known
from streamdiff.pipeline.planner.gpus import Gpu

GOALS = ("one", "many")
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
            raise ConfigError(f"--for {goal} says what --gpus N is used for; give --gpus too")
        return config
    _check(config.model, count, goal)
    gpu = _kind(count, list(here()))
    found, *_ = plan.compare(config.model, _job(config, gpu, count))
    best = found.for_many if goal == "many" else found.for_one
    if best is None:
        raise ConfigError(
            f"{config.model.name} does not fit on {found.machine}, however they are used; streamdiff plan --gpu "
            f"{gpu.name} --model {config.model.name} says which options make it fit"
        )
    decode = "" if _decides(config.model, "decode_rank") else f" --decode-rank {best.decode}"
    why = plan_parallel.reason(best, best.crowd if goal == "many" else best.alone, found)
    print(f"streamdiff: --parallel {best.parallel}{decode}: {why}", file=sys.stderr)
    chosen = {**config.model.model_dump(exclude_unset=True), "parallel": best.parallel, "decode_rank": best.decode}
    return config.model_copy(update={"model": ModelConfig.model_validate(chosen)})


def _decides(model: ModelConfig, name: str) -> bool:
    return name in model.model_fields_set


def _check(model: ModelConfig, count: int, goal: str | None) -> None:
    if goal is not None and goal not in GOALS:
        raise ConfigError(f"--for is {goal!r}, but must be {' or '.join(GOALS)}")
    for name in ("parallel", "stages"):
        if _decides(model, name):
            raise ConfigError(
                f"--gpus {count} chooses stages and the ranks that share them, and {name} is given "
                f"({getattr(model, name)}, by --{name} or model.{name} in the file); leave one of them out"
            )
    if model.device == "cpu":
        raise ConfigError(
            f"--gpus is {count}, and device is cpu; --stages or --parallel split a model over processes on a CPU"
        )


def _kind(count: int, titles: Sequence[str]) -> Gpu:
    """The GPU that the first `count` devices are. Raises ConfigError: they are not there, not alike, or not known."""
    if len(titles) < count:
        there = ", ".join(titles) if titles else "none"
        raise ConfigError(
            f"--gpus is {count}, and torch sees {len(titles)} CUDA devices here ({there}). Give fewer, or --stages or "
            f"--parallel; streamdiff plan --gpus {count} --gpu h100 says what GPUs that are not here would do"
        )
    kinds = sorted(set(titles[:count]))
    gpu = known.recognise(kinds[0])
    if len(kinds) > 1 or gpu is None:
        raise ConfigError(
            f"--gpus is {count}, and the devices are {', '.join(kinds)}; what is best is computed for GPUs alike, of "
            f"the kinds {', '.join(known.GPUS)}. Say it yourself with --parallel PxC (docs/parallel.md)"
        )
    return gpu


def _job(config: Config, gpu: Gpu, count: int) -> PlanJob:
    model = config.model
    return PlanJob(
        gpu=gpu.name,
        gpus=count,
        max_rows=config.batching.max_rows,
        decode=model.decode_rank if _decides(model, "decode_rank") else "auto",
        dtype=None if model.dtype == "auto" else model.dtype,
    )
