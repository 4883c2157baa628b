"""The network's own streams in training: the world finds their shapes, and says what should follow."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from streamdiff.models.autoencoder.autoencoder import load_decoder
from streamdiff.models.tiny import model, world
from streamdiff.models.tiny.text_encoder import TinyText
from streamdiff.models.tiny.training import corruption, denoiser, on_policy
from streamdiff.models.tiny.training.batches import FRAMES, LEVELS, LatentEncoder, Starts, Windows, stream_latents
from streamdiff.models.tiny.training.on_policy import PAST, OwnPasts
from tests.small import CPU

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("on-policy training")]
STREAMS = 12


@pytest.fixture(scope="module")
def encode() -> LatentEncoder:
    decoder = load_decoder(model.WEIGHTS, CPU)
    normalisation = decoder.normalisation
    assert normalisation is not None
    return LatentEncoder(decoder.autoencoder, normalisation.mean.flatten(), normalisation.std.flatten())


@pytest.fixture(scope="module")
def starts(encode: LatentEncoder) -> Starts:
    """Of one in thirty of the world's scenes."""
    with pytest.MonkeyPatch.context() as patch:
        some = world.all_scenes()[::30]
        patch.setattr(world, "all_scenes", lambda: some)
        return Starts(encode)


@pytest.fixture
def own(encode: LatentEncoder, starts: Starts) -> OwnPasts:
    return OwnPasts(encode, starts, STREAMS, torch.Generator().manual_seed(3))


def far(places: Tensor, others: Tensor) -> Tensor:
    """Pixels between places `[..., 2]`, the short way around the torus, along the worse axis."""
    half = world.SIZE // 2
    return ((places - others + half).remainder(world.SIZE) - half).abs().amax(-1)


def following(own: OwnPasts, chunk: int) -> Tensor:
    """Latents of chunk `chunk` of the streams as they should go on from their start: `[B, C, CHUNK, h, w]`."""
    centre = torch.full((STREAMS, 2), world.SIZE // 2)
    return stream_latents(own.encode, own.scenes, centre, chunk + 1)[0][:, chunk]


@torch.inference_mode()
def test_shapes_are_found_where_they_are_across_the_edge_and_with_a_side_gone(own: OwnPasts) -> None:
    origin = torch.randint(world.SIZE, (STREAMS, 2), generator=torch.Generator().manual_seed(5))
    latents, place = stream_latents(own.encode, own.scenes, origin, 1)
    last = origin + world.velocities()[own.scenes[:, 2]] * (FRAMES - 1)
    found, seen = own.locate(latents[:, 0], own.scenes)
    assert far(found, last).max() <= 2 and seen.min() > 0.8

    bare = corruption.empty_latents(own.encode)[own.scenes[:, 3]]
    window = Windows(latents, own.scenes[:, None], torch.zeros(STREAMS, dtype=torch.bool), place)
    right_side = (window.from_centers()[1] > 4)[:, 0, :, None].unsqueeze(1)
    halved = torch.where(right_side, bare[:, :, None], latents[:, 0])
    found, seen_of_half = own.locate(halved, own.scenes)
    assert far(found, last).float().median() <= 3
    assert (seen_of_half < seen).all() and seen_of_half.mean() < 0.8
    assert own.locate(bare[:, :, None].expand_as(latents[:, 0]), own.scenes)[1].max() < 0.3


@torch.inference_mode()
@pytest.mark.soak
def test_a_pupil_without_fault_makes_what_the_teacher_says(own: OwnPasts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams go on as the world would have them, chunk by chunk, and so does what it should have made."""
    monkeypatch.setattr(on_policy, "FRESH", 0.0)
    turns = 3
    scenes = own.scenes.clone()
    truth, _ = stream_latents(own.encode, scenes, torch.full((STREAMS, 2), world.SIZE // 2), PAST + turns)
    for chunk in range(PAST, PAST + turns):

        def flow(past: Tensor, noisy: Tensor, sigma: Tensor, scenes: Tensor, due: Tensor = truth[:, chunk]) -> Tensor:
            return (noisy - due) / sigma.view(-1, 1, 1, 1, 1)

        windows = own.turn(STREAMS, flow, LEVELS[4], torch.Generator().manual_seed(0))
        assert torch.equal(windows.scenes[:, -1], scenes)
        assert torch.allclose(own.latents, truth[:, chunk - PAST + 1 : chunk + 1], atol=1e-4)
        assert (windows.latents[:, -1] - truth[:, chunk]).square().mean() < 0.05, "to a pixel or two"
        # Halfway through the first latent frame of the chunk.
        middle = world.SIZE // 2 + world.velocities()[scenes[:, 2]] * (chunk * FRAMES + 1.5)
        assert far(windows.place[:, -1, 0], middle).max() <= 3


@torch.inference_mode()
def test_a_pupil_that_loses_the_shape_is_told_to_begin_where_streams_begin(own: OwnPasts, starts: Starts) -> None:
    bare = corruption.empty_latents(own.encode)[own.scenes[:, 3]]
    own.latents = bare[:, None, :, None].expand_as(own.latents).clone()
    windows = own.turn(STREAMS, lambda past, noisy, sigma, scenes: noisy, LEVELS[2], torch.Generator().manual_seed(0))
    assert torch.allclose(windows.latents[:, -1], following_first(own, windows), atol=1e-4)


def following_first(own: OwnPasts, windows: Windows) -> Tensor:
    return stream_latents(own.encode, windows.scenes[:, -1], torch.full((STREAMS, 2), world.SIZE // 2), 1)[0][:, 0]


@torch.inference_mode()
def test_streams_take_turns_and_begin_anew(own: OwnPasts, monkeypatch: pytest.MonkeyPatch) -> None:
    before = own.latents.clone()
    noise = torch.Generator().manual_seed(0)
    own.turn(5, lambda past, noisy, sigma, scenes: noisy, LEVELS[2], noise)
    changed = (own.latents != before).flatten(1).any(1)
    assert changed.tolist() == [True] * 5 + [False] * (STREAMS - 5)
    own.turn(STREAMS - 5, lambda past, noisy, sigma, scenes: noisy, LEVELS[2], noise)
    assert (own.latents != before).flatten(1).any(1).all()
    monkeypatch.setattr(on_policy, "FRESH", 1.0)
    own.turn(STREAMS, lambda past, noisy, sigma, scenes: noisy, LEVELS[2], noise)
    assert torch.equal(own.latents[:, 1], following(own, 1)), "all of them at their second chunk again"


def test_the_packaged_network_makes_nearly_what_is_right(own: OwnPasts) -> None:
    loaded = model.load_model(model.WEIGHTS, CPU)
    network = denoiser.TinyNetwork()
    network.transformer.load_state_dict(loaded.denoiser.model.state_dict())
    assert isinstance(loaded.text, TinyText)
    network.encoder.load_state_dict(loaded.text.encoder.state_dict())
    chance = random.Random(0)

    def ids_of(scenes: Tensor, chunks: int) -> Tensor:
        return network.text.tokens(denoiser.captions(scenes[:, None].expand(-1, chunks, -1), chance))

    windows = denoiser.rollout_step(network, own, 6, chance, torch.Generator().manual_seed(0), ids_of)
    made, right = own.latents[:6, -1], windows.latents[:, -1]
    assert (made - right).square().mean() < 0.1 * (windows.latents[:, -2] - right).square().mean()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # the norms of a transformer in float32
def test_gradients_in_bfloat16_point_where_those_in_float32_do(starts: Starts, encode: LatentEncoder) -> None:
    network = denoiser.TinyNetwork()
    network.load_model(model.load_model(model.WEIGHTS, CPU))
    network.encoder.requires_grad_(False)
    windows = starts.sample(2, torch.Generator().manual_seed(1))
    windows = Windows(
        windows.latents.repeat(1, 3, 1, 1, 1, 1),
        windows.scenes.repeat(1, 3, 1),
        windows.start,
        windows.place.repeat(1, 3, 1, 1),
    )
    empty = corruption.empty_latents(encode)
    gradients = []
    for bf16 in (False, True):
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            chance, generator = random.Random(0), torch.Generator().manual_seed(0)
            lesson = denoiser.lesson_of(network, windows, empty, "own", chance, generator)
            (loss,) = network.losses({"own": lesson}).values()
        assert loss.dtype is torch.float32
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.transformer.parameters() if p.grad is not None]))
    assert not torch.equal(*gradients)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.98
