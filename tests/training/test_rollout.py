"""Many streams in one batch: the same streams as one by one, with prompt changes where they were asked for."""

from __future__ import annotations

import pytest
import torch

from tests.small import BLUE, RED, WHITE, small_model
from training.judges.rollout import rollout

MODEL = small_model(5)
CONTEXTS = ("clean", "staircase", "same_step")


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_streams_together_are_the_streams_alone(kv_context: str) -> None:
    together = rollout(MODEL, [RED, BLUE, WHITE], chunks=4, steps=4, kv_context=kv_context, seed=3)
    assert list(together) == [0, 1, 2, 3]
    for i, text in enumerate((RED, BLUE, WHITE)):
        alone = rollout(MODEL, [text], chunks=4, steps=4, kv_context=kv_context, seed=3 + i)
        for chunk in range(4):
            assert together[chunk].shape == (3, *MODEL.spec.chunk_shape)
            torch.testing.assert_close(together[chunk][i], alone[chunk][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_a_switch_is_in_force_from_its_chunk_on(kv_context: str) -> None:
    plain = rollout(MODEL, [RED, BLUE], chunks=5, steps=2, kv_context=kv_context, seed=0)
    switched = rollout(
        MODEL, [RED, BLUE], chunks=5, steps=2, kv_context=kv_context, seed=0, switch={2: [WHITE, BLUE], 4: [RED, RED]}
    )
    for chunk in range(5):
        torch.testing.assert_close(switched[chunk][1], plain[chunk][1], rtol=1e-4, atol=1e-4) if chunk < 4 else None
        changed = (switched[chunk][0] - plain[chunk][0]).abs().max()
        assert (changed > 1e-3) == (chunk >= 2), f"chunk {chunk}"
    assert (switched[4][1] - plain[4][1]).abs().max() > 1e-3
