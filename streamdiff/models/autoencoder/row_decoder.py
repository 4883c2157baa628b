"""A decoder whose pictures several ranks share by rows: each has all weights, and of every layer its own rows.

A convolution of 3 x 3 looks one row beyond them, which the neighbours have: they are exchanged in front of each one
(the *halo*). Attention within a frame sees the whole picture, so its input is put together on every rank. All else goes
pixel by pixel. What a stream remembers is kept by each rank for its own rows, without a halo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanCausalConv3d
from torch import Tensor, nn

from streamdiff.models.autoencoder.picture_decoder import DecoderState, VideoDecoder
from streamdiff.models.autoencoder.wan import Memory
from streamdiff.session_state import walk

_ROWS = -2
"""The dimension of all tensors that a stream remembers."""


class RowExchange(Protocol):
    """One rank's rows of a picture that several ranks share, and the exchanges with the others. Rows are the last
    dimension but one of every tensor, at any resolution. All ranks call the methods but `local_rows` in the same order,
    with tensors that differ in the number of rows only."""

    @property
    def count(self) -> int:
        """Rows of the latents that this rank has."""

    @property
    def bounds(self) -> Sequence[tuple[int, int]]:
        """First and last (exclusive) of the rows of the latents that each rank has, without a gap."""

    def local_rows(self, whole: Tensor) -> Tensor:
        """A view of this rank's rows of a tensor with all rows. Raises ValueError if their number is not a multiple of
        the latents'."""

    def exchange_halo(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Each of `parts`, which have own rows, padded by the neighbours' adjacent rows; zeros beyond the picture."""

    def all_gather(self, own: Tensor) -> Tensor:
        """All ranks' rows, on every rank."""

    def gather_to_first(self, own: Tensor) -> Tensor:
        """All ranks' rows on the first rank; `own` on the others."""


class RowDecoder:
    """A `VideoDecoder` on one of the ranks that share pictures. They decode the same pieces of the same streams by the
    same methods in the same order; the first gets whole frames, each other one its own rows of them. It is given whole
    latents."""

    def __init__(self, network: VideoDecoder, rows: RowExchange) -> None:
        """Mutates: the layers of `network`, which decodes by `rows` from now on."""
        self._network, self.rows = network, rows
        self.layers, self.device, self.normalisation = network.layers, network.device, network.normalisation
        self.latent_channels, self.spatial, self.temporal = network.latent_channels, network.spatial, network.temporal
        self.new_memory, self.frames_of, self.pieces = network.new_memory, network.frames_of, network.pieces
        self.set_channels_last = network.set_channels_last
        _share_rows(network.layers, rows)

    def stream_bytes(self, height: int, width: int) -> int:
        """Bytes that this rank keeps of a stream, whatever `height`."""
        return self._network.stream_bytes(self.rows.count, width)

    @torch.inference_mode()
    def decode_video(self, latents: Tensor, memory: Any) -> Tensor:
        """See `VideoDecoder`."""
        return self.rows.gather_to_first(self._network.decode_video(self.rows.local_rows(latents), memory))

    def with_all_rows(self, parts: Sequence[Any]) -> Any:
        """What a stream remembers, of what each rank remembers of its own rows. Mutates: nothing."""
        return _of_height(walk.concatenated(parts, _ROWS), self._height)

    def rows_of(self, memory: Any, rank: int) -> Any:
        """The other way: views of a rank's rows of what a stream remembers of all. Raises ValueError where it is of
        another height."""
        first, end = self.rows.bounds[rank]

        def own(tensor: Tensor) -> Tensor:
            scale, left = divmod(tensor.shape[_ROWS], self._height)
            if left or not scale:
                raise ValueError(
                    f"there are {tensor.shape[_ROWS]} rows, but the ranks share pictures of {self._height}"
                )
            return tensor[..., first * scale : end * scale, :]

        return _of_height(walk.changed(memory, own), end - first)

    def as_whole(self, memory: Any) -> Any:
        """What this rank remembers of its own rows, as large as with all rows, and without content."""

        def whole(tensor: Tensor) -> Tensor:
            rows = tensor.shape[_ROWS] * self._height // self.rows.count
            return torch.empty((*tensor.shape[:_ROWS], rows, tensor.shape[-1]), dtype=tensor.dtype, device=walk.META)

        return _of_height(walk.changed(memory, whole), self._height)

    @property
    def _height(self) -> int:
        return self.rows.bounds[-1][1]

    def past(self, latents: Tensor, memory: Any) -> DecoderState:
        return self._network.past(self.rows.local_rows(latents), memory)

    def step(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        frames, after = self._network.step(self.rows.local_rows(piece), past)
        return self.rows.gather_to_first(frames), after

    def remember(self, latents: Tensor, memory: Any, past: DecoderState) -> int:
        return self._network.remember(self.rows.local_rows(latents), memory, past)


def _of_height(memory: Any, height: int) -> Any:
    """The memory, which says that it is of latents of this height. Mutates: memory."""
    if isinstance(memory, Memory) and memory.size is not None:
        memory.size = memory.size[0], height, memory.size[2]
    return memory


def one_pixel(frames: Tensor) -> Tensor:
    """The `Layout` of a rank whose rows another one has put together: of each frame a pixel, uint8 `[n, 1, 1]`."""
    return frames[:, 0, :1, :1].to(torch.uint8)


def _share_rows(layers: nn.Module, rows: RowExchange) -> None:
    """Have every layer that looks beyond its own rows see those of the other ranks. Mutates: layers."""

    def with_halo(module: nn.Module, given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Of a convolution's input, and of the frames that it looks back on, if there are any."""
        there = [each for each in given if each is not None]
        return (*rows.exchange_halo(*there), *[None] * (len(given) - len(there)))

    for module in layers.modules():
        if isinstance(module, WanAttentionBlock):
            module.register_forward_pre_hook(lambda _, given: (rows.all_gather(given[0]),))
            module.register_forward_hook(lambda _, given, result: rows.local_rows(result))
        elif isinstance(module, WanCausalConv3d) and module._padding[2]:
            width, _, _, _, time, later = module._padding
            module._padding = (width, width, 0, 0, time, later)
            module.register_forward_pre_hook(with_halo)
        elif isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1:
            module.padding = (0, int(module.padding[1]))
            module.register_forward_pre_hook(with_halo)
