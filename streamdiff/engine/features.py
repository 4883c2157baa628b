"""Features that were made elsewhere and come, as safetensors files, instead of a session's text, picture or video.

The same checks run where they come in, before anything is queued, and in the engine. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from streamdiff.core import ModelInfo
from streamdiff.engine.messages import DEFAULT_STRENGTH, Data, Open
from streamdiff.errors import ConfigError, RequestError
from streamdiff.models import headers
from streamdiff.models.headers import CAMERA_SHAPES, LENGTH_BYTES, FileSpec, TensorHeader

Floats = NDArray[np.float32]
NAMES = ("prompt_embeds", "image_latents", "video_latents", *CAMERA_SHAPES)
MAX_VIDEO_BYTES = 32 << 20
"""Of a file of `video_latents`. The others are as large as the model's sizes make them."""
MAX_CAMERA_BYTES = 4 << 20
"""Of a file of poses: half an hour of them in float64."""
MAX_VALUE = 10_000
"""Of any number in a file: a hundred times what encoders make. Much larger ones leave a model with NaN alone."""
_MAX_HEADER_BYTES = 1 << 20
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


@dataclass(frozen=True)
class Features:
    """The content of files; None: not given.

    `prompt_embeds` stand for the prompt until another comes; `image_latents` are those of the stream's first chunks,
    which it continues from; of `video_latents` each chunk starts from its own, with noise of level `strength` mixed in,
    and chunks behind the last one from noise alone. `poses` and `intrinsics`, files of NumPy's, say how the camera of a
    world moves, as far as they go; then keys steer."""

    prompt_embeds: Data | None = field(default=None, repr=False)
    image_latents: Data | None = field(default=None, repr=False)
    video_latents: Data | None = field(default=None, repr=False)
    poses: Data | None = field(default=None, repr=False)
    intrinsics: Data | None = field(default=None, repr=False)
    strength: float = DEFAULT_STRENGTH

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are given."""
        return tuple(name for name in NAMES if getattr(self, name) is not None)

    def without(self, name: str) -> Features:
        """The others."""
        return Features(**(self.fields() | {name: None}))

    def fields(self) -> dict[str, Any]:
        """As fields of `messages.Open`."""
        return {name: getattr(self, name) for name in (*NAMES, "strength")}


NOTHING = Features()


def features_of(command: Open) -> Features:
    """Those that a session is to be opened with."""
    return Features(**{name: getattr(command, name) for name in (*NAMES, "strength")})


def check_together(features: Features, *, prompt: bool, image: bool) -> None:
    """Whether these can be given together, and with a `prompt` or an `image`. Raises RequestError where one would be
    ignored."""
    if features.prompt_embeds is not None and prompt:
        raise RequestError("prompt_embeds", "prompt_embeds stand for the prompt; give one of them")
    if features.image_latents is not None and image:
        raise RequestError("image_latents", "image_latents stand for the picture; give one of them")
    if features.video_latents is not None and (image or features.image_latents is not None):
        raise RequestError(
            "video_latents", "the first chunk starts from video_latents or is a picture's, not both; give one of them"
        )
    if features.intrinsics is not None and features.poses is None:
        raise RequestError("intrinsics", "intrinsics are those of the camera that poses move; give both")
    if not 0 < features.strength <= 1:
        raise RequestError("strength", f"strength is {features.strength}; it must be above 0 and at most 1")


def contract(name: str, info: ModelInfo) -> FileSpec:
    """What a file of these features holds for the model. Raises RequestError where that takes none."""
    if not info.text_shape or not info.chunk_shape:
        raise RequestError(name, f"model {info.model} takes no features that were made elsewhere")
    shape, count = info.chunk_shape, info.first_chunks
    if name == "prompt_embeds":
        return headers.prompt_embeds_contract(info.text_shape)
    if name == "image_latents":
        return headers.image_latents_contract(shape, chunks=count)
    return headers.latents_contract(
        shape, chunks=count, frames=count * shape[1], what="a video's latents", max_bytes=MAX_VIDEO_BYTES
    )


def max_bytes(name: str, info: ModelInfo) -> int:
    """Of a file of these features; 0 where the model takes none, as `check_file` says then."""
    if name in CAMERA_SHAPES:
        return MAX_CAMERA_BYTES
    return contract(name, info).max_bytes if info.text_shape else 0


def check_file(name: str, file: BinaryIO, file_bytes: int, info: ModelInfo) -> None:
    """Look at the header of a file of features `name`, and leave the file where it was: nothing else is read, but that
    of poses is.

    Raises:
        RequestError: it is no such file, too large, or its tensors are not those that the model takes.
    """
    begin = file.tell()
    try:
        if name in CAMERA_SHAPES:
            _camera_array(name, file.read(MAX_CAMERA_BYTES + 1), info)
            return
        wanted = contract(name, info)
        _check_header_size(name, int.from_bytes(file.read(LENGTH_BYTES), "little"), file_bytes)
        file.seek(begin)
        _check(name, headers.parse_file(file, file_bytes, Path(name), wanted.max_bytes), wanted)
    except ConfigError as error:
        raise RequestError(name, str(error)) from None
    finally:
        file.seek(begin)


def decode(features: Features, info: ModelInfo) -> dict[str, NDArray[Any]]:
    """The numbers of all that is given, finite, by name: prompt embeddings `[L, D]`, latents `[n, C, F, h, w]`; and
    `motion` `[n]`, how much the pixels of each chunk of video move, if its file says it.

    Raises:
        RequestError: as `check_file`, or values that are not finite or beyond MAX_VALUE; names the file.
    """
    numbers: dict[str, NDArray[Any]] = {}
    for name in features.names:
        if name in CAMERA_SHAPES:
            numbers[name] = _camera_array(name, getattr(features, name), info)
            continue
        given, header = _decoded(name, getattr(features, name), info)
        numbers[name] = given.reshape(-1, given.shape[-1]) if name == "prompt_embeds" else _in_chunks(given, info)
        if name == "video_latents" and (motion := headers.read_motion(header)) is not None:
            count, _, frames = numbers[name].shape[:3]
            numbers["motion"] = np.array(motion[: count * frames]).reshape(count, -1).max(1)
    return numbers


def _camera_array(name: str, data: Data, info: ModelInfo) -> NDArray[np.floating]:
    if not info.has_camera:
        raise RequestError(name, f"model {info.model} has no camera that poses could move")
    if len(data) > MAX_CAMERA_BYTES:
        raise RequestError(name, f"{name}: expected at most {MAX_CAMERA_BYTES:,} bytes")
    try:
        return headers.read_camera_array(name, data, name)
    except ConfigError as error:
        raise RequestError(name, str(error)) from None


def _check_header_size(name: str, length: int, file_bytes: int) -> None:
    if _MAX_HEADER_BYTES < length <= file_bytes - LENGTH_BYTES:
        raise ConfigError(f"{name}: expected a header of at most {_MAX_HEADER_BYTES:,} bytes, got {length:,}")


def _check(name: str, header: TensorHeader, wanted: FileSpec) -> None:
    headers.check_contract(wanted, header)
    if name == "prompt_embeds":
        return
    if header.metadata.items() >= headers.RAW.items():
        raise ConfigError(
            f"{name}: latents: expected values that are normalised as the model has them, but the file's header says "
            "that they are not; encode without --raw"
        )
    if name == "video_latents":
        headers.read_motion(header)


def _decoded(name: str, data: Data, info: ModelInfo) -> tuple[Floats, TensorHeader]:
    """The only tensor of a file, and its header."""
    try:
        wanted = contract(name, info)
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        _check_header_size(name, length, len(data))
        header = headers.parse_data(data, name)
        _check(name, header, wanted)
    except ConfigError as error:
        raise RequestError(name, str(error)) from None
    [(tensor, entry)] = header.entries.items()
    raw = memoryview(data)[LENGTH_BYTES + length :][slice(*entry.data_offsets)]
    with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinite, and is found below
        if entry.dtype == "BF16":
            numbers = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = np.frombuffer(raw, _NUMPY[entry.dtype]).astype(np.float32)
    numbers = numbers.reshape(entry.shape)
    usable = np.abs(numbers) <= MAX_VALUE  # which no NaN is
    if not usable.all():
        place = [int(index) for index in np.unravel_index(usable.argmin(), usable.shape)]  # the first
        allowed = f"finite values from {-MAX_VALUE:,} to {MAX_VALUE:,}"
        raise RequestError(
            name,
            f"{name}: {tensor}: expected {allowed} (in float32), got {numbers[tuple(place)]} at {place} "
            f"({np.count_nonzero(~usable):,} of {numbers.size:,} are out of range)",
        )
    return numbers, header


def _in_chunks(latents: Floats, info: ModelInfo) -> Floats:
    """Latents `[n, C, F, h, w]` of those, or of a clip `[C, frames, h, w]`, whose last frames are left out where they
    fill no chunk."""
    if latents.ndim == 5:
        return latents
    frames = info.chunk_shape[1]
    count = latents.shape[1] // frames
    cut = latents[:, : count * frames].reshape(len(latents), count, frames, *latents.shape[2:])
    return np.ascontiguousarray(cut.swapaxes(0, 1))
