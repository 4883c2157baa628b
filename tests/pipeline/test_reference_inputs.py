"""What files can say of a reference run (levels by chunk and latent frame, latents to go on from), against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from streamdiff.commands.reference import PromptSwitch, ReferenceRun, run_reference
from streamdiff.errors import ConfigError
from streamdiff.models import sampling
from tests.pipeline.playing import local_ring
from tests.pipeline.reference_cases import CONTEXTS, NAMES, case, case_model, played
from tests.small import BLUE, CPU, RED, small_model


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_equals_float64_on_any_number_of_stages(name: str) -> None:
    run = case(name).run
    one, expected = played(case_model(), run), case(name).expected
    assert expected.std() > 0.3
    torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(played(case_model(), run, stages=3), one)


@pytest.mark.slow
@pytest.mark.parametrize("averaged", [None, 0.5])
def test_a_stream_goes_on_from_its_own_latents_as_if_it_had_never_ended(averaged: float | None) -> None:
    """To the bit, where only finished chunks are seen; also what is folded into the sink on the way."""
    model = small_model(3, layers=3, chunk=2, window=6, sink=2)
    model = replace(model, spec=replace(model.spec, averaged_sink=averaged))
    whole = ReferenceRun(model.text.encode(RED), 7, sampling.embedded_schedule(2, 5.0), seed=11)
    latents = played(model, whole)
    for count in (1, 3, 5):
        going_on = replace(whole, given_latents=latents[:count])
        assert torch.equal(played(model, going_on), latents), f"from chunk {count}"
        assert torch.equal(played(model, going_on, stages=3), latents), f"from chunk {count} on three stages"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["keep", "recache", "reset"])
def test_a_prompt_may_change_where_what_is_given_ends(policy: str) -> None:
    model = small_model(3, layers=3, chunk=2, window=6, sink=2)
    red, blue = model.text.encode(RED), model.text.encode(BLUE)
    whole = ReferenceRun(red, 6, sampling.embedded_schedule(2, 5.0), seed=11, switches=(PromptSwitch(3, blue, policy),))
    latents = played(model, whole)
    chunks = list(run_reference(local_ring(model, CPU, 2), replace(whole, given_latents=latents[:3])))
    assert torch.equal(torch.stack([each for each, _ in chunks]), latents)
    assert [chunk for chunk, (_, begins) in enumerate(chunks) if begins] == ([0, 3] if policy == "reset" else [0])


@pytest.mark.parametrize("kv_context", CONTEXTS)
def test_those_made_together_may_be_given(kv_context: str) -> None:
    model = small_model(3, layers=3, chunk=1, window=5, sink=2)
    model = replace(model, spec=replace(model.spec, first_chunks=2))
    whole = ReferenceRun(model.text.encode(RED), 5, sampling.embedded_schedule(2, 5.0), kv_context, 11)
    latents = played(model, whole)
    got = played(model, replace(whole, given_latents=latents[:2]))
    assert torch.equal(got[:2], latents[:2])
    if kv_context == "clean":
        assert torch.equal(got, latents)
    with pytest.raises(ConfigError) as caught:
        played(model, replace(whole, given_latents=latents[:1]))
    assert caught.value.field == "given_latents"
