"""One stream to the letter: the same function of weights and script on any number of stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamdiff.errors import ConfigError
from streamdiff.models import sampling
from streamdiff.models.base import Model
from streamdiff.pipeline.scripted import POLICIES, Script, Switch, play
from tests.pipeline.reference import Reference
from tests.small import BLUE, CPU, RED, small_model

CHUNKS = 7


@pytest.fixture
def model() -> Model:
    return small_model(3, layers=3, sink=2)


@pytest.fixture
def plain(model: Model) -> Script:
    return Script(model.text.encode(RED), CHUNKS, sampling.own(2, model.spec.shift), seed=11)


def played(model: Model, script: Script, stages: int = 1) -> Tensor:
    return torch.stack(list(play(model, CPU, script, stages=stages)))


def given(model: Model, script: Script) -> Script:
    """The same script with the noise of its seed as tensors."""
    steps = range(1, script.schedule.steps)

    def draw(chunk: int, step: int) -> Tensor:
        return sampling.noise(model.spec.chunk_shape, seed=script.seed, chunk=chunk, step=step)

    initial = torch.stack([draw(chunk, 0) for chunk in range(CHUNKS)])
    renoise = torch.stack([torch.stack([draw(chunk, step) for step in steps]) for chunk in range(CHUNKS)])
    return replace(script, initial=initial, renoise=renoise, seed=999)


def test_it_equals_the_uncached_reference(model: Model, plain: Script) -> None:
    expected = Reference(model, lambda chunk: RED, seed=11, steps=2, kv_context="clean").chunks(CHUNKS)
    torch.testing.assert_close(played(model, plain), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_noise_from_tensors_is_used_instead_of_the_seed(model: Model, plain: Script) -> None:
    assert torch.equal(played(model, given(model, plain)), played(model, plain))
    assert not torch.equal(played(model, replace(plain, seed=999)), played(model, plain))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("kv_context", ["clean", "staircase", "matched"])
def test_noise_is_scaled_where_it_is_drawn_and_not_where_it_is_given(
    model: Model, plain: Script, kv_context: str, stages: int
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


def test_noise_that_is_mixed_with_input_is_not_scaled(model: Model, plain: Script) -> None:
    video = torch.randn(CHUNKS, *model.spec.chunk_shape, generator=torch.Generator().manual_seed(1))
    mixed = replace(plain, video=video, strength=0.9)
    scaled = replace(mixed, schedule=replace(plain.schedule, noise_scale=0.75))
    assert torch.equal(played(model, scaled), played(model, mixed))


def test_beyond_the_given_noise_the_seed_goes_on(model: Model, plain: Script) -> None:
    script = given(model, plain)
    assert script.initial is not None and script.renoise is not None
    short = replace(script, initial=script.initial[:3], renoise=script.renoise[:3])
    one, other = played(model, script), played(model, short)
    assert torch.equal(one[:3], other[:3]) and not torch.equal(one[3], other[3])
    assert torch.equal(played(model, replace(short, seed=11)), one)


@pytest.mark.parametrize(
    ("policy", "kv_context"),
    [
        (policy, context)
        for policy in POLICIES
        for context in ("clean", "staircase", "matched")
        if (policy, context) != ("recache", "matched")  # refused, see below
    ],
)
def test_any_number_of_stages_gives_the_same(model: Model, plain: Script, policy: str, kv_context: str) -> None:
    switches = (Switch(2, model.text.encode(BLUE), policy), Switch(5, model.text.encode(RED), "keep"))
    script = replace(plain, switches=switches, kv_context=kv_context)
    one = played(model, script)
    assert torch.equal(one, played(model, script, stages=3))
    assert not torch.equal(one[2], played(model, replace(plain, kv_context=kv_context))[2])


@pytest.mark.parametrize("kv_context", ["clean", "staircase", "matched"])
def test_a_first_chunk_with_a_schedule_of_its_own(plain: Script, kv_context: str) -> None:
    """Four steps and two, against the reference, from tensors, on three stages, and after a reset again."""
    model = small_model(3, layers=3, sink=2)
    model = replace(model, spec=replace(model.spec, context_sigma=0.1))
    schedule = replace(plain.schedule, first=sampling.own(4, model.spec.shift))
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
    again = replace(script, switches=(Switch(3, plain.embeddings, "reset"),))
    assert torch.equal(played(model, again)[3:], one[: CHUNKS - 3])


@pytest.mark.parametrize("kv_context", ["clean", "staircase", "matched"])
def test_windows_that_cut_chunks_are_the_same_on_any_number_of_stages(plain: Script, kv_context: str) -> None:
    model = small_model(3, layers=3, window=6, sink=1, chunk=3)
    switches = (Switch(2, model.text.encode(BLUE), "flush"), Switch(4, model.text.encode(RED), "keep"))
    script = replace(plain, switches=switches, kv_context=kv_context)
    assert torch.equal(played(model, script), played(model, script, stages=3))


def test_a_reset_equals_a_fresh_stream(model: Model, plain: Script) -> None:
    """With a seed its noise begins again; noise that is given by chunk goes on."""
    blue, fresh = model.text.encode(BLUE), []
    script = replace(plain, switches=(Switch(4, blue, "reset"),))
    got = torch.stack(list(play(model, CPU, script, fresh=lambda: fresh.append(True))))
    assert fresh == [True]
    alone = replace(plain, embeddings=blue, chunks=3)
    assert torch.equal(got[:4], played(model, plain)[:4]) and torch.equal(got[4:], played(model, alone))
    with_noise = given(model, script)
    assert with_noise.initial is not None and with_noise.renoise is not None
    rest = replace(with_noise, embeddings=blue, chunks=3, switches=())
    rest = replace(rest, initial=with_noise.initial[4:], renoise=with_noise.renoise[4:])
    assert torch.equal(played(model, with_noise)[4:], played(model, rest))


def test_own_timesteps_and_sigmas_are_used(model: Model, plain: Script) -> None:
    told = sampling.told([1000, 500], [1.0, 0.6])
    one = played(model, replace(plain, chunks=1, schedule=told))
    other = played(model, replace(plain, chunks=1, schedule=sampling.told([1000, 600], [1.0, 0.6])))
    assert not torch.equal(one, other), "the model is told something else"
    third = played(model, replace(plain, chunks=1, schedule=sampling.told([1000, 500], [1.0, 0.5])))
    assert not torch.equal(one, third), "the sampler mixes something else"


@pytest.mark.parametrize(
    ("switches", "kv_context", "words"),
    [
        ([(3, "forget")], "clean", "'forget'; it can be keep, flush, recache, reset"),
        ([(0, "keep")], "clean", "at chunk 0, but must be after chunk 0"),
        ([(7, "keep")], "clean", "at chunk 7, but must be after chunk 0 and before chunk 7, the end"),
        ([(3, "keep"), (3, "keep")], "clean", "at chunk 3, but must be after chunk 3"),
        ([(3, "recache")], "matched", "recache needs a KV context with a clean pass"),
    ],
)
def test_switches_that_cannot_be_are_refused(
    model: Model, plain: Script, switches: list[tuple[int, str]], kv_context: str, words: str
) -> None:
    text = model.text.encode(BLUE)
    with pytest.raises(ConfigError, match=words):
        replace(plain, switches=tuple(Switch(at, text, policy) for at, policy in switches), kv_context=kv_context)


def test_at_least_one_chunk(plain: Script) -> None:
    with pytest.raises(ConfigError, match="chunks is 0; at least 1"):
        replace(plain, chunks=0)
