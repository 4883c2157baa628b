"""Contracts of input files (embeddings, noise, latents, video): expected names, dtypes and shapes, compared with a
file's header. Reads no tensor data; `tensor_file` does, after the check.

Every refusal says what was expected and what is there. Imports no torch: the web process checks what is sent to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from streamdiff.errors import ConfigError
from streamdiff.models.checkpoint.safetensors_header import ITEM_BYTES, Header, TensorEntry

FLOATS = ("F32", "BF16", "F16", "F64")
"""Dtypes of a file's tensors, by safetensors' names."""
MAX_BYTES = 8 * 2**30
"""Size limit of a file whose number of chunks is open."""
MAX_VIDEO_BYTES = 64 * 2**30
"""Size limit of a file of frames, which are much larger than their latents."""
NORMALISED = {"normalised": "model"}
"""What the header of a file with latents says of them: they are normalised as the model has them."""
RAW = {"normalised": "no"}
"""They are as the autoencoder's network gives them."""
MOTION = "motion"
"""Where that header says how video that was encoded moves: for each latent frame the largest root mean square
difference, over pixels in [-1, 1], of one of its frames from the frame before."""
_HEADER_BYTES = 2**20  # room for a header where a limit is computed from shapes


@dataclass(frozen=True)
class FreeDim:
    """A dimension that a file may choose, `low` to `high` (None: without end); the same everywhere in one file."""

    name: str
    low: int = 1
    high: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def range(self) -> str:
        """As a remark in a message."""
        return f"at least {self.low:,}" if self.high is None else f"{self.low:,} to {self.high:,}"


Shape = tuple[int | FreeDim, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a contract: any of `shapes`, any of `FLOATS`."""

    name: str
    shapes: tuple[Shape, ...]
    required: bool = True

    def describe(self, bound: dict[str, int] | None = None) -> str:
        """The shapes in words, free dimensions that are in `bound` as numbers."""
        known = bound or {}
        frees = {
            size for shape in self.shapes for size in shape if isinstance(size, FreeDim) and size.name not in known
        }
        listed = " or ".join(f"[{', '.join(_size(size, known) for size in shape)}]" for shape in self.shapes)
        ranges: dict[str, list[str]] = {}
        for free in sorted(frees, key=lambda free: free.name):
            ranges.setdefault(free.range, []).append(free.name)
        remarks = "; ".join(f"{', '.join(names)} {each}" for each, names in ranges.items())
        return f"{listed} ({remarks})" if remarks else listed


@dataclass(frozen=True)
class FileSpec:
    """The tensors of one file: the required ones must all be there (companions), and no others. `what` names it."""

    what: str
    tensors: tuple[TensorSpec, ...]
    max_bytes: int = MAX_BYTES

    def describe(self) -> str:
        """The tensors in words."""
        return ", ".join(f"{wanted.name} {wanted.describe()}" for wanted in self.tensors)


def prompt_embeds_contract(text_shape: tuple[int, int]) -> FileSpec:
    """`prompt_embeds` `[L, D]` or `[1, L, D]`, with (most L, D) in `text_shape`: a prompt's embeddings, unpadded or
    padded with zeros."""
    length = FreeDim("L", 1, text_shape[0])
    wanted = TensorSpec("prompt_embeds", ((length, text_shape[1]), (1, length, text_shape[1])))
    return FileSpec("prompt embeddings", (wanted,), prod(text_shape) * ITEM_BYTES["F64"] + _HEADER_BYTES)


def noise_contract(chunk_shape: Shape, *, steps: int, chunks: int = 1) -> FileSpec:
    """`initial` `[chunks, C, f, h, w]`, what the first step of each chunk receives, and its companion `renoise`
    `[chunks, steps-1, C, f, h, w]`, the noise of each later step; without later steps `renoise` may be left out.
    `chunk_shape` is `[C, f, h, w]`; the file must hold at least `chunks` chunks."""
    count = FreeDim("chunks", chunks)
    initial = TensorSpec("initial", ((count, *chunk_shape),))
    renoise = TensorSpec("renoise", ((count, steps - 1, *chunk_shape),), required=steps > 1)
    return FileSpec("noise", (initial, renoise))


def latents_contract(
    chunk_shape: Shape, *, chunks: int = 1, whole: bool = False, max_bytes: int = MAX_BYTES
) -> FileSpec:
    """`latents` `[chunks, C, f, h, w]`, clean and normalised as the model has them; `chunk_shape` is `[C, f, h, w]`,
    and the file must hold at least `chunks` chunks. With `whole` they may also be a clip `[C, F, h, w]`."""
    shapes: tuple[Shape, ...] = ((FreeDim("chunks", chunks), *chunk_shape),)
    if whole:
        shapes = ((chunk_shape[0], FreeDim("F"), *chunk_shape[2:]), *shapes)
    return FileSpec("clean latents", (TensorSpec("latents", shapes),), max_bytes)


def image_latents_contract(chunk_shape: tuple[int, int, int, int], *, chunks: int) -> FileSpec:
    """`latents` of the `chunks` chunks that a stream begins with, exactly: `[chunks, C, f, h, w]`, or as a clip
    `[C, chunks * f, h, w]`; `chunk_shape` is `[C, f, h, w]`."""
    channels, frames, *size = chunk_shape
    wanted = TensorSpec("latents", ((chunks, *chunk_shape), (channels, chunks * frames, *size)))
    return FileSpec("a picture's latents", (wanted,), chunks * prod(chunk_shape) * ITEM_BYTES["F64"] + _HEADER_BYTES)


def video_latents_contract(chunk_shape: tuple[int, int, int, int], *, chunks: int, max_bytes: int) -> FileSpec:
    """`latents` of at least `chunks` chunks that a stream follows: `[n, C, f, h, w]`, or a clip `[C, F, h, w]`."""
    channels, frames, *size = chunk_shape
    whole, clip = FreeDim("chunks", chunks), FreeDim("F", chunks * frames)
    wanted = TensorSpec("latents", ((whole, *chunk_shape), (channels, clip, *size)))
    return FileSpec("a video's latents", (wanted,), max_bytes)


def video_contract() -> FileSpec:
    """`video` `[3, F, H, W]`: red, green and blue of F frames, from -1 to 1, which is not checked here."""
    return FileSpec("frames", (TensorSpec("video", ((3, FreeDim("F"), FreeDim("H"), FreeDim("W")),)),), MAX_VIDEO_BYTES)


def check(contract: FileSpec, header: Header) -> dict[str, int]:
    """Compare a file's header with the contract; returns the free dimensions as the file has them.

    Raises:
        ConfigError: too large a file, missing or unknown tensors, or one of another rank, shape or dtype.
    """
    place = f"{header.path}: {contract.what}"
    if header.file_bytes > contract.max_bytes:
        raise ConfigError(f"{place}: expected at most {contract.max_bytes:,} bytes, got {header.file_bytes:,}")
    known = {wanted.name for wanted in contract.tensors}
    missing = [wanted for wanted in contract.tensors if wanted.required and wanted.name not in header.entries]
    unknown = sorted(set(header.entries) - known)
    if missing or unknown:
        faults = [f"{wanted.name} is missing" for wanted in missing] + [f"{name} is unknown" for name in unknown[:3]]
        held = ", ".join(sorted(header.entries)[:6]) or "nothing"
        raise ConfigError(
            f"{place}: {', '.join(faults)}; expected {contract.describe()}, got {held} ({len(header.entries)} in all)"
        )
    bound: dict[str, int] = {}
    for wanted in contract.tensors:
        if (entry := header.entries.get(wanted.name)) is not None:
            _check_tensor(place, wanted, entry, bound)
    return bound


def _check_tensor(place: str, wanted: TensorSpec, entry: TensorEntry, bound: dict[str, int]) -> None:
    """Mutates: bound, with the free dimensions of this tensor."""
    if entry.dtype not in FLOATS:
        raise ConfigError(f"{place}: {wanted.name}: expected dtype {' or '.join(FLOATS)}, got {entry.dtype}")
    for shape in wanted.shapes:
        if (found := _match(shape, entry.shape, bound)) is not None:
            bound.update(found)
            return
    expected, ranks = wanted.describe(bound), {len(shape) for shape in wanted.shapes}
    rank = "" if len(entry.shape) in ranks else f", which has {len(entry.shape)} dimensions"
    raise ConfigError(f"{place}: {wanted.name}: expected shape {expected}, got {list(entry.shape)}{rank}")


def _match(shape: Shape, actual: tuple[int, ...], bound: dict[str, int]) -> dict[str, int] | None:
    """The free dimensions if `actual` fits `shape`, those in `bound` being given; None if it does not."""
    if len(shape) != len(actual):
        return None
    found = dict(bound)
    for want, size in zip(shape, actual, strict=True):
        if isinstance(want, FreeDim):
            if size < want.low or (want.high is not None and size > want.high):
                return None
            want = found.setdefault(want.name, size)
        if want != size:
            return None
    return found


def _size(size: int | FreeDim, bound: dict[str, int]) -> str:
    return f"{size.name}={bound[size.name]}" if isinstance(size, FreeDim) and size.name in bound else str(size)


def read_motion(header: Header) -> list[float] | None:
    """How far the pixels of each latent frame of `latents` move, as the file's header says; None: it does not.

    Raises:
        ConfigError: it says it otherwise than MOTION has it.
    """
    if MOTION not in header.metadata:
        return None
    shape = header.entries["latents"].shape
    frames = shape[1] if len(shape) == 4 else shape[0] * shape[2]
    values = header.metadata[MOTION].split()
    if len(values) != frames or not all(_is_difference(each) for each in values):
        raise ConfigError(
            f"{header.path}: `{MOTION}` in its header must be a number from 0 to 2 for each of its {frames} latent "
            "frames"
        )
    return [float(each) for each in values]


def _is_difference(text: str) -> bool:
    """Whether it is a number from 0 to 2, the largest difference of pixels in [-1, 1]."""
    try:
        return 0 <= float(text) <= 2
    except ValueError:
        return False
