"""Which attention kernel runs, by name, whether it can be trusted here, and which is the fastest for a model.

Names are torch's own kernels, and FlashAttention 3 and 4 and SageAttention, where they are installed. A kernel that is
fast and wrong gives a picture of noise and no error (a published one does so on Hopper GPUs), so the chosen one
computes a small case at the start and is compared with the plain formula. `auto` of `model.attention` on CUDA is found
by trial on the device: each candidate computes self-attention at the model's real sizes; one that cannot run, or whose
numbers are wrong, is left out; the others are timed.

Rows of several sessions, over keys and values in pages, can be one call of torch's `varlen_attn` on CUDA (`paged`); a
trial on the device says whether that is used.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.attention as torch_attention
import torch.nn.functional as F
from torch import Tensor

from streamdiff.device import seconds_per_call
from streamdiff.errors import ConfigError
from streamdiff.models.transformer.rope import multiply_add

KERNELS = ("math", "flash", "efficient", "cudnn")
"""torch's, in the order of its numbers; `sdpa` leaves the choice to torch."""
FREE = ("auto", "sdpa")
"""torch's choice: `auto` until there was a trial."""


class Packaged(NamedTuple):
    """A kernel that comes in a package: torch's `name` of it, its module, and how to install that."""

    name: str
    module: str
    install: str


IMPLEMENTATIONS = {
    "fa3": Packaged("FA3", "flash_attn_interface", "flash-attn-3 of PyTorch's package index"),
    "fa4": Packaged("FA4", "flash_attn.cute.interface", "pip install flash-attn-4"),
}
"""Replacements for torch's own flash kernel, process-wide, by their names in `model.attention`."""
RETURNS_LSE = ("flash", "efficient", "cudnn", *IMPLEMENTATIONS)
"""Those that return the sum of the weights, so that keys may lie in pieces."""
SAGE = Packaged("sage", "sageattention", "pip install sageattention, 2.1.1 or newer")
NAMES = (*FREE, "flash", "cudnn", *IMPLEMENTATIONS, SAGE.name)
"""Those of `model.attention`."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_QUANTIZED = 8e-2
"""SageAttention rounds to 8 bits inside, so it is that much off by design."""
_SAMPLES = 64
"""Queries whose results are compared."""
REFUSALS = (RuntimeError, ValueError, AssertionError, NotImplementedError, ImportError, AttributeError, OSError)
"""What kernels raise where one cannot run."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
AttendParts = Callable[[Tensor, Sequence[tuple[Tensor, Tensor]]], Tensor]
"""The same over keys and values in pieces."""


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of `[R, L, H, d]` over `[R, K, H, d]` by the kernel that torch chooses."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@cache
def kernel(name: str) -> Attend:
    """As `attend`, by the kernel of this name, one of `NAMES` or `KERNELS`. The choice is made in each call:
    torch's `sdpa_kernel` would set flags of the whole process, which other threads meet."""
    if name in FREE:
        return attend
    return _sage if name == SAGE.name else _own_kernel(name)


def activate(name: str) -> None:
    """Let torch's flash kernel be that of `name`, if it is one of `IMPLEMENTATIONS`, else torch's own again. Mutates:
    torch's dispatch, for the whole process.

    Raises:
        what importing such a package may raise, see `REFUSALS`.
    """
    implementation = IMPLEMENTATIONS.get(name)
    current = _active()
    if implementation is not None and current != implementation.name:
        torch_attention.activate_flash_attention_impl(implementation.name)
    elif implementation is None and current is not None:
        torch_attention.restore_flash_attention_impl()


def _own_kernel(name: str) -> Attend:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _results(name, query, key, value, weighed=False)[0].transpose(1, 2)

    return run


def _results(name: str, query: Tensor, key: Tensor, value: Tensor, weighed: bool) -> Sequence[Tensor]:
    """What one of torch's `KERNELS` or `IMPLEMENTATIONS`, called by itself, gives: attention `[R, H, L, d]`; then, with
    `weighed`, of those in `RETURNS_LSE`, the logarithms of the sums of weights; then what nobody needs. Raises
    RuntimeError or NotImplementedError where it cannot run."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    aten: Any = torch.ops.aten
    if name == "math":
        results = aten._scaled_dot_product_attention_math(q, k, v)
    elif name == "efficient":
        results = aten._scaled_dot_product_efficient_attention(q, k, v, None, weighed)
    elif name == "cudnn":
        results = aten._scaled_dot_product_cudnn_attention(q, k, v, None, weighed)
    elif query.device.type == "cpu":
        results = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    else:
        results = aten._scaled_dot_product_flash_attention(q, k, v)
    return cast("Sequence[Tensor]", results)


def merge_attention_states(results: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Attention over all pieces of keys from that over each, `[R, L, H, d]`, and the logarithms of the sums of their
    weights, float32 `[R, L, H, 1]`."""
    mixed, total = results[0], weights[0].float()
    for number, (result, weight) in enumerate(zip(results[1:], weights[1:], strict=True), 2):
        last = number == len(results)
        share = torch.sigmoid(weight - total)  # of all weights so far, those of this piece
        rest = torch.addcmul(mixed, mixed, share, value=-1)
        mixed = multiply_add(rest, result, share, result.dtype if last else torch.float32)
        total = total if last else torch.logaddexp(total, weight.float())
    return mixed


Merge = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""As `merge_attention_states`."""


def attention_over_segments(name: str, merge: Merge = merge_attention_states) -> AttendParts:
    """Attention by the kernel of this name over keys and values in several pieces of memory, which are not put side by
    side: each piece by itself, then their results by the weights that their keys have, which is what `merge` does.
    Kernels that do not return these weights (`math` and `sage`) get a copy."""
    whole = kernel(name)

    def run(query: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        if len(parts) == 1:
            return whole(query, *parts[0])
        own = _fused_kernel(query, *parts[0]) if name in FREE else name
        if own not in RETURNS_LSE:
            return whole(query, *(torch.cat(pieces, 1) for pieces in zip(*parts, strict=True)))
        results, weights = zip(*(_with_weights(own, query, *part) for part in parts), strict=True)
        return merge(results, weights)

    return run


def _fused_kernel(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Which of `KERNELS` torch chooses."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    chosen: int = torch._fused_sdp_choice(q, k, v)
    return KERNELS[chosen] if 0 <= chosen < len(KERNELS) else "math"


def _with_weights(name: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention `[R, L, H, d]` and the logarithm of the sum of its weights, float32 `[R, L, H, 1]`."""
    mixed, weights = _results(name, query, key, value, weighed=True)[:2]
    weights = weights.flatten(2)[..., : query.shape[1]]  # one kernel pads them, another has a dimension more
    return mixed.transpose(1, 2), weights.transpose(1, 2).unsqueeze(-1)


def _sage(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result: Tensor = importlib.import_module(SAGE.module).sageattn(query, key, value, tensor_layout="NHD")
    return result


@dataclass(frozen=True)
class AttentionShape:
    """Of a model's self-attention: a chunk's tokens, and those that it sees."""

    heads: int
    head_dim: int
    queries: int = 64
    keys: int = 192


@dataclass(frozen=True)
class AttentionCase:
    """Random queries `[1, L, H, d]`, keys and values `[1, K, H, d]`; `expected` is the formula's result in float64, on
    the CPU, for the `sampled` queries."""

    query: Tensor
    key: Tensor
    value: Tensor
    sampled: Tensor
    expected: Tensor

    @classmethod
    def of(cls, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> AttentionCase:
        generator = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.randn(1, tokens, shape.heads, shape.head_dim, generator=generator).to(device, dtype)
            for tokens in (shape.queries, shape.keys, shape.keys)
        )
        sampled = _sampled(query)
        return cls(query, key, value, sampled, _formula(query[:, sampled], key, value))

    @property
    def parts(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values in two pieces of unlike length, as those of a sink and a window."""
        first = self.key.shape[1] // 3
        pieces = tuple(zip(*(each.tensor_split([first], 1) for each in (self.key, self.value)), strict=True))
        return cast("tuple[tuple[Tensor, Tensor], ...]", pieces)


def probe(name: str, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Compute a small case with the kernel and compare it with the formula in float64.

    Raises:
        ConfigError: an unknown kernel, one that is not installed or cannot run here, or one whose numbers are wrong;
            says why or by how much, and which ones are right here.
    """
    if name not in NAMES:
        raise ConfigError(f"model.attention is {name!r}; it can be {', '.join(NAMES)}")
    if (found := fault(name, AttentionCase.of(AttentionShape(heads, head_dim), device, dtype))) is None:
        return
    others = [other for other, bad in survey(device, dtype, heads, head_dim).items() if bad is None and other != name]
    case = f"{device}, {str(dtype).removeprefix('torch.')}, head width {head_dim}"
    raise ConfigError(f"attention kernel {name} {found} ({case}); right here are: {', '.join(others) or 'none'}")


def survey(device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> dict[str, str | None]:
    """Every kernel: None where it runs here and its numbers are right, else why not."""
    case = AttentionCase.of(AttentionShape(heads, head_dim), device, dtype)
    return {name: fault(name, case) for name in NAMES}


def fault(name: str, case: AttentionCase) -> str | None:
    """What is wrong with a kernel here; None if nothing is. Over keys in two pieces it has to be right too."""
    if (reason := missing(name, case.query.device)) is not None:
        return reason
    before = _active()
    try:
        with torch.inference_mode():
            activate(name)
            got = [
                kernel(name)(case.query, case.key, case.value),
                attention_over_segments(name)(case.query, case.parts),
            ]
            found = [_off(each[:, case.sampled], case.expected) for each in got]
    except REFUSALS as error:
        message = _first_line(error)
        return "cannot run here: " + (message.partition(". ")[0] if isinstance(error, NotImplementedError) else message)
    finally:
        activate(next((each for each, known in IMPLEMENTATIONS.items() if known.name == before), ""))
    allowed = max(_TOLERANCE[case.query.dtype], _QUANTIZED if name == SAGE.name else 0.0)
    for off, over in zip(found, ("", " over keys in two pieces"), strict=True):
        if not off <= allowed:
            return f"is wrong here{over}: off by {off:.3g}, with {allowed:g} allowed"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def missing(name: str, device: torch.device) -> str | None:
    """Why the kernel cannot be had on such a device, whatever the numbers: what is not installed, or another device
    that it is for. None where it may run; whether it does, and rightly, `probe` says."""
    if (known := {**IMPLEMENTATIONS, SAGE.name: SAGE}.get(name)) is None:
        return None
    if name != SAGE.name and known.name not in getattr(torch_attention, "list_flash_attention_impls", list)():
        return f"is not known to torch {torch.__version__}, which has it in newer versions"
    if not _is_installed(known.module):
        return f"is not installed (no module {known.module}; {known.install})"
    if device.type != "cuda":
        return f"is for CUDA, and the device is {device.type}"
    return None


def _active() -> str | None:
    """The implementation of torch's flash kernel in force, by torch's name; None: its own."""
    name: str | None = getattr(torch_attention, "current_flash_attention_impl", lambda: None)()
    return name


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of the package around it
        return False


def _sampled(query: Tensor) -> Tensor:
    """Numbers of some queries of `[R, L, H, d]`, the last among them: where a kernel's last tile is a part of one."""
    count = query.shape[1]
    return torch.linspace(0, count - 1, min(_SAMPLES, count)).round().long().to(query.device)


def _off(got: Tensor, expected: Tensor) -> float:
    """Relative error of a result: norm of the difference over norm of what is expected."""
    return float((got.double().cpu() - expected).norm() / expected.norm())


def _formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula, in float64 on the CPU."""
    q, k, v = (x.double().cpu().transpose(1, 2) for x in (query, key, value))
    return (torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v).transpose(1, 2)


CANDIDATES = ("sdpa", "cudnn", "flash", "fa3", "fa4")
"""The first is torch's own choice, which stays unless another is faster by `MARGIN`."""
MARGIN = 0.03
"""Share of the time: so that noise does not choose another kernel, with other roundings, at every start."""

Stopwatch = Callable[[Callable[[], object]], float]
"""Seconds that a call takes, see `streamdiff.device.seconds_per_call`."""


def try_attention(
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    candidates: Sequence[str] = CANDIDATES,
    stopwatch: Stopwatch = seconds_per_call,
) -> tuple[str, str]:
    """The kernel to use, and what was tried, for people. Of `candidates` the first of `CANDIDATES` stays unless another
    is faster by `MARGIN`, and where none runs. Takes seconds, and memory of the device for a layer's queries, keys and
    values. Leaves torch's flash kernel as torch comes with it (`activate`)."""
    case, usual = AttentionCase.of(shape, device, dtype), CANDIDATES[0]
    seconds, left_out = dict[str, float](), list[str]()
    for name in candidates:
        if (wrong := fault(name, case)) is not None:
            left_out.append(f"{name} {wrong}")
            continue
        activate(name)
        with torch.inference_mode():
            seconds[name] = stopwatch(partial(kernel(name), case.query, case.key, case.value))
        activate("")
    fastest = min(seconds, key=seconds.__getitem__, default=usual)
    if usual in seconds and seconds[fastest] >= (1 - MARGIN) * seconds[usual]:
        fastest = usual
    sizes = f"{shape.queries:,} of {shape.keys:,} tokens, {shape.heads} heads of {shape.head_dim}"
    timed = ", ".join(f"{name} {1000 * each:.3g} ms" for name, each in seconds.items()) or "none runs"
    reason = f"tried at {sizes}, {str(dtype).removeprefix('torch.')}: {timed}"
    return fastest, f"{reason}; left out: {'; '.join(left_out)}" if left_out else reason


# ---- rows of several sessions in one kernel ------------------------------------------------------------------------

AttendPaged = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attention of rows `[R, L, H, d]` over frames of a pool, keys and values `[frames, tokens, H, d]`, of which each row
sees those that it has in int64 `[R, n]`."""


def paged(page: int, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """As `AttendPaged`, by `varlen_attn` over pages of `page` tokens, by which a frame's can be divided. Its keys are
    not split, so that a row's result is the same bits whatever is beside it."""
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn  # older versions have none
    (rows, length), parts = query.shape[:2], key.shape[1] // page
    # A frame's pages follow one another.
    table = (seen[:, :, None] * parts + torch.arange(parts, device=seen.device)).flatten(1).int()
    tokens = table.shape[1] * page
    ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=query.device)
    used = torch.full((rows,), tokens, dtype=torch.int32, device=query.device)
    pages = [each.unflatten(1, (parts, page)).flatten(0, 1) for each in (key, value)]
    mixed: Tensor = varlen_attn(
        query.flatten(0, 1), *pages, ends, None, length, tokens, seqused_k=used, block_table=table, num_splits=1
    )
    return mixed.view(rows, length, *query.shape[2:])


def row_by_row(attend: AttendParts, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """As `AttendPaged`, by a kernel for one row at a time, over a copy of what it sees."""
    mixed = []
    for own, frames in zip(query, seen, strict=True):
        parts = [each.index_select(0, frames).flatten(0, 1)[None] for each in (key, value)]
        mixed.append(attend(own[None], [(parts[0], parts[1])]))
    return torch.cat(mixed)


@torch.inference_mode()
def try_paged(
    shape: AttentionShape,
    rows: int,
    frame_tokens: int,
    attend: AttendParts,
    device: torch.device,
    dtype: torch.dtype,
    kernel: Callable[..., Tensor] = paged,
    stopwatch: Stopwatch = seconds_per_call,
) -> tuple[AttendPaged | None, str]:
    """The kernel for several rows (None: row by row), and what was tried, for people. Try `kernel` with pages of a
    frame and of its largest divisor up to 256, against `rows` rows one after the other by `attend`: that stays unless a
    right one is faster by `MARGIN`. Takes seconds, and memory of the device for the keys and values of a layer of so
    many sessions."""
    if device.type != "cuda" and kernel is paged:
        return None, f"row by row: varlen_attn is for CUDA, and the device is {device.type}"
    try:
        generator = torch.Generator().manual_seed(0)
        count = shape.keys // frame_tokens
        seen = torch.randperm(rows * count, generator=generator).view(rows, count).to(device)
        sizes = ((rows, shape.queries), (rows * count, frame_tokens), (rows * count, frame_tokens))
        query, key, value = (
            torch.randn(*size, shape.heads, shape.head_dim, generator=generator).to(device, dtype) for size in sizes
        )
        loop = partial(row_by_row, attend)
        found, tried = list[tuple[float, AttendPaged | None]](), list[str]()
        for page in _pages(frame_tokens):
            own = partial(kernel, page)
            try:
                off = _wrong_rows(own(query, key, value, seen), query, key, value, seen)
            except (*REFUSALS, TypeError) as error:  # the last of a torch that does not know an argument yet
                tried.append(f"varlen, pages of {page}, cannot run here: {_first_line(error)}")
                continue
            if off is not None:
                tried.append(f"varlen, pages of {page}, is wrong here: off by {off:.3g}")
                continue
            found.append((stopwatch(partial(own, query, key, value, seen)), own))
            tried.append(f"varlen, pages of {page}, {1000 * found[-1][0]:.3g} ms")
        alone_s = stopwatch(partial(loop, query, key, value, seen))
    except REFUSALS as error:  # memory is short, most likely
        return None, f"row by row: the trial cannot run here: {_first_line(error)}"
    best_s, best = min(found, key=lambda each: each[0], default=(alone_s, None))
    chosen = best if best_s < (1 - MARGIN) * alone_s else None
    tried.append(f"row by row {1000 * alone_s:.3g} ms")
    name = "row by row" if chosen is None else "by varlen_attn"
    return chosen, f"{name}; tried with {rows} rows: {', '.join(tried)}"


def _pages(tokens: int) -> Sequence[int]:
    divisor = max(page for page in range(1, min(tokens, 256) + 1) if tokens % page == 0)
    return (tokens,) if divisor == tokens else (tokens, divisor)


def _wrong_rows(got: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> float | None:
    """By how much a row's result differs from the formula's, for some of the queries; None: by no more than its dtype
    allows."""
    sampled = _sampled(query)
    for row, own in enumerate(got):
        whole = (each[seen[row]].flatten(0, 1)[None] for each in (key, value))
        off = _off(own[None, sampled], _formula(query[row : row + 1, sampled], *whole))
        if not off <= _TOLERANCE[query.dtype]:
            return off
    return None
