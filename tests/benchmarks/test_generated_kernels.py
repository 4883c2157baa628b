"""What torch's compiler would launch on CUDA, counted without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernel_count import CUDA, WithoutDevice, compiled_kernels, spec_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]
LIMITS = {"clean": 13, "staircase": 17}
"""Seven between self-attentions. Self-attention, not compiled: two rotations of two kernels, keys and values written;
over a window in two pieces four more put the results together."""


def names(sizes: tuple[int, ...], joined: bool) -> list[str]:
    from benchmarks import generated_kernels  # imports torch's compiler, which warns

    def block(x: Tensor, y: Tensor) -> Tensor:
        x = (x * 2 + 1).relu()
        return (x @ y).relu() if joined else x.relu() * y.sum(-1, keepdim=True)

    with FakeTensorMode() as mode, WithoutDevice():
        given = [torch.zeros(sizes, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
        return generated_kernels.kernels(block, given, mode)


def test_what_fuses_is_one_kernel_and_a_matrix_product_parts_two() -> None:
    assert len(names((512, 512), joined=False)) == 1
    assert len(names((512, 512), joined=True)) == 2


@pytest.mark.parametrize("kv_context", LIMITS)
def test_a_compiled_block_is_few_kernels(kv_context: str) -> None:
    assert compiled_kernels(spec_of("self-forcing"), kv_context) <= LIMITS[kv_context]
