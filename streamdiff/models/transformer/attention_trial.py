"""Which attention kernel is the fastest for a model, by trial on its device: `auto` of `model.attention` on CUDA.

Each candidate computes self-attention at the model's real sizes. One that cannot run, or whose numbers are wrong, is
left out; the others are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from streamdiff.device import seconds_per_call
from streamdiff.models.transformer.attention_backend import AttentionShape, Case, activate, fault, kernel

CANDIDATES = ("sdpa", "cudnn", "flash", "fa3", "fa4")
"""The first is torch's own choice, which stays unless another is faster by `MARGIN`."""
MARGIN = 0.03
"""Share of the time: so that noise does not choose another kernel, with other roundings, at every start."""

Stopwatch = Callable[[Callable[[], object], torch.device], float]
"""Seconds that a call takes on a device, see `streamdiff.device.seconds_per_call`."""


@dataclass(frozen=True)
class Tried:
    """One candidate: the time of a call, or why it is left out."""

    name: str
    seconds: float | None
    fault: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.fault}" if self.seconds is None else f"{self.name} {1000 * self.seconds:.3g} ms"


@dataclass(frozen=True)
class Trial:
    """All candidates of one shape, in the order in which they were tried."""

    shape: AttentionShape
    dtype: torch.dtype
    tried: tuple[Tried, ...]

    @property
    def fastest(self) -> str:
        """The candidate to use: the first, or one that is faster by `MARGIN`. `sdpa` where none could be timed."""
        timed = {each.name: each.seconds for each in self.tried if each.seconds is not None}
        if not timed:
            return CANDIDATES[0]
        best, usual = min(timed, key=timed.__getitem__), timed.get(CANDIDATES[0])
        return best if usual is None or timed[best] < (1 - MARGIN) * usual else CANDIDATES[0]

    @property
    def reason(self) -> str:
        """What was tried, for people."""
        shape, dtype = self.shape, str(self.dtype).removeprefix("torch.")
        sizes = f"{shape.queries:,} of {shape.keys:,} tokens, {shape.heads} heads of {shape.head_dim}, {dtype}"
        timed = [str(each) for each in self.tried if each.seconds is not None]
        left_out = [str(each) for each in self.tried if each.seconds is None]
        reason = f"tried at {sizes}: {', '.join(timed) or 'none runs'}"
        return reason + (f"; left out: {'; '.join(left_out)}" if left_out else "")


def try_attention(
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    candidates: Sequence[str] = CANDIDATES,
    stopwatch: Stopwatch = seconds_per_call,
) -> Trial:
    """Try `candidates` out. Takes seconds, and memory of the device for a layer's queries, keys and values. Leaves
    torch's flash kernel as torch comes with it (`attention_backend.activate`)."""
    case, tried = Case.of(shape, device, dtype), []
    for name in candidates:
        if (wrong := fault(name, case)) is not None:
            tried.append(Tried(name, None, wrong))
            continue
        activate(name)
        with torch.inference_mode():
            seconds = stopwatch(partial(kernel(name), case.query, case.key, case.value), device)
        activate("")
        tried.append(Tried(name, seconds))
    return Trial(shape, dtype, tuple(tried))
