"""Streams that the network plays itself: what is seen of them, and what they are told should have come next."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamdiff.models.autoencoder.autoencoder import load_autoencoder
from streamdiff.models.tiny.scene import Scene, Thing
from tests.small import CPU, dice, untrained_autoencoder
from training import denoiser
from training import embedded as model
from training.batches import TrackEncoder
from training.denoiser import rollout_step
from training.network import Network
from training.on_policy import PAST, OwnPasts, locate
from training.rows import LEVELS
from training.scene_rows import COLUMN, row_of
from training.world.render import render
from training.world.tracks import CONTROLS, PAN, SCROLL, Streams, Track, join, shares_of_light


def frame_of(scene: Scene) -> Track:
    rows = torch.tensor([row_of(scene)])
    return Streams(rows).play(rows, 1).flat()


TWO = Scene(Thing("red", "star", "right"), Thing("blue", "heart", "down", "small"), "city", camera="left")


@pytest.mark.slow
@pytest.mark.parametrize(("begins", "late"), [(0.0, -1), (2.5, 0), (3.75, 1)])
def test_it_sees_how_far_light_that_passes_has_come(begins: float, late: int) -> None:
    """Told to go on from where the light should be, a stream whose light lags would be told to jump."""
    scene = replace(TWO, hour="passing", weather="rain")
    should, seen = frame_of(scene), frame_of(scene)
    should.light[0] = shares_of_light(torch.tensor(begins))
    seen.light[0] = shares_of_light(torch.tensor((begins + late / 6) % 4))
    found = locate(render(seen).frames, should)
    assert found.phase.tolist() == pytest.approx([late / 6]) and found.scroll.tolist() == [0]
    assert (found.seen > 0.9).all()


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(-5, 5), st.integers(-5, 5), st.integers(-1, 1))
def test_it_sees_how_far_things_and_scenery_are_from_where_they_should_be(y: int, x: int, slip: int) -> None:
    should, seen = frame_of(TWO), frame_of(TWO)
    seen.place[0, 0] += 4 * torch.tensor([y, x])
    seen.place[0, 1] -= 4 * torch.tensor([y, x])
    seen.scroll[0] = (seen.scroll[0] + PAN * slip) % SCROLL
    found = locate(render(seen).frames, should)
    assert found.scroll.tolist() == [PAN * slip]
    assert found.shift.tolist() == [[[4 * y, 4 * x], [-4 * y, -4 * x]]]
    assert (found.seen > 0.9).all()


@pytest.mark.slow
@pytest.mark.parametrize(("x", "hidden"), [(68, True), (252, True), (160, False)])
def test_a_thing_behind_another_has_not_gone(x: int, hidden: bool) -> None:
    """It would begin again elsewhere, and the network would learn that what hides for a moment jumps."""
    should = frame_of(TWO)
    should.place[0, 1] = should.place[0, 0] + torch.tensor([4, x - should.place[0, 0, 1]])
    seen = replace(should, scenes=should.scenes.clone())
    seen.scenes[0, COLUMN["second"]] = 0
    found = locate(render(seen).frames, should)
    assert (found.seen[0, 1] == 1) == hidden, "the first thing is at x = 64, and pictures repeat after 256"
    assert not hidden or found.shift[0, 1].tolist() == [0, 0]


def numbers(scenes: Tensor) -> Tensor:
    """A stand-in for the ids of the sentences of `scenes`."""
    return scenes


@pytest.fixture(scope="module")
def pasts() -> OwnPasts:
    return OwnPasts(TrackEncoder(untrained_autoencoder(), torch.zeros(16), torch.ones(16), numbers), 3, dice())


@pytest.mark.slow
def test_streams_take_turns_and_see_what_the_network_made(pasts: OwnPasts) -> None:
    made: list[Tensor] = []

    def flow(past: Tensor, noisy: Tensor, step: int, ids: Tensor, controls: Tensor) -> Tensor:
        assert (
            past.shape == (2, PAST, 16, 3, 16, 16)
            and len(ids) == 2
            and controls.shape == (2, PAST + 1, 3, len(CONTROLS))
        )
        made.append(noisy)
        return noisy  # so that what is clean is the noise less all of it: zeros

    windows = pasts.turn(2, flow, (1.0,), dice())
    assert windows.latents.shape == (2, PAST + 1, 16, 3, 16, 16)
    assert windows.place.shape == (2, PAST + 1, 3, 2, 2)
    assert not windows.start.any() and len(made) == 1
    again = pasts.turn(2, flow, (1.0,), dice(1))
    assert torch.equal(again.scenes[1], windows.scenes[0]), "the third stream, then the first again"
    assert again.latents[1, PAST - 1].abs().max() < 1e-5, "what the network made is its past now"
    assert again.latents[1, PAST].abs().max() > 0.1, "and the world says what follows"


@pytest.fixture(scope="module")
def trained() -> tuple[Network, TrackEncoder]:
    """The packaged model."""
    network = Network()
    mean, std = network.load_model(model.load_model(model.WEIGHTS, CPU))
    return network, TrackEncoder(load_autoencoder(model.WEIGHTS, "decoder", CPU).autoencoder, mean, std, network.tokens)


@pytest.mark.slow
@torch.inference_mode()
def test_a_thing_that_is_lost_begins_where_streams_begin(trained: tuple[Network, TrackEncoder]) -> None:
    _, encode = trained
    own = OwnPasts(encode, 3, dice(2))
    track = join([own.streams.take(torch.arange(3)).play(own.scenes) for _ in range(PAST)])
    own.latents = encode.latents_of(track, things=False).unflatten(1, (PAST, -1)).transpose(2, 3)
    windows = own.turn(3, lambda past, noisy, step, ids, controls: noisy, LEVELS[2], dice())
    fresh = Streams(windows.scenes[:, -1].cpu()).play(windows.scenes[:, -1]).middles()
    alone = windows.scenes[:, -1, COLUMN["second"]] == 0
    assert alone.any() and torch.equal(windows.place[alone, -1, 0, 0], fresh[alone, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("on_stairs", [0.0, 1.0])
def test_the_packaged_network_makes_nearly_what_is_right(
    trained: tuple[Network, TrackEncoder], on_stairs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, encode = trained
    monkeypatch.setattr(denoiser, "ON_STAIRS", on_stairs)
    own = OwnPasts(encode, 3, dice(3))
    windows = rollout_step(network, own, 3, random.Random(0), dice())
    made, right = own.latents[:, -1], windows.latents[:, -1]
    assert (made - right).square().mean() < 0.3 * (windows.latents[:, -2] - right).square().mean()
