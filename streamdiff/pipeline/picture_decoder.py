"""The decoder as a stream uses it: its steps as they are written, or compiled beforehand.

A *key* is what a graph is made for: the shapes of the latents and of what the stream remembers. A stream meets few: a
first call, and from the second or third on always the same. What no graph was made for is decoded the plain way, so
nothing is ever compiled again.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from streamdiff.models.stepping import Layout, Remembered, Step, SteppedDecoder, decode_by, rgb24

Key = Hashable
_CALLS = 5
"""Calls of a stream after which all are alike: what a graph leaves may lie in memory otherwise than what it was given,
which the next one meets."""


class PictureDecoder:
    """A `StreamDecoder` around another: pictures in `layout`, from graphs where `compile` has made them."""

    def __init__(self, decoder: SteppedDecoder, layout: Layout = rgb24) -> None:
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
        self._graphs, self._learning = self._graphs or {}, True
        memory, blank = self.new_memory(), torch.zeros_like(latents)
        for _ in range(_CALLS):
            for group in blank.split(at_once, 1):
                self.decode(group[None], memory)
        self._learning = False

    def _run(self, piece: Tensor, past: Remembered) -> tuple[Tensor, Remembered]:
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


def compiled(decoder: SteppedDecoder, layout: Layout) -> Step:
    """The decoder's step and what lays its frames out, as one graph without breaks; compiled when it is called."""

    def step(piece: Tensor, past: Remembered) -> tuple[Tensor, Remembered]:
        frames, after = decoder.step(piece, past)
        return layout(frames), after

    # torch keeps what it has compiled with the code, and stops at eight versions: each key has code of its own.
    own_code = FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
    return cast(Step, torch.compile(own_code, fullgraph=True, dynamic=False))
