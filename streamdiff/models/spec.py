"""`ModelSpec`: the facts about a model that everything plans with, and its attention windows; and what the engine
asks of a text encoder. Needs no torch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import Field

from streamdiff.core import KV_CONTEXTS, Control
from streamdiff.errors import ConfigError
from streamdiff.models.sampling import Schedule, embedded_schedule
from streamdiff.models.weight_files import Count, Positive

if TYPE_CHECKING:
    from torch import Tensor

_PICTURE_UNIT = 16
"""Pixels of a patch each way: of two latent pixels, each of eight pixels, in every Wan2.1 model. Wan2.2's have 16."""


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
class ActionRows:
    """What of a chunk's actions goes with it to every stage: float32 rows of `width` numbers. Its first latent frame
    sees the first `window` of them, and each other one as many from `stride` rows further on."""

    window: Count
    stride: Count
    width: Count

    def shape(self, frames: int) -> tuple[int, int]:
        """(rows, width) of a chunk of so many latent frames."""
        return self.window + self.stride * (frames - 1), self.width


@dataclass(frozen=True)
class ActionModules:
    """Matrix-Game 2's modules in `blocks`, see `transformer.actions`: attention of `heads` times `head_dim` channels,
    of which the first `rope_dim` turn with the latent frame, on the base `theta`; each of `rows` has `keyboard`
    numbers, which become `hidden`, and behind them `mouse` numbers, none without a mouse."""

    blocks: tuple[int, ...]
    heads: Count
    head_dim: Count
    keyboard: Count
    mouse: int
    hidden: Count
    rope_dim: int
    theta: Positive
    rows: ActionRows


CAMERA_ROWS = ActionRows(window=1, stride=1, width=16)
"""What of a chunk's cameras goes with it: see `models.camera`."""
CAMERA_CONTROLS = (
    Control("forward", keys=("KeyS", "KeyW")),
    Control("right", keys=("KeyA", "KeyD")),
    Control("look_right", keys=("KeyJ", "KeyL", "ArrowLeft", "ArrowRight", "MouseX")),
    Control("look_up", keys=("KeyK", "KeyI", "ArrowDown", "ArrowUp", "-MouseY")),
)
"""What steers a camera, as `models.camera.held_cameras` takes it."""


@dataclass(frozen=True)
class ModelSpec:
    """Facts about a model that everyone plans with; what a model's file says of them is checked
    against the types (`tiny.folder`). Sizes of chunk, windows and sink are in latent frames; `text_shape`
    is (text tokens, text width) of a prompt's embeddings; `steps` are the numbers of denoise steps per chunk that
    it has, the one that it was made for first; `context_sigma`, 0 to 1, is the noise level at which the
    clean pass writes a finished chunk into the cache (0: as it is); `rope` says whether the sink keeps its rotary
    positions (`absolute`) or stands right before the window (`relative`), `positions` how many latent frames apart
    anything was in training (None: no end), see `CacheGeometry.sink_at`; `adaptive_sink` is the likeness, -1 to 1,
    below which a new chunk takes a sink chunk's place (None: the sink stays as it is); `averaged_sink`, 0 to 1, is the
    share of the sink that stays when a chunk that leaves the window is folded into it (None: none is); the
    `first_chunks` of a stream are made together, as one longer chunk; with `context_alone` the clean pass of a chunk
    sees nothing before it but the sink, and with `context_pictures` it is shown a first latent frame that was encoded
    again from its picture; `switch` is what a new prompt does to the past unless it says; each latent frame
    has a vector of what the `controls` say, in their order. The last `condition_channels` input channels say with what
    picture the stream begins: a mask, with a channel for each frame of a latent frame, and latents. Where there are
    `action_rows` what `controls` say goes to every stage as such rows, of which `actions` are made for; it streams in
    `kv_contexts` alone."""

    name: str
    latent_channels: Count
    latent_height: Count
    latent_width: Count
    chunk_latents: Count
    window_latents: int
    sink_latents: Annotated[int, Field(ge=0)]
    frames_per_latent: int
    width: int
    height: int
    native_fps: Positive
    shift: Positive
    steps: tuple[Count, ...]
    text_shape: tuple[int, int]
    clean_window_latents: Count | None = None
    context_sigma: Annotated[float, Field(ge=0, le=1)] = 0.0
    rope: str = "relative"
    positions: Count | None = None
    adaptive_sink: float | None = None
    averaged_sink: float | None = None
    schedules: tuple[Schedule, ...] = ()
    first_chunks: int = 1
    context_alone: bool = False
    context_pictures: bool = False
    switch: str = "keep"
    controls: tuple[Control, ...] = ()
    condition_channels: int = 0
    actions: ActionModules | None = None
    action_rows: ActionRows | None = None
    kv_contexts: tuple[str, ...] = KV_CONTEXTS

    def schedule(self, steps: int) -> Schedule:
        """The denoise steps of a chunk in `steps` steps: those published, else the embedded model's."""
        return next((each for each in self.schedules if each.steps == steps), None) or embedded_schedule(
            steps, self.shift
        )

    def window(self, kv_context: str) -> int:
        """Latent frames that a chunk sees, sink and itself included. They may be fewer in KV context `clean`: its past
        is finished, and one finished chunk says more than several noisy ones."""
        return (self.clean_window_latents if kv_context == "clean" else None) or self.window_latents

    def window_chunks(self, kv_context: str) -> int:
        """Chunks that are kept for a window, the sink's and the chunk itself included."""
        sink, chunk = self.sink_latents, self.chunk_latents
        return -(-sink // chunk) - (sink - self.window(kv_context)) // chunk

    def adaptive_ring(self, kv_context: str) -> bool:
        """Whether the adaptive sink is as StreamDiffusionV2 published it, in its KV context and positions: a chunk that
        it takes in goes there instead of into the window, and keeps its position. Elsewhere a chunk is in both: it is
        copied over a sink chunk, which has the position of the one before, once it is finished or done with its
        step."""
        return self.adaptive_sink is not None and self.rope == "absolute" and kv_context == "same_step"

    @property
    def repeats(self) -> bool:
        """Whether a forward that was begun may be run again from the same inputs, to the same caches: a sink into which
        chunks are folded, or put, has them by then."""
        return self.adaptive_sink is None and self.averaged_sink is None

    @property
    def chunk_frames(self) -> int:
        """Frames that one chunk decodes to."""
        return self.chunk_latents * self.frames_per_latent

    def admitted_frames(self, chunk: int) -> int:
        """Frame credit that admitting `chunk` takes, with the chunks that are made together with it."""
        return self.chunk_frames * (self.first_chunks if chunk == 0 else 1)

    @property
    def chunk_shape(self) -> tuple[int, int, int, int]:
        """Shape `[C, F, h, w]` of a chunk's latents."""
        return self.latent_channels, self.chunk_latents, self.latent_height, self.latent_width

    @property
    def has_camera(self) -> bool:
        """Whether what goes to every stage are cameras."""
        return self.action_rows is not None and self.actions is None

    @property
    def control_planes(self) -> int:
        """Input channels that say what is held, one for each control."""
        return 0 if self.action_rows is not None else len(self.controls)

    @property
    def steering_shape(self) -> tuple[int, int] | None:
        """Shape of the tensor that says what steers a chunk: rows of actions, which go to every stage, or a vector of
        control planes for each latent frame, for the first stage; None: nothing does."""
        if self.action_rows is not None:
            return self.action_rows.shape(self.chunk_latents)
        return (self.chunk_latents, len(self.controls)) if self.controls else None

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """Shape of what the transformer is given of a chunk: its latents, then its condition."""
        channels, *size = self.chunk_shape
        return channels + self.condition_channels, size[0], size[1], size[2]


def with_size(spec: ModelSpec, width: int, height: int) -> ModelSpec:
    """`spec` with pictures of `width` x `height` pixels.

    Raises:
        ConfigError: whole patches do not fill them.
    """
    pixels = spec.width // spec.latent_width
    if width % (2 * pixels) or height % (2 * pixels):
        raise ConfigError(f"--size is {width}x{height}; the sides of {spec.name} are multiples of {2 * pixels}")
    return replace(spec, width=width, height=height, latent_width=width // pixels, latent_height=height // pixels)


def with_window(spec: ModelSpec, window: int | None, sink: int | None, rope: str | None) -> ModelSpec:
    """`spec` with this window and sink, in latent frames, and these positions; None leaves what it has. Without a sink
    nothing is done with one.

    Raises:
        ConfigError: they do not go together.
    """
    if sink == 0:
        spec = replace(spec, adaptive_sink=None, averaged_sink=None)
    spec = replace(
        spec,
        window_latents=spec.window_latents if window is None else window,
        clean_window_latents=spec.clean_window_latents if window is None else None,
        sink_latents=spec.sink_latents if sink is None else sink,
        rope=rope or spec.rope,
    )
    check_spec(spec)
    return spec


def check_spec(spec: ModelSpec) -> None:
    """Raises ConfigError unless window, sink, and what is done with the sink go together."""
    chunk = spec.chunk_latents
    if spec.first_chunks * chunk > min(map(spec.window, ("clean", "same_step"))):
        raise ConfigError(
            f"--window is {spec.window_latents} latent frames; it must hold the first chunk, which has "
            f"{spec.first_chunks * chunk}"
        )
    if not 0 <= spec.sink_latents <= min(map(spec.window, ("clean", "same_step"))) - chunk:
        raise ConfigError(
            f"--sink is {spec.sink_latents} and --window {spec.window_latents} latent frames; the window counts the "
            f"sink, which is at least 0, and must leave room for the chunk itself, {chunk} latent frames"
        )
    _check_sink(spec)


def context_fault(spec: ModelSpec, kv_context: str) -> str | None:
    """Why a model does not stream in a KV context; None: it does."""
    if kv_context in spec.kv_contexts:
        return None
    return (
        f"kv_context is {kv_context}; {spec.name} streams in {' or '.join(spec.kv_contexts)} alone: nobody measured "
        "how it keeps its quality in others (--untested allows them)"
    )


def _check_sink(spec: ModelSpec) -> None:
    if spec.actions is not None and spec.sink_latents:
        raise ConfigError(
            f"--sink is {spec.sink_latents}; what {spec.name} keeps of actions has no sink, so leave it out"
        )
    sink, chunk, adaptive, averaged = spec.sink_latents, spec.chunk_latents, spec.adaptive_sink, spec.averaged_sink
    if adaptive is not None and averaged is not None:
        raise ConfigError("--adaptive-sink and --averaged-sink are two ways to change the sink; give one of them")
    if adaptive is not None and not (-1 <= adaptive <= 1 and sink):
        raise ConfigError(
            f"--adaptive-sink is {adaptive:g} with a sink of {sink} latent frames; it must be from -1 to 1, and goes "
            "with a --sink"
        )
    if adaptive is not None and sink % chunk:
        raise ConfigError(
            f"--adaptive-sink puts chunks in the place of others, so --sink, which is {sink}, must be a multiple of "
            f"the chunk's {chunk} latent frames"
        )
    if spec.adaptive_ring("same_step") and spec.window("same_step") % chunk:
        raise ConfigError(
            f"--adaptive-sink with --rope absolute needs a --window of whole chunks; it is {spec.window('same_step')} "
            f"latent frames, and a chunk has {chunk}"
        )
    if averaged is not None and not (0 <= averaged <= 1 and sink == chunk):
        raise ConfigError(
            f"--averaged-sink is {averaged:g} with a sink of {sink} latent frames; it must be from 0 to 1, and the "
            f"sink one chunk, {chunk} latent frames, as chunks are folded into it"
        )


@dataclass(frozen=True)
class Lora:
    """A LoRA file (or PEFT's folder) and how strongly it counts; 1 is as it was trained."""

    path: Path
    scale: float = 1.0


def parse_lora(text: str) -> Lora:
    """`FILE` or `FILE:SCALE`; the scale is 1 where it is left out, and may be negative.

    Raises:
        ConfigError: no file is named, or the scale is not a finite number.
    """
    name, colon, number = text.rpartition(":")
    if not colon or Path(text).exists():
        name, number = text, "1"
    try:
        scale = float(number)
    except ValueError:
        scale = math.nan
    if not name or not math.isfinite(scale):
        raise ConfigError(f"--lora is {text!r}; it must be FILE or FILE:SCALE with a finite number as SCALE")
    return Lora(Path(name), scale)


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of `WIDTHxHEIGHT`, which a latent and a patch have to fit into.

    Raises:
        ConfigError: anything else.
    """
    match, unit = re.fullmatch(r"(\d+)x(\d+)", text), _PICTURE_UNIT
    if match is None or any(int(side) % unit or int(side) < unit for side in match.groups()):
        raise ConfigError(f"--size is {text!r}; it must be WIDTHxHEIGHT, multiples of {unit}, such as 832x480")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class ParsedPrompt:
    """How a model understood a prompt: `text` is what it is given, `notice` a remark for the user (or empty)."""

    text: str
    notice: str = ""


class TextEncoder(Protocol):
    """Prompt to conditioning. `slow` says that `encode` may take longer than a frame is shown: it is then called on a
    thread of its own, while streams go on and `read` is called on theirs. `suggestions`: groups of short prompts that
    change one thing each and leave the rest as it is; empty where `read` fills nothing in."""

    examples: tuple[str, ...] = ()
    suggestions: tuple[tuple[str, ...], ...] = ()
    vocabulary: str = ""
    slow: bool = False

    def read(self, prompt: str, previous: str | None) -> ParsedPrompt:
        """Understand a prompt; `previous` is the text in force, which fills what the new prompt leaves open."""

    def encode(self, text: str) -> Tensor:
        """Embeddings `[T, text_dim]` of a text that `read` returned; T is the model's fixed text length."""
