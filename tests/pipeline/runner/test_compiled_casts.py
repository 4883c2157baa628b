"""Compiled code against the plain path in bfloat16, where it may round no less: with torch told to emulate casts the
numbers are the same, so that whatever else the compiler did wrong would be seen. GELU is that of other devices than
CPUs, whose own form rounds after each of its operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from streamdiff.models.transformer import rope, wan
from streamdiff.models.transformer.wan import KeyValue
from streamdiff.pipeline.runner import compiled_stage
from streamdiff.pipeline.runner.graphs import one_graph
from streamdiff.pipeline.runner.model_runner import ModelRunner
from tests.small import CPU, small_model

pytestmark = [
    pytest.mark.soak,
    pytest.mark.xdist_group("compiled stage"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
]
SAME = 0.99
"""Share of numbers that are equal to the bit, at least: all were on the machine where it was tried first, but sums of
norms have an order of their own on each, and a number on the edge rounds to its neighbour then."""
DTYPE = torch.bfloat16


def whole_stage() -> ModelRunner:
    model = small_model(3)
    model.denoiser.model.to(DTYPE)
    model.denoiser.fuse()
    return ModelRunner(model, CPU)


def parts_of(stage: ModelRunner) -> list[Tensor]:
    """What each piece of a stage of two blocks makes of random numbers, as it is compiled now."""
    generator = torch.Generator().manual_seed(1)
    draw: Callable[..., Tensor] = partial(torch.randn, generator=generator)
    denoiser, (frames, height, width) = stage.denoiser, stage.grid
    heads = (denoiser.heads, denoiser.head_dim)
    grid = rope.Grid(height // 2, width // 2, denoiser.head_dim, CPU)
    ropes = (rope.matrices(grid.factors(range(10, 10 + frames))),)
    given = tuple(draw(each.shape).to(DTYPE) for each in stage.zeros(1))
    texts = (KeyValue(draw(1, 16, *heads).to(DTYPE), draw(1, 16, *heads).to(DTYPE)),)
    tokens = denoiser.tokens(stage.grid)
    mixed, hidden = draw(1, tokens, *heads).to(DTYPE), draw(1, tokens, denoiser.width).to(DTYPE)
    modulation = draw(1, frames, 6, denoiser.width)
    first, second = (denoiser.weights(layer) for layer in range(2))
    parts = compiled_stage.compiled(stage, keeps_unrotated=False)
    return [
        *parts.begin(ropes, first, given),
        *parts.between(ropes, first, second, hidden, modulation, texts, mixed),
        *parts.end(second, hidden, given[1], modulation, texts, mixed),
    ]


@pytest.mark.parametrize("emulated", [True, False])
@torch.inference_mode()
def test_with_casts_emulated_compiled_code_has_the_plain_paths_numbers(
    emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config as inductor_config  # imports torch's compiler, which warns

    monkeypatch.setattr(wan, "gelu", partial(F.gelu, approximate="tanh"))
    stage = whole_stage()
    with monkeypatch.context() as patch:
        patch.setattr(compiled_stage, "one_graph", lambda function: function)
        expected = parts_of(stage)
    torch._dynamo.reset()
    with inductor_config.patch(emulate_precision_casts=emulated):
        got = parts_of(stage)
    assert compiled_stage.one_graph is one_graph
    same = [float((one == other).double().mean()) for one, other in zip(got, expected, strict=True)]
    assert (min(same) >= SAME) is emulated, same
