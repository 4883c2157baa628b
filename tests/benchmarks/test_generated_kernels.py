"""What torch's compiler would launch on CUDA, counted without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernel_count import CUDA, WithoutDevice, compiled_block, kernels_beside, spec_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]
LIMITS = {("self-forcing", "clean"): 8, ("self-forcing", "staircase"): 9, ("longlive-1.3b", "matched"): 8}
"""Six from one self-attention to the next, and the writes of keys and values; over a window in two pieces one more puts
the results together. A sink is rotated once for all blocks."""


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


@pytest.mark.parametrize(
    ("model", "kv_context"),
    [case if case == ("self-forcing", "clean") else pytest.param(*case, marks=pytest.mark.soak) for case in LIMITS],
)
def test_a_compiled_block_is_few_kernels_that_copy_nothing_of_the_window(model: str, kv_context: str) -> None:
    block = compiled_block(spec_of(model), kv_context)
    assert kernels_beside(block) <= LIMITS[model, kv_context]
    assert block.copied_bytes == 0
