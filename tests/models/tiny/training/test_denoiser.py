"""The denoiser's training: attention written out in bfloat16 is the attention that streams run with."""

from __future__ import annotations

import pytest
import torch

from streamdiff.models.tiny.training.denoiser import _attend
from streamdiff.models.transformer.wan import attend


@pytest.mark.parametrize("seen", [48, 240])
def test_attention_in_bfloat16_is_attention_forwards_and_backwards(seen: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 48, 6, 32), (2, seen, 6, 32), (2, seen, 6, 32))
    plain = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    written_out = [tensor.detach().clone().requires_grad_() for tensor in plain]
    expected = attend(*plain)
    with torch.autocast("cpu", torch.bfloat16):
        found = _attend(*written_out)
    assert found.dtype == torch.bfloat16, "without autocast it is `attend` itself"
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0)
    weights = torch.randn(expected.shape, generator=generator)
    (expected * weights).sum().backward()
    (found.float() * weights).sum().backward()
    for own, theirs in zip(written_out, plain, strict=True):
        assert own.grad is not None and theirs.grad is not None
        torch.testing.assert_close(own.grad, theirs.grad, atol=0.05, rtol=0)
