"""The decoder as a stream uses it: its steps as they are written, or compiled beforehand.

A *key* is what a graph is made for: the shapes of the latents and of what the stream remembers. From its second chunk
on a stream meets the same ones with every chunk, one or two, and these get graphs. What none was made for, as a
stream's beginning, is decoded the plain way, so nothing is ever compiled again.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from streamdiff.models.autoencoder.stepped_decoder import DecoderState, Layout, Step, VideoDecoder, decode_by, rgb24
from streamdiff.pipeline.runner.torch_compile import one_graph

Key = Hashable
_BEFORE = 3
"""Latent frames, at least, after which all of a stream's chunks are alike: Wan's decoder has seen two frames then."""


class PictureDecoder:
    """A `StreamDecoder` around another: pictures in `layout`, from graphs where `compile` has made them."""

    def __init__(self, decoder: VideoDecoder, layout: Layout = rgb24) -> None:
        self.plain, self.layout = decoder, layout
        self.temporal = decoder.temporal
        self._graphs: dict[Key, Step] | None = None
        self._learning = False

    @property
    def keys(self) -> frozenset[Key]:
        """What there are graphs for."""
        return frozenset(self._graphs or ())

    def new_memory(self) -> Any:
        return self.plain.new_memory()

    def stream_bytes(self, height: int, width: int) -> int:
        return self.plain.stream_bytes(height, width)

    def decode(self, latents: Tensor, memory: Any) -> Tensor:
        """Pictures of normalised latents `[1, C, F, h, w]`, uint8 as `layout` lays them out. Mutates: memory.

        Raises:
            ValueError: latents of another shape than the stream can go on with.
        """
        if self._graphs is None:
            return decode_by(self.plain.step, self.layout, self.plain, latents, memory)
        return decode_by(self._run, lambda pictures: pictures, self.plain, latents, memory)

    @torch.inference_mode()
    def compile(self, latents: Tensor, at_once: int) -> None:
        """Make the graphs of a stream of chunks like `latents` `[C, F, h, w]` (what is in them is not looked at), of
        which a call decodes `at_once` latent frames. Takes from seconds to minutes. To be called on the thread that
        will decode, or on one that is set up alike: torch compiles anew for another number of CPU threads.
        Mutates: self.
        """
        self._graphs = self._graphs or {}
        memory, blank = self.new_memory(), torch.zeros_like(latents)
        before = -(-_BEFORE // latents.shape[1])
        for chunk in range(before + 2):  # two, as the second meets what graphs have left
            self._learning = chunk >= before
            for group in blank.split(at_once, 1):
                self.decode(group[None], memory)
        self._learning = False

    def _run(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        """A step whose frames are pictures already."""
        assert self._graphs is not None
        piece = piece.clone(memory_format=torch.contiguous_format)  # made in inference mode, and laid out, as always
        key = tuple(piece.shape), tuple(_shape(each) for each in past.values())
        if key not in self._graphs:
            if not self._learning:
                frames, after = self.plain.step(piece, past)
                return self.layout(frames), after
            self._graphs[key] = compiled(self.plain, self.layout)
        return self._graphs[key](piece, past)


def _shape(remembered: Tensor | str | None) -> Hashable:
    return tuple(remembered.shape) if isinstance(remembered, Tensor) else remembered


def compiled(decoder: VideoDecoder, layout: Layout) -> Step:
    """The decoder's step and what lays its frames out, as one graph without breaks; compiled when it is called."""

    def step(piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        frames, after = decoder.step(piece, past)
        return layout(frames), after

    return one_graph(step)
