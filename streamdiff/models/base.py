"""What the pipeline and the engine need of a model. Pure: weights are held, a stream's state is an argument.

Imports no torch, so that whoever only plans can ask for a model's sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from streamdiff.errors import ConfigError
from streamdiff.models.sampling import Schedule, own

if TYPE_CHECKING:
    from torch import Tensor

    from streamdiff.models.wan.transformer import WanDenoiser


@dataclass(frozen=True)
class Reading:
    """How a model understood a prompt: `text` is what it is given, `notice` a remark for the user (or empty)."""

    text: str
    notice: str = ""


class TextEncoder(Protocol):
    """Prompt to conditioning. `slow` says that `encode` may take longer than a frame is shown: it is then called on a
    thread of its own, while streams go on and `read` is called on theirs."""

    examples: tuple[str, ...]
    vocabulary: str
    slow: bool

    def read(self, prompt: str, previous: str | None) -> Reading:
        """Understand a prompt; `previous` is the text in force, which fills what the new prompt leaves open."""

    def encode(self, text: str) -> Tensor:
        """Embeddings `[T, text_dim]` of a text that `read` returned; T is the model's fixed text length."""


class StreamDecoder(Protocol):
    """Latents to frames, in any pieces: decoding a stream in pieces gives the frames of decoding it whole.

    What a stream remembers is the decoder's own type; everyone else only carries it. `temporal`: frames of each latent
    frame but a stream's first, which may have fewer.
    """

    temporal: int

    def new_memory(self) -> Any:
        """The memory of a stream that has not begun."""

    def stream_bytes(self, height: int, width: int) -> int:
        """Bytes that the memory of a running stream has, for latents of `height` x `width`."""

    def decode(self, latents: Tensor, memory: Any) -> Tensor:
        """Normalised latents `[1, C, F, h, w]` to frames uint8 `[n, H, W, 3]`. Mutates: memory."""


def window(kv_context: str, window_latents: int, clean_window_latents: int | None) -> int:
    """Latent frames that a chunk sees, sink and itself included.

    `clean_window_latents` is the window of KV context `clean` where that may be shorter: its past is finished, and one
    finished chunk says more than several noisy ones.
    """
    return (clean_window_latents if kv_context == "clean" else None) or window_latents


def window_chunks(window: int, sink: int, chunk: int) -> int:
    """Chunks that have to be kept for a window of that many latent frames, the sink's and the chunk itself included."""
    return -(-sink // chunk) - (sink - window) // chunk


def choose_steps(wanted: int | None, known: tuple[int, ...], model: str) -> int:
    """Denoise steps per chunk: `wanted`, or (None) what `model` was made for, the first of those `known`.

    Raises:
        ConfigError: a number that the model does not have, or it has none at all.
    """
    if not known:
        raise ConfigError(
            f"model {model} has no denoise steps of its own, so it cannot stream; `streamdiff models` lists others"
        )
    if wanted is None:
        return known[0]
    if wanted not in known:
        raise ConfigError(
            f"--steps is {wanted}; model {model} has {' or '.join(map(str, known))} (without --steps: {known[0]})"
        )
    return wanted


@dataclass(frozen=True)
class ModelSpec:
    """Facts about a model that everyone plans with. Sizes of chunk, windows and sink are in latent frames; `text_shape`
    is (text tokens, text width) of a prompt's embeddings; `steps` are the numbers of denoise steps per chunk that
    it has, the one that it was made for first; `context_sigma`, 0 to 1, is the noise level at which the
    clean pass writes a finished chunk into the cache (0: as it is); `rope` says whether the sink keeps its rotary
    positions (`absolute`) or stands right before the window (`relative`); `adaptive_sink` is the likeness, -1 to 1,
    below which a new chunk takes a sink chunk's place (None: the sink stays as it is); `averaged_sink`, 0 to 1, is the
    share of the sink that stays when a chunk that leaves the window is folded into it (None: none is); the
    `first_chunks` of a stream are made together, as one longer chunk; with `context_alone` the clean pass of a chunk
    sees nothing before it but the sink, and with `context_pictures` it is shown a first latent frame that was encoded
    again from its picture; `switch` is what a new prompt does to the past unless it says."""

    name: str
    latent_channels: int
    latent_height: int
    latent_width: int
    chunk_latents: int
    window_latents: int
    sink_latents: int
    frames_per_latent: int
    width: int
    height: int
    native_fps: float
    shift: float
    steps: tuple[int, ...]
    text_shape: tuple[int, int]
    clean_window_latents: int | None = None
    context_sigma: float = 0.0
    rope: str = "relative"
    adaptive_sink: float | None = None
    averaged_sink: float | None = None
    schedules: tuple[Schedule, ...] = ()
    first_chunks: int = 1
    context_alone: bool = False
    context_pictures: bool = False
    switch: str = "keep"

    def schedule(self, steps: int) -> Schedule:
        """The denoise steps of a chunk in `steps` steps: those published, else the embedded model's."""
        return next((each for each in self.schedules if each.steps == steps), None) or own(steps, self.shift)

    def window(self, kv_context: str) -> int:
        """Latent frames that a chunk sees, sink and itself included."""
        return window(kv_context, self.window_latents, self.clean_window_latents)

    def window_chunks(self, kv_context: str) -> int:
        """Chunks that are kept for a window, the sink's and the chunk itself included."""
        return window_chunks(self.window(kv_context), self.sink_latents, self.chunk_latents)

    @property
    def chunk_frames(self) -> int:
        """Frames that one chunk decodes to."""
        return self.chunk_latents * self.frames_per_latent

    def room(self, chunk: int) -> int:
        """Frames for which there must be room to begin with `chunk`, and what is made together with it."""
        return self.chunk_frames * (self.first_chunks if chunk == 0 else 1)

    @property
    def chunk_shape(self) -> tuple[int, int, int, int]:
        """Shape `[C, F, h, w]` of a chunk's latents."""
        return self.latent_channels, self.chunk_latents, self.latent_height, self.latent_width


class Past(Protocol):
    """What the clean pass is shown of a finished chunk, where that is not its latents as they are."""

    def new_memory(self) -> Any:
        """The memory of a stream that has not begun."""

    def stream_bytes(self, height: int, width: int) -> int:
        """Bytes that the memory of a running stream has, for latents of `height` x `width`."""

    def again(self, chunk: int, latents: Tensor, memory: Any) -> Tensor:
        """What is shown of the next chunk's finished latents `[C, F, h, w]`, of that shape. Mutates: memory."""


@dataclass(frozen=True)
class Trunk:
    """What a stage needs of a model: facts, and a run of transformer blocks on one device."""

    spec: ModelSpec
    denoiser: WanDenoiser


@dataclass(frozen=True)
class Model(Trunk):
    """What the head needs of a model: a trunk, and what stands before and behind it. With one stage that is all.
    `decoder` is None where another rank decodes, `past` where the clean pass is shown latents as they are."""

    text: TextEncoder
    decoder: StreamDecoder | None
    past: Past | None = None

    @property
    def blocks(self) -> int:
        """Transformer blocks of `denoiser`."""
        return len(self.denoiser.blocks)

    def part(self, first: int, last: int) -> Model:
        """The same model with blocks `first` to `last` (exclusive) only."""
        return replace(self, denoiser=self.denoiser.part(first, last))
