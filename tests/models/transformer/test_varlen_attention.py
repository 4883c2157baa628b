"""Which attention of several sessions' rows is taken, and that pages are counted as the kernel wants them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from streamdiff.models.transformer import attention_backend
from streamdiff.models.transformer.attention_backend import (
    AttendPaged,
    AttentionShape,
    attention_over_segments,
    paged,
    row_by_row,
    try_paged,
)

CPU = torch.device("cpu")
SHAPE, FRAME = AttentionShape(2, 8, queries=12, keys=72), 12
ATTEND = attention_over_segments("math")


def plain_varlen(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: None, max_q: int, max_k: int, **more: Tensor
) -> Tensor:
    """What `varlen_attn` does with pages, by its documentation."""
    table, used, mixed = more["block_table"], more["seqused_k"], []
    assert table.dtype == ends.dtype == used.dtype == torch.int32 and more["num_splits"] == 1
    for row, (begin, end) in enumerate(pairwise(ends)):
        assert end - begin <= max_q and used[row] <= max_k
        keys, values = (each[table[row].long()].flatten(0, 1)[: used[row]][None] for each in (key, value))
        mixed.append(ATTEND(query[begin:end][None], [(keys, values)])[0])
    return torch.cat(mixed)


@pytest.mark.parametrize("page", [FRAME, 4, 1])
def test_pages_of_a_frame_and_parts_of_it_are_what_each_row_sees(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = plain_varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    query, key, value = (torch.randn(rows, FRAME, 2, 8) for rows in (3, 20, 20))
    seen = torch.randperm(18).view(3, 6)
    got = paged(page, query, key, value, seen)
    assert torch.allclose(got, row_by_row(ATTEND, query, key, value, seen), atol=1e-6)


def tried(kernel: Callable[..., Tensor], seconds: dict[str, float]) -> tuple[AttendPaged | None, str]:
    """The trial as on CUDA, with times by the name of what is called."""

    def stopwatch(call: partial[Tensor]) -> float:
        call()
        return seconds["alone" if call.func is row_by_row else f"pages of {call.args[0]}"]

    return try_paged(SHAPE, 3, FRAME, ATTEND, CPU, torch.float32, kernel, stopwatch)  # type: ignore[arg-type]


def right(page: int, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    return row_by_row(ATTEND, query, key, value, seen)


def wrong(page: int, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Every row sees what the first one does."""
    return row_by_row(ATTEND, query, key, value, seen[:1].expand_as(seen))


def refusing(page: int, *_: Tensor) -> Tensor:
    raise RuntimeError(f"page size {page} is no multiple of 256")


def test_a_right_kernel_that_is_faster_is_taken() -> None:
    found = tried(right, {"alone": 1.0, "pages of 12": 0.5})
    assert found[0] is not None and "by varlen_attn; tried with 3 rows" in found[1]
    assert tried(right, {"alone": 1.0, "pages of 12": 0.98})[0] is None, "that is noise"


@pytest.mark.parametrize(("kernel", "told"), [(wrong, "is wrong here: off by"), (refusing, "no multiple of 256")])
def test_one_that_is_wrong_or_cannot_run_is_not(kernel: Callable[..., Tensor], told: str) -> None:
    found = tried(kernel, {"alone": 1.0, "pages of 12": 0.1})
    assert found[0] is None and told in found[1] and found[1].startswith("row by row; ")


def test_large_frames_are_also_tried_in_parts() -> None:
    assert attention_backend._pages(1560) == (1560, 195)
    assert attention_backend._pages(64) == (64,)


def test_a_cpu_tries_nothing() -> None:
    found = try_paged(SHAPE, 3, FRAME, ATTEND, CPU, torch.float32)
    assert found == (None, "row by row: varlen_attn is for CUDA, and the device is cpu")


def test_a_trial_that_the_device_has_no_memory_for_leaves_it_at_row_by_row() -> None:

    def short(call: Callable[[], object]) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    found = try_paged(SHAPE, 3, FRAME, ATTEND, CPU, torch.float32, refusing, short)
    assert found[0] is None and found[1].startswith("row by row: the trial cannot run here")
