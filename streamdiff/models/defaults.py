"""Resolves settings left at their default, by device and by the presets `plain` and `fast`, with the reason for each.

The one place for that. A setting that is given is taken as it is, whatever the preset. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from streamdiff.config import ModelConfig
from streamdiff.models.catalogue.entries import small_autoencoder

_PLAIN = "--plain"


class Choice(NamedTuple):
    """A setting's value, and the reason for it."""

    setting: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.value} ({self.reason})"


@dataclass(frozen=True)
class Defaults:
    """`config` with all defaults resolved that device or preset decide (`auto` of attention and quantize stays: a trial
    on the device decides it); torch's process-wide cuDNN flag; whether pictures lie in the decoder with the channels
    last (None: as its network has it); and every choice with its reason, for the log."""

    config: ModelConfig
    cudnn_benchmark: bool
    channels_last: bool | None
    choices: tuple[Choice, ...]


class _Case(NamedTuple):
    """`steps` are those that the model has, the one it was made for first; `compile_fault` says why nothing can be
    compiled here, None if it can."""

    config: ModelConfig
    cuda: bool
    steps: Sequence[int]
    compile_fault: Callable[[], str | None]

    @property
    def plain(self) -> bool:
        return self.config.preset == "plain"

    @property
    def fast(self) -> bool:
        return self.config.preset == "fast"


def settle(
    config: ModelConfig, device: str, steps: Sequence[int], compile_fault: Callable[[], str | None] = lambda: None
) -> Defaults:
    """The defaults of `config`, which `models.resolve.completed` gave, on a `device`, `cpu` or `cuda`; see `_Case` for
    the others."""
    case = _Case(config, device == "cuda", steps, compile_fault)
    choices = [_device(case), _dtype(case), _vae(case), _steps(case)]
    settled: dict[str, object] = {}
    if case.fast and config.steps is None and steps:
        settled["steps"] = min(steps)
    for setting, choose in (("attention", _attention), ("compile", _compile)):
        configured = str(getattr(config, setting))
        value, reason = choose(case) if configured == "auto" else (configured, "as asked")
        settled[setting] = value
        choices.append(Choice(setting, value, reason))
    benchmark, reason = _cudnn_benchmark(case)
    choices += [Choice("cudnn.benchmark", "on" if benchmark else "off", reason), _quantize(case)]
    channels_last, layout = _channels_last(case)
    choices += [layout, *_decoding(case)]
    if settled["compile"] == "on" and case.cuda:
        choices.append(Choice("decode", "a stream of its own", "of lower priority than the transformer's graphs"))
    return Defaults(case.config.model_copy(update=settled), benchmark, channels_last, tuple(choices))


def may_compile(config: ModelConfig) -> bool:
    """Whether an engine with this configuration may compile graphs at its start, determined without importing torch."""
    if config.compile != "auto":
        return config.compile == "on"
    found = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))
    return config.preset != "plain" and (config.device == "cuda" or (config.device == "auto" and found))


# ---- one setting each ------------------------------------------------------------------------------------------------


def _device(case: _Case) -> Choice:
    reason = "as asked" if case.config.device != "auto" else f"torch sees {'a' if case.cuda else 'no'} CUDA device"
    return Choice("device", "cuda" if case.cuda else "cpu", reason)


def _dtype(case: _Case) -> Choice:
    if case.config.dtype != "auto":
        return Choice("dtype", case.config.dtype, "as asked")
    return Choice("dtype", *(("bfloat16", "CUDA") if case.cuda else ("float32", "CPU")))


def _vae(case: _Case) -> Choice:
    vae = case.config.vae
    if vae is not None:
        small = case.fast and vae == small_autoencoder(case.config.name)
        return Choice("vae", vae, "--fast: small, pictures a little softer" if small else "as asked")
    return Choice("vae", "the model's own", "no smaller one is known" if case.fast else "--fast takes a small one")


def _steps(case: _Case) -> Choice:
    config, steps = case.config, case.steps
    if config.steps is not None:
        return Choice("steps", str(config.step_count or len(config.timesteps or ())), "as asked")
    if not steps:
        return Choice("steps", "the model's own", "nothing is known of others")
    if case.fast and min(steps) < steps[0]:
        return Choice("steps", str(min(steps)), f"--fast: of {' or '.join(map(str, steps))}")
    fewer = min(steps) < steps[0]
    return Choice("steps", str(steps[0]), f"{'--fast takes' if fewer else 'the model has no fewer than'} {min(steps)}")


def _attention(case: _Case) -> tuple[str, str]:
    if case.plain:
        return "sdpa", f"{_PLAIN}: torch's own choice, no trial"
    if case.cuda:
        return "auto", f"CUDA: the fastest of a trial; {_PLAIN} leaves it to torch"
    return "sdpa", "CPU: torch's own choice"


def _compile(case: _Case) -> tuple[str, str]:
    if case.plain:
        return "off", _PLAIN
    if not case.cuda:
        return "off", "CPU: compiling takes long there; --compile on asks for it"
    if case.config.attention == "sage":
        return "off", "attention sage is not torch's; --compile on asks for it"
    if (fault := case.compile_fault()) is not None:
        return "off", f"{fault}; --compile on asks for it"
    return "on", f"CUDA; {_PLAIN} switches it off"


def _channels_last(case: _Case) -> tuple[bool | None, Choice]:
    if case.plain:
        return False, Choice("decoder's layout", "contiguous", _PLAIN)
    if case.cuda:
        return True, Choice("decoder's layout", "channels last", f"CUDA; {_PLAIN} switches it off")
    return None, Choice("decoder's layout", "the decoder's own", "CPU: channels last, but for Wan's decoder")


def _decoding(case: _Case) -> tuple[Choice, ...]:
    if not case.cuda:
        return Choice("decoder's call", "a latent frame", "CPU: its pictures are early"), Choice(
            "pictures", "rgb", "CPU"
        )
    return (
        Choice("decoder's call", "a chunk", "CUDA; one latent frame where memory is short"),
        Choice("pictures", "yuv420 to a server's encoders, else rgb", "CUDA; rgb where serve.upscale is above 1"),
    )


def _cudnn_benchmark(case: _Case) -> tuple[bool, str]:
    if case.plain or not case.cuda:
        return False, _PLAIN if case.plain else "CPU"
    return True, f"CUDA: convolutions are tried out once; {_PLAIN} switches it off"


def _quantize(case: _Case) -> Choice:
    reason = {
        "none": "8 bits change the picture; --quantize auto takes fp8 where it is faster",
        "auto": "fp8 is tried at the model's sizes, and kept where it is faster",
    }.get(case.config.quantize, "as asked")
    return Choice("quantize", case.config.quantize, reason)
