"""What every autoencoder can do (`VideoAutoencoder`); and latents to pictures, by steps: what a stream remembers goes
in and comes out as tensors, so that a step can be compiled.

A *past* is what a stream remembers, by the number of the layer that will look at it: a tensor; None where the layer has
seen nothing; or a word that the layer itself has left there. A step changes none of what it is given.

*Raw* latents are what an autoencoder's network gives and takes. *Normalised* ones, `(raw - mean) / std` per channel,
are what the transformer works on, what streams carry, and what files hold.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from streamdiff.errors import ConfigError
from streamdiff.models import catalogue
from streamdiff.session_state import walk


class Normalisation:
    """Between raw and normalised latents `[B, C, F, h, w]`; computes in float32, gives float32.

    `mean` and `std` are `[1, C, 1, 1, 1]`, float32.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        self.mean, self.std = (
            torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1, 1) for values in (mean, std)
        )

    def apply(self, raw: Tensor) -> Tensor:
        return (raw.float() - self.mean) / self.std

    def undo(self, latents: Tensor) -> Tensor:
        return latents.float() * self.std + self.mean


def wan_config(path: object, channels: int) -> Mapping[str, Any]:
    """Configuration of diffusers' class of Wan's autoencoder with so many latent channels, mean and deviation included;
    ConfigError where there is none."""
    name = catalogue.autoencoder_of(channels)
    config = None if name is None else catalogue.parts().autoencoders[name].config
    if config is None:
        raise ConfigError(
            f"{path} has {channels} latent channels; mean and standard deviation are known of Wan2.1's, which has 16, "
            "and Wan2.2's, which has 48. Use a diffusers folder, whose config.json has latents_mean and latents_std; a "
            "TAEHV can take normalised latents"
        )
    return config


def check_shape(what: str, piece: Tensor, channels: int, spatial: int = 1) -> tuple[int, int, int]:
    """Size (batch, height, width) of latents or frames `[B, channels, n, height, width]`; ValueError for another shape,
    or for sides that are no multiple of `spatial`."""
    if piece.ndim != 5 or piece.shape[1] != channels or 0 in piece.shape:
        raise ValueError(f"{what} are {list(piece.shape)}; expected [B, {channels}, n, height, width], n at least 1")
    batch, _, _, height, width = piece.shape
    if height % spatial or width % spatial:
        raise ValueError(f"{what} are {width} x {height}; both sides must be multiples of {spatial}")
    return batch, height, width


def split_whole(pending: Tensor | None, frames: Tensor, first: int, group: int) -> tuple[Tensor, Tensor | None]:
    """Whole groups of `pending` and `frames` `[B, 3, n, H, W]` together, and what is left over (None: nothing).

    `first` frames make the first group, `group` each later one. What is left over holds no memory of `frames`.
    """
    joined = frames if pending is None else torch.cat([pending, frames], 2)
    count = joined.shape[2]
    whole = first + (count - first) // group * group if count >= first else 0
    return joined[:, :, :whole], joined[:, :, whole:].clone() if whole < count else None


DecoderState = Mapping[int, Tensor | str | None]
Step = Callable[[Tensor, DecoderState], tuple[Tensor, DecoderState]]
"""Normalised latents `[1, C, F, h, w]` and a past to frames `[n, 3, H, W]`, float in [0, 255], and the past after."""
Capture = Callable[[Step, Tensor, DecoderState], Step]
"""Makes a step that is replayed of one that has been compiled, with tensors like those that it will be given."""
Key = Hashable
_BEFORE = 3
"""Latent frames, at least, after which all of a stream's chunks are alike: Wan's decoder has seen two frames then."""


def memory_outlines(new_memory: Callable[[], Any], decode: Callable[[Any], object], chunk_latents: int) -> list[Any]:
    """Possible shapes of a stream's decoder memory, as outlines (`session_state.walk`): before it begins, and after
    each chunk until all are alike. `decode` decodes a chunk of `chunk_latents` latent frames with a memory."""
    memory = new_memory()
    outlines = [walk.outline(memory)]
    for _ in range(1 + -(-_BEFORE // chunk_latents)):
        decode(memory)
        outlines.append(walk.outline(memory))
    return outlines


Layout = Callable[[Tensor], Tensor]
"""Frames `[n, 3, H, W]`, float in [0, 255], to pictures in bytes."""


class VideoAutoencoder(Protocol):
    """A network between latents and frames, in any pieces: a stream that is decoded, or encoded, in pieces gives what
    it gives as a whole. What a stream remembers is the network's own type; everyone else only carries it. One half may
    have no weights (`autoencoder.load_autoencoder`).

    Sizes: `spatial` pixels per latent pixel each way, `temporal` frames per latent frame, but a stream's first, which
    may have fewer, `first_frames` to encode. `normalisation` leads from raw latents to normalised ones, None where the
    network knows the latter alone. `layers` are those of the decoder that see more than a pixel."""

    latent_channels: int
    spatial: int
    temporal: int
    first_frames: int
    device: torch.device
    layers: nn.Module

    @property
    def normalisation(self) -> Normalisation | None: ...

    def new_encode_memory(self) -> Any:
        """The memory of a stream to encode that has not begun."""

    def latents_of(self, frames: int) -> int:
        """Latent frames that a clip becomes; ConfigError for a length that cannot be encoded."""

    def encode(self, video: Tensor, memory: Any) -> Tensor:
        """Frames `[B, 3, n, H, W]` in [-1, 1] to normalised latents float32 `[B, C, F, h, w]`, F 0 or more; frames
        that do not make a latent frame yet wait in the memory. Mutates: memory."""

    def finish(self, memory: Any) -> Tensor | None:
        """At the end of a stream to encode: latents of frames that wait, None if there are none. Mutates: memory."""

    def new_memory(self) -> Any:
        """The memory of a stream to decode that has not begun."""

    def stream_bytes(self, height: int, width: int) -> int:
        """Bytes that the memory of a running stream has, for latents of `height` x `width`."""

    def frames_of(self, latents: int) -> int:
        """Frames that a stream's first `latents` latent frames give."""

    def decode_video(self, latents: Tensor, memory: Any) -> Tensor:
        """Normalised latents `[B, C, F, h, w]` to frames float32 `[B, 3, n, H, W]` in [-1, 1]. Mutates: memory."""

    def set_channels_last(self, channels_last: bool) -> None:
        """Lay weights and pictures out with the channels last, or with the width, from now on; before any
        stream begins. Mutates: self."""

    def past(self, latents: Tensor, memory: Any) -> DecoderState:
        """What `memory` remembers. Raises ValueError for latents of another shape than the stream can continue with."""

    def pieces(self, latents: Tensor, past: DecoderState) -> Sequence[Tensor]:
        """Latents `[1, C, F, h, w]` as they go through steps, one after the other, the first of which sees `past`."""

    def step(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        """See `Step`."""

    def remember(self, latents: Tensor, memory: Any, past: DecoderState) -> int:
        """Take the past after `latents` into `memory`; returns how many of the frames in front are not shown.
        Mutates: memory."""


def rgb24(frames: Tensor) -> Tensor:
    """Frames `[n, 3, H, W]`, float in [0, 255], as uint8 `[n, H, W, 3]`."""
    return frames.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


_RED, _BLUE = 0.2126, 0.0722
"""Shares of brightness, BT.709; green has the rest."""


def yuv420p(frames: Tensor) -> Tensor:
    """Frames `[n, 3, H, W]`, float in [0, 255], both sides even, as uint8 `[n, 3 H / 2, W]`: brightness, then the two
    planes of colour, one value for 2 x 2 pixels; BT.709 in limited range (ITU-R BT.709-6, 3 and 4). It is what
    libswscale makes of RGB, within two levels, where it takes a colour for the mean of its four pixels."""
    halved = F.avg_pool2d(frames, 2)
    blue_off, red_off = halved[:, 2] - _luma(halved), halved[:, 0] - _luma(halved)
    planes = (
        16 + _luma(frames) * (219 / 255),
        128 + blue_off * (224 / 255 / (2 - 2 * _BLUE)),
        128 + red_off * (224 / 255 / (2 - 2 * _RED)),
    )
    height, width = frames.shape[2:]
    joined = torch.cat([plane.flatten(1) for plane in planes], 1)
    return joined.round().to(torch.uint8).view(-1, height * 3 // 2, width)


def _luma(frames: Tensor) -> Tensor:
    """Brightness `[n, H, W]` of frames `[n, 3, H, W]`."""
    red, green, blue = frames.unbind(1)
    return _RED * red + (1 - _RED - _BLUE) * green + _BLUE * blue


class PictureDecoder:
    """Decoder of streams: a network's frames as pictures in `layout`, by compiled graphs where `compile` has made some.

    A *key* is what a graph is made for: the shapes of the latents and of what the stream remembers. From its second
    chunk on a stream meets the same ones with every chunk, one or two, and these get graphs. What none was made for, as
    a stream's beginning, is decoded the plain way, so nothing is ever compiled again.
    """

    def __init__(self, network: VideoAutoencoder, layout: Layout = rgb24) -> None:
        self.network, self.layout, self.temporal = network, layout, network.temporal
        self.new_memory, self.stream_bytes = network.new_memory, network.stream_bytes
        self._graphs: dict[Key, Step] | None = None
        self._captured: set[Key] = set()
        self._one_graph: Callable[[Step], Step] | None = None
        self._capture: Capture | None = None

    @property
    def keys(self) -> frozenset[Key]:
        """Keys that have a graph."""
        return frozenset(self._graphs or ())

    @torch.inference_mode()
    def decode(self, latents: Tensor, memory: Any) -> Tensor:
        """Pictures of normalised latents `[1, C, F, h, w]`, uint8 as `layout` lays them out. Mutates: memory.

        Raises:
            ValueError: latents of another shape than the stream can continue with.
        """
        past, pictures = self.network.past(latents, memory), []
        for piece in self.network.pieces(latents, past):
            made, past = self._run(piece, past)
            pictures.append(made)
        hidden = self.network.remember(latents, memory, past)
        return (pictures[0] if len(pictures) == 1 else torch.cat(pictures))[hidden:]

    @torch.inference_mode()
    def compile(
        self, latents: Tensor, at_once: int, one_graph: Callable[[Step], Step], capture: Capture | None = None
    ) -> None:
        """Make the graphs of a stream of chunks like `latents` `[C, F, h, w]` (what is in them is not looked at), of
        which a call decodes `at_once` latent frames; `one_graph` makes one of a step that it is given, and `capture`
        one that is replayed of that. Takes from seconds to minutes. To be called on the thread that will decode, or on
        one that is set up alike: torch compiles again for another number of CPU threads. Mutates: self.
        """
        self._graphs = self._graphs or {}
        memory, blank = self.new_memory(), torch.zeros_like(latents)
        before = -(-_BEFORE // latents.shape[1])
        for chunk in range(before + 2):  # two, as the second meets what graphs have left
            self._one_graph, self._capture = (one_graph, capture) if chunk >= before else (None, None)
            for group in blank.split(at_once, 1):
                self.decode(group[None], memory)
        self._one_graph = self._capture = None

    def _run(self, piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
        """A step whose frames are pictures already."""
        if self._graphs is None:
            return self._step()(piece, past)
        piece = piece.clone(memory_format=torch.contiguous_format)  # made in inference mode, and laid out, as always
        key = tuple(piece.shape), tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in past.values())
        if key not in self._graphs and self._one_graph is not None:
            self._graphs[key] = self._one_graph(self._step())
        elif self._capture is not None and key not in self._captured:
            self._graphs[key] = self._capture(self._graphs[key], piece, past)
            self._captured.add(key)
        return self._graphs.get(key, self._step())(piece, past)

    def _step(self) -> Step:
        network, layout = self.network, self.layout

        def step(piece: Tensor, past: DecoderState) -> tuple[Tensor, DecoderState]:
            frames, after = network.step(piece, past)
            return layout(frames), after

        return step
