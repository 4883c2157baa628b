"""Partition invariance over real processes and TCP: the numbers do not depend on how many ranks there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamdiff.pipeline.ring import Ring
from tests.pipeline.distributed.rough import BROKEN, LANES
from tests.pipeline.playing import CHUNKS, CHUNKS_LONG, OTHER_STEPS, THREE, play, same
from tests.pipeline.processes import RankFailed, run_ranks
from tests.pipeline.ring_process import Case, model_of
from tests.small import CPU

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ring processes")]
LIMIT_S = 900.0  # ends what hangs; a busy machine takes minutes
ALONE = [f"{dtype}/1/{name}" for dtype in ("float32", "bfloat16") for name in THREE]
TOGETHER = ["float32/1/0,1,2", "bfloat16/1/0,1,2"]
SEVERAL_ROWS = ["float32/4/1", "float32/4/0,1,2"]
ROUGH, EAGER, HASTY, OVER_LANES = (f"float32/1/0,1,2/{links}" for links in ("rough", "eager", "hasty", LANES))
STEPS_CHANGE = f"float32/1/{','.join(map(str, OTHER_STEPS))}"
CASES = {
    2: [*TOGETHER, "float32/1/1", OVER_LANES],
    3: [*TOGETHER, "float32/1/1", OVER_LANES, "float32/4/0,1,2", ROUGH, EAGER, STEPS_CHANGE],
    4: [*ALONE, *TOGETHER, *SEVERAL_ROWS, ROUGH, EAGER, OVER_LANES],
}
"""Of so many ranks. Three, with unequal parts of four blocks, have a case of each kind."""
RINGS = [3, *(pytest.param(stages, marks=pytest.mark.soak) for stages in (2, 4))]
Latents = dict[int, list[torch.Tensor]]


def make(stages: int, cases: list[str], folder: Path) -> dict[str, Latents]:
    """What a ring of so many processes makes, by case."""
    out = folder / "latents.pt"
    run_ranks("tests.pipeline.ring_process", [str(out), *cases], stages, LIMIT_S)
    results: dict[str, Latents] = torch.load(out, weights_only=True)
    assert list(results) == cases
    return results


@pytest.fixture(scope="module", params=RINGS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Latents]:
    stages: int = request.param
    return make(stages, CASES[stages], tmp_path_factory.mktemp("ring"))


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, int], list[torch.Tensor]]:
    """Every session by itself, in this process, on one stage."""
    return {
        (dtype, name): play(Ring(model_of(dtype), CPU), model_of(dtype), {name: order}, CHUNKS_LONG)[name]
        for dtype in ("float32", "bfloat16")
        for name, order in THREE.items()
    }


def test_latents_are_bit_identical(made: dict[str, Latents], plain: dict[tuple[str, int], list[torch.Tensor]]) -> None:
    for case, sessions in made.items():
        dtype, max_rows, names, links = Case.of(case)
        if max_rows > 1 or links in BROKEN or case == STEPS_CHANGE:
            continue
        for name in names:
            assert len(sessions[name]) == CHUNKS_LONG
            assert same(sessions[name], plain[dtype, name]), f"{case}: session {name}"


@pytest.mark.parametrize("made", [3], indirect=True)
def test_a_change_of_steps_is_the_same_change_on_any_number_of_ranks(made: dict[str, Latents]) -> None:
    """Five sessions at once, each of which goes on in another number of steps, beside each one by itself on one."""
    model = model_of("float32")
    for name, order in OTHER_STEPS.items():
        alone = play(Ring(model, CPU), model, {name: order}, CHUNKS_LONG)[name]
        assert same(made[STEPS_CHANGE][name], alone), f"session {name}: {order}"


def test_several_rows_agree_within_a_rounding(
    made: dict[str, Latents], plain: dict[tuple[str, int], list[torch.Tensor]]
) -> None:
    """Kernels for more rows sum in another order: 1e-4 over 16 chunks, each of which sees the ones before it."""
    for case, sessions in made.items():
        dtype, max_rows, names, _ = Case.of(case)
        for name in names if max_rows > 1 else []:
            for one, other in zip(sessions[name], plain[dtype, name], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("made", [3], indirect=True)
def test_a_slot_that_is_given_away_while_it_is_read_is_seen(
    made: dict[str, Latents], plain: dict[tuple[str, int], list[torch.Tensor]]
) -> None:
    """The comparison above has teeth: of an inbox that posts the next receive too early no session is right."""
    for name in THREE:
        assert not same(made[EAGER][name], plain["float32", name][:CHUNKS]), f"session {name}"


def test_a_slot_that_is_free_before_its_message_has_left_is_seen(tmp_path: Path) -> None:
    """Receives are posted late, so messages wait; what arrives of an outbox that does not is rubbish."""
    with pytest.raises(RankFailed, match=r"is not a valid MessageKind|a link brought message"):
        make(2, [HASTY], tmp_path)
