"""What `streamdiff generate` can be told by numbers and files, and what `decode` and `encode` are told. Needs no torch.

A field that is annotated with a metavar is an option of the command: its docstring is the help, its name the flag
unless another is annotated too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from streamdiff.config import ModelConfig

_Job = ConfigDict(frozen=True, use_attribute_docstrings=True)
_File = Annotated[Path | None, "FILE"]
_Count = Annotated[int | None, "N"]
_Numbers = Annotated[tuple[float, ...] | None, "N,N,..."]
_Switch = Annotated[bool, ""]
_YesOrNo = Annotated[bool | None, ""]


class ConvertJob(BaseModel):
    """What `decode` and `encode` have in common."""

    model_config = _Job

    vae: Annotated[str, "PATH"]
    """the autoencoder: a path or name, see below"""
    source: Path
    out: Annotated[Path, "FILE"]
    overwrite: _Switch = False
    """replace what exists (default: refuse)"""
    chunk_latents: Annotated[int | None, "N", "--chunk-frames"] = None
    """latent frames per call of the network (default: the file's chunks, else 4); the result is the same"""
    latent_space: Annotated[str | None, "SPACE"] = None
    """what a TAEHV file takes: normalised or raw (default: by its published name: taew2_1, lighttaew2_1)"""
    device: Annotated[str, "DEVICE"] = "auto"
    """auto, cpu or cuda (default auto)"""
    dtype: Annotated[str, "TYPE"] = "auto"
    """float32 or bfloat16 of the network (default: float32 on a CPU, bfloat16 on CUDA)"""


class DecodeJob(ConvertJob):
    """Latents in a file to a video."""

    source: Annotated[Path, "FILE", "--latents"]
    """a tensor file with `latents`, see below"""
    out: Annotated[Path, "FILE"]
    """what to write: .mp4, .webm, a folder for PNG frames, or .safetensors with `video`"""
    fps: Annotated[float | None, "N"] = None
    """of a video file (default: the model's own; Wan's is 16)"""


class EncodeJob(ConvertJob):
    """A video to latents in a file."""

    source: Annotated[Path, "FILE", "--video"]
    """a video, a folder of .png pictures, or a tensor file with `video`, see below"""
    out: Annotated[Path, "FILE"]
    """what to write: .safetensors with `latents`"""
    raw: _Switch = False
    """write latents as the network gives them, not normalised, and say so in the file (default: normalised)"""


class ReferenceJob(BaseModel):
    """Options of a reference run: `model` selects the model and how it runs. None: the model's own value, or nothing.
    `window`, `sink` and `rope` override those of `model`; a window of 0 is the whole stream.
    """

    model_config = _Job

    model: ModelConfig
    prompt: str = ""
    seed: int = 0
    output: Path | None = None
    overwrite: bool = False
    fps: float | None = None
    chunks: _Count = None
    """chunks to make, instead of --seconds"""
    latents_out: _File = None
    """write the latents"""
    prompt_embeds: _File = None
    """the prompt's embeddings, instead of --prompt"""
    noise: _File = None
    """noise instead of --seed"""
    video_latents: _File = None
    """encoded video that chunks start from instead of noise alone, as `streamdiff encode` writes it: [C, F, h, w], or
    in chunks, see below"""
    strength: Annotated[float | None, "S"] = None
    """noise level, 0 to 1, that --video-latents is mixed with for the first step, which is told 1000 S (default: those
    of the first of --steps)"""
    first_steps: _File = None
    """timestep and noise level of each chunk's first step, or of every step, also by latent frame, instead of those of
    --steps and --strength; see below"""
    given_latents: _File = None
    """finished latents of the stream's first chunks, which it goes on from; they count in --chunks and come out again.
    Where finished chunks have a pass of their own (--kv-context clean, staircase) they get that alone, at timestep 0
    without noise; in same_step every step sees them at its own noise level"""
    container: Annotated[str | None, "NAME"] = None
    """which tensors of --weights: generator, generator_ema, ... (default: the usual)"""
    architecture: Annotated[Path | None, "FILE", "--model-config"] = None
    """config.json of diffusers, for what shapes cannot tell (the number of heads)"""
    shift: Annotated[float | None, "N"] = None
    """timestep shift of --warp and --nearest (default 1: none)"""
    sigmas: _Numbers = None
    """noise levels of the steps, if they are not timestep / 1000; a 0 at the end of --steps is a step where it has a
    level above 0 here, and is dropped otherwise"""
    first_chunk_steps: _Numbers = None
    """the list of --steps for a stream's first chunk, where that has another, at least as long; its noise levels are
    timestep / 1000, or follow from --shift and --warp"""
    window: _Count = None
    """latent frames a chunk can see, the sink and the chunk itself included; 0: all"""
    sink: _Count = None
    """latent frames at the stream's beginning that stay in sight (default: the model's own, or 0)"""
    rope: Annotated[str | None, "KIND"] = None
    """absolute (positions count from the stream's beginning, without end) or relative (the sink stands next to the
    window); default: the model's own, or relative"""
    chunk_latents: Annotated[int | None, "N", "--chunk-frames"] = None
    """latent frames of a chunk (default: those of --noise, or the model's own)"""
    first_chunk_latents: Annotated[int | None, "N", "--first-chunk-frames"] = None
    """latent frames that are made together at the beginning, a multiple of the chunk's (default: the model's own); in
    files, and for --chunks, they are several chunks"""
    context_noise: Annotated[float | None, "T"] = None
    """timestep, 0 to 1000, at which a finished chunk is remembered (default: the model's own, or 0)"""
    prompt_mix: _Count = None
    """chunks over which each --prompt-switch (keep, recache, recache-causal) comes: they see 1/N, 2/N, ... 1 of its
    embeddings and the rest of those before it (default 1: at once; Krea's server has 3)"""
    adaptive_sink: Annotated[float | None, "THRESHOLD"] = None
    """a chunk takes the place of the sink chunk that it is least like, if their keys and values are less alike than
    this (cosine, -1 to 1; StreamDiffusionV2 has 0.2; -1: never): with --kv-context same_step and --rope absolute
    instead of a place in the window, as published, else beside it"""
    averaged_sink: Annotated[float | None, "KEEP"] = None
    """a chunk that leaves the window is folded into the sink, of which this share stays (0 to 1; Reward-Forcing has
    0.999; 1: the sink stays as it is); the sink is then one chunk"""
    warp: _Switch = False
    """--steps are meant before the shift"""
    nearest: _Switch = False
    """the noise level of a timestep, also of one that --strength or motion gives, is the nearest of 1,000 shifted ones,
    as Self-Forcing's and StreamDiffusionV2's code looks it up (with --shift)"""
    motion_noise: _Switch = False
    """the more --video-latents move, the less noise is mixed in, down to 0.1 below --strength; the model is told 0.1
    less than that (StreamDiffusionV2, with --strength 0.8); motion is that of the pixels where the file says it, as one
    of `streamdiff encode` does, else of the latents"""
    context_alone: _YesOrNo = None
    """a finished chunk is remembered as it is without what was before it, but the sink (default: the model's own; Krea
    computes its past anew for every chunk, which with a window of two chunks is the same)"""
    context_pictures: _YesOrNo = None
    """from the second chunk on a finished chunk is remembered with its first latent frame encoded again, by itself,
    from the last of its pictures; takes both halves of the autoencoder (default: the model's own; Krea)"""
    no_decode: _Switch = False
    """make latents only"""
    processes: _Switch = False
    """a process for each of --stages, started here, instead of turns in this one"""
    prompt_switch: Annotated[tuple[str, ...], "CHUNK:FILE[:POLICY]"] = ()
    """other prompt embeddings from this chunk on; POLICY is keep (default: only the text changes), flush (the past is
    forgotten but for the sink), recache (the window's clean latents are run through the model again under the new text,
    all in one forward, as LongLive does), recache-causal (the same chunk by chunk, each of which sees those before it)
    or reset (a fresh stream); may be given several times"""
