"""Attention of rows of several sessions in one kernel, over keys and values in pages: torch's `varlen_attn`, for CUDA.
A trial on the device says whether it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamdiff.device import seconds_per_call
from streamdiff.models.transformer.attention_backend import (
    MARGIN,
    REFUSALS,
    AttendParts,
    AttentionShape,
    Stopwatch,
    formula_error,
)

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


class PagedTrial(NamedTuple):
    """Result of a trial: the kernel for several rows (None: row by row), and a report for people."""

    attend: AttendPaged | None
    report: str


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
) -> PagedTrial:
    """Try `kernel` with pages of a frame and of its largest divisor up to 256, against `rows` rows one after the other
    by `attend`: that stays unless a right one is faster by `MARGIN`. Takes seconds, and memory of the device for the
    keys and values of a layer of so many sessions."""
    if device.type != "cuda" and kernel is paged:
        return PagedTrial(None, f"row by row: varlen_attn is for CUDA, and the device is {device.type}")
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
                off = _off(own(query, key, value, seen), query, key, value, seen)
            except (*REFUSALS, TypeError) as error:  # the last of a torch that does not know an argument yet
                tried.append(f"varlen, pages of {page}, cannot run here: {_first_line(error)}")
                continue
            if off is not None:
                tried.append(f"varlen, pages of {page}, is wrong here: off by {off:.3g}")
                continue
            found.append((stopwatch(partial(own, query, key, value, seen), device), own))
            tried.append(f"varlen, pages of {page}, {1000 * found[-1][0]:.3g} ms")
        alone_s = stopwatch(partial(loop, query, key, value, seen), device)
    except REFUSALS as error:  # memory is short, most likely
        return PagedTrial(None, f"row by row: the trial cannot run here: {_first_line(error)}")
    best_s, best = min(found, key=lambda each: each[0], default=(alone_s, None))
    chosen = best if best_s < (1 - MARGIN) * alone_s else None
    tried.append(f"row by row {1000 * alone_s:.3g} ms")
    name = "row by row" if chosen is None else "by varlen_attn"
    return PagedTrial(chosen, f"{name}; tried with {rows} rows: {', '.join(tried)}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["?"])[0]


def _pages(tokens: int) -> Sequence[int]:
    divisor = max(page for page in range(1, min(tokens, 256) + 1) if tokens % page == 0)
    return (tokens,) if divisor == tokens else (tokens, divisor)


def _off(got: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> float | None:
    """By how much a row is wrong; None: none is."""
    for row, own in enumerate(got):
        whole = [each[seen[row]].flatten(0, 1)[None] for each in (key, value)]
        if (off := formula_error(own[None], query[row : row + 1], whole[0], whole[1])) is not None:
            return off
    return None
