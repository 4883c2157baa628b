"""Latents to video and back, from file to file: what `streamdiff decode` and `streamdiff encode` do.

Knows nothing about the command line, codecs or networks: `models/autoencoder/autoencoder.py` has the networks,
`video/files.py` the videos, `models/tensor_file.py` and `models/headers.py` the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from streamdiff.atomic_write import exit_on_sigterm
from streamdiff.commands.jobs import ConvertJob, DecodeJob, EncodeJob
from streamdiff.device import pick_device, pick_dtype
from streamdiff.errors import ConfigError
from streamdiff.models import tensor_file
from streamdiff.models.autoencoder import autoencoder
from streamdiff.models.autoencoder.picture_decoder import PictureDecoder, VideoAutoencoder
from streamdiff.models.headers import MOTION, NORMALISED, RAW, VIDEO_FILE, FreeDim
from streamdiff.video import files

LATENTS, VIDEO = "latents", "video"
_ANY_CHUNK = (FreeDim("C"), FreeDim("f"), FreeDim("h"), FreeDim("w"))
_CHUNK = 4
_RANGE_SLACK = 1e-3


def decode(job: DecodeJob) -> int:
    """Latents in a file to a video file, pictures, or a tensor `video`; returns the exit status.

    Raises:
        ConfigError: what was asked for cannot be done; nothing is written then.
    """
    _check(job)
    if job.fps is not None and not files.LOWEST_FPS <= job.fps <= files.HIGHEST_FPS:
        limits = f"at least {files.LOWEST_FPS} and at most {files.HIGHEST_FPS}"
        raise ConfigError(f"--fps is {job.fps:g}, but must be {limits}", field="fps")
    is_tensor = job.out.suffix == tensor_file.SUFFIX
    (tensor_file if is_tensor else files).check_target(job.out, job.overwrite)
    latents, length = read_latents(job.source)
    decoder = autoencoder.load_autoencoder(job.vae, "decoder", *_device_and_dtype(job), job.latent_space)
    if latents.shape[0] != decoder.latent_channels:
        raise ConfigError(
            f"{job.source}: `{LATENTS}` has {latents.shape[0]} channels, but {job.vae} takes {decoder.latent_channels}"
        )
    if tensor_file.is_raw(job.source):
        latents = autoencoder.normalisation(decoder, job.vae).apply(latents[None].to(decoder.device))[0]
    pieces = latents.split(job.chunk_latents or length, 1)
    total = decoder.frames_of(latents.shape[1])
    height, width = (side * decoder.spatial for side in latents.shape[2:])
    with exit_on_sigterm(), tqdm(total=total, unit="frame", desc=job.out.name, dynamic_ncols=True) as bar:
        if is_tensor:
            tensor_file.write_tensor(job.out, VIDEO, _decode_video(decoder, pieces, (3, total, height, width), bar))
        else:
            fps = autoencoder.native_fps(job.vae) if job.fps is None else job.fps
            files.write_video(job.out, _pictures(decoder, pieces, bar), fps)
    print(f"{job.out}: {total} frames, {width} x {height}, from {latents.shape[1]} latent frames")
    return 0


def encode(job: EncodeJob) -> int:
    """A video file, pictures or a tensor `video` to a tensor `latents`; returns the exit status.

    Raises:
        ConfigError: what was asked for cannot be done; nothing is written then.
    """
    _check(job)
    tensor_file.check_target(job.out, job.overwrite)
    clip = read_clip(job.source)
    size = clip.shape[1:] if isinstance(clip, Tensor) else (clip.frames, clip.height, clip.width)
    frames, height, width = size  # frames: None where that is not known before they are read
    encoder = autoencoder.load_autoencoder(job.vae, "encoder", *_device_and_dtype(job), job.latent_space)
    raw = autoencoder.normalisation(encoder, job.vae) if job.raw else None
    if height % encoder.spatial or width % encoder.spatial:
        raise ConfigError(
            f"{job.source} is {width} x {height}; {job.vae} takes sides that are multiples of {encoder.spatial}"
        )
    if frames is not None:
        encoder.latents_of(frames)
    with exit_on_sigterm(), tqdm(total=frames, unit="frame", desc=job.out.name, dynamic_ncols=True) as bar:
        pieces = _pieces(clip, (job.chunk_latents or _CHUNK) * encoder.temporal)
        latents, motion = encode_clip(encoder, pieces, bar)
        if raw is not None:
            latents = raw.undo(latents[None].to(encoder.device))[0].cpu()
        about = NORMALISED if raw is None else RAW
        tensor_file.write_tensor(job.out, LATENTS, latents, {**about, MOTION: motion})
        read = bar.n
    space = "" if raw is None else ", not normalised"
    print(f"{job.out}: `{LATENTS}` {list(latents.shape)}{space}, from {read} frames, {width} x {height}")
    return 0


# ---- reading ----------------------------------------------------------------------------------------------------


def read_latents(path: Path) -> tuple[Tensor, int]:
    """Latents `[C, F, h, w]` of a file, chunks laid end to end, and the latent frames of a piece.

    Raises:
        ConfigError: no such file or tensor, or another shape, dtype or values than latents have.
    """
    latents = tensor_file.read_latents(path, _ANY_CHUNK)
    if latents.ndim == 5:
        return latents.transpose(0, 1).flatten(1, 2), latents.shape[2]
    return latents, _CHUNK


def read_clip(path: Path) -> files.Clip | Tensor:
    """A tensor `video` `[3, F, H, W]` in [-1, 1], or what `open_clip` finds.

    Raises:
        ConfigError: nothing there that can be read, or a tensor of another shape, dtype or range.
    """
    if path.suffix != tensor_file.SUFFIX:
        return files.open_clip(path)
    video = tensor_file.read(path, VIDEO_FILE)["video"]
    low, high = (float(limit) for limit in video.aminmax())
    if max(-low, high) > 1 + _RANGE_SLACK:
        raise ConfigError(f"{path}: `{VIDEO}` has values from {low:g} to {high:g}; expected -1 to 1")
    return video


def _pieces(clip: files.Clip | Tensor, length: int) -> Iterator[Tensor]:
    """Frames `[3, n, H, W]` in [-1, 1], n at most `length`."""
    if isinstance(clip, Tensor):
        yield from clip.split(length, 1)
        return
    frames = iter(clip)
    while piece := list(islice(frames, length)):
        yield torch.from_numpy(np.stack(piece)).permute(3, 0, 1, 2).float() / 127.5 - 1


# ---- converting -------------------------------------------------------------------------------------------------


def _pictures(
    decoder: VideoAutoencoder, pieces: tuple[Tensor, ...], bar: tqdm[NoReturn]
) -> Iterator[NDArray[np.uint8]]:
    """Frames uint8 `[H, W, 3]` of pieces `[C, F, h, w]`. Mutates: bar."""
    memory, pictures = decoder.new_memory(), PictureDecoder(decoder)
    for piece in pieces:
        for picture in pictures.decode(piece[None].to(decoder.device), memory).cpu().numpy():
            yield picture
            bar.update()


def _decode_video(
    decoder: VideoAutoencoder, pieces: tuple[Tensor, ...], shape: tuple[int, ...], bar: tqdm[NoReturn]
) -> Tensor:
    """Frames float32 of that `shape` `[3, F, H, W]`. Mutates: bar."""
    video, memory, done = torch.empty(shape), decoder.new_memory(), 0
    for piece in pieces:
        part = decoder.decode_video(piece[None].to(decoder.device), memory)[0]
        video[:, done : done + part.shape[1]] = part
        done += part.shape[1]
        bar.update(part.shape[1])
    return video


def encode_clip(encoder: VideoAutoencoder, pieces: Iterator[Tensor], bar: tqdm[NoReturn]) -> tuple[Tensor, str]:
    """Normalised latents float32 `[C, F, h, w]` on the CPU; and, for the file's header, how far the frames of each
    latent frame are from those before them: root mean square over pixels, the largest. Mutates: bar."""
    memory, parts, moves, before = encoder.new_encode_memory(), [], list[float](), None
    for piece in pieces:
        line = torch.cat([piece[:, :1] if before is None else before, piece], 1)
        moves += (line[:, 1:] - line[:, :-1]).square().mean((0, 2, 3), dtype=torch.float64).sqrt().tolist()
        before = piece[:, -1:]
        parts.append(encoder.encode(piece[None].to(encoder.device), memory)[0].cpu())
        bar.update(piece.shape[1])
    last = encoder.finish(memory)
    latents = torch.cat([*parts, *(() if last is None else (last[0].cpu(),))], 1)
    limits = [0, *range(encoder.first_frames, len(moves), encoder.temporal), len(moves)]
    return latents, " ".join(f"{max(moves[begin:end]):.9g}" for begin, end in pairwise(limits))


# ---- what was asked for -----------------------------------------------------------------------------------------


def _check(job: ConvertJob) -> None:
    if job.out.exists() and job.source.exists() and job.out.samefile(job.source):
        raise ConfigError(f"--out is {job.out}, which is what is read; name another file", field="out")


def _device_and_dtype(job: ConvertJob) -> tuple[torch.device, torch.dtype]:
    device = pick_device(job.device)
    return device, pick_dtype(job.dtype, device)
