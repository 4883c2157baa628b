"""One stream to the letter: the same function of weights and script on any number of stages; what files can say of it
(levels by chunk and latent frame, latents to go on from) against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamdiff.commands.reference import PromptSwitch, ReferenceRun, run_reference
from streamdiff.core import PROMPT_POLICIES, RECACHES
from streamdiff.errors import ConfigError
from streamdiff.models import sampling
from streamdiff.models.model import Model
from tests.pipeline.playing import local_ring
from tests.pipeline.reference import Reference
from tests.pipeline.reference_cases import CONTEXTS, NAMES, case, case_model, played
from tests.small import BLUE, CPU, RED, WHITE, small_model

CHUNKS = 7
STAGES = [pytest.param(1, marks=pytest.mark.soak), 3]


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model(3, layers=3, sink=2)


@pytest.fixture(scope="module")
def plain(model: Model) -> ReferenceRun:
    return ReferenceRun(model.text.encode(RED), CHUNKS, sampling.embedded_schedule(2, model.spec.shift), seed=11)


def given(model: Model, script: ReferenceRun) -> ReferenceRun:
    """The same script with the noise of its seed as tensors."""
    steps = range(1, script.schedule.steps)

    def draw(chunk: int, step: int) -> Tensor:
        return sampling.noise(model.spec.chunk_shape, seed=script.seed, chunk=chunk, step=step)

    initial = torch.stack([draw(chunk, 0) for chunk in range(CHUNKS)])
    renoise = torch.stack([torch.stack([draw(chunk, step) for step in steps]) for chunk in range(CHUNKS)])
    return replace(script, initial=initial, renoise=renoise, seed=999)


def test_noise_from_tensors_is_used_instead_of_the_seed(model: Model, plain: ReferenceRun) -> None:
    assert torch.equal(played(model, given(model, plain)), played(model, plain))
    assert not torch.equal(played(model, replace(plain, seed=999)), played(model, plain))


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("kv_context", ["clean", "staircase", "same_step"])
def test_noise_is_scaled_where_it_is_drawn_and_not_where_it_is_given(
    model: Model, plain: ReferenceRun, kv_context: str, stages: int
) -> None:
    """What is given is what the first step receives; beyond it, the seed's noise is scaled again."""
    plain = replace(plain, kv_context=kv_context)
    scaled = replace(plain, schedule=replace(plain.schedule, noise_scale=0.75))
    by_hand = given(model, plain)
    assert by_hand.initial is not None and by_hand.renoise is not None
    initial, renoise = by_hand.initial * 0.75, by_hand.renoise
    by_hand = replace(by_hand, initial=initial)
    expected = played(model, by_hand)
    assert torch.equal(played(model, scaled, stages), expected)
    assert not torch.equal(expected, played(model, plain))
    assert torch.equal(played(model, replace(by_hand, schedule=scaled.schedule), stages), expected)
    short = replace(scaled, initial=initial[:3], renoise=renoise[:3])
    assert torch.equal(played(model, short, stages), expected)


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(
    ("policy", "kv_context"),
    [("keep", "clean"), ("keep", "staircase"), ("keep", "same_step"), ("recache", "clean"), ("recache", "staircase")],
)
def test_a_prompt_that_comes_over_chunks_is_a_switch_at_each(
    model: Model, plain: ReferenceRun, policy: str, kv_context: str, stages: int
) -> None:
    """Thirds of it; another that comes meanwhile goes on from what holds then, and the stream's end cuts it."""
    red, blue, other = (model.text.encode(text) for text in (RED, BLUE, WHITE))
    plain = replace(plain, kv_context=kv_context)
    mixed = replace(plain, switches=(PromptSwitch(1, blue, policy), PromptSwitch(3, other, policy)), mix=3)
    last = red + (blue - red) * 2 / 3
    shares = [(1, red + (blue - red) / 3), (2, last), (3, last + (other - last) / 3)]
    shares += [(4, last + (other - last) * 2 / 3), (5, other)]
    by_hand = replace(plain, switches=tuple(PromptSwitch(chunk, rows, policy) for chunk, rows in shares))
    got = played(model, mixed, stages)
    torch.testing.assert_close(got, played(model, by_hand), rtol=1e-4, atol=1e-5)
    at_once = played(model, replace(mixed, mix=1))
    assert torch.equal(got[0], at_once[0]) and (got[1] - at_once[1]).abs().max() > 1e-4
    cut = replace(plain, chunks=2, switches=(PromptSwitch(1, blue, policy),), mix=3)
    torch.testing.assert_close(played(model, cut, stages), got[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "kv_context"),
    [
        pytest.param(policy, context, marks=[] if context == "clean" or policy == "flush" else pytest.mark.soak)
        for policy in PROMPT_POLICIES
        for context in ("clean", "staircase", "same_step")
        if policy not in RECACHES or context != "same_step"  # refused, see below
    ],
)
def test_any_number_of_stages_gives_the_same(model: Model, plain: ReferenceRun, policy: str, kv_context: str) -> None:
    switches = (PromptSwitch(2, model.text.encode(BLUE), policy), PromptSwitch(5, model.text.encode(RED), "keep"))
    script = replace(plain, switches=switches, kv_context=kv_context)
    one = played(model, script)
    assert torch.equal(one, played(model, script, stages=3))
    assert not torch.equal(one[2], played(model, replace(plain, kv_context=kv_context))[2])


@pytest.mark.slow
@pytest.mark.parametrize("kv_context", ["clean", "staircase", "same_step"])
def test_a_first_chunk_with_a_schedule_of_its_own(plain: ReferenceRun, kv_context: str) -> None:
    """Four steps and two, against the reference, from tensors, on three stages, and after a reset again."""
    model = small_model(3, layers=3, sink=2)
    model = replace(model, spec=replace(model.spec, context_sigma=0.1))
    schedule = replace(plain.schedule, first=sampling.embedded_schedule(4, model.spec.shift))
    script = replace(plain, schedule=schedule, kv_context=kv_context)
    one = played(model, script)
    reference = Reference(model, lambda chunk: RED, seed=11, steps=2, first_steps=4, kv_context=kv_context)
    torch.testing.assert_close(one, torch.stack(reference.chunks(CHUNKS)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(one[1], played(model, replace(script, schedule=plain.schedule))[1], atol=1e-2)
    assert torch.equal(one, played(model, script, stages=3))
    draw = lambda chunk, step: sampling.noise(model.spec.chunk_shape, seed=11, chunk=chunk, step=step)  # noqa: E731
    initial = torch.stack([draw(chunk, 0) for chunk in range(CHUNKS)])
    renoise = torch.stack([torch.stack([draw(chunk, step) for step in (1, 2, 3)]) for chunk in range(CHUNKS)])
    assert torch.equal(one, played(model, replace(script, initial=initial, renoise=renoise)))
    again = replace(script, switches=(PromptSwitch(3, plain.embeddings, "reset"),))
    assert torch.equal(played(model, again)[3:], one[: CHUNKS - 3])


def test_a_reset_equals_a_fresh_stream(model: Model, plain: ReferenceRun) -> None:
    """With a seed its noise begins again; noise that is given by chunk goes on."""
    blue = model.text.encode(BLUE)
    script = replace(plain, switches=(PromptSwitch(4, blue, "reset"),))
    chunks = list(run_reference(local_ring(model, CPU), script))
    got = torch.stack([latents for latents, _ in chunks])
    assert [chunk for chunk, (_, begins) in enumerate(chunks) if begins] == [0, 4]
    alone = replace(plain, embeddings=blue, chunks=3)
    assert torch.equal(got[:4], played(model, plain)[:4]) and torch.equal(got[4:], played(model, alone))
    with_noise = given(model, script)
    assert with_noise.initial is not None and with_noise.renoise is not None
    rest = replace(with_noise, embeddings=blue, chunks=3, switches=())
    rest = replace(rest, initial=with_noise.initial[4:], renoise=with_noise.renoise[4:])
    assert torch.equal(played(model, with_noise)[4:], played(model, rest))


@pytest.mark.parametrize(
    ("switches", "kv_context", "field"),
    [
        ([(0, "keep")], "clean", "prompt_switch"),
        ([(7, "keep")], "clean", "prompt_switch"),
        ([(3, "keep"), (3, "keep")], "clean", "prompt_switch"),
        ([(3, "recache")], "same_step", "kv_context"),
        ([(3, "recache-causal")], "same_step", "kv_context"),
    ],
)
def test_switches_that_cannot_be_are_refused(
    model: Model, plain: ReferenceRun, switches: list[tuple[int, str]], kv_context: str, field: str
) -> None:
    text = model.text.encode(BLUE)
    with pytest.raises(ConfigError) as caught:
        replace(plain, switches=tuple(PromptSwitch(at, text, policy) for at, policy in switches), kv_context=kv_context)
    assert caught.value.field == field


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
