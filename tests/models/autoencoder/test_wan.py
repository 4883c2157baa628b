"""The streaming Wan autoencoder against diffusers' whole-clip one: any pieces, several streams, all entry points."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor
from torch.overrides import TorchFunctionMode

from streamdiff.errors import ConfigError
from streamdiff.models.autoencoder.wan import WanAutoencoder, WanMemory
from streamdiff.session_state import walk
from tests.small_vae import relative_error, small_wan_autoencoder

pytestmark = pytest.mark.slow

LATENTS = 6
FRAMES = 1 + 4 * (LATENTS - 1)
TOLERANCE = 1e-5
# Wan2.1 as it is, wide enough to tell its parts apart; and Wan2.2's kind: pixels in patches, shortcuts around blocks.
WAN = small_wan_autoencoder()
WAN22 = small_wan_autoencoder(
    1,
    base_dim=4,
    decoder_base_dim=8,
    z_dim=4,
    is_residual=True,
    patch_size=2,
    in_channels=12,
    out_channels=12,
    latents_mean=[0.1, -0.2, 0.3, 0.4],
    latents_std=[1.1, 0.9, 1.2, 0.8],
    scale_factor_spatial=16,
)
KINDS = {"wan2.1": WAN, "wan2.2": WAN22}
kinds = pytest.mark.parametrize("kind", KINDS)


def raw_of(autoencoder: AutoencoderKLWan, batch: int = 1, seed: int = 1) -> Tensor:
    shape = (batch, autoencoder.config["z_dim"], LATENTS, 2, 3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def video_of(autoencoder: AutoencoderKLWan, batch: int = 1, seed: int = 2) -> Tensor:
    side = 8 * (autoencoder.config["patch_size"] or 1)
    shape = (batch, 3, FRAMES, 2 * side, side)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def whole_decode(autoencoder: AutoencoderKLWan, raw: Tensor) -> Tensor:
    with torch.no_grad():
        video: Tensor = autoencoder.decode(raw).sample
    # A picture that is all limit would agree with anything.
    assert video.std() > 0.05 and (video.abs() < 1).float().mean() > 0.7
    return video


def whole_encode(autoencoder: AutoencoderKLWan, video: Tensor) -> Tensor:
    with torch.no_grad():
        raw: Tensor = autoencoder.encode(video).latent_dist.mode()
    assert raw.std() > 0.01
    return raw


@kinds
@pytest.mark.parametrize("pieces", [[1] * 6, [4, 2], [6], [2, 1, 1, 2]], ids=str)
def test_decoding_in_pieces_equals_diffusers_whole(kind: str, pieces: list[int]) -> None:
    autoencoder = KINDS[kind]
    raw, decoder, memory = raw_of(autoencoder), WanAutoencoder(autoencoder), WanMemory()
    parts = [decoder.decode_raw(piece, memory) for piece in raw.split(pieces, 2)]
    assert [part.shape[2] for part in parts] == [4 * pieces[0] - 3, *(4 * count for count in pieces[1:])]
    assert relative_error(torch.cat(parts, 2), whole_decode(autoencoder, raw)) <= TOLERANCE


def test_a_call_is_one_step_but_for_a_streams_first_latent_frame() -> None:
    decoder, memory, raw = WanAutoencoder(WAN), WanMemory(), raw_of(WAN)
    assert [piece.shape[2] for piece in decoder.pieces(raw, decoder.past(raw, memory))] == [1, LATENTS - 1]
    decoder.decode_raw(raw[:, :, :1], memory)
    assert [piece.shape[2] for piece in decoder.pieces(raw, decoder.past(raw, memory))] == [LATENTS]


class NoWords(TorchFunctionMode):
    """Refuses to compare a tensor with a word, as the compiler of torch before 2.13 does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(isinstance(each, str) for each in args), f"{func} of a tensor and a word"
        return func(*args, **(kwargs or {}))


@kinds
def test_a_step_compares_no_tensor_with_a_word(kind: str) -> None:
    decoder, memory = WanAutoencoder(KINDS[kind]), WanMemory()
    with NoWords():
        for piece in raw_of(KINDS[kind]).split(2, 2):
            decoder.decode_raw(piece, memory)


@kinds
@pytest.mark.parametrize("pieces", [[1, 4, 4, 4, 4, 4], [1] * 21, [21], [2, 3, 7, 9]], ids=str)
def test_encoding_in_pieces_equals_diffusers_whole(kind: str, pieces: list[int]) -> None:
    autoencoder = KINDS[kind]
    video, encoder, memory = video_of(autoencoder), WanAutoencoder(autoencoder), WanMemory()
    parts = [encoder.encode_raw(piece, memory) for piece in video.split(pieces, 2)]
    assert encoder.finish(memory) is None
    assert relative_error(torch.cat(parts, 2), whole_encode(autoencoder, video)) <= TOLERANCE


def test_streams_and_whole_clips_in_turn_do_not_disturb_each_other() -> None:
    """One set of weights; three streams, two of them decoding, and diffusers' own calls between."""
    decoder, encoder = WanAutoencoder(WAN), WanAutoencoder(WAN)
    one, two, video = raw_of(WAN, seed=3), raw_of(WAN, seed=4), video_of(WAN)
    wanted = whole_decode(WAN, one), whole_decode(WAN, two), whole_encode(WAN, video)
    memories, parts = (WanMemory(), WanMemory(), WanMemory()), ([], [], [])  # type: ignore[var-annotated]
    frames = video.split([1, 4, 4, 4, 4, 4], 2)
    for index in range(LATENTS):
        parts[0].append(decoder.decode_raw(one[:, :, index : index + 1], memories[0]))
        parts[1].append(decoder.decode_raw(two[:, :, index : index + 1], memories[1]))
        whole_decode(WAN, two)
        parts[2].append(encoder.encode_raw(frames[index], memories[2]))
    for got, expected in zip(parts, wanted, strict=True):
        assert relative_error(torch.cat(got, 2), expected) <= TOLERANCE


def test_normalised_latents_are_those_that_the_transformer_makes() -> None:
    decoder, encoder = WanAutoencoder(WAN), WanAutoencoder(WAN)
    mean, std = (torch.tensor(WAN.config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    raw, video = raw_of(WAN), video_of(WAN)
    decoded = decoder.decode_video((raw - mean) / std, WanMemory())
    assert decoded.dtype == torch.float32
    assert relative_error(decoded, whole_decode(WAN, raw)) <= TOLERANCE
    assert relative_error(encoder.encode(video, WanMemory()), (whole_encode(WAN, video) - mean) / std) <= TOLERANCE


def test_memory_does_not_grow_with_the_stream() -> None:
    decoder, encoder, memories = WanAutoencoder(WAN), WanAutoencoder(WAN), (WanMemory(), WanMemory())
    raw, video = raw_of(WAN), video_of(WAN)
    sizes = set()
    for piece, frames in zip(raw.split(2, 2), (video[:, :, :5], video[:, :, 5:13], video[:, :, 13:]), strict=True):
        decoder.decode_raw(piece, memories[0])
        encoder.encode_raw(frames, memories[1])
        sizes.add(tuple(walk.nbytes(memory) for memory in memories))
    assert len(sizes) == 1
    held = [f for memory in memories for f in memory.features if isinstance(f, Tensor)]
    assert held and all(f.untyped_storage().nbytes() == f.nbytes for f in held)


@pytest.mark.parametrize(
    "shape", [(1, 16, 1, 2, 4), (2, 16, 1, 2, 3), (1, 15, 1, 2, 3), (1, 16, 0, 2, 3), (16, 1, 2, 3)]
)
def test_a_piece_that_does_not_fit_is_refused_and_changes_nothing(shape: tuple[int, ...]) -> None:
    decoder, raw, memory = WanAutoencoder(WAN), raw_of(WAN), WanMemory()
    first = decoder.decode_raw(raw[:, :, :2], memory)
    with pytest.raises(ValueError):
        decoder.decode_raw(torch.zeros(shape), memory)
    rest = decoder.decode_raw(raw[:, :, 2:], memory)
    assert relative_error(torch.cat([first, rest], 2), whole_decode(WAN, raw)) <= TOLERANCE


def test_a_call_that_fails_half_way_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    autoencoder = small_wan_autoencoder()
    decoder, raw, memory = WanAutoencoder(autoencoder), raw_of(autoencoder), WanMemory()
    first = decoder.decode_raw(raw[:, :, :2], memory)
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> Tensor:
            raise torch.OutOfMemoryError("no room")

        patch.setattr(autoencoder.decoder.up_blocks[2], "forward", full)
        with pytest.raises(torch.OutOfMemoryError):
            decoder.decode_raw(raw[:, :, 2:], memory)
    rest = decoder.decode_raw(raw[:, :, 2:], memory)
    assert relative_error(torch.cat([first, rest], 2), whole_decode(autoencoder, raw)) <= TOLERANCE


def test_frames_that_make_no_group_wait_and_are_told_at_the_end() -> None:
    encoder, video, memory = WanAutoencoder(WAN), video_of(WAN), WanMemory()
    assert encoder.encode_raw(video[:, :, :1], memory).shape == (1, 16, 1, 2, 1)
    assert encoder.encode_raw(video[:, :, 1:4], memory).shape == (1, 16, 0, 2, 1)
    with pytest.raises(ConfigError):
        encoder.finish(memory)
    assert encoder.encode_raw(video[:, :, 4:5], memory).shape == (1, 16, 1, 2, 1)
    assert encoder.finish(memory) is None


def test_frames_that_wait_are_the_streams_own() -> None:
    """The caller's buffer, here the same for every frame, may be used again at once, and is not kept alive."""
    encoder, video, memory = WanAutoencoder(WAN), video_of(WAN), WanMemory()
    buffer, parts = torch.empty(1, 3, 2, 16, 8), []
    for number in range(FRAMES):
        buffer[:, :, :1] = video[:, :, number : number + 1]
        parts.append(encoder.encode_raw(buffer[:, :, :1], memory))
        assert memory.pending is None or memory.pending.untyped_storage().nbytes() == memory.pending.nbytes
    assert relative_error(torch.cat(parts, 2), whole_encode(WAN, video)) <= TOLERANCE
